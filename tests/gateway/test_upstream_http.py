"""Connections to upstreams: kept and used again when that is safe, never when it is not; over TLS as without."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from shutil import which

import httpx
import pytest

from headrace.gateway import plain_http
from headrace.gateway.snapshot import Timeouts, Upstream
from headrace.gateway.upstream_client import BrokenAnswer, UpstreamClient
from headrace.gateway.upstream_errors import UpstreamFailure
from tests.gateway import replies
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.gateways import provider, providers, running_gateway
from tests.gateway.replies import Reply

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def with_client(fake: FakeUpstream, work: Callable[[UpstreamClient, str], Awaitable[None]], **more: object) -> None:
    upstream = Upstream(name="u", base_url=fake.url, timeouts=Timeouts(connect_s=1.0), **more)  # type: ignore[arg-type]

    async def run() -> None:
        client = UpstreamClient(upstream)
        try:
            await work(client, client.url("/chat/completions"))
        finally:
            await client.close()

    asyncio.run(run())


async def asked(client: UpstreamClient, url: str, body: bytes = b"{}") -> bytes:
    answer = await client.send("POST", url, {}, body)
    try:
        return await answer.read_whole()
    finally:
        answer.close()


def test_a_connection_is_used_again_and_dropped_when_it_has_been_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_http, "KEEP_ALIVE_S", 0.3)
    with FakeUpstream(replies.chat("Hi")) as fake:

        async def work(client: UpstreamClient, url: str) -> None:
            for _ in range(3):
                await asked(client, url)
            assert fake.num_connections == 1
            await asyncio.sleep(0.7)
            assert not fake.open_connections
            await asked(client, url)
            assert fake.num_connections == 2

        with_client(fake, work)


NOT_KEPT = {
    "a second answer behind the first": OK + OK,
    "told to close": OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"),
    "HTTP/1.0": OK.replace(b"1.1", b"1.0"),
}


@pytest.mark.parametrize("what", NOT_KEPT)
def test_an_answer_is_never_taken_for_another_ones(what: str) -> None:
    with FakeUpstream(Reply(raw=NOT_KEPT[what])) as fake:

        async def work(client: UpstreamClient, url: str) -> None:
            assert await asked(client, url) == b"ok"
            assert await asked(client, url) == b"ok"
            assert fake.num_connections == 2

        with_client(fake, work)


def test_what_comes_unasked_ends_the_connection() -> None:
    with FakeUpstream(Reply(parts=(b"ok",))) as fake:

        async def work(client: UpstreamClient, url: str) -> None:
            assert await asked(client, url) == b"ok"
            (connection,) = fake.open_connections
            connection.upstream._loop.call_soon_threadsafe(connection.transport.write, OK)  # type: ignore[union-attr]
            for _ in range(100):
                if not fake.open_connections:
                    break
                await asyncio.sleep(0.02)
            assert await asked(client, url) == b"ok"
            assert fake.num_connections == 2

        with_client(fake, work)


INVALID = {
    "an endless head": b"HTTP/1.1 200 OK\r\nx: " + b"a" * (plain_http.MAX_HEAD_BYTES + 10),
    "another protocol": b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nokk",
    "a length and chunks": b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "garbage": b"\x16\x03\x01garbage\r\n\r\n",
}


@pytest.mark.parametrize("what", INVALID)
def test_what_is_no_answer_is_refused(what: str) -> None:
    with FakeUpstream(Reply(raw=INVALID[what])) as fake:

        async def work(client: UpstreamClient, url: str) -> None:
            with pytest.raises(UpstreamFailure) as failure:
                await asked(client, url)
            assert failure.value.error.code == "upstream_invalid_response"

        with_client(fake, work)


def test_a_body_that_ends_early_is_broken_however_it_is_framed() -> None:
    with FakeUpstream() as fake:

        async def work(client: UpstreamClient, url: str) -> None:
            for reply in (replies.chat("x"), replies.chat("x").chunked(), replies.chat("x").gzipped()):
                fake.script(reply.cut(1), reply.cut(1).by_reset())
                for _ in range(2):
                    with pytest.raises(BrokenAnswer):
                        await asked(client, url)

        with_client(fake, work)


def test_a_body_is_not_taken_faster_than_it_is_read() -> None:
    size = 64 * plain_http.MAX_UNREAD_BYTES
    with FakeUpstream(Reply(parts=(b"x" * size,))) as fake:

        async def work(client: UpstreamClient, url: str) -> None:
            answer = await client.send("POST", url, {}, b"{}")
            await asyncio.sleep(0.3)
            connection = answer.read.__self__  # type: ignore[attr-defined]
            assert connection._num_unread < 4 * plain_http.MAX_UNREAD_BYTES
            assert len(await answer.read_whole()) == size
            answer.close()

        with_client(fake, work)


def test_the_end_of_a_finished_answer_is_let_pass_and_its_connection_kept() -> None:
    with FakeUpstream(Reply(parts=(b"data: [DONE]\n\n", b": late\n\n"), framing="chunked", pauses_s=0.1)) as fake:

        async def work(client: UpstreamClient, url: str) -> None:
            for _ in range(2):
                answer = await client.send("POST", url, {}, b"{}")
                assert (await answer.read()).startswith(b"data: [DONE]")
                answer.finish()
                await asyncio.sleep(0.3)
            assert fake.num_connections == 1

        with_client(fake, work)


def test_what_reads_may_take_pieces_as_they_come() -> None:
    parts = tuple(b"%d" % number for number in range(9))
    with FakeUpstream(Reply(parts=parts, framing="chunked", pauses_s=0.02)) as fake:

        async def work(client: UpstreamClient, url: str) -> None:
            answer = await client.send("POST", url, {}, b"{}")
            taken: list[bytes] = []

            def take(data: bytes) -> bool:
                if data == b"5":
                    return False
                taken.append(data)
                return True

            read = []
            while data := await answer.read(take):
                read.append(data)
            assert b"5" in read and sorted(taken + read) == sorted(parts)
            answer.close()

        with_client(fake, work)


def test_the_upstreams_own_headers_win() -> None:
    with FakeUpstream(replies.chat("Hi")) as fake:

        async def work(client: UpstreamClient, url: str) -> None:
            answer = await client.send("POST", url, {b"x-a": b"client", b"x-b": b"client"}, b"{}")
            await answer.read_whole()
            answer.close()

        with_client(fake, work, api_key="sk-up", headers=(("X-A", "own"), ("Host", "elsewhere")))
        headers = fake.last.headers
        assert (headers["x-a"], headers["x-b"], headers["authorization"]) == ("own", "client", "Bearer sk-up")
        assert headers["host"] == f"127.0.0.1:{fake.port}"
        assert b"authorization" in fake.last.raw_head.lower()


@pytest.fixture(scope="module")
def tls_upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """A server with a certificate of its own making: it streams one chat answer to every request."""
    if which("openssl") is None:
        pytest.skip("no openssl here to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run([*make.split(), "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    loop = asyncio.new_event_loop()
    body = replies.chat_stream("Wa", "ter").body
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(body)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.readuntil(b"\r\n\r\n"):
            length = int(request.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            await reader.readexactly(length)
            writer.write(head + body)

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield server.sockets[0].getsockname()[1], certificate
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)


def test_an_upstream_over_tls_answers_and_one_with_an_unknown_certificate_does_not(
    tls_upstream: tuple[int, Path], tmp_path: Path
) -> None:
    port, certificate = tls_upstream
    config = providers(tls=provider(f"https://localhost:{port}", "tls", max_retries=0))
    body = {"model": "fake", "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
    for folder, environment, status in (
        ("known", {"SSL_CERT_FILE": str(certificate)}, 200),
        ("unknown", {"SSL_CERT_FILE": str(tmp_path / "none.pem")}, 502),
    ):
        (tmp_path / folder).mkdir()
        with running_gateway(tmp_path / folder, config, environment=environment) as gateway:
            for _ in range(2):
                answer = httpx.post(gateway.url + "/v1/chat/completions", headers=gateway.auth, json=body, timeout=10)
                assert answer.status_code == status, answer.text
                if status == 200:
                    assert '"Wa"' in answer.text and answer.text.endswith("data: [DONE]\n\n")
                else:
                    assert answer.json()["error"]["code"] == "upstream_unreachable"
