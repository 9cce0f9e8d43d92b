"""Requests that are wrong as HTTP before they are wrong as JSON: too large, broken, compressed, from a strange page."""

from __future__ import annotations

import gzip
import json
import socket

import httpx
import pytest

from headrace.protocol.http_connection import MAX_HEAD_BYTES, MAX_URL_BYTES
from headrace.server import http as server_http
from headrace.server.routes import ROUTES
from tests.scripted_engine import ScriptedEngine, asgi_client, make_app, server_settings

ASK = {"prompt": "Hi", "max_tokens": 2}
BODY = json.dumps(ASK).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


def answer_to(url: str, *pieces: bytes) -> tuple[bytes, dict]:
    """The head and the JSON of the one answer, after which the server closes."""
    host, port = url.removeprefix("http://").split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        for piece in pieces:
            connection.sendall(piece)
        while piece := connection.recv(65536):
            received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    return head, json.loads(body)


@pytest.mark.parametrize("num_bytes", [MAX_HEAD_BYTES + 1000, 400_000, 600_000])
def test_a_head_over_the_limit_is_431_however_it_comes(url: str, num_bytes: int) -> None:
    for lines in ([b"x-a: " + b"a" * num_bytes], [b"x-a: " + b"a" * 995] * (num_bytes // 1000 + 5)):
        head, body = answer_to(url, POST + b"\r\n".join(lines) + b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ")
        assert (body["error"]["code"], str(MAX_HEAD_BYTES) in body["message"]) == ("headers_too_large", True)


def test_a_head_under_the_limit_is_read_and_a_body_behind_it_is_not_counted(url: str) -> None:
    headers = {"x-a": "a" * (MAX_HEAD_BYTES - 4096)}
    assert httpx.post(url + "/v1/completions", json={**ASK, "user": "a" * 400_000}, headers=headers).status_code == 200


@pytest.mark.parametrize("num_bytes", [MAX_URL_BYTES + 1, 200_000, 240_000])
def test_an_address_over_the_limit_is_414_naming_it(url: str, num_bytes: int) -> None:
    head, body = answer_to(url, b"GET /health?" + b"a" * (num_bytes - 8) + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 414 ")
    assert (body["error"]["code"], str(MAX_URL_BYTES) in body["message"]) == ("url_too_long", True)
    longest = b"GET /health?" + b"a" * (MAX_URL_BYTES - 8)
    head, _ = answer_to(url, longest + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("chunks", [b"zz\r\n", b"5\r\nhelloX\r\n", b"5\r\nhello\r\n-1\r\n", b"fffffffffffffffffff\r\n"])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_broken_chunked_body_is_answered(url: str, chunks: bytes, at_once: bool) -> None:
    start = POST + b"transfer-encoding: chunked\r\n\r\n"
    head, body = answer_to(url, *([start + chunks] if at_once else [start, chunks]))
    assert head.startswith(b"HTTP/1.1 400 ")
    assert body["error"]["code"] == "invalid_http"
    assert "chunk" in body["message"]
    assert httpx.post(url + "/v1/completions", json=ASK).status_code == 200


def test_an_answer_that_ends_the_connection_says_so_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_http, "BODY_IDLE_S", 0.1)
    head, body = answer_to(url, POST + b"content-length: 100\r\n\r\n{")
    assert body["error"]["code"] == "request_timeout"
    assert head.lower().count(b"connection:") == 1
    head, _ = answer_to(url, POST + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY)
    assert head.lower().count(b"connection:") == 1


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "zstd", "gzip, identity"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/tokenize", "/v1/files"])
def test_a_compressed_body_is_415_saying_what_is_read(url: str, encoding: str, path: str) -> None:
    headers = {"content-encoding": encoding, "content-type": "multipart/form-data; boundary=x"}
    answer = httpx.post(url + path, content=gzip.compress(BODY), headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")
    assert encoding in error["message"] and "uncompressed" in error["message"]


def test_identity_is_no_compression(url: str) -> None:
    for name in ("identity", "Identity", ""):
        answer = httpx.post(url + "/v1/completions", content=BODY, headers={"content-encoding": name})
        assert answer.status_code == 200


# pages from elsewhere

WRITING = [(route.method, route.path) for route in ROUTES if route.method not in ("GET", "HEAD")]


@pytest.mark.asyncio
@pytest.mark.parametrize(("method", "path"), WRITING)
async def test_a_page_from_elsewhere_cannot_make_a_server_without_a_key_work(method: str, path: str) -> None:
    """A form needs no preflight: the page would not see the answer, but it would be computed."""
    engine = ScriptedEngine()
    headers = {"origin": "http://evil.example", "content-type": "text/plain"}
    async with asgi_client(make_app(engine)) as client:
        answer = await client.request(method, path, content=BODY, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert "evil.example" in answer.json()["message"] and "--allowed-origins" in answer.json()["message"]
    assert not engine.requests and not engine.controls and not engine.stopped_ids


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("settings", "headers"),
    [
        ({}, {}),
        ({"allowed_origins": ("http://evil.example",)}, {"origin": "http://evil.example"}),
        ({"allowed_origins": ("*",)}, {"origin": "http://evil.example"}),
        ({"api_keys": ("sk-1",)}, {"origin": "http://evil.example", "authorization": "Bearer sk-1"}),
    ],
)
async def test_who_is_allowed_or_has_the_key_may_ask(settings: dict, headers: dict) -> None:
    async with asgi_client(make_app(ScriptedEngine(), server_settings(**settings))) as client:
        assert (await client.post("/v1/completions", json=ASK, headers=headers)).status_code == 200


@pytest.mark.asyncio
async def test_reading_needs_no_allowed_origin_as_the_page_sees_nothing() -> None:
    async with asgi_client(make_app(ScriptedEngine())) as client:
        answer = await client.get("/v1/models", headers={"origin": "http://evil.example"})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers
