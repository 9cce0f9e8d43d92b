"""The small routes, keys on every route, browser origins, tokens and text, documents."""

from __future__ import annotations

import json
import logging

import pytest

import headrace
from headrace.server.routes import NOT_BUILT, ROUTES
from tests.scripted_engine import MODEL, ScriptedEngine, asgi_client, make_app, server_settings, tokenizer

KEY = "sk-local-0123456789"
OPEN = {"/health", "/ready", "/readyz", "/ping", "/version"}


async def test_with_a_key_every_route_but_the_open_ones_is_closed() -> None:
    app = make_app(ScriptedEngine(), server_settings(api_keys=("other", KEY)))
    odd = {"/nowhere", "/v1/models/x", "/metrics/", "/v1/tokenize", "/api/v1/v1/models"}
    paths = {route.path for route in ROUTES} | set(NOT_BUILT) | odd
    async with asgi_client(app) as client:
        for path in paths:
            for method in ("GET", "POST", "HEAD", "OPTIONS", "DELETE"):
                answer = await client.request(method, path)
                assert (answer.status_code == 401) == (path not in OPEN), (method, path, answer.status_code)
        answer = await client.get("/metrics", headers={"authorization": f"Bearer {KEY}"})
        assert answer.status_code == 200


async def test_small_routes_answer() -> None:
    async with asgi_client(make_app(ScriptedEngine())) as client:
        assert (await client.get("/health")).json() == {}
        assert (await client.get("/ready")).json() == {"status": "ready"}
        assert (await client.post("/ping")).status_code == 200
        assert (await client.get("/version")).json() == {"version": headrace.__version__}
        assert (await client.get("/load")).json() == {"server_load": 0}
        assert (await client.post("/reset_prefix_cache")).json() == {"num_blocks": 7}
        assert (await client.get("/")).json()["model"] == MODEL
        models = (await client.get("/v1/models")).json()
        assert models["data"][0]["id"] == MODEL
        assert models["data"][0]["max_model_len"] == 512


async def test_log_requests_writes_a_line_before_and_after(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for wanted in (True, False):
        caplog.clear()
        async with asgi_client(make_app(ScriptedEngine(), server_settings(log_requests=wanted))) as client:
            await client.post("/v1/completions", json={"prompt": "secret", "request_id": "r-7"})
        lines = [record.getMessage() for record in caplog.records if "r-7" in record.getMessage()]
        assert len(lines) == (2 if wanted else 0)
        if wanted:
            assert "1 prompt tokens" in lines[0]
            assert "processed: POST /v1/completions, status 200" in lines[1]
        assert "secret" not in caplog.text


async def test_metrics_count_requests_by_route_and_status() -> None:
    async with asgi_client(make_app(ScriptedEngine())) as client:
        await client.get("/nowhere/of/any/kind")
        await client.get("/health")
        text = (await client.get("/metrics")).text
    assert 'http_requests_total{handler="/health",method="GET",status="2xx"} 1.0' in text
    assert "/nowhere" not in text


async def test_tokenize_and_detokenize_are_inverse() -> None:
    text = "Hello 你好 <|im_start|>"
    async with asgi_client(make_app(ScriptedEngine())) as client:
        answer = (await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
        assert answer["tokens"] == tokenizer().encode(text, add_special_tokens=True)
        assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)
        assert len(answer["token_strs"]) == answer["count"]
        back = await client.post("/detokenize", json={"tokens": answer["tokens"]})
        assert back.json() == {"prompt": text}
        chat = await client.post("/v1/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]})
        rendered = tokenizer().decode(chat.json()["tokens"], skip_special_tokens=False)
        assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        assert (await client.post("/tokenize", json={})).status_code == 400
        assert (await client.post("/detokenize", json={"tokens": [49152]})).status_code == 400


async def test_a_page_of_an_allowed_origin_may_call() -> None:
    app = make_app(ScriptedEngine(), server_settings(allowed_origins=("http://a.example",), api_keys=(KEY,)))
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    async with asgi_client(app) as client:
        preflight = await client.options("/v1/chat/completions", headers={"origin": "http://a.example", **wanted})
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-origin"] == "http://a.example"
        assert preflight.headers["access-control-allow-methods"] == "POST"
        assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
        readable = await client.get("/v1/models", headers={"origin": "http://a.example"})
        assert readable.status_code == 401
        assert readable.headers["access-control-allow-origin"] == "http://a.example"
        stranger = await client.options("/v1/models", headers={"origin": "http://b.example", **wanted})
        assert stranger.status_code == 403
        assert "access-control-allow-origin" not in stranger.headers


async def test_without_allowed_origins_no_page_may_call_and_with_a_star_every_page() -> None:
    for origins, allowed in (((), None), (("*",), "*")):
        app = make_app(ScriptedEngine(), server_settings(allowed_origins=origins))
        async with asgi_client(app) as client:
            answer = await client.get("/v1/models", headers={"origin": "http://a.example"})
        assert answer.headers.get("access-control-allow-origin") == allowed


async def test_a_root_path_is_taken_off_the_front() -> None:
    app = make_app(ScriptedEngine(), server_settings(root_path="/llm"))
    async with asgi_client(app) as client:
        for path in ("/llm/v1/models", "/v1/models", "/llm/health"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/llm/openapi.json")).json()["servers"] == [{"url": "/llm"}]
        assert (await client.get("/llms/v1/models")).status_code == 404


async def test_the_openapi_document_has_every_route_and_resolves_its_references() -> None:
    async with asgi_client(make_app(ScriptedEngine())) as client:
        document = (await client.get("/openapi.json")).json()
    assert {(path, method) for path, ops in document["paths"].items() for method in ops} == {
        (route.path, route.method.lower()) for route in ROUTES
    }
    schemas = document["components"]["schemas"]
    assert {"ChatFields", "CompletionFields", "SamplingFields", "Error"} <= set(schemas)
    operations = [operation["operationId"] for ops in document["paths"].values() for operation in ops.values()]
    assert len(set(operations)) == len(operations)
    for part in json.dumps(document).split('"#/components/schemas/')[1:]:
        assert part.split('"')[0] in schemas


async def test_the_docs_page_needs_nothing_from_the_network() -> None:
    async with asgi_client(make_app(ScriptedEngine())) as client:
        page = await client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "/v1/chat/completions" in page.text
    assert MODEL in page.text
    for outside in ("<script", "<link", "src=", "https://", "@import"):
        assert outside not in page.text


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_head_is_answered_like_get(method: str) -> None:
    async with asgi_client(make_app(ScriptedEngine())) as client:
        assert (await client.request(method, "/health")).status_code == 200
