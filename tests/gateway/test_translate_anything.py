"""Whatever a client or an upstream sends: a body or a 400, an answer or an ApiError, and never another exception.

Valid requests, answers and streams with one to three places changed, left out or replaced by something odd.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.protocol.errors import ApiError
from headrace.protocol.translate.events import Dialect
from headrace.protocol.translate.translator import (
    _WRITE_WHOLE,
    StreamTranslator,
    translate_answer,
    translate_request,
)
from headrace.protocol.translate.wire import Json
from tests.gateway.answers import THOUGHT_AND_CALLS, chat_stream, data_lines, exchange, upstream_bytes
from tests.gateway.dialect_requests import REQUESTS

DIALECTS: tuple[Dialect, ...] = ("chat", "messages", "responses")
NUM_CASES = 300

ODD: list[Any] = [None, True, 0, -1, 3.5, "", "x", "text", [], {}, [1], [None], [[]], [{}], ["x"], 10**30,
                  {"type": "x"}, {"type": []}, {"a": None}]  # fmt: skip

MORE: dict[Dialect, Json] = {
    "chat": {"functions": [{"name": "f"}], "reasoning_effort": "low", "metadata": {"a": "b"}},
    "messages": {"thinking": {"type": "enabled", "budget_tokens": 2000}, "output_config": {"effort": "low"}},
    "responses": {"reasoning": {"effort": "low"}, "include": ["x"], "metadata": {"a": "b"}},
}


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in inner:
        yield from places(item, (*place, name))


def changed(value: Any, draw: random.Random) -> Any:
    value = copy.deepcopy(value)
    for _ in range(draw.randint(1, 3)):
        *path, last = draw.choice(list(places(value)) or [(None,)])
        if last is None:
            return value
        holder = value
        for name in path:
            holder = holder[name]
        if draw.random() < 0.2:
            del holder[last]
        else:
            holder[last] = copy.deepcopy(draw.choice(ODD))
    return value


@pytest.mark.parametrize("client", DIALECTS)
def test_a_request_is_translated_or_refused_by_name(client: Dialect):
    draw = random.Random(1)
    for _ in range(NUM_CASES):
        body = changed({**REQUESTS[client], **MORE[client]}, draw)
        names = {"model": "asked", "upstream_model": "real", "request_id": "r"}
        try:
            found = translate_request(body, client=client, upstream=draw.choice(DIALECTS), created_s=1, **names)
        except ApiError as error:
            refusal = (error.status, bool(error.param))
            assert refusal == (400, True), body
        else:
            json.dumps(found.body)


@pytest.mark.parametrize("upstream", DIALECTS)
def test_an_answer_is_translated_or_an_error(upstream: Dialect):
    draw = random.Random(2)
    whole = _WRITE_WHOLE[upstream](THOUGHT_AND_CALLS, exchange(upstream, upstream))
    for _ in range(NUM_CASES):
        body = json.dumps(changed(whole, draw)).encode()
        try:
            found = translate_answer(body, exchange(draw.choice(DIALECTS), upstream)).body
        except ApiError as error:
            refused = error.status >= 400
            assert refused, body
        else:
            json.dumps(found)


@pytest.mark.parametrize("upstream", DIALECTS)
def test_a_stream_ends_in_its_end_or_an_error(upstream: Dialect):
    draw = random.Random(3)
    events = list(data_lines(upstream_bytes(THOUGHT_AND_CALLS, upstream)))
    for _ in range(NUM_CASES):
        stream = StreamTranslator(exchange(draw.choice(DIALECTS), upstream))
        sent = [*stream.feed(chat_stream(changed(events, draw))), *stream.finish()]
        assert stream.is_done and sent
        assert b"".join(outgoing.encode() for outgoing in sent).endswith(b"\n\n")


@pytest.mark.parametrize("body", [b"", b"  ", b"<html>502</html>", b"[]", b"null", b"{}", b'{"choices": []}', b'{"a":'])
@pytest.mark.parametrize("upstream", DIALECTS)
def test_what_is_no_answer_is_a_502(upstream: Dialect, body: bytes):
    with pytest.raises(ApiError) as caught:
        translate_answer(body, exchange("chat", upstream))
    assert (caught.value.status, caught.value.code) == (502, "upstream_invalid_response")
