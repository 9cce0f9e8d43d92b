"""The HTTP application: bare ASGI, one exchange at a time through key check, route, handler and error table.

Whatever goes wrong in one exchange ends in that exchange: a known refusal as its status and JSON, anything else
as a 500 with an id that the log explains. The client sees no stack trace.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping

from headrace.config.settings import EngineSettings, ServerSettings
from headrace.protocol import errors
from headrace.protocol.errors import ApiError
from headrace.protocol.generation_defaults import sampling_defaults
from headrace.server import routes
from headrace.server.admin import check_admin
from headrace.server.auth import Cors, KeyCheck
from headrace.server.batch_place import BatchPlace
from headrace.server.http import ClientGone, Exchange, Receive, Scope, Send
from headrace.server.metrics import EngineMetrics
from headrace.server.serving import Client, Serving
from headrace.text.chat_template import ChatTemplate
from headrace.text.tokenizer import Tokenizer

logger = logging.getLogger("headrace.server")

CLIENT_CLOSED_REQUEST = 499
"""In metrics and log only: the client left before there was anything to send."""


def create_app(
    server_settings: ServerSettings,
    engine_settings: EngineSettings,
    client: Client,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    *,
    generation_config: Mapping[str, object],
    metrics: EngineMetrics,
    tool_template: ChatTemplate | None = None,
) -> App:
    """The application over `client`. `generation_config` is the model's own, {} where it has none; `tool_template` the
    chat template that the model has for requests with tools, where that is another one.

    Raises ConfigError for generation defaults that cannot work.
    """
    defaults = sampling_defaults(
        generation_config, server_settings.generation_config, server_settings.override_generation_config
    )
    if defaults:
        logger.info("Sampling defaults for fields a request leaves out: %s", json.dumps(defaults))
    if chat_template is None and engine_settings.pooler is None:
        logger.warning("The model has no chat template: /v1/chat/completions answers 400. Use --chat-template FILE.")
    serving = Serving(
        server_settings, engine_settings, client, tokenizer, chat_template, tool_template, defaults, metrics
    )
    if serving.chat is not None:
        for line in serving.chat.warnings():
            logger.warning("%s", line)
    return App(serving)


class App:
    """The ASGI application. `serving` may be read by whoever runs it (its count of open requests, for instance)."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self._keys = KeyCheck(serving.settings.api_keys)
        self._cors = Cors(serving.settings)
        self._root_path = serving.settings.root_path
        serving.batches = BatchPlace(serving.settings, serving.engine_settings, self.dispatch)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003})
        else:
            await self._http(Exchange(scope, receive, send))

    async def _http(self, exchange: Exchange) -> None:
        began = time.perf_counter()
        exchange.answer_headers.update(self._cors.headers(exchange.headers.get("origin")))
        label = "none"
        self.serving.exchanges.add(exchange)
        try:
            label = await self._dispatch(exchange)
        except ClientGone:
            logger.debug("The client of request %s left.", exchange.request_id)
        finally:
            self.serving.exchanges.discard(exchange)
            seconds = time.perf_counter() - began
            status = exchange.status or CLIENT_CLOSED_REQUEST
            self.serving.metrics.http_request(exchange.method, label, status, seconds)
            if self.serving.settings.log_requests:
                name, path = exchange.request_id, exchange.path
                logger.info(
                    "Request %s processed: %s %s, status %d, %.3f s", name, exchange.method, path, status, seconds
                )

    async def _dispatch(self, exchange: Exchange) -> str:
        """Answers the exchange. Returns the route's path for the metrics."""
        async with _errors_answered(exchange):
            path = routes.canonical(exchange.path, self._root_path)
            exchange.dialect = routes.dialect_of(path, exchange.headers)
            origin = exchange.headers.get("origin")
            if exchange.method == "OPTIONS" and origin and "access-control-request-method" in exchange.headers:
                await exchange.answer(204, b"", headers=self._cors.preflight(origin, exchange.headers))
                return "none"
            refusal = self._keys.refusal(exchange.headers, path)
            if refusal is not None:
                raise refusal
            self._cors.check(exchange.method, origin)
            return await self.dispatch(exchange, path)
        return "none"

    async def dispatch(self, exchange: Exchange, path: str) -> str:
        """Answers an exchange that is let in, by the route of its canonical path. Returns the route's path."""
        label = "none"
        async with _errors_answered(exchange):
            route = routes.find(exchange.method, path, exchange.path)
            label = route.path
            if route.admin:
                check_admin(self.serving, exchange)
            if route.gives is not None:
                self.serving.check_gives(route.gives)
            await route.answer(self.serving, exchange)
        return label


@contextlib.asynccontextmanager
async def _errors_answered(exchange: Exchange) -> AsyncIterator[None]:
    """An error inside becomes the answer, by the error table or as a fault of ours. Raises ClientGone."""
    try:
        yield
    except ApiError as error:
        await exchange.answer_error(error)
    except ClientGone:
        raise
    except Exception:
        await _answer_fault(exchange)


async def _answer_fault(exchange: Exchange) -> None:
    """A fault of ours: the log has the stack trace, the client an id to find it by."""
    error_id = uuid.uuid4().hex[:12]
    logger.exception("Error %s while answering request %s (%s)", error_id, exchange.request_id, exchange.path)
    error = errors.internal_error(error_id)
    if exchange.status is None:
        await exchange.answer_error(error)
    elif exchange.is_streaming:
        await exchange.write_error(error)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
