"""The model server that `bench.gateway` puts behind gateways: an answer begins after 20 ms and costs next to nothing.

    python -m headrace.bench.gateway_upstream PORT

A whole answer is one chat completion; a stream is 100 chunks 2 ms apart, its usage and [DONE].
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from typing import cast

import uvloop

ANSWER_AFTER_S = 0.020
CHUNKS = 100
CHUNK_EVERY_S = 0.002

_COMMON = {"id": "chatcmpl-bench", "created": 1_700_000_000, "model": "bench"}
_USAGE = {"prompt_tokens": 12, "completion_tokens": CHUNKS, "total_tokens": 12 + CHUNKS}


def _chunk(choices: list[object], **more: object) -> bytes:
    value = {**_COMMON, "object": "chat.completion.chunk", "choices": choices, **more}
    data = b"data: " + json.dumps(value).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


_MESSAGE = {"role": "assistant", "content": "The wheel turns because the water falls. " * 8}
_WHOLE_BODY = json.dumps(
    {
        **_COMMON,
        "object": "chat.completion",
        "choices": [{"index": 0, "message": _MESSAGE, "finish_reason": "stop"}],
        "usage": _USAGE,
    }
).encode()
WHOLE = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_WHOLE_BODY)
) + _WHOLE_BODY
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM_CHUNK = _chunk([{"index": 0, "delta": {"content": " water"}, "finish_reason": None}])
_DONE = b"data: [DONE]\n\n"
STREAM_END = (
    _chunk([{"index": 0, "delta": {}, "finish_reason": "stop"}])
    + _chunk([], usage=_USAGE)
    + b"%x\r\n%s\r\n0\r\n\r\n" % (len(_DONE), _DONE)
)


class _Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = b""
        self.loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lowered = head.lower()
        if lowered.startswith(b"get "):
            self.buffer = b""
            self.transport.write(WHOLE)
            return
        at = lowered.find(b"content-length:")
        length = int(lowered[at + 15 :].partition(b"\r\n")[0])
        if len(body) < length:
            return
        self.buffer = b""
        streamed = b'"stream":true' in body or b'"stream": true' in body
        self.loop.call_later(ANSWER_AFTER_S, self.begin_stream if streamed else self.answer)

    def answer(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(WHOLE)

    def begin_stream(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(STREAM_HEAD + STREAM_CHUNK)
            self.chunk(1)

    def chunk(self, sent: int) -> None:
        if self.transport.is_closing():
            return
        if sent == CHUNKS:
            self.transport.write(STREAM_END)
            return
        if sent > 1:
            self.transport.write(STREAM_CHUNK)
        self.loop.call_later(CHUNK_EVERY_S, self.chunk, sent + 1)


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Connection, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
