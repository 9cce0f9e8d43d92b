"""The HTTP client for upstreams: one aiohttp session each, answers as they come off the wire.

Redirects are not followed, bodies are not decompressed behind our back, no cookies, no proxy from the environment.
Idle connections are dropped after 4 s, before a server under uvicorn (5 s) drops them; a request that still meets a
connection closed in that very moment is sent once more. Upstreams from the console connect only to public addresses:
the address that was checked is the one that is used.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import zlib
from collections.abc import Callable, Mapping
from contextvars import ContextVar

import aiohttp
from aiohttp import ClientRequest
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from yarl import URL

from headrace.gateway import upstream_errors
from headrace.gateway.headers import RawHeaders
from headrace.gateway.snapshot import Upstream

MAX_CONNECTIONS = 2000
KEEP_ALIVE_S = 4.0
DNS_CACHE_S = 30
READ_BUFFER_BYTES = 256 * 1024
MAX_ANSWER_BYTES = 256 * 1024 * 1024
MAX_ERROR_BYTES = 256 * 1024

METADATA = frozenset(
    map(ipaddress.ip_address, ("169.254.169.254", "169.254.170.2", "100.100.100.200", "fd00:ec2::254", "192.0.0.192"))
)
"""Where clouds hand out credentials: refused for every upstream, whoever registered it."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class BlockedAddress(OSError):
    """The upstream's name leads to an address that it may not use."""


def refusal(address: str, *, trusted: bool) -> str | None:
    """Why an upstream must not connect to this address, None where it may."""
    ip: Address = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip.sixtofour or ip
    if ip in METADATA:
        return f"{ip} is a cloud's metadata address"
    if not trusted and (not ip.is_global or ip.is_multicast):
        return f"{ip} is not a public address; name the upstream in the configuration file to allow it"
    return None


class GuardedResolver(AbstractResolver):
    """Names to addresses, of which only those that the upstream may use are connected to."""

    def __init__(self, trusted: bool) -> None:
        self._trusted = trusted

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, family=family)
        results: list[ResolveResult] = []
        for kind, _, proto, _, address in found:
            reason = refusal(str(address[0]), trusted=self._trusted)
            if reason is not None:
                raise BlockedAddress(f"{host} leads to {reason}")
            results.append(
                ResolveResult(
                    hostname=host,
                    host=str(address[0]),
                    port=port,
                    family=kind,
                    proto=proto,
                    flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
                )
            )
        return results

    async def close(self) -> None:
        pass


class UpstreamAnswer:
    """The head of an answer, and its body in pieces. `close` ends it at once, also in the middle."""

    __slots__ = ("_inflate", "_response", "status")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        packed = response.headers.get("content-encoding", "").strip().lower()
        self._inflate: Callable[[bytes], bytes] | None = None
        if packed in ("gzip", "x-gzip", "deflate"):
            self._inflate = zlib.decompressobj(wbits=47 if "gzip" in packed else 15).decompress

    @property
    def raw_headers(self) -> RawHeaders:
        return self._response.raw_headers

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        """By lower-case name; of repeated headers the last."""
        return {name.lower(): value for name, value in self._response.raw_headers}

    @property
    def content_type(self) -> str:
        return self._response.headers.get("content-type", "").partition(";")[0].strip().lower()

    async def read(self) -> bytes:
        """What has arrived, at least one byte; b"" at the end. Raises BrokenAnswer when the end came too early."""
        try:
            while True:
                data = await self._response.content.readany()
                if not data or self._inflate is None:
                    return data
                data = self._inflate(data)
                if data:
                    return data
        except (aiohttp.ClientError, OSError, zlib.error) as error:
            raise BrokenAnswer(type(error).__name__) from None

    async def read_whole(self, limit_bytes: int = MAX_ANSWER_BYTES) -> bytes:
        """The rest of the body. Raises BrokenAnswer, also when it is longer than the limit."""
        parts: list[bytes] = []
        size = 0
        while data := await self.read():
            parts.append(data)
            size += len(data)
            if size > limit_bytes:
                raise BrokenAnswer(f"more than {limit_bytes} bytes")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def read_error(self) -> bytes:
        """As much of the body as an error message needs; b"" where nothing can be read."""
        try:
            return await self.read_whole(MAX_ERROR_BYTES)
        except BrokenAnswer:
            return b""

    def close(self) -> None:
        """Frees the connection: back to the pool when the answer is complete, closed otherwise."""
        if self._response.content.is_eof():
            self._response.release()
        else:
            self._response.close()


class BrokenAnswer(Exception):
    """The connection ended, or what it carried was damaged, before the answer was complete."""


_is_reused: ContextVar[bool] = ContextVar("_is_reused", default=False)
"""Whether the request that this task sends got a connection that had carried another before."""


class _Connector(aiohttp.TCPConnector):
    """Says whether a connection is new; aiohttp tells that only to its tracing, which costs more than a route."""

    async def connect(self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout) -> Connection:
        connection = await super().connect(req, traces, timeout)
        protocol = connection.protocol
        _is_reused.set(hasattr(protocol, "headrace_used"))
        setattr(protocol, "headrace_used", True)  # noqa: B010
        return connection


class UpstreamClient:
    """All requests to one upstream. Made on the loop that uses it."""

    def __init__(self, upstream: Upstream) -> None:
        connect_s = upstream.timeouts.connect_s
        self.upstream = upstream
        self._session = aiohttp.ClientSession(
            connector=_Connector(
                limit=MAX_CONNECTIONS,
                keepalive_timeout=KEEP_ALIVE_S,
                ttl_dns_cache=DNS_CACHE_S,
                resolver=GuardedResolver(upstream.trusted),
            ),
            timeout=aiohttp.ClientTimeout(total=None, connect=connect_s, sock_connect=connect_s, ceil_threshold=60),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
            read_bufsize=READ_BUFFER_BYTES,
        )
        self._urls: dict[str, URL] = {}

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> UpstreamAnswer:
        """The answer's head. Raises UpstreamFailure when there is none."""
        place = self._urls.get(url)
        if place is None:
            if len(self._urls) > 100:
                self._urls.clear()
            place = self._urls[url] = URL(url)
            self._check_literal(place)
        for is_last in (False, True):
            try:
                response = await self._session.request(method, place, headers=headers, data=body, allow_redirects=False)
                return UpstreamAnswer(response)
            except aiohttp.ConnectionTimeoutError:
                raise upstream_errors.timed_out(self.upstream, "connect", self.upstream.timeouts.connect_s) from None
            except aiohttp.InvalidURL:
                raise upstream_errors.unreachable(self.upstream, url, "this is no valid address") from None
            except aiohttp.ClientConnectorError as error:
                blocked = error.os_error
                if isinstance(blocked, BlockedAddress):
                    raise upstream_errors.blocked_address(self.upstream, str(blocked)) from None
                raise upstream_errors.unreachable(self.upstream, url, _cause(error.os_error)) from None
            except (aiohttp.ServerDisconnectedError, ConnectionError, aiohttp.ClientOSError) as error:
                if isinstance(error, BlockedAddress):
                    raise upstream_errors.blocked_address(self.upstream, str(error)) from None
                if _is_reused.get() and not is_last:
                    continue
                raise upstream_errors.connection_lost(self.upstream) from None
            except BlockedAddress as error:
                raise upstream_errors.blocked_address(self.upstream, str(error)) from None
            except (aiohttp.ClientError, OSError, ValueError) as error:
                detail = f"its answer is not HTTP ({type(error).__name__})"
                raise upstream_errors.invalid_response(self.upstream, detail) from None
        raise AssertionError("unreachable")

    def _check_literal(self, url: URL) -> None:
        """An address written as such is not resolved, so it is checked here."""
        try:
            reason = refusal(url.host or "", trusted=self.upstream.trusted)
        except ValueError:
            return
        if reason is not None:
            self._urls.clear()
            raise upstream_errors.blocked_address(self.upstream, reason)

    async def close(self) -> None:
        await self._session.close()


class UpstreamClients:
    """The client of each upstream, made when first needed, and anew when its settings have changed."""

    def __init__(self) -> None:
        self._clients: dict[str, UpstreamClient] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def of(self, upstream: Upstream) -> UpstreamClient:
        client = self._clients.get(upstream.name)
        if client is not None:
            if client.upstream is upstream:
                return client
            if client.upstream == upstream:  # another snapshot says the same
                client.upstream = upstream
                return client
            self._retire(client)
        client = self._clients[upstream.name] = UpstreamClient(upstream)
        return client

    def keep(self, names: Mapping[str, object]) -> None:
        """Close the clients of upstreams that are no longer configured."""
        for name in [name for name in self._clients if name not in names]:
            self._retire(self._clients.pop(name))

    def _retire(self, client: UpstreamClient) -> None:
        """Running requests may finish; their connections die with them."""

        async def close_later() -> None:
            await asyncio.sleep(client.upstream.timeouts.total_s)
            await client.close()

        task = asyncio.get_running_loop().create_task(close_later())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for task in list(self._closing):
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        for client in self._clients.values():
            await client.close()
        self._clients.clear()


def _cause(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, socket.gaierror):
        return "its host name is not known"
    return error.strerror or type(error).__name__
