"""Clients that leave at odd moments, and a gateway that is told to end. (test_faults.py has the usual moments.)"""

from __future__ import annotations

import dataclasses
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.gateway import replies
from tests.gateway.dialects import WAYS, Answer, Way, ask
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.gateways import ThreadedGateway, provider, providers, running_gateway, threaded_gateway
from tests.gateway.replies import Reply

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def upstream() -> Iterator[FakeUpstream]:
    with FakeUpstream() as fake:
        yield fake


@pytest.fixture(scope="module")
def gateway(upstream: FakeUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedGateway]:
    with threaded_gateway(tmp_path_factory.mktemp("left"), providers(main=provider(upstream.url))) as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    gateway.forget()
    upstream.forget()


def sent(gateway: ThreadedGateway, path: str, body: dict[str, Any], *, all_of_it: bool = True) -> socket.socket:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.key}\r\n"
    connection = socket.create_connection(("127.0.0.1", gateway.port), timeout=5)
    connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode())
    connection.sendall(content if all_of_it else content[:10])
    return connection


BODY = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


def test_a_client_that_leaves_in_the_middle_of_its_body_reaches_nobody(
    gateway: ThreadedGateway, upstream: FakeUpstream
) -> None:
    sent(gateway, CHAT, BODY, all_of_it=False).close()
    assert gateway.wait_until_idle()
    assert upstream.requests == [] and gateway.events == []


def test_a_client_that_leaves_between_two_attempts_ends_them(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    def failures() -> list[bytes]:
        return [line for line in gateway.state.metrics.text().splitlines() if b"upstream_failures_total{" in line]

    upstream.answer = replies.rate_limited(1)
    before = failures()
    connection = sent(gateway, CHAT, BODY)
    assert upstream.wait_for(lambda u: len(u.requests) == 1 and failures() != before)
    connection.close()
    assert gateway.wait_until_idle(0.8)
    event = gateway.wait_for_events(1)[0]
    assert (event.outcome, event.status, event.input_tokens) == ("client_left", 499, 0)
    time.sleep(0.5)
    assert len(upstream.requests) == 1


def test_a_client_that_leaves_a_download_ends_it(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    upstream.answer = Reply(
        content_type="audio/mpeg", framing="chunked", parts=(b"x" * 1000,) * 2, preamble=0, stall_at_part=1
    )
    connection = sent(gateway, "/v1/audio/speech", {"model": "fake", "input": "Hi"})
    while b"xxx" not in connection.recv(65536):
        pass
    connection.close()
    assert upstream.wait_for(lambda u: u.last.client_left_s is not None, 1.0)
    assert gateway.wait_until_idle()
    assert gateway.wait_for_events(1)[0].outcome == "client_left"


def test_a_client_that_reads_everything_and_closes_has_not_left(
    gateway: ThreadedGateway, upstream: FakeUpstream
) -> None:
    for stream in (False, True):
        connection = sent(gateway, CHAT, {**BODY, "stream": stream})
        received = b""
        while not received.endswith(b"0\r\n\r\n" if stream else b"}"):
            received += connection.recv(65536)
        connection.close()
    assert [event.outcome for event in gateway.wait_for_events(2)] == ["ok", "ok"]


def finished(way: Way, *, usage_after_s: float) -> Reply:
    """The finish reason comes at once, what is behind it so much later."""
    reply = way.stream("Water ", "does.")
    place = next(n for n, part in enumerate(reply.parts) if b'"finish_reason": "stop"' in part)
    begin, rest = b"".join(reply.parts[: place + 1]), b"".join(reply.parts[place + 1 :])
    return dataclasses.replace(reply, parts=(begin, rest), preamble=0, pauses_s=usage_after_s)


@pytest.mark.parametrize("way", [way for way in WAYS if way.upstream == "openai"], ids=str)
def test_a_client_that_leaves_at_the_finish_reason_is_billed_exactly(
    gateway: ThreadedGateway, upstream: FakeUpstream, way: Way
) -> None:
    """Many a client reads no further. The generation is over then, so the usage is waited for."""
    upstream.without = ("/responses",)
    upstream.script(finished(way, usage_after_s=0.2))
    connection = sent(gateway, way.path, way.body(stream=True))
    received = b""
    while b"does." not in received:
        received += connection.recv(65536)
    time.sleep(0.05)
    connection.close()
    event = gateway.wait_for_events(1)[0]
    assert (event.outcome, event.estimated) == ("client_left", False)
    assert (event.input_tokens, event.output_tokens) == replies.USAGE


def test_an_upstream_that_keeps_its_usage_back_is_cut_within_a_second(
    gateway: ThreadedGateway, upstream: FakeUpstream
) -> None:
    way = Way("chat", "openai")
    upstream.script(finished(way, usage_after_s=30))
    connection = sent(gateway, way.path, way.body(stream=True))
    while b"stop" not in connection.recv(65536):
        pass
    left_s = time.monotonic()
    connection.close()
    assert upstream.wait_for(lambda u: u.last.client_left_s is not None, 1.0)
    assert time.monotonic() - left_s < 1.0
    event = gateway.wait_for_events(1)[0]
    assert (event.outcome, event.estimated) == ("client_left", True) and event.output_tokens >= 2


def test_sigterm_lets_a_stream_finish_and_refuses_what_comes_then(tmp_path) -> None:
    with FakeUpstream() as upstream:
        upstream.answer = replies.chat_stream("a", "b", "c", "d").slow(between_s=0.3)
        with running_gateway(tmp_path, providers(main=provider(upstream.url))) as gateway:
            texts: list[str] = []

            def read() -> None:
                answer = httpx.post(gateway.url + CHAT, json={**BODY, "stream": True}, headers=gateway.auth, timeout=20)
                texts.append(answer.text)

            thread = threading.Thread(target=read)
            thread.start()
            assert upstream.wait_for(lambda u: len(u.requests) == 1)
            gateway.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            refused = httpx.post(gateway.url + CHAT, json=BODY, headers=gateway.auth)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            thread.join(10)
            assert texts and texts[0].endswith("data: [DONE]\n\n")
            assert gateway.process.wait(5) == 0


@pytest.mark.parametrize("way", [way for way in WAYS if way.client != "completions"], ids=str)
def test_what_is_cut_by_the_end_of_the_gateway_says_so(tmp_path, way: Way) -> None:
    """Ctrl-C waits for nobody: a stream ends with an error inside it, a request without an answer yet gets a 503."""
    with FakeUpstream(without=("/responses",)) as upstream:
        upstream.script(way.stream("Falling ", "water").stall(2), way.whole().stall_before_headers())
        entry = provider(upstream.url, dialect=way.upstream, models=[way.model])
        with running_gateway(tmp_path, providers(main=entry)) as gateway:
            answers: dict[bool, Answer] = {}

            def read(stream: bool) -> None:
                with httpx.Client(base_url=gateway.url, headers=gateway.auth) as client:
                    answers[stream] = ask(client, way, stream=stream)

            threads = [threading.Thread(target=read, args=(stream,)) for stream in (True, False)]
            for number, thread in enumerate(threads, 1):
                thread.start()
                assert upstream.wait_for(lambda u, number=number: len(u.requests) == number)
            time.sleep(0.2)
            gateway.process.send_signal(signal.SIGINT)
            for thread in threads:
                thread.join(10)
            assert gateway.process.wait(10) == 0
    broken, refused = answers[True], answers[False]
    assert broken.text == "Falling water" and not broken.is_complete and not broken.ended_early
    assert broken.error is not None and "shutting down" in broken.error["message"]
    assert refused.status == 503 and refused.headers["retry-after"] == "2"
    assert refused.error is not None and "shutting down" in refused.error["message"]
