"""The gateway's HTTP application: bare ASGI, one exchange at a time through path, key, handler and error table.

Whatever goes wrong in one exchange ends in that exchange, as JSON of the dialect that its path means. Pages are
another application, which gets every path that is not the API's.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
import uuid
from collections.abc import Sequence

from headrace.gateway import logs, paths, status
from headrace.gateway.count_tokens import count_tokens
from headrace.gateway.exchange import Application, ClientGone, Exchange, Receive, Scope, Send
from headrace.gateway.forward import forward, plan_of
from headrace.gateway.models_route import list_models, one_model
from headrace.gateway.owned import batches, files, stored_response
from headrace.gateway.paths import Place
from headrace.gateway.snapshot import Dialect
from headrace.gateway.state import GatewayState
from headrace.protocol import errors
from headrace.protocol.errors import ApiError

logger = logging.getLogger("headrace.gateway")

_EXPOSED = b"x-request-id, x-headrace-ignored, retry-after, x-gateway-upstream, x-gateway-model, x-gateway-attempts"


def create_app(state: GatewayState, pages: Application | None = None) -> App:
    """The application over `state`. `pages` answers what is not the API's; without it such paths are 404 JSON."""
    return App(state, pages)


class App:
    """The ASGI application."""

    def __init__(self, state: GatewayState, pages: Application | None) -> None:
        self.state = state
        self._pages = pages
        self._proxies: tuple[Sequence[str], list[ipaddress.IPv4Network | ipaddress.IPv6Network]] = ((), [])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "http":
            path: str = scope["path"]
            if self._pages is not None and not _is_for_api(path, scope):
                await self._pages(scope, receive, send)
            else:
                await self._http(Exchange(scope, receive, send))
        elif kind == "lifespan":
            await _lifespan(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _http(self, exchange: Exchange) -> None:
        state = self.state
        path = paths.canonical(exchange.path)
        exchange.form = paths.error_form(path)
        counts = not paths.is_open(path)
        state.num_open += counts
        state.metrics.num_in_flight += counts
        try:
            await self._dispatch(exchange, path)
        except ApiError as error:
            await exchange.answer_error(error)
            _note_refusal(state, exchange, path, error)
        except ClientGone:
            pass
        except asyncio.CancelledError:  # the gateway ends, and the time that running requests had is over
            await exchange.answer_error(errors.gateway_draining())
        except Exception:
            await _answer_fault(exchange)
        finally:
            state.num_open -= counts
            state.metrics.num_in_flight -= counts

    async def _dispatch(self, exchange: Exchange, path: str) -> None:
        state, snapshot = self.state, self.state.snapshot
        origin = exchange.headers.get(b"origin")
        if origin is not None and snapshot.listen.allowed_origins:
            if exchange.method == "OPTIONS" and b"access-control-request-method" in exchange.headers:
                return await self._preflight(exchange, origin)
            exchange.answer_headers += self._cors(origin)
        place = paths.find(exchange.method, path, exchange.path)
        kind = place.endpoint.kind
        if kind in paths.OPEN_KINDS:
            return await status.answer(state, exchange, kind)
        if snapshot.listen.admin.trusted_proxies:
            exchange.client_ip = self._forwarded_for(exchange)
        record = exchange.key = state.keys.authenticate(exchange.headers, exchange.client_ip)
        exchange.answer_headers += state.keys.warning_headers(record)
        if state.is_draining:
            raise errors.gateway_draining()
        if kind in ("generate", "whole", "opaque"):
            await forward(state, snapshot, exchange, place, record)
        elif kind == "models":
            await list_models(state, snapshot, exchange, record)
        elif kind == "model":
            await one_model(state, snapshot, exchange, record, _id(place))
        else:
            handler = {"count_tokens": count_tokens, "files": files, "batches": batches}.get(kind, stored_response)
            dialect: Dialect = "anthropic" if exchange.form == "anthropic" else "openai"
            with state.limiter.admit(record, plan_of(snapshot, record), dialect=dialect) as lease:
                exchange.answer_headers += lease.headers()
                await handler(state, snapshot, exchange, place, record)

    def _forwarded_for(self, exchange: Exchange) -> str:
        """The client's address behind proxies that are believed: the last that is none of them."""
        trusted = self.state.snapshot.listen.admin.trusted_proxies
        if self._proxies[0] is not trusted:
            self._proxies = (trusted, [ipaddress.ip_network(text, strict=False) for text in trusted])
        hops = exchange.headers.get(b"x-forwarded-for", b"").decode("latin-1").split(",")
        address = exchange.client_ip
        for hop in [*reversed([hop.strip() for hop in hops if hop.strip()]), ""]:
            try:
                ip = ipaddress.ip_address(address.partition("%")[0])
            except ValueError:
                return address
            if isinstance(ip, ipaddress.IPv6Address):
                ip = ip.ipv4_mapped or ip
            if not hop or not any(ip in network for network in self._proxies[1]):
                return address
            address = hop
        return address

    def _cors(self, origin: bytes) -> list[tuple[bytes, bytes]]:
        allowed = self.state.snapshot.listen.allowed_origins
        if "*" in allowed:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", _EXPOSED)]
        if origin.decode("latin-1") in allowed:
            return [
                (b"access-control-allow-origin", origin),
                (b"access-control-expose-headers", _EXPOSED),
                (b"vary", b"Origin"),
            ]
        return [(b"vary", b"Origin")]

    async def _preflight(self, exchange: Exchange, origin: bytes) -> None:
        cors = self._cors(origin)
        if cors[0][0] != b"access-control-allow-origin":
            advice = "Add it to `allowed_origins` in `[server]` of the configuration."
            raise errors.origin_not_allowed(origin.decode("latin-1"), advice)
        wanted = exchange.headers.get(b"access-control-request-headers", b"")
        allows = [
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"access-control-allow-headers", wanted),
            (b"access-control-max-age", b"600"),
        ]
        await exchange.answer(204, b"", [*cors, *allows])


def _id(place: Place) -> str:
    assert place.id is not None
    return place.id


def _is_for_api(path: str, scope: Scope) -> bool:
    """/models and / mean a page to a browser and the API to everything else."""
    if not paths.is_api(path):
        return False
    if path.rstrip("/") in ("", "/models") and scope["method"] in ("GET", "HEAD"):
        accept = next((value for name, value in scope["headers"] if name == b"accept"), b"")
        return b"text/html" not in accept
    return True


def _note_refusal(state: GatewayState, exchange: Exchange, path: str, error: ApiError) -> None:
    """An answer that no upstream gave, in metrics and log. Files and batches carry codes that upstreams make up."""
    is_ours = not path.startswith(("/files", "/batches", "/responses/"))
    key = exchange.key
    tag = key.tags[0] if key is not None and key.tags else ""
    state.metrics.refused((error.code if is_ours else None) or f"status_{error.status}", tag)
    logs.log_request(
        logs.RequestLine(
            request_id=exchange.request_id.decode("latin-1"),
            key=None if key is None else key.prefix,
            method=exchange.method,
            path=exchange.path[:200],
            status=error.status,
            client=exchange.client_ip,
            outcome="refused",
            code=error.code,
        )
    )


async def _answer_fault(exchange: Exchange) -> None:
    """A fault of ours: the log has the stack trace, the client an id to find it by."""
    error_id = uuid.uuid4().hex[:12]
    seconds = time.perf_counter() - exchange.began_s
    logger.exception(
        "Error %s while answering request %s (%s) after %.3f s",
        error_id,
        exchange.request_id.decode("latin-1"),
        exchange.path,
        seconds,
    )
    await exchange.answer_error(errors.internal_error(error_id))


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
