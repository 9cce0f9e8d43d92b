"""HTTP/1.1 to upstreams over TLS: an aiohttp session, which knows certificates and tries addresses side by side.

Redirects are not followed, bodies are not decompressed behind our back, no cookies, no proxy from the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from contextvars import ContextVar

import aiohttp
from aiohttp import ClientRequest
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from yarl import URL

from headrace.gateway.headers import RawHeaders
from headrace.gateway.plain_http import FINISH_S, KEEP_ALIVE_S, BrokenAnswer, ConnectionLost, NotHttp, Take
from headrace.gateway.upstream_addresses import BlockedAddress, Resolver

MAX_CONNECTIONS = 2000
READ_BUFFER_BYTES = 256 * 1024

_is_reused: ContextVar[bool] = ContextVar("_is_reused", default=False)
"""Whether the request that this task sends got a connection that had carried another before."""


class _Checked(AbstractResolver):
    """Our resolver in aiohttp's words."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in await self._resolver.addresses(host)
        ]

    async def close(self) -> None:
        pass


class _Connector(aiohttp.TCPConnector):
    """Says whether a connection is new; aiohttp tells that only to its tracing, which costs more than a route."""

    async def connect(self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout) -> Connection:
        connection = await super().connect(req, traces, timeout)
        protocol = connection.protocol
        _is_reused.set(hasattr(protocol, "headrace_used"))
        setattr(protocol, "headrace_used", True)  # noqa: B010
        return connection


class TlsConnections:
    """The connections to one upstream's servers."""

    def __init__(self, resolver: Resolver, connect_s: float) -> None:
        self._session = aiohttp.ClientSession(
            connector=_Connector(
                limit=MAX_CONNECTIONS,
                keepalive_timeout=KEEP_ALIVE_S,
                use_dns_cache=False,
                resolver=_Checked(resolver),
            ),
            timeout=aiohttp.ClientTimeout(total=None, connect=connect_s, sock_connect=connect_s, ceil_threshold=60),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
            read_bufsize=READ_BUFFER_BYTES,
        )
        self._resolver = resolver

    async def send(self, method: str, url: str, headers: RawHeaders, body: bytes | None) -> TlsAnswer:
        """The answer's head. Raises TimeoutError, OSError, ConnectionLost and NotHttp as PlainConnections does."""
        await self._resolver.addresses(URL(url).raw_host or "")  # aiohttp does not ask for one written as an address
        texts = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
        for is_last in (False, True):
            try:
                response = await self._session.request(method, url, headers=texts, data=body, allow_redirects=False)
                return TlsAnswer(response)
            except aiohttp.ConnectionTimeoutError:
                raise TimeoutError from None
            except aiohttp.ClientConnectorError as error:
                raise error.os_error from None
            except (aiohttp.ServerDisconnectedError, ConnectionError, aiohttp.ClientOSError) as error:
                if isinstance(error, BlockedAddress):
                    raise
                if _is_reused.get() and not is_last:
                    continue
                raise ConnectionLost from None
            except (aiohttp.ClientError, ValueError) as error:
                raise NotHttp(f"its answer is not HTTP ({type(error).__name__})") from None
        raise AssertionError("unreachable")

    async def close(self) -> None:
        await self._session.close()


class TlsAnswer:
    """An answer, its head being there, as PlainConnection is one."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.headers = [(name.lower(), value) for name, value in response.raw_headers]
        self._response = response
        self._finishing: asyncio.Task[None] | None = None

    async def read(self, take: Take | None = None) -> bytes:
        """`take` is for connections that are nearer."""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise BrokenAnswer(type(error).__name__) from None

    def close(self) -> None:
        if self._response.content.is_eof():
            self._response.release()
        else:
            self._response.close()

    def finish(self) -> None:
        self._finishing = asyncio.get_running_loop().create_task(self._finish())

    async def _finish(self) -> None:
        try:
            with contextlib.suppress(BrokenAnswer, TimeoutError):
                async with asyncio.timeout(FINISH_S):
                    while await self.read():
                        pass
        finally:
            self.close()
