"""Tries a grammar in a process of its own first, where one that hangs or takes all memory or stack hurts nobody.

    python -m headrace.runtime.grammar_check      messages on standard input: four bytes of length, then msgpack

The first message is the vocabulary, each further one a GrammarSpec; a byte on standard output says that it was
survived. A process that dies of a grammar is the answer too, and the next grammar gets a new one.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import struct
import subprocess
import sys
import threading
from typing import BinaryIO

import llguidance
import msgspec

from headrace.protocol.ipc import GrammarSpec
from headrace.runtime.grammar import GrammarError
from headrace.runtime.grammar_store import STACK_BYTES

MAX_CPU_S = 3
MAX_DATA_BYTES = 1 << 30
MAX_WAIT_S = 60.0
"""By the clock: on a machine that is busy three seconds of processor take longer."""


class Words(msgspec.Struct, frozen=True, array_like=True):
    """A vocabulary: the bytes of each token, and which of them are special or end an answer."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_ids: list[int]


class GrammarCheck:
    """The process and the pipe to it. To be used by one thread at a time."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._process: subprocess.Popen[bytes] | None = None

    def survives(self, spec: GrammarSpec) -> bool:
        """Whether compiling the grammar and its first mask leave the process alive."""
        if self._process is None:
            command = [sys.executable, "-m", "headrace.runtime.grammar_check"]
            pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing, start_new_session=True)
            self._send(self._words)
        process = self._process
        assert process.stdout is not None
        self._send(spec)
        ready, _, _ = select.select([process.stdout], [], [], MAX_WAIT_S)
        if ready and process.stdout.read(1):
            return True
        self.close()
        return False

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _send(self, message: Words | GrammarSpec) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        payload = msgspec.msgpack.encode(message)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(struct.pack("<I", len(payload)) + payload)
            self._process.stdin.flush()


class _ByteView:
    """What the library asks of a tokenizer; forced text is spelled byte by byte."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, words: Words) -> None:
        self.tokens = words.tokens
        self.special_token_ids = words.special_token_ids
        self.eos_token_id = words.eos_token_ids[0] if words.eos_token_ids else len(words.tokens) - 1
        self._bytes = {token: token_id for token_id, token in enumerate(words.tokens) if len(token) == 1}

    def __call__(self, text: str | bytes) -> list[int]:
        whole = text if isinstance(text, bytes) else text.encode()
        return [self._bytes[bytes([byte])] for byte in whole if bytes([byte]) in self._bytes]


def main() -> int:
    from headrace.runtime.grammar_source import LIMITS, library_grammar

    pipe = sys.stdin.buffer
    first = _read(pipe)
    if first is None:
        return 0
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    words = msgspec.msgpack.decode(first, type=Words)
    view: object = _ByteView(words)
    tokenizer = llguidance.LLTokenizer(view, n_vocab=len(words.tokens), eos_token=words.eos_token_ids or None)  # type: ignore[arg-type]

    def attempt(spec: GrammarSpec) -> None:
        with contextlib.suppress(GrammarError):
            matcher = llguidance.LLMatcher(tokenizer, library_grammar(spec), log_level=0, limits=LIMITS)
            if not matcher.is_error():
                matcher.compute_bitmask()

    threading.stack_size(STACK_BYTES // 2)
    while (payload := _read(pipe)) is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        most = int(used.ru_utime + used.ru_stime) + MAX_CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
        thread = threading.Thread(target=attempt, args=(msgspec.msgpack.decode(payload, type=GrammarSpec),))
        thread.start()
        thread.join()
        sys.stdout.buffer.write(b"1")
        sys.stdout.buffer.flush()
    return 0


def _read(pipe: BinaryIO) -> bytes | None:
    """One message; None at the end."""
    head = pipe.read(4)
    return pipe.read(struct.unpack("<I", head)[0]) if len(head) == 4 else None


if __name__ == "__main__":
    sys.exit(main())
