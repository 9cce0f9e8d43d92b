"""What every request for text goes through before it is answered: a word about unknown fields, a log line."""

from __future__ import annotations

import logging

import msgspec

from headrace.protocol.ipc import SamplingParams
from headrace.protocol.json import Body
from headrace.protocol.sampling import SamplingFields
from headrace.protocol.unbuilt_fields import unknown_fields
from headrace.server.http import Exchange
from headrace.server.serving import Serving

logger = logging.getLogger("headrace.server")

MAX_NAMES = 20


def note_unknown_fields(exchange: Exchange, body: Body, sampling: SamplingFields) -> None:
    """Raises ApiError (400) for a known field that cannot be honoured; names unknown ones in a header and the log.

    Call it when every type of the request has been read from `body`.
    """
    if sampling.request_id and "x-request-id" not in exchange.headers:
        exchange.name(sampling.request_id)
    unknown = unknown_fields(body.others())
    if unknown:
        exchange.warn_ignored(unknown[:MAX_NAMES])
        logger.warning(
            "Request %s to %s has unknown fields, which have no effect: %s",
            exchange.request_id,
            exchange.path,
            exchange.answer_headers["x-headrace-ignored"],
        )


def log_request(
    serving: Serving, exchange: Exchange, answer_id: str, prompt_tokens: int, params: SamplingParams
) -> None:
    if serving.settings.log_requests:
        logger.info(
            "Request %s (%s) to %s: %d prompt tokens, %s",
            exchange.request_id,
            answer_id,
            exchange.path,
            prompt_tokens,
            msgspec.json.encode(params).decode()[: serving.settings.max_log_len],
        )
