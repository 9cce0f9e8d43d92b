"""Every answer that is no result: JSON, the right status, in the dialect that the path means."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
