"""Every fault of an upstream, for every pair of dialects: what the client sees, what goes to another upstream, what is
billed. No fault may look like a whole answer, and none may leave a slot behind."""

from __future__ import annotations

import collections
import dataclasses
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from headrace.protocol.translate.wire import Json
from tests.gateway import replies
from tests.gateway.dialects import WAYS, Answer, Way, ask
from tests.gateway.fake_upstream import FakeUpstream, black_hole, refused_url
from tests.gateway.gateways import ThreadedGateway, abort_many, provider, providers, threaded_gateway
from tests.gateway.replies import Reply

SHORT = {"connect": 0.4, "first_token": 0.4, "idle": 0.4, "total": 0.8}
"""Seconds; a fault test waits for one of them. A whole answer is silent until it is there: only the total counts."""

INPUT_TOKENS, OUTPUT_TOKENS = replies.USAGE


@dataclass(frozen=True)
class Set:
    """A gateway whose models have one upstream each (`alone`), one whose models have a spare, and the upstreams."""

    alone: ThreadedGateway
    paired: ThreadedGateway
    openai: FakeUpstream
    anthropic: FakeUpstream
    spare: FakeUpstream

    def upstream(self, way: Way) -> FakeUpstream:
        return self.openai if way.upstream == "openai" else self.anthropic


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Set]:
    with (
        FakeUpstream(without=("/responses",)) as openai,
        FakeUpstream() as anthropic,
        FakeUpstream(without=("/responses",)) as spare,
    ):
        common = {"timeouts": SHORT, "max_retries": 0}
        upstreams = {
            "main": provider(openai.url, "main", **common),
            "claude": provider(anthropic.url, dialect="anthropic", models=["claude-model"], **common),
        }
        spare_provider = provider(spare.url, models=["spare-model"], **common)
        paired = providers(spare=spare_provider, routing={"default": "main", "fallback": "spare"}, **upstreams)
        with (
            threaded_gateway(tmp_path_factory.mktemp("alone"), providers(**upstreams)) as alone_gateway,
            threaded_gateway(tmp_path_factory.mktemp("paired"), paired) as paired_gateway,
        ):
            yield Set(alone_gateway, paired_gateway, openai, anthropic, spare)


@pytest.fixture(autouse=True)
def _fresh(parts: Set) -> None:
    for upstream in (parts.openai, parts.anthropic, parts.spare):
        upstream.forget()
    for gateway in (parts.alone, parts.paired):
        gateway.forget()


ways = pytest.mark.parametrize("way", WAYS, ids=str)
modes = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def assert_refused(answer: Answer, status: int, code: str, *, way: Way) -> None:
    """A proper error of the client's dialect, with nothing of an answer in it."""
    assert (answer.status, answer.code) == (status, code), answer
    assert answer.text == "" and not answer.is_complete
    assert answer.headers["content-type"].startswith("application/json")
    (body,) = answer.events
    assert "choices" not in body
    assert body["message"] == body["error"]["message"]
    if way.client == "messages":
        assert body["type"] == "error" and body["request_id"] == answer.request_id


# Right answers, however they are sent


@ways
@modes
def test_a_right_answer_arrives_whole_and_is_billed_once(parts: Set, way: Way, stream: bool) -> None:
    parts.upstream(way).script(way.reply(stream, "Water ", "does."))
    answer = ask(parts.alone.client, way, stream=stream)
    assert answer.status == 200, answer.events
    assert answer.text == "Water does." and answer.is_complete and answer.error is None
    event = parts.alone.event(answer)
    assert (event.input_tokens, event.output_tokens, event.estimated) == (INPUT_TOKENS, OUTPUT_TOKENS, False)
    assert (event.outcome, event.status, event.attempts, event.stream) == ("ok", 200, 1, stream)
    assert event.cost_micros == 0 and event.model == way.model


@ways
def test_a_tool_call_crosses_the_dialects(parts: Set, way: Way) -> None:
    if way.client == "completions":
        pytest.skip("text completions have no tools")
    for stream in (False, True):
        parts.upstream(way).script(way.reply(stream, *([] if stream else ["x"]), tool="get_weather"))
        answer = ask(parts.alone.client, way, stream=stream, tool="get_weather")
        assert answer.tool is not None, answer.events
        assert answer.tool[0] == "get_weather" and json.loads(answer.tool[1]) == {"city": "Ulm"}
        assert answer.is_complete


HARMLESS: dict[str, Callable[[Reply], Reply]] = {
    "one byte a write": Reply.one_byte_a_write,
    "CRLF": Reply.crlf,
    "gzip": Reply.gzipped,
    "chunked": Reply.chunked,
    "until close": Reply.until_close,
    "103 first": lambda reply: reply.after_interim(103),
}


@ways
@pytest.mark.parametrize("form", HARMLESS)
def test_odd_but_right_forms_change_nothing(parts: Set, way: Way, form: str) -> None:
    for stream in (False, True):
        parts.upstream(way).script(HARMLESS[form](way.reply(stream, "Wa", "ter")))
        answer = ask(parts.alone.client, way, stream=stream)
        assert (answer.status, answer.text, answer.is_complete, answer.error) == (200, "Water", True, None)
        assert "content-encoding" not in answer.headers
        event = parts.alone.event(answer)
        assert (event.input_tokens, event.output_tokens) == (INPUT_TOKENS, OUTPUT_TOKENS)


@ways
def test_an_upstream_that_hangs_up_on_a_kept_connection_is_asked_again(parts: Set, way: Way) -> None:
    upstream = parts.upstream(way)
    upstream.script(way.whole("one").keep_alive_race(), way.whole("two"))
    assert ask(parts.alone.client, way, stream=False).text == "one"
    answer = ask(parts.alone.client, way, stream=False)
    assert answer.text == "two"
    assert parts.alone.event(answer).attempts == 1


@ways
@modes
def test_missing_usage_is_counted_here_and_marked_estimated(parts: Set, way: Way, stream: bool) -> None:
    parts.upstream(way).script(way.reply(stream, "Falling ", "water ", "does.", usage=None))
    answer = ask(parts.alone.client, way, stream=stream)
    assert answer.is_complete
    event = parts.alone.event(answer)
    assert event.estimated
    assert 3 <= event.input_tokens <= 40 and 3 <= event.output_tokens <= 12


# Faults before any content


BEFORE: dict[str, tuple[Callable[[Way, bool], Reply], int, str]] = {
    "closes without an answer": (lambda w, s: w.reply(s).cut_before_headers(), 502, "upstream_unreachable"),
    "resets without an answer": (lambda w, s: w.reply(s).cut_before_headers().by_reset(), 502, "upstream_unreachable"),
    "says nothing": (lambda w, s: w.reply(s).stall_before_headers(), 504, "upstream_timeout"),
    "stops after its headers": (lambda w, s: w.reply(s).stall_after_headers(), 504, "upstream_timeout"),
    "HTML 502": (lambda w, s: replies.html(502), 502, "upstream_invalid_response"),
    "HTML 200": (lambda w, s: replies.html(200), 502, "upstream_invalid_response"),
    "empty 200": (lambda w, s: replies.empty_200(), 502, "upstream_invalid_response"),
    "invalid JSON": (lambda w, s: replies.invalid_json(), 502, "upstream_invalid_response"),
    "not HTTP": (lambda w, s: replies.not_http(), 502, "upstream_invalid_response"),
    "error in 200": (lambda w, s: replies.error_in_200(), 502, "upstream_error"),
    "error first in a stream": (lambda w, s: replies.error_in_200(streamed=s), 502, "upstream_error"),
    "500": (lambda w, s: replies.error(500, "It broke."), 502, "upstream_error"),
    "401": (lambda w, s: replies.unauthorized(), 502, "upstream_auth_failed"),
    "429": (lambda w, s: replies.rate_limited(7, anthropic=w.upstream == "anthropic"), 429, "upstream_rate_limited"),
}


@ways
@modes
@pytest.mark.parametrize("fault", BEFORE)
def test_a_fault_before_content_is_a_proper_error_and_costs_nothing(
    parts: Set, way: Way, stream: bool, fault: str
) -> None:
    build, status, code = BEFORE[fault]
    parts.upstream(way).answer = build(way, stream)
    if code == "upstream_timeout":
        code = "upstream_timeout_first_token" if stream else "upstream_timeout_total"
    answer = ask(parts.alone.client, way, stream=stream)
    assert_refused(answer, status, code, way=way)
    event = parts.alone.event(answer)
    assert (event.status, event.outcome) == (status, "error")
    assert (event.output_tokens, event.cost_micros) == (0, 0)
    if fault == "429":
        assert answer.headers["retry-after"] == "7"
    assert answer.error is not None
    assert ("with `stream` true" in answer.error["message"]) == (code == "upstream_timeout_total")


@ways
@pytest.mark.parametrize("fault", BEFORE)
def test_a_fault_before_content_goes_to_the_next_upstream_unseen(parts: Set, way: Way, fault: str) -> None:
    stream = True
    build, _, _ = BEFORE[fault]
    parts.upstream(way).answer = build(way, stream)
    spare_way = Way(way.client, "openai")
    parts.spare.script(spare_way.stream("From ", "the spare."))
    answer = ask(parts.paired.client, way, stream=stream)
    assert (answer.status, answer.text, answer.is_complete) == (200, "From the spare.", True), answer
    assert answer.headers["x-gateway-upstream"] == "spare"
    assert parts.spare.last.json["model"] == "spare-model"
    event = parts.paired.event(answer)
    assert (event.upstream, event.attempts, event.outcome) == ("spare", 2, "ok")
    assert (event.input_tokens, event.output_tokens) == (INPUT_TOKENS, OUTPUT_TOKENS)


@ways
@pytest.mark.parametrize("cut_after", [None, 0], ids=["after headers", "before content"])
def test_a_stream_cut_before_content_is_no_answer(parts: Set, way: Way, cut_after: int | None) -> None:
    parts.upstream(way).answer = way.stream("never", "seen").cut(cut_after)
    answer = ask(parts.alone.client, way, stream=True)
    assert_refused(answer, 502, "upstream_stream_truncated", way=way)
    parts.spare.script(Way(way.client, "openai").stream("spare"))
    answer = ask(parts.paired.client, way, stream=True)
    assert (answer.text, answer.is_complete, answer.error) == ("spare", True, None)


@ways
def test_a_whole_answer_that_is_cut_is_no_answer(parts: Set, way: Way) -> None:
    parts.upstream(way).answer = way.whole("never seen").cut(0)
    answer = ask(parts.alone.client, way, stream=False)
    assert_refused(answer, 502, "upstream_stream_truncated", way=way)


@ways
def test_a_refusal_that_is_the_callers_own_is_passed_on_and_asked_of_nobody_else(parts: Set, way: Way) -> None:
    parts.upstream(way).answer = replies.error(400, "temperature must be below 2", code="invalid_value")
    answer = ask(parts.paired.client, way, stream=True)
    assert answer.status == 400
    assert answer.error is not None and "temperature must be below 2" in answer.error["message"]
    assert parts.spare.requests == []


def test_an_address_that_nobody_listens_at_is_named(tmp_path, parts: Set) -> None:
    url = refused_url()
    config = providers(fake=provider(url, timeouts=SHORT, max_retries=0))
    with threaded_gateway(tmp_path, config) as gateway:
        answer = ask(gateway.client, Way("chat", "openai"), stream=True)
    assert (answer.status, answer.code) == (502, "upstream_unreachable")
    assert answer.error is not None and url in answer.error["message"]


def test_a_connection_that_is_never_accepted_times_out_by_its_own_limit(tmp_path) -> None:
    with black_hole() as url:
        config = providers(fake=provider(url, timeouts=SHORT, max_retries=0))
        with threaded_gateway(tmp_path, config) as gateway:
            answer = ask(gateway.client, Way("chat", "openai"), stream=False)
    assert (answer.status, answer.code) == (504, "upstream_timeout_connect")


def test_an_upstream_that_accepts_slowly_is_waited_for(tmp_path) -> None:
    with FakeUpstream(accept_after_s=0.1) as upstream:
        config = providers(fake=provider(upstream.url, timeouts=SHORT, max_retries=0))
        with threaded_gateway(tmp_path, config) as gateway:
            assert ask(gateway.client, Way("chat", "openai"), stream=True).is_complete


# Faults after content


AFTER: dict[str, tuple[Callable[[Reply], Reply], str, str]] = {
    "cut": (lambda reply: reply.cut(2), "upstream_stream_truncated", "incomplete"),
    "reset": (lambda reply: reply.cut(2).by_reset(), "upstream_stream_truncated", "incomplete"),
    "stall": (lambda reply: reply.stall(2), "upstream_timeout_idle", "fell silent"),
    "ends cleanly but unfinished": (lambda reply: unfinished(reply, 2), "upstream_stream_truncated", "incomplete"),
}
"""What happens, the code, and a part of the message. Only OpenAI's errors have a free code."""


def unfinished(reply: Reply, deltas: int) -> Reply:
    """The HTTP body is complete, the answer in it is not."""
    return dataclasses.replace(reply, parts=reply.parts[: reply.preamble + deltas])


@ways
@pytest.mark.parametrize("fault", AFTER)
def test_a_stream_that_breaks_is_an_error_the_client_sees(parts: Set, way: Way, fault: str) -> None:
    damage, code, words = AFTER[fault]
    reply = way.stream("Falling ", "water ", "does ", "it.")
    parts.upstream(way).answer = damage(reply)
    answer = ask(parts.alone.client, way, stream=True)
    assert answer.status == 200
    assert answer.text == "Falling water "
    assert answer.error is not None and words in answer.error["message"]
    if way.client in ("chat", "completions"):
        assert answer.code == code
    assert not answer.is_complete and not any(event.get("type") == "[DONE]" for event in answer.events)
    event = parts.alone.event(answer)
    assert event.outcome == "truncated" and event.estimated
    assert 1 <= event.output_tokens <= 8 and event.input_tokens >= 3


@ways
def test_an_error_in_the_middle_of_a_stream_ends_it_as_an_error(parts: Set, way: Way) -> None:
    reply = way.stream("Falling ", "water ", "does ", "it.")
    broken = {"error": {"message": "out of memory", "type": "server_error", "code": "oom"}}
    data = b"data: " + json.dumps({"type": "error", **broken}).encode() + b"\n\n"
    head = b"event: error\n" if way.upstream == "anthropic" else b""
    parts_sent = (*reply.parts[: reply.preamble + 2], head + data)
    parts.upstream(way).answer = dataclasses.replace(reply, parts=parts_sent).slow(between_s=0.02)
    answer = ask(parts.alone.client, way, stream=True)
    assert answer.text == "Falling water "
    assert answer.error is not None and "out of memory" in answer.error["message"]
    assert not answer.is_complete
    assert parts.alone.event(answer).outcome in ("truncated", "error")


UNTRANSLATABLE: dict[str, tuple[Json, ...]] = {
    "openai": ({"choices": [{"index": 0, "delta": {}, "finish_reason": "error"}]},),
    "anthropic": (
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "id": "toolu_1"}},
        {"type": "content_block_stop", "index": 1},
    ),
}
"""Events in good JSON that end no answer and have no words in the client's dialect."""


@ways
@pytest.mark.parametrize("pause_s", [0.0, 0.02], ids=["in one piece", "event by event"])
@pytest.mark.parametrize("is_cut", [False, True], ids=["closed", "without its blank line"])
def test_a_stream_that_cannot_be_translated_ends_as_one_failed_answer(
    parts: Set, way: Way, pause_s: float, is_cut: bool
) -> None:
    if not way.is_translated:
        pytest.skip("what is passed through is not understood either")
    reply = way.stream("Falling ", "water ", "does ", "it.")
    odd = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in UNTRANSLATABLE[way.upstream])
    sent = (*reply.parts[: reply.preamble + 2], odd[:-1] if is_cut else odd)
    if not pause_s:
        sent = (sent[0], b"".join(sent[1:]))
    parts.upstream(way).answer = dataclasses.replace(reply, parts=sent).slow(between_s=pause_s)
    answer = ask(parts.alone.client, way, stream=True)
    assert answer.text == "Falling water "
    assert answer.error is not None and not answer.is_complete and not answer.ended_early
    assert sum(1 for event in answer.events if "error" in event or event.get("type") == "response.failed") == 1
    if way.client == "responses":
        assert answer.events[-1]["response"]["id"] == answer.events[0]["response"]["id"]
        assert [event["sequence_number"] for event in answer.events] == list(range(len(answer.events)))
    assert parts.alone.event(answer).outcome == "truncated"


@ways
def test_a_whole_answer_to_a_stream_becomes_the_stream(parts: Set, way: Way) -> None:
    for more, counted in (({}, True), ({"usage": None}, False)):
        parts.upstream(way).script(way.whole("Water does.", **more))
        answer = ask(parts.alone.client, way, stream=True)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert (answer.status, answer.text, answer.is_complete, answer.error) == (200, "Water does.", True, None)
        event = parts.alone.event(answer)
        assert (event.outcome, event.stream, event.estimated) == ("ok", True, not counted)
        if counted:
            assert (event.input_tokens, event.output_tokens) == (INPUT_TOKENS, OUTPUT_TOKENS)
        else:
            assert event.input_tokens > 0 and event.output_tokens > 0


@pytest.mark.parametrize("way", [way for way in WAYS if not way.is_translated], ids=str)
def test_nothing_of_a_whole_answer_is_lost_in_the_stream(parts: Set, way: Way) -> None:
    tool = None if way.client == "completions" else "get_weather"
    parts.upstream(way).script(way.whole("Water does.", **({"tool": tool} if tool else {})))
    more = {"stream_options": {"include_usage": True}} if way.upstream == "openai" else {}
    answer = ask(parts.alone.client, way, stream=True, **({"tool": tool} if tool else {}), **more)
    assert answer.is_complete and answer.usage == replies.USAGE
    if tool:
        assert answer.tool is not None and answer.tool[0] == tool and json.loads(answer.tool[1]) == {"city": "Ulm"}


def test_what_else_stands_in_a_whole_answer_stays_in_its_place(parts: Set) -> None:
    way = Way("chat", "openai")
    value = json.loads(way.whole("Wa").body)
    value |= {"system_fingerprint": "fp", "x_new": {"a": 1}}
    value["choices"] = [
        {"index": n, "message": {"role": "assistant", "content": text, "reasoning_content": "Hm."},
         "logprobs": {"content": []}, "finish_reason": "length"}
        for n, text in enumerate(("Wa", "ter"))
    ]  # fmt: skip
    parts.openai.script(replies.json_reply(value))
    said, ended, done = ask(parts.alone.client, way, stream=True, n=2).events
    assert said["object"] == ended["object"] == "chat.completion.chunk" and done == {"type": "[DONE]"}
    assert (said["id"], said["system_fingerprint"], said["x_new"]) == (value["id"], "fp", {"a": 1})
    assert [choice["delta"] for choice in said["choices"]] == [choice["message"] for choice in value["choices"]]
    assert [(choice["logprobs"], choice["finish_reason"]) for choice in said["choices"]] == [
        ({"content": []}, None)
    ] * 2
    assert [choice["finish_reason"] for choice in ended["choices"]] == ["length", "length"]


@ways
def test_a_whole_answer_that_is_none_is_no_stream_either(parts: Set, way: Way) -> None:
    for body in (b"{}", b'{"choices": [], "content": 5}', b'{"choices": [{"message": {"content": "'):
        parts.upstream(way).answer = dataclasses.replace(way.whole(), parts=(body,))
        answer = ask(parts.alone.client, way, stream=True)
        assert_refused(answer, 502, "upstream_invalid_response", way=way)
    parts.spare.script(Way(way.client, "openai").stream("spare"))
    answer = ask(parts.paired.client, way, stream=True)
    assert (answer.text, answer.is_complete) == ("spare", True)


MALFORMED_INSIDE = (b'"\xff"', b"1e999", b'[{"a": "\xff"}]')
"""Values that a reader of the outermost level alone takes for JSON."""


@ways
@pytest.mark.parametrize("value", MALFORMED_INSIDE)
def test_an_answer_that_is_malformed_inside_is_the_upstreams_fault(parts: Set, way: Way, value: bytes) -> None:
    body = way.whole(usage=None).body
    name = b'"usage"' if b'"usage"' not in body else b'"object"'
    broken = body[:-1] + b", " + name + b": " + value + b"}"
    parts.upstream(way).answer = dataclasses.replace(way.whole(), parts=(broken,))
    answer = ask(parts.alone.client, way, stream=False)
    assert_refused(answer, 502, "upstream_invalid_response", way=way)


@ways
def test_a_broken_stream_is_not_continued_by_the_spare(parts: Set, way: Way) -> None:
    parts.upstream(way).answer = way.stream("Falling ", "water").cut(1)
    answer = ask(parts.paired.client, way, stream=True)
    assert answer.text == "Falling " and answer.error is not None
    assert parts.spare.requests == []


def test_a_price_turns_every_outcome_into_the_right_cost(tmp_path) -> None:
    """3 micro-units an input token, 10 an output token."""
    with FakeUpstream() as upstream:
        config = json.dumps(
            {
                "providers": {"main": provider(upstream.url, timeouts=SHORT, max_retries=0)},
                "models": {"fake": {"upstream": "main", "price": {"input": 3, "output": 10}}},
            }
        )
        way = Way("chat", "openai")
        with threaded_gateway(tmp_path, config) as gateway:
            good = ask(gateway.client, way, stream=True)
            assert gateway.event(good).cost_micros == 3 * INPUT_TOKENS + 10 * OUTPUT_TOKENS
            upstream.script(way.stream("Falling ", "water ", "does").cut(2))
            cut = ask(gateway.client, way, stream=True)
            event = gateway.event(cut)
            assert event.cost_micros == 3 * event.input_tokens + 10 * event.output_tokens > 0
            upstream.script(replies.html())
            assert gateway.event(ask(gateway.client, way, stream=True)).cost_micros == 0
            stored = gateway.stored_events()
            assert sorted(e.cost_micros for e in stored) == sorted(e.cost_micros for e in gateway.events)


# Clients that leave


@ways
@modes
@pytest.mark.parametrize("when", ["before headers", "before content", "in the middle"])
def test_a_client_that_leaves_is_noticed_at_the_upstream_within_a_second(
    parts: Set, way: Way, stream: bool, when: str
) -> None:
    reply = way.reply(stream, "Falling ", "water ", "does.")
    upstream = parts.upstream(way)
    if when == "in the middle" and not stream:
        pytest.skip("a whole answer has no middle")
    stalled = {
        "before headers": reply.stall_before_headers,
        "before content": reply.stall_after_headers,
        "in the middle": lambda: reply.stall(2),
    }[when]()
    upstream.script(stalled)
    left_s = leave(parts.alone, way, stream, upstream, read_first=when == "in the middle")
    assert upstream.wait_for(lambda u: u.last.client_left_s is not None, 2.0), "the upstream still waits"
    assert upstream.last.client_left_s - left_s < 1.0
    event = parts.alone.wait_for_events(1)[-1]
    assert event.outcome == "client_left"
    assert (event.output_tokens > 0) == (when == "in the middle")
    assert parts.alone.wait_until_idle()


def raw_request(gateway: ThreadedGateway, way: Way, stream: bool, key: str | None = None) -> bytes:
    body = json.dumps(way.body(stream=stream)).encode()
    head = (
        f"POST {way.path} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key or gateway.key}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def leave(gateway: ThreadedGateway, way: Way, stream: bool, upstream: FakeUpstream, *, read_first: bool) -> float:
    """Send a request, wait until the upstream has it (or content came), close the connection. When it was closed."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=5) as connection:
        connection.sendall(raw_request(gateway, way, stream))
        assert upstream.wait_for(lambda u: len(u.requests) > 0)
        received = b""
        while read_first and b"water" not in received:
            received += connection.recv(65536)
    return time.monotonic()


def test_a_thousand_clients_that_leave_hold_no_slot(tmp_path) -> None:
    """The key may have 50 requests at once; 1,000 are begun and left in every phase, and then it has all 50 again."""
    way = Way("chat", "openai")
    phases = [
        way.stream("a", "b").stall_before_headers(),
        way.stream("a", "b").stall_after_headers(),
        way.stream("a", "b").stall(1),
        way.stream("a", "b"),
        way.whole("a").stall_before_headers(),
    ]
    config = {"max_retries": 0, "timeouts": {"first_token": 60, "idle": 60}}
    with (
        FakeUpstream() as upstream,
        threaded_gateway(tmp_path, providers(fake=provider(upstream.url, **config))) as gateway,
    ):
        key = gateway.new_key("aborts", concurrency=50)
        upstream.script(*(phases[number % len(phases)] for number in range(1000)))
        abort_many(gateway.port, raw_request(gateway, way, True, key), 1000, at_once=40)
        assert gateway.wait_until_idle(10)
        assert gateway.in_flight_of("aborts") == 0
        upstream.forget()
        with gateway.client_with(key) as client:
            assert ask(client, way, stream=True).is_complete
        outcomes = collections.Counter(event.outcome for event in gateway.events)
        assert outcomes.keys() <= {"client_left", "ok"}, outcomes
        assert upstream.wait_for(lambda u: all(r.finished_s or r.client_left_s for r in u.requests))
