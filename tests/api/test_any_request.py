"""Whatever the values of the fields, a request is a result or a refusal of that request: never a fault of ours."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.protocol.openai_chat import ChatFields
from headrace.protocol.openai_completions import CompletionFields
from headrace.protocol.sampling import SamplingFields
from headrace.protocol.tokenization import DetokenizeFields, TokenizeFields
from headrace.protocol.unbuilt_fields import UNBUILT
from tests.scripted_engine import ScriptedEngine, asgi_client, events, make_app

MESSAGES = [{"role": "user", "content": "Hi"}]
numbers = st.integers(-3, 200) | st.floats(allow_nan=False) | st.integers()
scalars = st.none() | st.booleans() | numbers | st.text(max_size=6)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ROUTES = {
    "/v1/chat/completions": ((ChatFields, SamplingFields), {"messages": MESSAGES, "max_tokens": 4}),
    "/v1/completions": ((CompletionFields, SamplingFields), {"prompt": "Hi", "max_tokens": 4}),
    "/tokenize": ((TokenizeFields,), {"prompt": "Hi"}),
    "/detokenize": ((DetokenizeFields,), {"tokens": [1, 2, 3]}),
}


@pytest.mark.parametrize("route", list(ROUTES))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
async def test_any_values_give_a_result_or_a_refusal(route: str, data: st.DataObject) -> None:
    types, base = ROUTES[route]
    names = sorted({name for type in types for name in type.__struct_fields__} | set(UNBUILT) | {"best_of", "nonsense"})
    changes = data.draw(st.dictionaries(st.sampled_from(names), values, max_size=3))
    if data.draw(st.booleans()):
        changes = {name: value for name, value in changes.items() if value is not None}
    logging.disable(logging.WARNING)
    try:
        async with asgi_client(make_app(ScriptedEngine())) as client:
            answer = await client.post(route, content=json.dumps({**base, **changes}).encode())
    finally:
        logging.disable(logging.NOTSET)
    if answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"):
        assert events(answer.text)[-1] == "[DONE]"
    elif answer.status_code == 200:
        assert answer.json()
    else:
        assert answer.status_code in (400, 404), answer.text
        assert answer.json()["error"]["message"]


@settings(max_examples=60, deadline=None)
@given(
    messages=st.lists(
        st.dictionaries(st.sampled_from(["role", "content", "name", "x"]), values, max_size=3), max_size=3
    )
)
async def test_any_messages_give_a_result_or_a_refusal(messages: list[object]) -> None:
    async with asgi_client(make_app(ScriptedEngine())) as client:
        answer = await client.post("/v1/chat/completions", content=json.dumps({"messages": messages}).encode())
    assert answer.status_code in (200, 400), answer.text
