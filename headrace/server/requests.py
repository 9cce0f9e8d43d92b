"""What every request for text goes through before it is answered: its body read, unknown fields named, a log line."""

from __future__ import annotations

import logging
from typing import TypeVar

import msgspec

from headrace.protocol.ipc import SamplingParams
from headrace.protocol.json import Body
from headrace.protocol.sampling import SamplingFields
from headrace.protocol.unbuilt_fields import unknown_fields
from headrace.server.http import Exchange
from headrace.server.serving import Serving

logger = logging.getLogger("headrace.server")

T = TypeVar("T", bound=msgspec.Struct)


async def read_request(serving: Serving, exchange: Exchange, dialect: type[T]) -> tuple[T, SamplingFields]:
    """The body's fields: the dialect's own, and those of sampling. A long body is parsed in a thread.

    Raises ApiError (400) for a known field that cannot be honoured; names unknown ones in a header and the log.
    """
    raw = await exchange.body(serving.settings.max_body_bytes)

    def parsed() -> tuple[T, SamplingFields, dict[str, object]]:
        body = Body(raw)
        return body.read(dialect), body.read(SamplingFields), body.others()

    fields, sampling, others = await serving.aside(len(raw), parsed)
    exchange.name(sampling.request_id)
    unknown = unknown_fields(others)
    if unknown:
        exchange.warn_ignored(unknown)
        if not exchange.is_background:
            logger.warning(
                "Request %s to %s has unknown fields, which have no effect: %s",
                exchange.request_id,
                exchange.path,
                exchange.answer_headers["x-headrace-ignored"],
            )
    return fields, sampling


def log_request(
    serving: Serving, exchange: Exchange, answer_id: str, prompt_tokens: int, params: SamplingParams
) -> None:
    """Tie the answer's id to its exchange, so that either ends the request, and log what is asked for."""
    exchange.answer_id = answer_id
    if serving.settings.log_requests:
        logger.info(
            "Request %s (%s) to %s: %d prompt tokens, %s",
            exchange.request_id,
            answer_id,
            exchange.path,
            prompt_tokens,
            msgspec.json.encode(params).decode()[: serving.settings.max_log_len],
        )
