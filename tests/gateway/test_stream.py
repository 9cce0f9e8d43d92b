"""Streams on their way through: what the client gets, byte for byte, and when."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from headrace.gateway import exchange as exchange_module
from headrace.gateway.stream import Framer, Renaming, Watch, events, read_usage
from tests.gateway import replies
from tests.gateway.dialects import Way, ask
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.gateways import ThreadedGateway, provider, providers, threaded_gateway

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def upstream() -> Iterator[FakeUpstream]:
    with FakeUpstream() as fake:
        yield fake


@pytest.fixture(scope="module")
def gateway(upstream: FakeUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedGateway]:
    config = providers(main=provider(upstream.url, max_retries=0))
    with threaded_gateway(tmp_path_factory.mktemp("stream"), config) as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    gateway.forget()
    upstream.forget()


def body(**more: object) -> dict[str, object]:
    return {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "stream": True, **more}


def test_a_stream_is_passed_on_byte_for_byte_when_usage_was_asked_for(
    gateway: ThreadedGateway, upstream: FakeUpstream
) -> None:
    reply = replies.chat_stream("Hel", "lo")
    upstream.script(reply)
    answer = gateway.client.post(CHAT, json=body(stream_options={"include_usage": True}))
    assert answer.content == reply.body
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-accel-buffering"] == "no" and "content-length" not in answer.headers


def test_usage_is_asked_for_always_and_shown_only_to_who_asked(
    gateway: ThreadedGateway, upstream: FakeUpstream
) -> None:
    reply = replies.chat_stream("Hel", "lo")
    upstream.script(reply)
    answer = gateway.client.post(CHAT, json=body(stream_options={"x": 1}))
    assert upstream.last.json["stream_options"] == {"x": 1, "include_usage": True}
    without_usage = b"".join(part for part in reply.parts if b'"choices": []' not in part)
    assert answer.content == without_usage
    event = gateway.wait_for_events(1)[0]
    assert (event.input_tokens, event.output_tokens, event.estimated) == (*replies.USAGE, False)


@pytest.mark.parametrize("form", ["one byte a write", "CRLF", "gzip", "until close"])
def test_how_it_was_cut_into_packets_changes_nothing(
    gateway: ThreadedGateway, upstream: FakeUpstream, form: str
) -> None:
    reply = replies.chat_stream("Hel", "lo, wörld", tool=None)
    forms = {
        "one byte a write": replace(reply.one_byte_a_write()),
        "CRLF": reply.crlf(),
        "gzip": reply.gzipped(),
        "until close": reply.until_close(),
    }
    upstream.script(forms[form])
    answer = ask(gateway.client, Way("chat", "openai"), stream=True)
    assert (answer.text, answer.is_complete) == ("Hello, wörld", True)
    assert gateway.event(answer).output_tokens == replies.USAGE[1]


def test_the_first_token_is_sent_when_it_comes(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    upstream.script(replies.chat_stream("Hel", "lo").stall(1))
    with gateway.client.stream("POST", CHAT, json=body()) as answer:
        received = b""
        for piece in answer.iter_raw():
            received += piece
            if b'"Hel"' in received:
                break
    assert b'"role": "assistant"' in received


def test_a_stream_that_names_its_end_but_not_done_gets_the_done_that_clients_wait_for(
    gateway: ThreadedGateway, upstream: FakeUpstream
) -> None:
    reply = replies.chat_stream("Hel", "lo", usage=None)
    upstream.script(replace(reply, parts=reply.parts[:-1]))
    assert gateway.client.post(CHAT, json=body()).content == reply.body


def test_a_last_event_without_its_blank_line_counts(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    reply = replies.chat_stream("Hel", "lo", usage=None)
    upstream.script(replace(reply, parts=(*reply.parts[:-1], b"data: [DONE]")))
    assert gateway.client.post(CHAT, json=body()).content == reply.body


def test_an_event_of_megabytes_goes_through(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    huge = "x" * 3_000_000
    upstream.script(replies.chat_stream("a", huge, "b"))
    answer = ask(gateway.client, Way("chat", "openai"), stream=True)
    assert len(answer.text) == 3_000_002 and answer.is_complete


def test_a_long_wait_is_filled_with_comments_and_an_error_then_comes_inside(
    upstream: FakeUpstream, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module, "KEEP_ALIVE_S", 0.2)
    config = json.loads(providers(main=provider(upstream.url, max_retries=0, timeouts={"first_token": 1.2})))
    with threaded_gateway(tmp_path, json.dumps(config)) as gateway:
        listen = replace(gateway.state.snapshot.listen, hold_back_s=0.3)
        gateway.state.snapshot = replace(gateway.state.snapshot, listen=listen)
        upstream.script(replies.chat_stream("late").slow(head_s=0.9))
        answer = gateway.client.post(CHAT, json=body())
        assert answer.status_code == 200 and answer.text.count(": keep-alive") >= 2
        assert '"late"' in answer.text and answer.text.endswith("data: [DONE]\n\n")
        assert answer.headers["x-gateway-upstream"] == "main"
        upstream.script(replies.chat_stream("never").stall_before_headers())
        failed = gateway.client.post(CHAT, json=body())
        assert failed.status_code == 200
        last = failed.text.strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "upstream_timeout_first_token"
        assert "[DONE]" not in failed.text
        upstream.script(replies.messages_stream("late"))
        way = Way("messages", "openai")
        upstream.scripted.clear()
        upstream.script(replies.chat_stream("late").slow(head_s=0.6))
        pinged = gateway.client.post(way.path, json=way.body(stream=True))
        assert 'event: ping\ndata: {"type": "ping"}' in pinged.text and "message_stop" in pinged.text


def test_a_slow_reader_slows_the_upstream_down_and_is_not_the_upstreams_silence(
    upstream: FakeUpstream, tmp_path
) -> None:
    """Nothing is read for longer than the idle limit; then all of it is there, and little of it was buffered."""
    config = providers(main=provider(upstream.url, max_retries=0, timeouts={"idle": 0.5}))
    piece = "x" * 60_000
    with threaded_gateway(tmp_path, config) as gateway:
        upstream.script(replies.chat_stream(*[piece] * 200))
        content = json.dumps(body()).encode()
        with socket.create_connection(("127.0.0.1", gateway.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.key}\r\n"
            connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            assert upstream.wait_for(lambda u: len(u.requests) == 1)
            time.sleep(1.2)
            received = 0
            tail = b""
            while b"[DONE]" not in tail:
                data = connection.recv(1 << 20)
                assert data, tail[-300:]
                received += len(data)
                tail = (tail + data)[-200:]
        assert received > 200 * 60_000
        assert gateway.wait_for_events(1)[0].outcome == "ok"


# Parts


def test_the_framer_gives_the_same_events_for_any_chunking() -> None:
    reply = replies.chat_stream("Hel", "lo", "wörld")
    draw = random.Random(3)
    for data in (reply.body, reply.crlf().body):
        for _ in range(50):
            framer, found, place = Framer(), b"", 0
            while place < len(data):
                step = draw.randint(1, 90)
                block = framer.feed(data[place : place + step])
                assert block == b"" or len(list(events(block))) >= 1
                found += block
                place += step
            assert found == data and framer.rest == b""


def test_a_mark_inside_a_text_is_no_mark() -> None:
    text = 'data: [DONE] "finish_reason":"stop" {"usage":{}} "error": 1'
    watch = Watch("openai")
    for event in replies.chat_stream(text, usage=None).parts[:-2]:
        if watch.is_marked(event):
            watch.look(event)
        else:
            watch.passed(event)
    assert not watch.complete and watch.error is None and watch.usage is None
    assert watch.num_deltas >= 1


def test_deltas_are_counted_in_every_dialect() -> None:
    for wire, reply in (
        ("openai", replies.chat_stream("a", "b", "c")),
        ("messages", replies.messages_stream("a", "b", "c")),
        ("responses", replies.responses_stream("a", "b", "c")),
    ):
        watch = Watch(wire)  # type: ignore[arg-type]
        for number, part in enumerate(reply.parts):
            if number <= reply.preamble or watch.is_marked(part):
                watch.look(part)
            else:
                watch.passed(part)
        assert (watch.num_deltas, watch.complete) == (3, True), wire
        assert watch.usage is not None
        assert (watch.usage.input_tokens, watch.usage.output_tokens) == replies.USAGE


def test_usage_of_every_dialect_is_read() -> None:
    openai = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}
    anthropic = {"input_tokens": 2, "output_tokens": 4, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 2}
    responses = {"input_tokens": 9, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 5}}
    for usage in (openai, anthropic, responses):
        found = read_usage(usage)
        assert found is not None
        assert (found.input_tokens, found.output_tokens, found.cached_tokens) == (9, 4, 5)
    assert read_usage(None) is None and read_usage({}) is None and read_usage({"prompt_tokens": "x"}).input_tokens == 0


def test_a_models_name_in_a_text_is_not_renamed() -> None:
    renaming = Renaming("real", "asked")
    block = b'data: {"model":"real","x":{"model": "real"},"choices":[{"delta":{"content":"\\"model\\":\\"real\\""}}]}'
    assert renaming.apply(block) == block.replace(b'"model":"real","x"', b'"model":"asked","x"').replace(
        b'{"model": "real"}', b'{"model": "asked"}'
    )
