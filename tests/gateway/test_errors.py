"""Every answer that is no result: JSON, the right status, in the dialect that the path means."""

from __future__ import annotations

import dataclasses
import gzip
import logging
import random
from collections.abc import Callable, Iterator

import pytest

from headrace.gateway.keys import KeyRequest
from headrace.gateway.snapshot import Limits
from tests.gateway import replies
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
    with threaded_gateway(tmp_path_factory.mktemp("errors"), config) as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    gateway.forget()
    upstream.forget()


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("POST", CHAT, b"{", 400, "invalid_json"),
        ("POST", CHAT, b"[]", 400, "invalid_json"),
        ("POST", CHAT, b"", 400, "invalid_json"),
        ("POST", CHAT, b'{"model":"a","model":"b"}', 400, "duplicate_key"),
        ("POST", CHAT, b'{"model":1}', 400, "invalid_type"),
        ("POST", CHAT, b'{"model":"fake","stream":"yes"}', 400, "invalid_type"),
        ("POST", CHAT, b'{"model":"f\xffake","messages":[]}', 400, "invalid_json"),
        ("POST", CHAT, b'{"model":"fake","tools":[["\xff"]]}', 400, "invalid_json"),
        ("POST", CHAT, b'{"model":"fake","max_tokens":1e999}', 400, "invalid_value"),
        ("POST", CHAT, b'{"model":"fakee","messages":[]}', 404, "model_not_found"),
        ("POST", "/v1/chat/completion", b"{}", 404, "unknown_endpoint"),
        ("GET", CHAT, b"", 405, "method_not_allowed"),
        ("GET", "/api/v1/models/none", b"", 404, "model_not_found"),
    ],
)
def test_refusals_in_the_openai_form(
    gateway: ThreadedGateway, method: str, path: str, content: bytes, status: int, code: str
) -> None:
    answer = gateway.client.request(method, path, content=content)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    error = answer.json()["error"]
    assert error["code"] == code and error["message"] == answer.json()["message"]
    assert {"message", "type", "param", "code"} == error.keys()
    assert "x-request-id" in answer.headers
    assert gateway.state.num_open == 0


def test_a_wrong_model_names_the_right_one(gateway: ThreadedGateway) -> None:
    answer = gateway.client.post(CHAT, json={"model": "Fake", "messages": []})
    assert "The model `Fake` does not exist" in answer.text and "Did you mean `fake`?" in answer.text


@pytest.mark.parametrize(
    ("content", "status", "kind"),
    [
        (b"{", 400, "invalid_request_error"),
        (
            b'{"model":"fake","max_tokens":1,"messages":[{"role":"user","content":"\xff"}]}',
            400,
            "invalid_request_error",
        ),
        (b'{"model":"fake","max_tokens":1,"messages":[],"temperature":1e999}', 400, "invalid_request_error"),
        (b'{"model":"none","max_tokens":1,"messages":[]}', 404, "not_found_error"),
    ],
)
def test_refusals_in_the_anthropic_form(gateway: ThreadedGateway, content: bytes, status: int, kind: str) -> None:
    answer = gateway.client.post("/v1/messages?beta=true", content=content)
    assert answer.status_code == status
    assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", kind)
    assert answer.headers["request-id"] == answer.json()["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [("/v1/models/none", 404, "not_found_error"), ("/v1/nothing", 404, "not_found_error")],
)
def test_who_sends_anthropics_version_gets_anthropics_errors(
    gateway: ThreadedGateway, path: str, status: int, kind: str
) -> None:
    answer = gateway.client.get(path, headers={"anthropic-version": "2023-06-01"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert answer.json()["request_id"] == answer.headers["request-id"]


def test_no_key_is_a_401_before_the_body_is_looked_at(gateway: ThreadedGateway) -> None:
    with gateway.client_with("") as client:
        client.headers.pop("authorization")
        for path, kind in ((CHAT, "invalid_request_error"), ("/v1/messages", "authentication_error")):
            answer = client.post(path, content=b"{")
            assert answer.status_code == 401 and answer.json()["error"]["type"] == kind
            assert answer.headers["www-authenticate"] == "Bearer"
        assert client.get("/health").status_code == 200
        assert client.get("/metrics").status_code == 200
        assert client.get("/v1/models").status_code == 401


@pytest.mark.parametrize("header", ["x-api-key", "api-key", "authorization"])
def test_the_key_may_come_in_any_of_the_usual_headers(gateway: ThreadedGateway, header: str) -> None:
    with gateway.client_with("") as client:
        client.headers.pop("authorization")
        value = f" Bearer Bearer {gateway.key} " if header == "authorization" else gateway.key
        assert client.get("/v1/models", headers={header: value.strip()}).status_code == 200


def test_a_limit_is_a_429_with_its_numbers_and_asks_nobody(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    secret = gateway.new_key("one a minute", rpm=1)
    body = {"model": "fake", "messages": []}
    with gateway.client_with(secret) as client:
        allowed = client.post(CHAT, json=body)
        refused = client.post(CHAT, json=body)
    assert allowed.headers["x-ratelimit-limit-requests"] == "1"
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) > 1
    assert len(upstream.requests) == 1


def test_a_refusal_is_told_of_its_key(gateway: ThreadedGateway, caplog: pytest.LogCaptureFixture) -> None:
    record, secret = gateway.ledger.store.create(KeyRequest(name="ci", tags=("ci", "x"), limits=Limits(rpm=1)))
    gateway.ledger.keys.reload()
    caplog.set_level(logging.INFO, "headrace.gateway")
    with gateway.client_with(secret) as client:
        for _ in range(2):
            client.post(CHAT, json={"model": "fake", "messages": []})
        client.get("/v1/models/none")
        client.get("/v1/models", headers={"authorization": "Bearer x"})
    told = gateway.client.get("/metrics").text
    for code, tag in (("rate_limit_exceeded", "ci"), ("model_not_found", "ci"), ("invalid_api_key", "")):
        assert f'headrace_gateway_refused_total{{code="{code}",key_tag="{tag}"}}' in told
    lines = [vars(each)["line"] for each in caplog.records if "line" in vars(each)]
    assert {line.key for line in lines if line.code == "rate_limit_exceeded"} == {record.prefix}


def test_rate_headers_have_the_names_of_the_dialect(gateway: ThreadedGateway) -> None:
    secret = gateway.new_key("one a minute for Anthropic", rpm=1, tpm=1000)
    body = {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    with gateway.client_with(secret) as client:
        for status in (200, 429):
            answer = client.post("/v1/messages", json=body)
            assert answer.status_code == status
            assert answer.headers["anthropic-ratelimit-requests-limit"] == "1"
            assert answer.headers["anthropic-ratelimit-tokens-limit"] == "1000"
            assert not any(name.startswith("x-ratelimit") for name in answer.headers)


def test_a_fault_of_ours_is_a_500_with_an_id_and_frees_the_slot(
    gateway: ThreadedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.gateway import attempts

    def broken(*arguments: object, **more: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(attempts, "call_for", broken)
    answer = gateway.client.post(CHAT, json={"model": "fake", "messages": []})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in answer.text
    assert gateway.wait_until_idle()
    assert gateway.wait_for_events(1)[0].outcome == "error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "reply",
    [
        replies.json_reply({"id": "x", "object": "chat.completion"}),
        replies.json_reply({"id": "x", "choices": []}),
        replies.json_reply({"choices": None}),
        replies.json_reply("text"),
        replies.empty_200(),
        replies.html(200),
        replies.json_reply({"object": "error", "message": "broken", "code": 500}),
        replies.json_reply({"error": "broken"}),
    ],
)
def test_a_200_on_chat_always_has_choices(
    gateway: ThreadedGateway, upstream: FakeUpstream, reply: replies.Reply, stream: bool
) -> None:
    upstream.answer = reply
    answer = gateway.client.post(CHAT, json={"model": "fake", "messages": [], "stream": stream})
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] in ("upstream_invalid_response", "upstream_error")


def test_draining_refuses_new_requests_and_says_so(gateway: ThreadedGateway) -> None:
    gateway.state.is_draining = True
    try:
        answer = gateway.client.post(CHAT, json={"model": "fake", "messages": []})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        assert "retry-after" in answer.headers
        assert gateway.client.get("/health/ready").status_code == 503
        assert gateway.client.get("/health/live").status_code == 200
    finally:
        gateway.state.is_draining = False


MESSAGES = [{"role": "user", "content": "Hi"}]
BODY = {"model": "fake", "messages": MESSAGES, "max_tokens": 9, "prompt": "Hi", "input": "Hi"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "reply"),
    [
        (CHAT, replies.chat),
        ("/v1/completions", replies.completion),
        ("/v1/responses", replies.responses),
        ("/v1/messages", replies.chat),
        ("/v1/embeddings", replies.embeddings),
        ("/v1/audio/speech", replies.embeddings),
    ],
)
def test_fields_without_effect_at_the_upstream_are_named_to_the_client(
    gateway: ThreadedGateway, upstream: FakeUpstream, path: str, reply: Callable[[], replies.Reply], stream: bool
) -> None:
    streams = {
        replies.chat: replies.chat_stream,
        replies.completion: replies.completion_stream,
        replies.responses: replies.responses_stream,
    }
    answer_to = streams.get(reply, reply) if stream else reply
    upstream.script(dataclasses.replace(answer_to(), headers=(("x-headrace-ignored", "temprature,top_kk"),)))
    answer = gateway.client.post(path, json={**BODY, "stream": stream})
    assert answer.status_code == 200
    assert answer.headers.get_list("x-headrace-ignored")[0].split(",")[:2] == ["temprature", "top_kk"]
    assert len(answer.headers.get_list("x-headrace-ignored")) == 1


def test_fields_that_the_upstream_ignores_and_those_left_out_here_are_one_list(
    gateway: ThreadedGateway, upstream: FakeUpstream
) -> None:
    upstream.script(dataclasses.replace(replies.chat(), headers=(("x-headrace-ignored", "zap, top_kk"),)))
    body = {"model": "fake", "messages": MESSAGES, "max_tokens": 9, "zap": 1, "top_k": 3, "container": "c"}
    told = gateway.client.post("/v1/messages", json=body).headers["x-headrace-ignored"].split(",")
    assert told[:2] == ["zap", "top_kk"] and "container" in told
    assert len(set(told)) == len(told)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/moderations", "/v1/audio/speech", CHAT])
def test_what_an_upstream_says_it_cannot_do_is_passed_on(
    gateway: ThreadedGateway, upstream: FakeUpstream, path: str
) -> None:
    error = {"message": "No vectors here.", "type": "invalid_request_error", "param": None, "code": "not_implemented"}
    upstream.script(replies.json_reply({"error": error}, status=501))
    answer = gateway.client.post(path, json=BODY)
    assert answer.status_code == 501
    assert answer.json()["error"] == error
    assert answer.headers["x-should-retry"] == "false"
    upstream.script(replies.json_reply({"error": {**error, "code": "unsupported_by_model"}}, status=400))
    answer = gateway.client.post(path, json=BODY)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "No vectors here.")


@pytest.mark.parametrize("status", [404, 405])
def test_an_endpoint_that_an_upstream_lacks_is_told_in_its_words(
    gateway: ThreadedGateway, upstream: FakeUpstream, status: int
) -> None:
    upstream.script(replies.json_reply({"error": {"message": "No POST /v2/rerank here."}}, status=status))
    answer = gateway.client.post("/v1/rerank", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_invalid_response")
    assert f"(status {status}: No POST /v2/rerank here); check its base_url" in answer.json()["message"]


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings", "/v1/files"])
@pytest.mark.parametrize("size", [20, 300_000])
def test_a_compressed_body_is_a_415(gateway: ThreadedGateway, path: str, size: int) -> None:
    packed = gzip.compress(random.Random(size).randbytes(size))
    answer = gateway.client.post(path, content=packed, headers={"content-encoding": "gzip"})
    assert answer.status_code == 415
    assert "Content-Encoding: gzip" in answer.json()["error"]["message"]
    assert answer.headers["accept-encoding"] == "identity"
    plain = gateway.client.post(CHAT, json=BODY, headers={"content-encoding": "identity"})
    assert plain.status_code == 200


def test_questions_about_the_gateway_itself_are_no_open_requests(gateway: ThreadedGateway) -> None:
    assert gateway.client.get("/health").json()["requests_open"] == 0
    assert "headrace_gateway_requests_in_flight 0.0" in gateway.client.get("/metrics").text


@pytest.mark.parametrize("path", ["/v1/usage", "/usage", "/api/v1/nothing", "/v1/v1/engines"])
def test_an_unknown_path_is_quoted_as_it_was_sent(gateway: ThreadedGateway, path: str) -> None:
    message = gateway.client.post(path, json={}).json()["message"]
    assert message.startswith(f"There is no POST {path} on this gateway. /v1/models lists")
