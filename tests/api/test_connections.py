"""Clients that leave, stall or send slowly: each over a real connection."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

import httpx
import pytest

from headrace.server import http as server_http
from tests.scripted_engine import ScriptedEngine, events, for_ever, listening, make_app, saying, until

LONG = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400}


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(script=for_ever, step_s=0.01)


@pytest.fixture(autouse=True)
def forget(engine: ScriptedEngine) -> None:
    engine.requests.clear()
    engine.aborted.clear()


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def head(length: int) -> bytes:
    return f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_a_client_that_leaves_stops_its_request_streamed_or_not(
    url: str, engine: ScriptedEngine, stream: bool, route: str
) -> None:
    fields = LONG if "chat" in route else {"prompt": ["a", "b"], "max_tokens": 400}
    body = json.dumps({**fields, "stream": stream})
    with connect(url) as connection:
        connection.sendall(head(len(body)).replace(b"/v1/chat/completions", route.encode()) + body.encode())
        assert until(lambda: bool(engine.running))
        if stream:
            assert b"200 OK" in connection.recv(100)
        assert httpx.get(url + "/load").json() == {"server_load": 1}
    assert until(lambda: not engine.running, 1.0)
    assert {reason for _, _, reason in engine.aborted} == {"abort"}
    assert until(lambda: httpx.get(url + "/load").json() == {"server_load": 0})


def test_a_client_that_leaves_while_sending_leaves_no_trace(url: str, engine: ScriptedEngine) -> None:
    with connect(url) as connection:
        connection.sendall(head(1000) + b'{"messages": ')
    time.sleep(0.05)
    assert engine.requests == []
    assert httpx.get(url + "/health").status_code == 200


def test_a_body_that_does_not_arrive_is_408(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_http, "BODY_IDLE_S", 0.1)
    with connect(url) as connection:
        connection.sendall(head(1000) + b'{"messages": ')
        answer = connection.recv(4000)
    assert b"408 Request Timeout" in answer
    assert b"request_timeout" in answer


def test_a_reader_that_stalls_is_given_up_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_http, "WRITE_STALL_S", 0.3)
    engine = ScriptedEngine(script=for_ever)
    # Many choices, each beginning with its prompt's token ids, soon fill the socket's buffers.
    fields = {"prompt": [[1] * 300] * 40, "max_tokens": 200, "n": 25, "stream": True, "return_token_ids": True}
    echo = json.dumps(fields)
    with listening(make_app(engine)) as url, connect(url) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(head(len(echo)).replace(b"/v1/chat/completions", b"/v1/completions") + echo.encode())
        assert until(lambda: bool(engine.running))
        other = httpx.post(url + "/v1/completions", json={"prompt": "x", "max_tokens": 3}, timeout=20)
        assert other.status_code == 200
        assert until(lambda: not engine.running, 15.0)


def test_one_bad_request_never_hurts_the_stream_beside_it(url: str, engine: ScriptedEngine) -> None:
    engine.script = saying("A sentence that goes on for a while and then some more, until it ends.")
    answers: list[str] = []
    body = {**LONG, "stream": True}

    def read() -> None:
        answers.append(httpx.post(url + "/v1/chat/completions", json=body, timeout=20).text)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for bad in (b"{", b"[]", b'{"messages": 5}', b'{"messages": [], "n": 1e9}', b"\xff" * 100):
        assert httpx.post(url + "/v1/chat/completions", content=bad).status_code == 400
    for thread in threads:
        thread.join()
    texts = set()
    for answer in answers:
        data = events(answer)
        assert data.pop() == "[DONE]"
        texts.add("".join(json.loads(one)["choices"][0]["delta"].get("content", "") for one in data))
    assert texts == {"A sentence that goes on for a while and then some more, until it ends."}


def answer_to(url: str, data: bytes) -> tuple[int, dict]:
    """Status and JSON of what comes back for these bytes; the server closes the connection."""
    received = b""
    with connect(url) as connection:
        connection.sendall(data)
        while piece := connection.recv(65536):
            received += piece
    start, _, body = received.partition(b"\r\n\r\n")
    return int(start.split()[1]), json.loads(body)


def test_what_is_no_http_gets_json_too(url: str) -> None:
    status, body = answer_to(url, b"GARBAGE\r\n\r\n")
    assert (status, body["error"]["code"]) == (400, "invalid_http")


def test_headers_without_end_are_cut_off_and_nobody_else_is_hurt(url: str) -> None:
    taken = 0
    with connect(url) as connection, contextlib.suppress(OSError):
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n")
        while taken < 64 << 20:
            connection.sendall(b"x-a: b\r\n" * 1024)
            taken += 8192
    assert taken < 32 << 20
    assert httpx.get(url + "/health").status_code == 200
