"""Spans of requests and attempts, as a collector gets them."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.gateway.config_load import InvalidConfig, load_config
from headrace.gateway.snapshot import Tracing
from headrace.gateway.traces import MAX_WAITING_SPANS, Tracer
from tests.gateway import replies
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.gateways import Gateway, provider, running_gateway

CHAT = "/v1/chat/completions"
PROMPT = "canary-prompt-the-heron-stands-in-the-race"
BODY = {"model": "fake", "messages": [{"role": "user", "content": PROMPT}]}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = "canary-collector-5a6b7c8d"


@dataclass(frozen=True)
class Set:
    gateway: Gateway
    first: FakeUpstream
    second: FakeUpstream
    collector: FakeUpstream

    def ask(self, body: dict[str, Any], **headers: str) -> httpx.Response:
        return httpx.post(self.gateway.url + CHAT, json=body, headers={**self.gateway.auth, **headers}, timeout=10)

    def spans(self, number: int) -> list[dict[str, Any]]:
        """All that were collected, with their attributes as one dictionary."""

        def collected() -> list[dict[str, Any]]:
            posts = [request.json["resourceSpans"][0] for request in self.collector.requests]
            return [span for post in posts for span in post["scopeSpans"][0]["spans"]]

        deadline = time.monotonic() + 5
        while len(collected()) < number:
            assert time.monotonic() < deadline, f"{len(collected())} spans came"
            time.sleep(0.02)
        return [{**span, "attributes": plain(span["attributes"])} for span in collected()]


def plain(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    return {each["key"]: next(iter(each["value"].values())) for each in attributes}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Set]:
    with FakeUpstream() as first, FakeUpstream() as second, FakeUpstream(replies.json_reply({})) as collector:
        config = {
            "providers": {
                "first": provider(first.url, max_retries=0),
                "second": provider(second.url, max_retries=0, models=["fake"]),
            },
            "routing": {"default": "first", "fallback": "second"},
            "server": {"traces": {"endpoint": collector.url, "headers": {"x-token": HEADER}, "service_name": "hr"}},
        }
        with running_gateway(tmp_path_factory.mktemp("traced"), json.dumps(config)) as gateway:
            yield Set(gateway, first, second, collector)


@pytest.fixture
def parts(running: Set) -> Set:
    running.first.forget()
    running.second.forget()
    running.collector.requests.clear()
    return running


def test_a_request_is_a_span_with_one_below_it_for_each_attempt(parts: Set) -> None:
    parts.first.script(replies.error(500, "It broke."))
    parts.second.script(replies.chat_stream("Wa", "ter"))
    answer = parts.ask({**BODY, "stream": True}, traceparent=f"00-{TRACE}-{PARENT}-01", tracestate="a=b")
    assert answer.status_code == 200
    request, broken, answered = parts.spans(3)
    assert {span["traceId"] for span in (request, broken, answered)} == {TRACE}
    assert request["parentSpanId"] == PARENT and request["kind"] == 2 and request["name"] == "chat fake"
    assert broken["parentSpanId"] == answered["parentSpanId"] == request["spanId"]
    assert broken["status"]["code"] == 2 and broken["attributes"]["error.type"] == "upstream_error"
    assert answered["status"] == request["status"] == {} and answered["kind"] == 3
    values = request["attributes"]
    assert values["gen_ai.usage.input_tokens"] == "7" and values["gen_ai.usage.output_tokens"] == "3"
    assert values["http.response.status_code"] == "200" and values["headrace.upstream"] == "second"
    assert int(values["headrace.time_to_first_token_ms"]) < 5000
    assert values["headrace.request_id"] == answer.headers["x-request-id"]
    began, ended = (int(request[name]) for name in ("startTimeUnixNano", "endTimeUnixNano"))
    assert began <= int(broken["startTimeUnixNano"]) <= int(answered["endTimeUnixNano"]) <= ended
    assert abs(ended / 1e9 - time.time()) < 60


def test_the_upstream_goes_on_with_the_trace(parts: Set) -> None:
    parts.ask(BODY, traceparent=f"00-{TRACE}-{PARENT}-01", tracestate="a=b")
    _, attempt = parts.spans(2)
    assert parts.first.last.headers["traceparent"] == f"00-{TRACE}-{attempt['spanId']}-01"
    assert parts.first.last.headers["tracestate"] == "a=b"


def test_a_request_without_a_trace_gets_one_of_its_own(parts: Set) -> None:
    parts.ask(BODY)
    parts.ask(BODY, traceparent="not one")
    one, _, other, _ = parts.spans(4)
    assert one["traceId"] != other["traceId"] and "parentSpanId" not in one
    assert parts.first.last.headers["traceparent"].startswith(f"00-{other['traceId']}-")
    assert f'"trace_id":"{one["traceId"]}"' in parts.gateway.log()


def test_a_client_that_does_not_trace_is_not_traced(parts: Set) -> None:
    parts.ask(BODY, traceparent=f"00-{TRACE}-{PARENT}-00")
    assert parts.first.last.headers["traceparent"] == f"00-{TRACE}-{PARENT}-00"
    parts.ask(BODY)
    assert TRACE not in {span["traceId"] for span in parts.spans(2)}


def test_no_prompt_no_answer_and_no_key_is_in_a_span(parts: Set) -> None:
    parts.first.script(replies.error(400, f"The prompt {PROMPT} is bad."), replies.chat("canary-answer"))
    parts.ask(BODY)
    parts.ask(BODY)
    parts.spans(4)
    sent = b"".join(request.raw_head + request.body for request in parts.collector.requests)
    assert HEADER.encode() in sent
    for secret in (PROMPT, "canary-answer", parts.gateway.key, "upstream-key-7f3c9a1e5b"):
        assert secret.encode() not in sent
    assert HEADER not in parts.gateway.log()


def test_a_collector_that_fails_costs_spans_and_is_told_of_once(parts: Set) -> None:
    parts.collector.answer = replies.error(503, "full")
    try:
        for _ in range(2):
            assert parts.ask(BODY).status_code == 200
            parts.spans(2)
            time.sleep(0.1)
            parts.collector.requests.clear()
    finally:
        parts.collector.answer = replies.json_reply({})
    assert parts.gateway.log().count("Traces are lost") == 1
    metrics = httpx.get(parts.gateway.url + "/metrics").text
    assert "headrace_gateway_spans_dropped_total 4.0" in metrics


def test_a_share_is_drawn_and_the_queue_is_bounded() -> None:
    async def run() -> tuple[int, int]:
        tracer = Tracer(Tracing(endpoint="http://127.0.0.1:1", sample=0.25), random.Random(3))
        traced = sum(tracer.begin(None) is not None for _ in range(4000))
        for _ in range(MAX_WAITING_SPANS + 7):
            tracer.take([{}])
        return traced, tracer.num_dropped

    traced, dropped = asyncio.run(run())
    assert 900 < traced < 1100 and dropped == 7


@pytest.mark.parametrize(
    ("traces", "words"),
    [
        ({}, "has no endpoint"),
        ({"endpoint": "collector:4318"}, "is not a URL"),
        ({"endpoint": "http://c:4318", "sample": 2}, "must be 0 to 1"),
        ({"endpoint": "http://c:4318", "sampel": 1}, "Did you mean sample?"),
    ],
)
def test_a_mistake_in_the_section_is_named(tmp_path: Path, traces: dict[str, Any], words: str) -> None:
    path = tmp_path / "gateway.json"
    path.write_text(json.dumps({"providers": {"a": {"base_url": "http://a"}}, "server": {"traces": traces}}))
    with pytest.raises(InvalidConfig, match=words.replace("?", r"\?")):
        load_config(path, {})


def test_the_endpoint_may_be_written_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "gateway.json"
    server = {"traces": {"endpoint": "http://c:4318/v1/traces", "sample": 0.5}}
    path.write_text(json.dumps({"providers": {"a": {"base_url": "http://a"}}, "server": server}))
    assert load_config(path, {}).listen.traces == Tracing(endpoint="http://c:4318", sample=0.5)
