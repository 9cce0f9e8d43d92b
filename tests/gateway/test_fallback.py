"""Which failures are asked of another upstream, which of the same again, and which of nobody."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from headrace.gateway.breaker import CONSECUTIVE
from tests.gateway import replies
from tests.gateway.fake_upstream import FakeUpstream, refused_url
from tests.gateway.gateways import ThreadedGateway, provider, providers, threaded_gateway
from tests.gateway.replies import Reply

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def first() -> Iterator[FakeUpstream]:
    with FakeUpstream() as fake:
        yield fake


@pytest.fixture(scope="module")
def second() -> Iterator[FakeUpstream]:
    with FakeUpstream() as fake:
        yield fake


@pytest.fixture(scope="module")
def gateway(
    first: FakeUpstream, second: FakeUpstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ThreadedGateway]:
    config = providers(
        first=provider(first.url, "first", max_retries=1),
        second=provider(second.url, "second", models=["big"], max_retries=0),
        routing={"default": "first", "fallback": "second"},
    )
    with threaded_gateway(tmp_path_factory.mktemp("fallback"), config) as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh(gateway: ThreadedGateway, first: FakeUpstream, second: FakeUpstream) -> None:
    gateway.forget()
    first.forget()
    second.forget()


def body(**more: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], **more}


def replicated(*urls: str, **more: Any) -> dict[str, Any]:
    entry = {**provider(urls[0], **more), "urls": [url + "/v1" for url in urls]}
    del entry["base_url"]
    return entry


def ask(gateway: ThreadedGateway, **more: Any) -> Any:
    return gateway.client.post(CHAT, json=body(**more), timeout=10)


def test_what_may_pass_is_asked_once_more_of_the_same_upstream(
    gateway: ThreadedGateway, first: FakeUpstream, second: FakeUpstream
) -> None:
    first.script(replies.error(500))
    answer = ask(gateway)
    assert (answer.status_code, answer.headers["x-gateway-upstream"]) == (200, "first")
    assert answer.headers["x-gateway-attempts"] == "2"
    assert (len(first.requests), len(second.requests)) == (2, 0)


def test_what_stays_goes_to_the_fallback_with_its_own_model(
    gateway: ThreadedGateway, first: FakeUpstream, second: FakeUpstream
) -> None:
    first.answer = replies.error(500)
    answer = ask(gateway)
    assert answer.headers["x-gateway-upstream"] == "second" and answer.headers["x-gateway-model"] == "big"
    assert answer.json()["model"] == "fake"
    assert second.last.json["model"] == "big"
    assert gateway.wait_for_events(1)[0].attempts == 3


OVERFLOW = "This model's maximum context length is 4096 tokens. However, you requested 9000 tokens."


@pytest.mark.parametrize(
    ("reply", "asks_again"),
    [
        (replies.unauthorized(), False),
        (replies.error(403), False),
        (replies.error(404, "The model `fake` does not exist.", code="model_not_found"), False),
        (replies.anthropic_error(404, "model: fake", type="not_found_error"), False),
        (replies.error(400, OVERFLOW), False),
        (replies.error(400, OVERFLOW, code="context_length_exceeded"), False),
        (replies.html(502), True),
        (replies.html(200), False),
        (replies.rate_limited(60), False),
        (replies.rate_limited(None), True),
        (Reply(status=302, headers=(("location", "http://127.0.0.1:1/"),), framing="length"), False),
    ],
)
def test_failures_that_go_on(
    gateway: ThreadedGateway, first: FakeUpstream, second: FakeUpstream, reply: Reply, asks_again: bool
) -> None:
    first.answer = reply
    assert ask(gateway).headers["x-gateway-upstream"] == "second"
    assert len(first.requests) == (2 if asks_again else 1)


@pytest.mark.parametrize(
    "message",
    [
        "prompt is too long: 205000 tokens > 200000 maximum",
        "input length and `max_tokens` exceed context limit: 197202 + 21333 > 200000, decrease input length",
        "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
        "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000",
        "The input token count (1048577) exceeds the maximum number of tokens allowed (1048576).",
        "the request exceeds the available context size. try increasing the context size",
        "Input is too long for requested model.",
    ],
)
def test_what_is_too_long_for_one_goes_to_the_next_however_it_is_said(
    gateway: ThreadedGateway, first: FakeUpstream, second: FakeUpstream, message: str
) -> None:
    first.answer = replies.error(400, message)
    assert ask(gateway).headers["x-gateway-upstream"] == "second"
    second.answer = replies.error(400, message)
    assert ask(gateway).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("status", [400, 409, 413, 415, 422, 451])
def test_the_callers_own_mistakes_are_asked_of_nobody_else(
    gateway: ThreadedGateway, first: FakeUpstream, second: FakeUpstream, status: int
) -> None:
    first.answer = replies.error(status, "temperature must be at most 2", code="bad_temperature")
    for _ in range(CONSECUTIVE + 1):
        answer = ask(gateway)
        assert answer.status_code == status
        assert answer.json()["error"]["message"] == "temperature must be at most 2"
        assert answer.json()["error"]["code"] == "bad_temperature"
    assert second.requests == [] and len(first.requests) == CONSECUTIVE + 1, "and no breaker minds"


def test_a_short_retry_after_is_waited_for(gateway: ThreadedGateway, first: FakeUpstream) -> None:
    first.script(replies.rate_limited(1))
    began_s = time.monotonic()
    assert ask(gateway).headers["x-gateway-upstream"] == "first"
    assert time.monotonic() - began_s >= 1.0


def test_when_all_fail_the_last_cause_is_told_and_sdks_do_not_repeat_it(
    gateway: ThreadedGateway, first: FakeUpstream, second: FakeUpstream
) -> None:
    first.answer = replies.error(500, "first broke")
    second.answer = replies.error(500, "second broke")
    answer = ask(gateway)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error")
    assert "second broke" in answer.json()["error"]["message"] == answer.json()["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert answer.headers["x-gateway-attempts"] == "3"
    event = gateway.wait_for_events(1)[0]
    assert (event.outcome, event.input_tokens, event.cost_micros) == ("error", 0, 0)


def test_the_upstreams_key_is_not_in_what_it_says(gateway: ThreadedGateway, first: FakeUpstream) -> None:
    from tests.gateway.gateways import UPSTREAM_KEY

    first.answer = replies.error(400, f"Incorrect API key provided: {UPSTREAM_KEY}", code="x")
    answer = ask(gateway)
    assert UPSTREAM_KEY not in answer.text and "***" in answer.text


def test_an_upstream_that_keeps_failing_is_left_alone_and_comes_back(
    gateway: ThreadedGateway, first: FakeUpstream
) -> None:
    first.answer = replies.error(500)
    while len(first.requests) < CONSECUTIVE:
        ask(gateway)
    asked = len(first.requests)
    assert ask(gateway).headers["x-gateway-attempts"] == "1"
    assert len(first.requests) == asked
    states = {(m.labels["upstream"], m.labels["model"]): m.value for m in _breaker_samples(gateway)}
    assert states.get(("first", "fake"), 2) == 2
    first.answer = replies.chat()
    breaker = gateway.state.breakers.of(("first", 0, "fake"))
    breaker.open_until_s = time.monotonic() - 0.01
    assert ask(gateway).headers["x-gateway-upstream"] == "first"
    assert breaker.state(time.monotonic()) == "closed"


def _breaker_samples(gateway: ThreadedGateway) -> list[Any]:
    for family in gateway.state.metrics.collect():
        if family.name.endswith("breaker_state"):
            return list(family.samples)
    return []


def test_nobody_healthy_is_a_503_that_says_when_to_come_back(
    gateway: ThreadedGateway, first: FakeUpstream, second: FakeUpstream
) -> None:
    for key in (("first", 0, "fake"), ("second", 0, "big")):
        for _ in range(CONSECUTIVE):
            gateway.state.breakers.of(key).failed(time.monotonic())
    answer = ask(gateway)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_healthy_upstream")
    assert answer.headers["retry-after"] == "5"
    assert first.requests == second.requests == []


def test_a_dead_replica_costs_nothing_but_a_moment(second: FakeUpstream, tmp_path) -> None:
    dead = refused_url()
    entry = replicated(second.url, dead, max_retries=2)
    with threaded_gateway(tmp_path, json.dumps({"providers": {"main": entry}, "routing": {"default": "main"}})) as own:
        for number in range(12):
            answer = own.client.post(CHAT, json=body(user=str(number)))
            assert answer.status_code == 200, answer.text
            own.state.balancer.load("main", 1).ttft_s = 0.01  # it looks attractive


def test_replicas_share_the_load_and_a_session_stays_with_one(
    first: FakeUpstream, second: FakeUpstream, tmp_path
) -> None:
    entry = replicated(first.url, second.url)
    with threaded_gateway(tmp_path, json.dumps({"providers": {"main": entry}, "routing": {"default": "main"}})) as own:
        for number in range(20):
            own.client.post(CHAT, json=body(), headers={"x-session-id": f"session {number}"})
        assert min(len(first.requests), len(second.requests)) >= 3
        first.forget()
        second.forget()
        for _ in range(8):
            own.client.post(CHAT, json=body(), headers={"x-claude-code-session-id": "one"})
        assert sorted((len(first.requests), len(second.requests))) == [0, 8]


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("whole", [False, True])
def test_a_stream_whose_head_had_to_name_another_says_who_answered(
    gateway: ThreadedGateway, first: FakeUpstream, second: FakeUpstream, path: str, whole: bool
) -> None:
    before = gateway.state.snapshot
    gateway.state.snapshot = replace(before, listen=replace(before.listen, hold_back_s=0.6))
    mark = ": answered by second with big\n\n"
    asked = {"model": "fake", "max_tokens": 5, "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
    asked = {"model": "fake", "stream": True, "input": "Hi"} if path == "/v1/responses" else asked
    try:
        first.answer = replies.html(502).slow(head_s=0.4)
        if whole:
            second.answer = replies.responses() if path == "/v1/responses" else replies.chat()
        answer = gateway.client.post(path, json=asked)
        assert (answer.status_code, answer.headers["x-gateway-upstream"]) == (200, "first")
        assert answer.text.count(mark) == 1
        first.answer = replies.html(502)
        assert mark not in gateway.client.post(path, json=asked).text, "the head names the one that answered"
    finally:
        gateway.state.snapshot = before
