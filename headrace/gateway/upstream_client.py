"""The HTTP client for upstreams: requests out, with the upstream's own authentication; answers as they come.

Redirects are not followed, bodies arrive decompressed, and whatever goes wrong before an answer's head is there is an
UpstreamFailure.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import quote, urlsplit

from headrace.gateway import upstream_errors
from headrace.gateway.headers import RawHeaders, own_headers
from headrace.gateway.plain_http import BrokenAnswer, ConnectionLost, NotHttp, Origin, PlainConnections, Take
from headrace.gateway.snapshot import Upstream
from headrace.gateway.upstream_addresses import BlockedAddress, Resolver

if TYPE_CHECKING:
    from headrace.gateway.tls_http import TlsConnections

__all__ = ["BrokenAnswer", "UpstreamAnswer", "UpstreamClient", "UpstreamClients"]

MAX_ANSWER_BYTES = 256 * 1024 * 1024
MAX_ERROR_BYTES = 256 * 1024
MAX_PLACES = 100
_UNQUOTED = "/?%:@!$&'()*+,;=~[]"


class _Body(Protocol):
    """An answer as the connections give it."""

    status: int
    headers: list[tuple[bytes, bytes]]

    async def read(self, take: Take | None = None) -> bytes: ...
    def close(self) -> None: ...
    def finish(self) -> None: ...


class UpstreamAnswer:
    """The head of an answer, and its body in pieces. `close` ends it at once, also in the middle."""

    __slots__ = ("_body", "_inflate", "close", "content_type", "finish", "headers", "raw_headers", "read", "status")

    def __init__(self, body: _Body) -> None:
        self.status = body.status
        self.raw_headers: RawHeaders = body.headers
        """Names in lower case."""
        self.headers: Mapping[bytes, bytes] = dict(body.headers)
        """Of repeated headers the last."""
        self.content_type = _media_type(self.headers.get(b"content-type", b""))
        self.close: Callable[[], None] = body.close
        """Frees the connection: kept for another request when the answer was read to its end, closed otherwise."""
        self.finish: Callable[[], None] = body.finish
        """As `close`, where the answer is over but for what frames it: that is let pass, in the background."""
        self.read = body.read
        """What has arrived, at least one byte; b"" at the end. Raises BrokenAnswer when the end came too early."""
        packed = self.headers.get(b"content-encoding")
        if packed is not None and packed.strip().lower() in (b"gzip", b"x-gzip", b"deflate"):
            self._body = body
            self._inflate = zlib.decompressobj(wbits=47 if b"gzip" in packed.lower() else 15).decompress
            self.read = self._read_packed

    async def _read_packed(self, take: Take | None = None) -> bytes:
        try:
            while packed := await self._body.read():
                data = self._inflate(packed)
                if data:
                    return data
        except zlib.error as error:
            raise BrokenAnswer(type(error).__name__) from None
        return b""

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


@functools.lru_cache(maxsize=200)
def _media_type(content_type: bytes) -> str:
    return content_type.partition(b";")[0].strip().lower().decode("latin-1")


class _Place(NamedTuple):
    """An address worked out. `origin` None: over TLS. `lines` of a request name it, from its target on."""

    origin: Origin | None
    lines: bytes


class UpstreamClient:
    """All requests to one upstream. Made on the loop that uses it."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self._resolver = Resolver(upstream.trusted)
        self._plain = PlainConnections(self._resolver, upstream.timeouts.connect_s)
        self._tls: TlsConnections | None = None
        self._own = own_headers(upstream)
        self._places: dict[str, _Place] = {}
        self._urls: dict[tuple[str, int], str] = {}

    def url(self, path: str, replica: int = 0) -> str:
        """`Upstream.url`, worked out once for each endpoint."""
        url = self._urls.get((path, replica))
        if url is None:
            url = self._urls[path, replica] = self.upstream.url(path, replica)
        return url

    async def send(self, method: str, url: str, headers: Mapping[bytes, bytes], body: bytes | None) -> UpstreamAnswer:
        """The answer's head. `headers` are the request's; the upstream's own are added. Raises UpstreamFailure."""
        upstream = self.upstream
        try:
            place = self._places.get(url) or self._place(url)
            sent = {**self._own.usual, **headers, **self._own.always}
            if place.origin is None:
                return UpstreamAnswer(await self._over_tls().send(method, url, list(sent.items()), body))
            if body is not None:
                sent[b"content-length"] = b"%d" % len(body)
            head = b"%s %s%s\r\n\r\n" % (method.encode(), place.lines, b"\r\n".join(map(b": ".join, sent.items())))
            return UpstreamAnswer(await self._plain.send(place.origin, head, body or b""))
        except TimeoutError:
            raise upstream_errors.timed_out(upstream, "connect", upstream.timeouts.connect_s) from None
        except BlockedAddress as error:
            raise upstream_errors.blocked_address(upstream, str(error)) from None
        except ConnectionLost:
            raise upstream_errors.connection_lost(upstream) from None
        except NotHttp as error:
            raise upstream_errors.invalid_response(upstream, str(error)) from None
        except OSError as error:
            raise upstream_errors.unreachable(upstream, url, _cause(error)) from None
        except ValueError:
            raise upstream_errors.unreachable(upstream, url, "this is no valid address") from None

    def _place(self, url: str) -> _Place:
        """Raises ValueError for what is no address."""
        if len(self._places) >= MAX_PLACES:
            self._places.clear()
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(url)
        host = parts.hostname if parts.hostname.isascii() else parts.hostname.encode("idna").decode()
        shown = (f"[{host}]" if ":" in host else host) + (f":{parts.port}" if parts.port else "")
        target = quote(parts.path or "/", safe=_UNQUOTED) + (
            f"?{quote(parts.query, safe=_UNQUOTED)}" if parts.query else ""
        )
        lines = f"{target} HTTP/1.1\r\nhost: {shown}\r\n".encode()
        place = self._places[url] = _Place((host, parts.port or 80) if parts.scheme == "http" else None, lines)
        return place

    def _over_tls(self) -> TlsConnections:
        if self._tls is None:
            from headrace.gateway.tls_http import TlsConnections  # 15 MiB, and many a gateway has none such

            self._tls = TlsConnections(self._resolver, self.upstream.timeouts.connect_s)
        return self._tls

    async def close(self) -> None:
        self._plain.close()
        if self._tls is not None:
            await self._tls.close()


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
    return error.strerror or str(error) or type(error).__name__
