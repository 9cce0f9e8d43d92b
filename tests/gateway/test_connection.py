"""What comes over a connection before a request is one: bounded in size and in time, whoever sends it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
import uvloop

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


# HTTP itself, over an application that shows what it was asked


ANSWERED_AT_ONCE: list[bool] = []


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """An ASGI application that answers by its path, on a connection of ours."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        path = scope["path"]
        if path == "/fault":
            raise ValueError("a fault")
        if path == "/nothing":
            return
        body, more = b"", True
        while more and path != "/unread":
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        headers = [(b"x-query", scope["query_string"]), (b"x-path", path.encode())]
        if path == "/split":
            headers.append((b"x-bad", b"a\r\nx-injected: 1"))
        if path == "/slow":
            await asyncio.sleep(0.2)
        if path == "/stream" or scope["method"] == "HEAD":
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for piece in (b"one ", b"", b"two"):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            return
        headers.append((b"content-length", b"%d" % len(body)))
        if path == "/at-once":
            taken = scope["extensions"][connection.ANSWER](200, headers, body)
            ANSWERED_AT_ONCE.append(taken)
            if taken:
                return
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http=connection.Connection, lifespan="off", log_config=None))
    thread = threading.Thread(target=uvloop.run, args=(server.serve(sockets=[listener]),), daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(5)


def exchanged(port: int, data: bytes, *, pieces: int = 1) -> bytes:
    """Everything that comes back for `data`, which ends with a request to close."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        size = -(-len(data) // pieces)
        for start in range(0, len(data), size):
            client.sendall(data[start : start + size])
            time.sleep(0.002 if pieces > 1 else 0)
        return everything(client)


def post(path: str, body: bytes, *more: str, last: bool = True) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *more]
    return "\r\n".join([*lines, *(["connection: close"] if last else [])]).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize("pieces", [1, 3, 60])
def test_a_request_in_pieces_is_the_same_request(port: int, pieces: int) -> None:
    head, _, body = exchanged(port, post("/a%20b?c=d", b"x" * 50), pieces=pieces).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and b"x-query: c=d" in head and b"x-path: /a b" in head
    assert body == b"x" * 50 and b"\r\ndate: " in head


def test_requests_sent_at_once_are_answered_in_turn(port: int) -> None:
    data = post("/slow", b"1", last=False) + b"".join(post("/", b"%d" % n, last=False) for n in range(2, 40))
    found = exchanged(port, data + post("/", b"end"))
    bodies = [part.partition(b"HTTP/1.1")[0] for part in found.split(b"\r\n\r\n")[1:]]
    assert bodies == [b"%d" % n for n in range(1, 40)] + [b"end"]


def test_requests_of_one_connection_have_each_their_own_address(port: int) -> None:
    asked = ["/a?x=1", "/a?x=1", "/b", "/a%20a", "/a?x=2", "/a"]
    data = b"".join(post(address, b"", last=address == "/a") for address in asked)
    heads = exchanged(port, data).split(b"\r\n\r\n")[:-1]
    told = [dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:]) for head in heads]
    assert [(each[b"x-path"], each[b"x-query"]) for each in told] == [
        (b"/a", b"x=1"), (b"/a", b"x=1"), (b"/b", b""), (b"/a a", b""), (b"/a", b"x=2"), (b"/a", b"")
    ]  # fmt: skip


def test_a_whole_answer_is_written_at_once_where_the_client_takes_it_and_comes_whole_where_it_does_not(
    port: int,
) -> None:
    ANSWERED_AT_ONCE.clear()
    assert exchanged(port, post("/at-once", b"hello")).endswith(b"\r\n\r\nhello")
    assert ANSWERED_AT_ONCE == [True]
    bodies = [b"%d" % number * 1_000_000 for number in range(8)]
    data = b"".join(post("/at-once", body, last=body is bodies[-1]) for body in bodies)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        sender = threading.Thread(target=client.sendall, args=(data,), daemon=True)
        sender.start()
        time.sleep(0.5)
        found = everything(client)
        sender.join(5)
    assert [part.partition(b"HTTP/1.1")[0] for part in found.split(b"\r\n\r\n")[1:]] == bodies
    assert False in ANSWERED_AT_ONCE


def test_a_stream_is_chunked_and_a_head_has_no_body(port: int) -> None:
    assert exchanged(port, post("/stream", b"")).endswith(b"\r\n\r\n4\r\none \r\n3\r\ntwo\r\n0\r\n\r\n")
    assert exchanged(port, post("/", b"").replace(b"POST", b"HEAD")).endswith(b"\r\n\r\n")


def test_a_client_of_http_1_0_gets_no_chunks(port: int) -> None:
    head, _, body = exchanged(port, post("/stream", b"", last=False).replace(b"1.1", b"1.0")).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    assert body == b"one two"


def test_the_head_and_the_body_of_an_answer_come_together(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        client.sendall(post("/", b"hello"))
        assert client.recv(65536).endswith(b"\r\n\r\nhello")


def test_a_client_that_waits_for_continue_is_told_to(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        head, _, body = post("/", b"hello", "expect: 100-continue").partition(b"\r\n\r\n")
        client.sendall(head + b"\r\n\r\n")
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert everything(client).endswith(b"\r\n\r\nhello")


OFFER = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__")
"""Java's client sends it with every request over http."""


@pytest.mark.parametrize("pieces", [1, 3, 60])
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_a_body_behind_an_offer_to_upgrade_is_read(port: int, pieces: int, chunked: bool) -> None:
    sent = post("/a", b"hello", *OFFER, last=False)
    if chunked:
        sent = sent.replace(b"content-length: 5", b"transfer-encoding: chunked")
        sent = sent.replace(b"\r\n\r\nhello", b"\r\n\r\n2;ext=1\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n")
    offer = "\r\n".join(["GET /b HTTP/1.1", "host: x", *OFFER]).encode() + b"\r\n\r\n"
    found = exchanged(port, sent * 2 + offer + sent + post("/end", b"end"), pieces=pieces)
    bodies = [part.partition(b"HTTP/1.1")[0] for part in found.split(b"\r\n\r\n")[1:]]
    assert bodies == [b"hello", b"hello", b"", b"hello", b"end"]
    assert [part.split(b"\r\n")[0] for part in found.split(b"x-path: ")[1:]] == [b"/a", b"/a", b"/b", b"/a", b"/end"]


def test_a_thousand_offers_at_once_are_left_one_by_one(port: int) -> None:
    offer = b"GET /b HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    assert exchanged(port, offer * 1000 + post("/end", b"end")).count(b"x-path: /b\r\n") == 1000


def test_a_trailer_is_no_header(gateway: ThreadedGateway) -> None:
    """Who stands before this server has taken headers out, such as x-forwarded-for, and has not looked at trailers."""
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n".encode()
    body = json.dumps({"model": "fake", "messages": []}).encode()
    chunk = b'%x;name="value"\r\n%s\r\n0\r\n' % (len(body), body)
    key = f"authorization: Bearer {gateway.key}\r\n".encode()
    wrong = b"authorization: Bearer wrong\r\nx-request-id: mine\r\n"
    for headers, trailers, status in ((key, wrong, b"200"), (b"", key, b"401")):
        with connected(gateway) as client:
            client.sendall(head + headers + b"\r\n" + chunk + trailers + b"\r\n")
            answer = everything(client)
        assert answer.startswith(b"HTTP/1.1 " + status) and b"x-request-id: mine" not in answer


@pytest.mark.parametrize("path", ["/fault", "/nothing", "/split"])
def test_an_application_that_fails_is_a_500_and_never_a_header_of_its_own(port: int, path: str) -> None:
    head, _, body = exchanged(port, post(path, b"", last=False)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500 ") and b"x-injected" not in head
    assert json.loads(body)["error"]["code"] == "internal_error"


def test_a_body_that_nobody_reads_does_not_stand_in_the_way(port: int) -> None:
    data = post("/unread", b"y" * 300_000, last=False) + post("/", b"end")
    assert exchanged(port, data).endswith(b"\r\n\r\nend")


def test_a_large_body_is_held_back_until_it_is_read(port: int) -> None:
    body = b"z" * (64 * connection.MAX_UNREAD_BYTES)
    assert exchanged(port, post("/slow", body)).endswith(b"\r\n\r\n" + body)
