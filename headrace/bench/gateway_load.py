"""The generator of `bench.gateway`: bare sockets, so that it costs little beside what is measured."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

PATH = "/v1/chat/completions"

MESSAGES = [
    {"role": "system", "content": "You answer questions about water wheels in one sentence."},
    {"role": "user", "content": "Why does an overshot wheel turn more slowly than an undershot one? " * 4},
]


class LoadError(Exception):
    """A request was not answered as it should be."""


@dataclass(frozen=True)
class Head:
    """Headers of every request to one contestant."""

    headers: Mapping[str, str]

    def request(self, streamed: bool) -> bytes:
        body = json.dumps({"model": "bench", "messages": MESSAGES, "stream": streamed}).encode()
        lines = [
            f"POST {PATH} HTTP/1.1",
            "host: 127.0.0.1",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass
class Round:
    latencies_s: list[float] = field(default_factory=list)
    firsts_s: list[float] = field(default_factory=list)
    """Request to the first byte of the body."""
    num_chunks: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Of the process that was asked, its children included."""

    @property
    def num_requests(self) -> int:
        return len(self.latencies_s)

    @property
    def rate(self) -> float:
        return self.num_requests / self.wall_s

    def latency_s(self, share: float) -> float:
        return percentile(self.latencies_s, share)

    def first_s(self, share: float) -> float:
        return percentile(self.firsts_s, share)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


class _Client(asyncio.Protocol):
    """One connection, one request at a time; the future of an answer gives when its body began and its chunks."""

    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: bytes) -> asyncio.Future[tuple[float, int]]:
        self.buffer = b""
        self.body_bytes: int | None = None
        self.began_s = 0.0
        self.num_chunks = 0
        self.in_body = False
        self.answered: asyncio.Future[tuple[float, int]] = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.answered

    def data_received(self, data: bytes) -> None:
        if self.in_body:
            self.num_chunks += data.count(b"data: ")
            if self.body_bytes is None:
                self.buffer = (self.buffer + data)[-8:]
            else:
                self.body_bytes -= len(data)
        else:
            self.buffer += data
            head, found, body = self.buffer.partition(b"\r\n\r\n")
            if not found:
                return
            if not head.startswith(b"HTTP/1.1 200"):
                self.fail(self.buffer.decode("latin-1")[:600])
                return
            lowered = head.lower()
            at = lowered.find(b"content-length:")
            length = int(lowered[at + 15 :].partition(b"\r\n")[0]) if at >= 0 else None
            if not body and length is None:
                return
            self.in_body, self.began_s = True, time.perf_counter()
            self.num_chunks += body.count(b"data: ")
            self.body_bytes = None if length is None else length - len(body)
            self.buffer = body[-8:]
        is_over = self.buffer.endswith(b"0\r\n\r\n") if self.body_bytes is None else self.body_bytes <= 0
        if is_over and not self.answered.done():
            self.answered.set_result((self.began_s, self.num_chunks))

    def connection_lost(self, exc: Exception | None) -> None:
        if hasattr(self, "answered"):
            self.fail(f"the connection ended: {exc}")

    def fail(self, message: str) -> None:
        if not self.answered.done():
            self.answered.set_exception(LoadError(message))


async def run_round(port: int, head: Head, streamed: bool, num_requests: int, concurrency: int) -> Round:
    """`num_requests` over `concurrency` kept connections. Raises LoadError."""
    loop = asyncio.get_running_loop()
    request = head.request(streamed)
    result = Round()
    left = num_requests
    clients = [(await loop.create_connection(_Client, "127.0.0.1", port))[1] for _ in range(concurrency)]

    async def work(client: _Client) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            sent = time.perf_counter()
            began_s, num_chunks = await client.ask(request)
            result.latencies_s.append(time.perf_counter() - sent)
            result.firsts_s.append(began_s - sent)
            result.num_chunks += num_chunks

    start = time.perf_counter()
    await asyncio.gather(*map(work, clients))
    result.wall_s = time.perf_counter() - start
    for client in clients:
        client.transport.close()
    return result
