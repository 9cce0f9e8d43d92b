"""What of a request reaches the upstream, and what of its answer the client: all of it, but for what must change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import anthropic
import pytest
from anthropic.types import ModelInfo

import headrace
from headrace.gateway.keys import KeyRequest
from tests.gateway import replies
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.gateways import UPSTREAM_KEY, ThreadedGateway, provider, threaded_gateway

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
ANTHROPIC = {"anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def upstream() -> Iterator[FakeUpstream]:
    with FakeUpstream() as fake:
        yield fake


@pytest.fixture(scope="module")
def gateway(upstream: FakeUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedGateway]:
    config = {
        "providers": {"main": provider(upstream.url, "main", models=["fake", "Real/Name"], max_retries=0)},
        "models": {"short": {"upstream": "main", "upstream_model": "Real/Name"}},
        "routing": {"default": "main"},
    }
    with threaded_gateway(tmp_path_factory.mktemp("forward"), json.dumps(config)) as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    gateway.forget()
    upstream.forget()


def test_a_body_with_nothing_to_change_arrives_byte_for_byte(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    body = (
        b'{ "model":"fake", "messages" : [{"role":"user","content":"\\u00fc\\/ 1.00"}],\n "x_future":{"a":[1.0,2e3]} }'
    )
    answer = gateway.client.post(CHAT, content=body)
    assert answer.status_code == 200
    assert upstream.last.body == body


def test_unknown_fields_survive_a_change_of_the_model(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    extra = {"x_future": {"deep": [1, None, "é"]}, "guided_json": {"type": "object"}, "n": 2}
    gateway.client.post(CHAT, json={"model": "short", "messages": MESSAGES, **extra})
    assert upstream.last.json == {"model": "Real/Name", "messages": MESSAGES, **extra}


def test_the_answer_names_the_model_that_was_asked_for(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    for stream in (False, True):
        answer = gateway.client.post(CHAT, json={"model": "short", "messages": MESSAGES, "stream": stream})
        assert '"Real/Name"' not in answer.text and '"short"' in answer.text
        assert answer.headers["x-gateway-model"] == "Real/Name"
        assert answer.headers["x-gateway-upstream"] == "main"
        assert answer.headers["x-gateway-attempts"] == "1"
        assert answer.headers["x-gateway-config-generation"] == "1"


def test_an_answer_is_passed_on_byte_for_byte(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    odd = b'{ "id":"x", "choices":[{"index":0,"message":{"role":"assistant","content":"1.00"},"x":1.0}] , "model":"y"}'
    upstream.script(replies.Reply(parts=(odd,)))
    assert gateway.client.post(CHAT, json={"model": "fake", "messages": MESSAGES}).content == odd


def test_only_listed_headers_cross_and_the_key_never_does(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    sent = {
        "x-request-id": "my-request",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "openai-beta": "assistants=v2",
        "cookie": "session=secret",
        "api-key": gateway.key,
        "x-forwarded-for": "10.0.0.1",
        "x-internal": "secret",
    }
    upstream.script(replies.chat().with_headers(set_cookie="a=b", x_powered_by="x", openai_processing_ms="12"))
    answer = gateway.client.post(CHAT, json={"model": "fake", "messages": MESSAGES}, headers=sent)
    arrived = upstream.last.headers
    assert arrived["authorization"] == f"Bearer {UPSTREAM_KEY}"
    assert arrived["x-request-id"] == "my-request" == answer.headers["x-request-id"]
    assert arrived["traceparent"] == sent["traceparent"] and arrived["openai-beta"] == sent["openai-beta"]
    assert arrived["accept-encoding"] == "identity"
    assert arrived["user-agent"] == f"headrace/{headrace.__version__}"
    assert not {"cookie", "api-key", "x-forwarded-for", "x-internal"} & arrived.keys()
    assert gateway.key.encode() not in upstream.last.raw_head + upstream.last.body
    assert answer.headers["openai-processing-ms"] == "12"
    assert not {"set-cookie", "x-powered-by"} & answer.headers.keys()


@pytest.mark.parametrize(
    "called", ["application/x-www-form-urlencoded", "text/plain", "application/json; charset=utf-8"]
)
def test_what_was_read_as_json_goes_on_as_json(gateway: ThreadedGateway, upstream: FakeUpstream, called: str) -> None:
    content = json.dumps({"model": "fake", "messages": MESSAGES}).encode()
    answer = gateway.client.post(CHAT, content=content, headers={"content-type": called})
    assert (answer.status_code, upstream.last.headers["content-type"]) == (200, "application/json")


def test_presets_fill_what_the_request_leaves_out(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    before = gateway.state.snapshot
    models = {**before.models, "fake": _with(before.models["fake"], presets={"temperature": 0.3, "top_p": 0.5})}
    changed = _with(before, models=models, presets={"temperature": 0.9, "seed": 42}, generation=2)
    gateway.state.snapshot = changed
    try:
        gateway.client.post(CHAT, json={"model": "fake", "messages": MESSAGES, "top_p": 1})
        assert upstream.last.json == {
            "model": "fake", "messages": MESSAGES, "top_p": 1, "temperature": 0.3, "seed": 42,
        }  # fmt: skip
    finally:
        gateway.state.snapshot = before


def test_a_key_of_a_plan_that_is_gone_gets_nothing(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    secret = gateway.ledger.store.create(KeyRequest(name="planned", plan="gone"))[1]
    gateway.ledger.keys.reload()
    with gateway.client_with(secret) as client:
        answer = client.post(CHAT, json={"model": "fake", "messages": MESSAGES})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "plan_not_found")
    assert upstream.requests == []


def test_a_key_calls_and_sees_only_its_models(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    secret = gateway.ledger.store.create(KeyRequest(name="narrow", models=("short",)))[1]
    gateway.ledger.keys.reload()
    with gateway.client_with(secret) as client:
        refused = client.post(CHAT, json={"model": "fake", "messages": MESSAGES})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
        assert client.post(CHAT, json={"model": "short", "messages": MESSAGES}).status_code == 200
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["short"]
        assert client.get("/v1/models/fake").status_code == 404


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/short", CHAT, "/v1/messages/count_tokens"])
def test_a_key_near_its_end_says_so_with_every_answer(gateway: ThreadedGateway, path: str) -> None:
    ends_at = datetime.now(UTC) + timedelta(days=2)
    secret = gateway.ledger.store.create(KeyRequest(name=path, expires_at=ends_at.timestamp()))[1]
    gateway.ledger.keys.reload()
    with gateway.client_with(secret) as client:
        body = None if "models" in path else {"model": "short", "messages": MESSAGES}
        answer = client.request("GET" if body is None else "POST", path, json=body)
    assert answer.status_code == 200
    assert answer.headers.get_list("x-headrace-key-expires") == [ends_at.strftime("%Y-%m-%d %H:%M UTC")]
    assert "expires on" in answer.headers["warning"]


def test_models_answer_in_the_shape_that_the_client_reads(gateway: ThreadedGateway) -> None:
    openai = gateway.client.get("/api/v1/models").json()
    names = {model["id"] for model in openai["data"]}
    assert openai["object"] == "list" and {"fake", "short"} <= names
    assert isinstance(openai["models"], list), "Codex reads this key"
    page = gateway.client.get("/v1/models", headers=ANTHROPIC).json()
    assert {model["id"] for model in page["data"]} == names
    assert page["has_more"] is False
    for model in page["data"]:
        assert ModelInfo.model_validate(model).id == model["id"]
    one = gateway.client.get("/v1/models/short").json()
    assert (one["id"], one["object"]) == ("short", "model")
    assert ModelInfo.model_validate(gateway.client.get("/v1/models/short", headers=ANTHROPIC).json()).type == "model"


def test_anthropic_models_come_page_by_page(gateway: ThreadedGateway) -> None:
    names = [model["id"] for model in gateway.client.get("/v1/models").json()["data"]]
    client = anthropic.Anthropic(base_url=gateway.url, api_key=gateway.key)
    assert [model.id for model in client.models.list(limit=1)] == names
    before = gateway.client.get("/v1/models", params={"before_id": names[-1]}, headers=ANTHROPIC).json()
    assert [model["id"] for model in before["data"]] == names[:-1]
    for limit in ("0", "-1", "x", "9" * 5000, "1e3", ""):
        page = gateway.client.get("/v1/models", params={"limit": limit}, headers=ANTHROPIC)
        assert page.status_code == 200 and page.json()["first_id"] == names[0]


def test_embeddings_go_through_and_are_counted(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    body = {"model": "fake", "input": [[1, 2, 3]], "encoding_format": "base64"}
    answer = gateway.client.post("/v1/embeddings", json=body)
    assert answer.json()["data"][0]["embedding"] == [0.5, 0.25]
    assert upstream.last.json == body
    event = gateway.wait_for_events(1)[0]
    assert (event.endpoint, event.input_tokens, event.output_tokens) == ("embeddings", replies.USAGE[0], 0)


def test_a_body_too_large_is_refused_after_the_key_was_checked(gateway: ThreadedGateway) -> None:
    before = gateway.state.snapshot
    gateway.state.snapshot = _with(before, listen=_with(before.listen, max_body_bytes=100))
    try:
        large = {"model": "fake", "messages": [{"role": "user", "content": "x" * 200}]}
        assert gateway.client.post(CHAT, json=large).status_code == 413
        with gateway.client_with("sk-hr-wrong") as client:
            assert client.post(CHAT, json=large).status_code == 401
    finally:
        gateway.state.snapshot = before


TO_COUNT = {"model": "short", "messages": [{"role": "user", "content": "one two three four five six"}]}


def test_tokens_are_counted_by_the_upstream_that_can(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    answer = gateway.client.post("/v1/messages/count_tokens", json=TO_COUNT)
    assert answer.status_code == 200 and answer.json() == {"input_tokens": replies.USAGE[0]}
    assert "x-gateway-estimated" not in answer.headers
    assert upstream.last.path == "/v1/messages/count_tokens"
    assert upstream.last.json == {**TO_COUNT, "model": "Real/Name"}


def test_a_malformed_request_is_not_counted(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    upstream.script(replies.anthropic_error(400, "messages: must be a list", type="invalid_request_error"))
    answer = gateway.client.post("/v1/messages/count_tokens", json={**TO_COUNT, "messages": 5})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "messages: must be a list")
    assert answer.json()["type"] == "error"


def test_count_tokens_is_an_estimate_where_the_upstream_cannot_count(
    gateway: ThreadedGateway, upstream: FakeUpstream
) -> None:
    """Who does not know the endpoint is asked once, who fails is asked again."""
    upstream.script(replies.error(500, "It broke."), replies.error(404, "Not Found"))
    try:
        for _ in range(4):
            answer = gateway.client.post("/v1/messages/count_tokens", json=TO_COUNT)
            assert answer.status_code == 200 and 8 <= answer.json()["input_tokens"] <= 40
            assert answer.headers["x-gateway-estimated"] == "true"
        assert len(upstream.requests) == 2
        assert gateway.client.post(CHAT, json={**TO_COUNT, "max_tokens": 1}).status_code == 200
    finally:
        gateway.state.take(gateway.state.snapshot)


def test_a_request_without_a_model_goes_to_the_default_one(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    answer = gateway.client.post(CHAT, json={"messages": MESSAGES})
    assert answer.status_code == 200, answer.text
    assert upstream.last.json["model"] == "fake"


def _with(value: Any, **changes: object) -> Any:

    return replace(value, **changes)
