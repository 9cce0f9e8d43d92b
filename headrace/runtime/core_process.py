"""What makes a process a server's core: its settings come through standard input, and it does not outlive it."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys

import msgspec

from headrace.protocol import ipc


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel end this process when the server dies, however it dies, even in the middle of a step."""
    if sys.platform != "linux":
        return  # the end of standard input tells the same, after the step
    PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_NAME, b"headrace-core", 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the call
        raise SystemExit(1)


def read_start(pipe: int) -> ipc.Start:
    """Four bytes of length, little-endian, and as many of msgpack; the pipe stays open behind them."""
    (length,) = struct.unpack("<I", _read_exactly(pipe, 4))
    return msgspec.msgpack.decode(_read_exactly(pipe, length), type=ipc.Start)


def _read_exactly(pipe: int, count: int) -> bytes:
    content = b""
    while len(content) < count:
        piece = os.read(pipe, count - len(content))
        if not piece:
            raise SystemExit(1)  # the server is gone before it said anything
        content += piece
    return content
