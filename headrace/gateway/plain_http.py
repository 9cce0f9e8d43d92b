"""HTTP/1.1 to upstreams without TLS, as engines are reached: httptools on bare connections, which are kept.

    idle connection ──or a new one──► request, one write ──► head ──► body in pieces ──whole──► idle again, for 4 s

A server under uvicorn drops idle connections after 5 s, so ours are dropped before. A request that still meets a
connection closed in that very moment is sent once more, on a new one. A body is taken as it arrives, and not faster
than it is read. Who reads may leave a function that takes pieces then and there, without a task being woken for each.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import httptools

from headrace.gateway.upstream_addresses import Resolver

KEEP_ALIVE_S = 4.0
MAX_HEAD_BYTES = 256 * 1024
MAX_UNREAD_BYTES = 256 * 1024
FINISH_S = 1.0
"""How long the end of an answer that is no longer read is waited for, so that its connection can be used again."""
SEPARATE_BYTES = 64 * 1024
"""A body from this size on is not copied behind its head."""

Origin = tuple[str, int]
Take = Callable[[bytes], bool]


class ConnectionLost(Exception):
    """The connection ended without an answer."""


class NotHttp(Exception):
    """What came is no answer; the message is a detail for a sentence."""


class BrokenAnswer(Exception):
    """The connection ended, or what it carried was damaged, before the answer was complete."""


class PlainConnections:
    """The connections to one upstream's servers."""

    def __init__(self, resolver: Resolver, connect_s: float) -> None:
        self._resolver = resolver
        self._connect_s = connect_s
        self._idle: dict[Origin, deque[PlainConnection]] = {}
        self._all: set[PlainConnection] = set()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    async def send(self, origin: Origin, head: bytes, body: bytes) -> PlainConnection:
        """The connection that carries the answer, its head being there.

        Raises TimeoutError when none came about in time, OSError where none can, ConnectionLost, NotHttp.
        """
        connection = self._kept(origin)
        if connection is not None:
            try:
                await connection.ask(head, body)
                return connection
            except ConnectionLost:
                if connection.has_answered:
                    raise
        connection = await self._connect(origin)
        await connection.ask(head, body)
        return connection

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for connection in list(self._all):
            connection.abort()

    def keep(self, connection: PlainConnection) -> None:
        """For the next request."""
        connection.idle_since_s = self._loop.time()
        self._idle.setdefault(connection.origin, deque()).append(connection)
        if self._timer is None:
            self._timer = self._loop.call_later(KEEP_ALIVE_S, self._drop_old)

    def lost(self, connection: PlainConnection) -> None:
        self._all.discard(connection)

    def _kept(self, origin: Origin) -> PlainConnection | None:
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.is_open and self._loop.time() - connection.idle_since_s < KEEP_ALIVE_S:
                return connection
            connection.abort()
        return None

    def _drop_old(self) -> None:
        self._timer = None
        before_s = self._loop.time() - KEEP_ALIVE_S
        oldest: float | None = None
        for origin, idle in list(self._idle.items()):
            while idle and (not idle[0].is_open or idle[0].idle_since_s <= before_s):
                idle.popleft().abort()
            if not idle:
                del self._idle[origin]
            elif oldest is None or idle[0].idle_since_s < oldest:
                oldest = idle[0].idle_since_s
        if oldest is not None:
            self._timer = self._loop.call_later(max(0.05, oldest - before_s), self._drop_old)

    async def _connect(self, origin: Origin) -> PlainConnection:
        """Tries a name's addresses one after the other; each gets its share of the time that is left."""
        host, port = origin
        failure: OSError = OSError("it has no address")
        async with asyncio.timeout(self._connect_s):
            addresses = await self._resolver.addresses(host)
            ends_s = self._loop.time() + self._connect_s
            for index, address in enumerate(addresses):
                share_s = (ends_s - self._loop.time()) / (len(addresses) - index)
                try:
                    async with asyncio.timeout(share_s):
                        _, connection = await self._loop.create_connection(
                            lambda: PlainConnection(self, origin), address, port
                        )
                except OSError as error:
                    failure = error
                else:
                    self._all.add(connection)
                    return connection
        raise failure


class PlainConnection(asyncio.Protocol):
    """One connection, one request at a time. After `ask` it is the answer, until `close` or `finish`."""

    def __init__(self, pool: PlainConnections, origin: Origin) -> None:
        self.origin = origin
        self.idle_since_s = 0.0
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        """Of the answer; names in lower case."""
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True)
        self._waiter: asyncio.Future[None] | None = None
        self._take: Take | None = None
        self._is_asked = False
        self._begin()

    def _begin(self) -> None:
        self.headers = []
        self._head_bytes = 0
        self._has_head = False
        self._is_whole = False
        self._ends_with_connection = False
        self._may_keep = True
        self._parts: list[bytes] = []
        self._num_unread = 0
        self._fault: str | None = None
        """Why no more of the answer will come."""
        self._finishing: asyncio.TimerHandle | None = None

    # The request

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def has_answered(self) -> bool:
        """At least one byte of an answer has come."""
        return self._head_bytes > 0

    async def ask(self, head: bytes, body: bytes) -> None:
        """Send a request and wait for the answer's head. Raises ConnectionLost, NotHttp; a connection is then gone."""
        if self._transport is None:
            raise ConnectionLost
        self._begin()
        self._is_asked = True
        if len(body) < SEPARATE_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines([head, body])
        try:
            while not self._has_head:
                if self._fault is not None:
                    raise NotHttp(self._fault) if self._fault else ConnectionLost
                await self._news()
        except BaseException:
            self.abort()
            raise

    # The answer

    async def read(self, take: Take | None = None) -> bytes:
        """What has arrived, at least one byte; b"" at the end. Raises BrokenAnswer when the end came too early.

        What arrives while this waits is offered to `take` first, and returned only where that does not take it.
        """
        while not self._parts:
            if self._is_whole:
                return b""
            if self._fault is not None:
                raise BrokenAnswer(self._fault)
            self._take = take
            await self._news()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        if self._num_unread > MAX_UNREAD_BYTES and self.is_open:
            assert self._transport is not None
            self._transport.resume_reading()
        self._num_unread = 0
        return data

    def close(self) -> None:
        """No more of the answer is wanted: the connection is kept if it was whole, and closed otherwise."""
        self._is_asked = False
        transport = self._transport
        if self._is_whole and self._may_keep and transport is not None and not transport.get_write_buffer_size():
            self._pool.keep(self)
        else:
            self.abort()

    def finish(self) -> None:
        """The answer has been understood to its end: what is left of it is let pass, for a moment."""
        if self._is_whole or self._transport is None:
            return self.close()
        self._finishing = self._loop.call_later(FINISH_S, self.abort)

    def abort(self) -> None:
        if self._finishing is not None:
            self._finishing.cancel()
        if self._transport is not None:
            self._transport.abort()

    async def _news(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = self._take = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # The transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = self._parser = None
        self._pool.lost(self)
        if self._ends_with_connection and exc is None and self._fault is None:
            self._is_whole = True
        if self._fault is None:
            self._fault = ""
        self._wake()

    def data_received(self, data: bytes) -> None:
        if not self._is_asked:
            return self.abort()  # nobody asked
        if not self._has_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break(f"its answer is not HTTP ({error or type(error).__name__})")
        if self._head_bytes > MAX_HEAD_BYTES and not self._has_head:
            self._break(f"its answer's head is longer than {MAX_HEAD_BYTES} bytes")
        if self._num_unread > MAX_UNREAD_BYTES and self.is_open:
            cast(asyncio.Transport, self._transport).pause_reading()
        if self._finishing is not None:
            self._parts.clear()
            self._num_unread = 0
            if self._is_whole:
                self._finishing.cancel()
                self.close()
        if self._take is not None and len(self._parts) == 1 and not self._is_whole and self._take(self._parts[0]):
            self._parts.clear()
            self._num_unread = 0
            return
        self._wake()

    def _break(self, fault: str) -> None:
        if not self._is_whole:
            self._fault = fault
        self._may_keep = False
        self.abort()

    # The parser

    def on_message_begin(self) -> None:
        if self._is_whole:
            self._may_keep = False  # a second answer to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._has_head:
            return
        if status < 200:
            self.headers.clear()
            if status == 101:
                self._break("it changes to a protocol that nobody asked for")
            return
        self.status = status
        self._has_head = True
        told = dict(self.headers)
        self._ends_with_connection = (
            b"content-length" not in told
            and not told.get(b"transfer-encoding", b"").lower().endswith(b"chunked")
            and status not in (204, 304)
        )

    def on_body(self, body: bytes) -> None:
        if not self._is_whole:
            self._parts.append(body)
            self._num_unread += len(body)

    def on_message_complete(self) -> None:
        if self._has_head and not self._is_whole:
            self._is_whole = True
            self._may_keep = self._may_keep and self._parser.should_keep_alive()
