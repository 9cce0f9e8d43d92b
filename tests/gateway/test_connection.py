"""What comes over a connection before a request is one: bounded in size and in time, whoever sends it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from headrace.protocol import http_connection as connection
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.gateways import ThreadedGateway, provider, providers, threaded_gateway

CHAT = "/v1/chat/completions"
ENOUGH = 64 * connection.MAX_HEAD_BYTES


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedGateway]:
    with (
        FakeUpstream() as upstream,
        threaded_gateway(tmp_path_factory.mktemp("connection"), providers(main=provider(upstream.url))) as running,
    ):
        yield running


def connected(gateway: ThreadedGateway) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", gateway.port), timeout=5)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)
    return found


def everything(client: socket.socket) -> bytes:
    received = b""
    try:
        while data := client.recv(65536):
            received += data
    except ConnectionResetError:
        pass
    return received


def sent_until_refused(client: socket.socket, piece: bytes) -> int:
    """How many bytes were taken before the connection was closed."""
    taken = 0
    try:
        while taken < ENOUGH:
            client.sendall(piece)
            taken += len(piece)
    except OSError:
        pass
    return taken


START = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n"
ENDLESS = {
    "an address": (b"GET /v1/", b"a" * 8192),
    "a header's name": (START, b"a" * 8192),
    "a header's value": (START + b"x-a: ", b"a" * 8192),
    "headers": (START, b"x-a: b\r\n" * 1024),
    "trailers": (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n",
        b"x-a: b\r\n" * 1024,
    ),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_an_endless_head_is_ended_without_a_key(gateway: ThreadedGateway, what: str) -> None:
    start, piece = ENDLESS[what]
    with connected(gateway) as client:
        client.sendall(start)
        assert sent_until_refused(client, piece) < ENOUGH // 2
    assert gateway.wait_until_idle()
    assert gateway.client.get("/v1/models").status_code == 200


def test_a_head_that_is_too_large_is_a_431(gateway: ThreadedGateway) -> None:
    with connected(gateway) as client:
        client.sendall(START + b"x-a: ")
        for _ in range(connection.MAX_HEAD_BYTES // 4096 + 1):
            client.sendall(b"a" * 4096)
        head, _, body = everything(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["code"] == "headers_too_large"


def test_a_large_head_and_a_large_body_are_fine(gateway: ThreadedGateway) -> None:
    headers = {"x-a": "a" * (connection.MAX_HEAD_BYTES // 2)}
    body = {"model": "fake", "messages": [{"role": "user", "content": "a" * 4 * connection.MAX_HEAD_BYTES}]}
    for _ in range(3):
        assert gateway.client.get("/v1/models", headers=headers).status_code == 200
        assert gateway.client.post(CHAT, headers=headers, json=body).status_code == 200


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"FOO /v1/models\r\n\r\n"])
def test_what_is_no_http_is_told_so_as_json(gateway: ThreadedGateway, data: bytes) -> None:
    with connected(gateway) as client:
        client.sendall(data)
        head, _, body = everything(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"application/json" in head
    assert json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_an_offer_to_upgrade_is_left_without_a_word(
    gateway: ThreadedGateway, caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    answer = gateway.client.get("/v1/models", headers={"connection": "upgrade", "upgrade": protocol})
    assert answer.status_code == 200
    assert caplog.records == []


@pytest.mark.parametrize("data", [b"", b"GET /v1/models HT"])
def test_a_connection_without_a_request_is_closed(
    gateway: ThreadedGateway, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.2)
    with connected(gateway) as client:
        client.sendall(data)
        began_s = time.monotonic()
        assert everything(client) == b""
        assert 0.1 < time.monotonic() - began_s < 3
