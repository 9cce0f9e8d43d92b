"""Messages over a connected stream socket, for the two ends of one conversation between processes.

A message is four bytes of length, little-endian, and as many of content. Nothing here waits: what the system does not
take at once is kept and goes with `flush`. The end of the other side is an error like any other, so no second channel
must tell of it.
"""

from __future__ import annotations

import select
import socket
import struct

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 16


class PeerGone(Exception):
    """Nobody is at the other end, and all that was sent has been received."""


class MessageSocket:
    """One end. `sock` belongs to this object."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._chunk = memoryview(bytearray(_READ_BYTES))
        self._received = bytearray()
        self._taken = 0
        """Bytes of `_received` that are done with."""
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: bytes) -> bool:
        """Whether all of it is on its way; what is not waits for `flush`. Raises PeerGone."""
        if not self._unsent:
            frame = _LENGTH.pack(len(message)) + message
            num_sent = self._send(frame)
            if num_sent == len(frame):
                return True
            self._unsent += frame[num_sent:]
            return False
        self._unsent += _LENGTH.pack(len(message))
        self._unsent += message
        return self.flush()

    def flush(self) -> bool:
        """Send what waits, as far as it goes; whether that was all. Raises PeerGone."""
        while self._unsent:
            with memoryview(self._unsent) as waiting:
                num_sent = self._send(waiting)
            if not num_sent:
                return False
            del self._unsent[:num_sent]
        return True

    def receive(self) -> bytes | None:
        """The next message; None while there is none. Raises PeerGone."""
        while (message := self._next()) is None:
            try:
                count = self._socket.recv_into(self._chunk)
            except BlockingIOError:
                return None
            except ConnectionError:
                count = 0
            if not count:
                raise PeerGone
            self._received += self._chunk[:count]
        return message

    def wait(self, timeout_s: float | None, *, to_send: bool = False) -> None:
        """Until a message or the end may have come, or with `to_send` until more can be sent."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT if to_send else select.POLLIN)
        poll.poll(None if timeout_s is None else 1000 * timeout_s)

    def close(self) -> None:
        self._socket.close()

    def _send(self, content: bytes | memoryview) -> int:
        try:
            return self._socket.send(content)
        except BlockingIOError:
            return 0
        except ConnectionError:
            raise PeerGone from None

    def _next(self) -> bytes | None:
        received, taken = self._received, self._taken
        if len(received) - taken >= _LENGTH.size:
            start = taken + _LENGTH.size
            end = start + _LENGTH.unpack_from(received, taken)[0]
            if len(received) >= end:
                message = bytes(received[start:end])
                if len(received) == end:
                    received.clear()
                    end = 0
                self._taken = end
                return message
        if taken:
            del received[:taken]
            self._taken = 0
        return None
