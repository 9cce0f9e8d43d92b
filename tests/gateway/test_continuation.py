"""An answer that breaks in the middle is gone on with by another upstream, where the configuration asks for it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.gateway import replies
from tests.gateway.dialects import Answer, Way, ask
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.gateways import ThreadedGateway, provider, threaded_gateway
from tests.gateway.replies import Reply

SHORT = {"connect": 0.5, "first_token": 0.5, "idle": 0.4, "total": 5}
TIMES_A_MILLION = {"input": 1, "output": 10}
"""A price: an input token costs one micro-unit, an output token ten."""
INPUT_TOKENS, OUTPUT_TOKENS = replies.USAGE


@dataclass(frozen=True)
class Set:
    gateway: ThreadedGateway
    first: FakeUpstream
    second: FakeUpstream


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Set]:
    with (
        FakeUpstream(without=("/responses",)) as first,
        FakeUpstream(without=("/responses",)) as second,
    ):
        common = {"timeouts": SHORT, "max_retries": 0}
        dear = {"input": 2, "output": 20}
        config = {
            "providers": {
                "first": provider(first.url, models=["small"], **common),
                "second": provider(second.url, models=["large"], **common),
                "strict": provider(second.url, models=["other"], extended_sampling=False, **common),
            },
            "models": {
                "fake": {
                    "targets": [
                        {"upstream": "first", "model": "small", "price": TIMES_A_MILLION},
                        {"upstream": "second", "model": "large", "price": dear},
                    ]
                },
                "picky": {"targets": [{"upstream": "strict", "model": "other"}]},
                "lonely": {"upstream": "first", "upstream_model": "small"},
            },
            "routing": {"default": "first", "stream_failure": "continue"},
        }
        with threaded_gateway(tmp_path_factory.mktemp("continued"), json.dumps(config)) as gateway:
            yield Set(gateway, first, second)


@pytest.fixture(autouse=True)
def _fresh(parts: Set) -> None:
    parts.gateway.forget()
    parts.first.forget()
    parts.second.forget()


ways = pytest.mark.parametrize(
    "way", [Way(client, "openai") for client in ("chat", "completions", "messages", "responses")], ids=str
)
BREAKS = {
    "cut": lambda reply: reply.cut(2),
    "reset": lambda reply: reply.cut(2).by_reset(),
    "silence": lambda reply: reply.stall(2),
    "an error": lambda reply: with_error(reply, 2),
}


def with_error(reply: Reply, deltas: int) -> Reply:
    event = b'data: {"error": {"message": "The engine died.", "code": 500}}\n\n'
    place = reply.preamble + deltas
    return replace(reply, parts=(*reply.parts[:place], event, *reply.parts[place:]))


def broken(way: Way, how: str = "cut") -> Reply:
    return BREAKS[how](way.stream("A head", "race ", "never ", "seen", model="small"))


def assert_broken(answer: Answer, text: str) -> None:
    assert answer.status == 200 and answer.text == text
    assert answer.error is not None and not answer.is_complete


@ways
@pytest.mark.parametrize("how", BREAKS)
def test_the_client_gets_one_answer(parts: Set, way: Way, how: str) -> None:
    parts.first.script(broken(way, how))
    parts.second.script(way.stream("is a ", "channel.", model="large"))
    answer = ask(parts.gateway.client, way, stream=True)
    assert (answer.text, answer.is_complete, answer.error) == ("A headrace is a channel.", True, None)
    sent = parts.second.last.json
    assert sent["model"] == "large"
    if way.client == "completions":
        assert sent["prompt"].endswith("A headrace ")
    else:
        assert sent["messages"][-1] == {"role": "assistant", "content": "A headrace "}
        assert sent["continue_final_message"] is True and sent["add_generation_prompt"] is False
    assert parts.gateway.wait_until_idle()


@pytest.mark.parametrize("client", ["chat", "completions"])
def test_it_has_one_name_and_one_beginning(parts: Set, client: Any) -> None:
    way = Way(client, "openai")
    parts.first.script(broken(way))
    second = way.stream("is a ", "channel.", model="large")
    renamed = [
        part.replace(b"cmpl-fake", b"cmpl-second").replace(b"1700000000", b"1800000000") for part in second.parts
    ]
    parts.second.script(replace(second, parts=tuple(renamed)))
    answer = ask(parts.gateway.client, way, stream=True)
    chunks = [event for event in answer.events if event.get("choices")]
    assert len(chunks) >= 5 and {(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks} == {
        (chunks[0]["id"], 1_700_000_000, "fake")
    }
    roles = [choice.get("delta", {}).get("role") for chunk in chunks for choice in chunk["choices"]]
    assert roles[1:] == [None] * (len(roles) - 1)


@ways
def test_both_upstreams_are_paid(parts: Set, way: Way) -> None:
    """The first for its prompt and two deltas, the second for all that it counted, each at its own price."""
    parts.first.script(broken(way))
    parts.second.script(way.stream("is a ", "channel.", model="large"))
    event = parts.gateway.event(ask(parts.gateway.client, way, stream=True))
    first_input = event.input_tokens - INPUT_TOKENS
    assert 3 <= first_input <= 40 and event.output_tokens == 2 + OUTPUT_TOKENS and event.estimated
    assert event.cost_micros == first_input + 2 * 10 + INPUT_TOKENS * 2 + OUTPUT_TOKENS * 20
    assert (event.outcome, event.attempts, event.upstream) == ("ok", 2, "second")


def test_the_usage_that_the_client_sees_is_of_one_answer(parts: Set) -> None:
    """Two tokens that were the first's answer were the second's prompt."""
    way = Way("chat", "openai")
    parts.first.script(broken(way))
    parts.second.script(way.stream("is a ", "channel."))
    answer = ask(parts.gateway.client, way, stream=True, stream_options={"include_usage": True})
    assert answer.usage == (INPUT_TOKENS - 2, OUTPUT_TOKENS + 2)


def test_the_place_is_marked_in_the_stream(parts: Set) -> None:
    way = Way("chat", "openai")
    parts.first.script(broken(way))
    parts.second.script(way.stream("is a ", "channel."))
    text = parts.gateway.client.post(way.path, json=way.body(stream=True)).text
    assert ": continued by second after first:upstream_stream_truncated\n\n" in text
    assert text.index(": continued") > text.index("race ") and text.index(": continued") < text.index("channel.")


def test_limits_are_those_of_the_whole_answer(parts: Set) -> None:
    way = Way("chat", "openai")
    parts.first.script(broken(way))
    parts.second.script(way.stream("is a ", "channel."))
    assert ask(parts.gateway.client, way, stream=True, max_tokens=10).is_complete
    assert parts.second.last.json["max_tokens"] == 8
    parts.first.script(broken(way))
    assert_broken(ask(parts.gateway.client, way, stream=True, max_tokens=2), "A headrace ")
    assert len(parts.second.requests) == 1


def test_a_text_that_the_client_itself_goes_on_with_is_gone_on_with(parts: Set) -> None:
    way = Way("chat", "openai")
    messages = [{"role": "user", "content": "Say"}, {"role": "assistant", "content": "Well: "}]
    parts.first.script(broken(way))
    parts.second.script(way.stream("is a ", "channel."))
    more = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert ask(parts.gateway.client, way, stream=True, **more).is_complete
    assert parts.second.last.json["messages"][1:] == [{"role": "assistant", "content": "Well: A headrace "}]


@ways
def test_it_is_done_once(parts: Set, way: Way) -> None:
    parts.first.script(broken(way))
    parts.second.script(way.stream("is a ", "chann", "never").cut(2))
    answer = ask(parts.gateway.client, way, stream=True)
    assert_broken(answer, "A headrace is a chann")
    assert len(parts.first.requests) == len(parts.second.requests) == 1
    event = parts.gateway.event(answer)
    assert (event.outcome, event.attempts) == ("truncated", 2)
    assert parts.gateway.wait_until_idle()


@ways
@pytest.mark.parametrize("refusal", ["500", "400", "silence", "cut", "html"])
def test_where_nobody_can_go_on_the_client_is_told_why_it_broke(parts: Set, way: Way, refusal: str) -> None:
    parts.first.script(broken(way))
    parts.second.script(
        {
            "500": replies.error(500, "It broke too."),
            "400": replies.error(400, "continue_final_message is not known."),
            "silence": way.stream().stall_after_headers(),
            "cut": way.stream("never").cut(0),
            "html": replies.html(200),
        }[refusal]
    )
    answer = ask(parts.gateway.client, way, stream=True)
    assert_broken(answer, "A headrace ")
    assert answer.error is not None and "first ended its answer" in answer.error["message"]
    event = parts.gateway.event(answer)
    assert (event.outcome, event.output_tokens) == ("truncated", 2)
    assert parts.gateway.wait_until_idle()


NOT_PLAIN = {
    "tools are offered": ({"tools": [{"type": "function", "function": {"name": "a"}}]}, None),
    "several answers": ({"n": 2}, None),
    "a grammar": ({"response_format": {"type": "json_object"}}, None),
    "a thought": ({}, {"reasoning_content": "Hm."}),
    "a tool call": ({}, {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "a", "arguments": ""}}]}),
    "a refusal": ({}, {"refusal": "No."}),
}


@pytest.mark.parametrize("what", NOT_PLAIN)
def test_what_is_more_than_text_is_not_gone_on_with(parts: Set, what: str) -> None:
    way = Way("chat", "openai")
    fields, delta = NOT_PLAIN[what]
    reply = way.stream("A head", "race ", "never ")
    if delta is not None:
        text = b'data: {"choices": [{"index": 0, "delta": ' + json.dumps(delta).encode() + b"}]}\n\n"
        reply = replace(reply, parts=(reply.parts[0], text, *reply.parts[1:]), preamble=2)
    parts.first.script(reply.cut(2))
    assert_broken(ask(parts.gateway.client, way, stream=True, **fields), "A headrace ")
    assert parts.second.requests == []


def test_an_upstream_that_may_not_know_how_is_not_asked(parts: Set) -> None:
    way = Way("chat", "openai")
    parts.second.script(broken(way))
    assert_broken(ask(parts.gateway.client, way, stream=True, model="picky"), "A headrace ")
    assert len(parts.second.requests) == 1


def test_an_upstream_alone_goes_on_with_its_own_answer(parts: Set) -> None:
    way = Way("chat", "openai")
    parts.first.script(broken(way), way.stream("is a ", "channel.", model="small"))
    answer = ask(parts.gateway.client, way, stream=True, model="lonely")
    assert (answer.text, answer.is_complete) == ("A headrace is a channel.", True)


def test_an_answer_whose_end_was_said_is_not_gone_on_with(parts: Set) -> None:
    way = Way("chat", "openai")
    reply = way.stream("A headrace")
    finished = replace(reply, parts=reply.parts[:3], parts_sent=3)
    parts.first.script(finished)
    ask(parts.gateway.client, way, stream=True)
    assert parts.second.requests == []


def test_a_client_that_leaves_meanwhile_ends_it(parts: Set) -> None:
    way = Way("chat", "openai")
    parts.first.script(broken(way))
    parts.second.script(way.stream("is a ", "channel.").slow(first_part_s=5))
    with parts.gateway.client.stream("POST", way.path, json=way.body(stream=True)) as response:
        pieces = response.iter_raw()
        next(pieces)
        assert parts.second.wait_for(lambda upstream: len(upstream.requests) == 1)
    began_s = time.monotonic()
    assert parts.second.wait_for(lambda upstream: upstream.last.client_left_s is not None, 1.0)
    assert time.monotonic() - began_s < 1.0 and parts.gateway.wait_until_idle()
    assert parts.gateway.wait_for_events(1)[0].outcome == "client_left"


def test_without_being_asked_for_it_is_not_done(parts: Set) -> None:
    way = Way("chat", "openai")
    before = parts.gateway.state.snapshot
    parts.gateway.state.snapshot = replace(before, continues_streams=False)
    try:
        parts.first.script(broken(way))
        assert_broken(ask(parts.gateway.client, way, stream=True), "A headrace ")
        assert parts.second.requests == []
    finally:
        parts.gateway.state.snapshot = before
