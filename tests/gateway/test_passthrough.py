"""Endpoints that the gateway does not look into: files, batches, stored responses, audio, images, rerank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from headrace.gateway.keys import KeyRequest
from headrace.gateway.owned import owned_id, split_id
from headrace.gateway.snapshot import Limits
from tests.gateway import replies
from tests.gateway.fake_upstream import FakeUpstream, Request
from tests.gateway.gateways import ThreadedGateway, provider, providers, threaded_gateway
from tests.gateway.replies import Reply


@pytest.fixture(scope="module")
def first() -> Iterator[FakeUpstream]:
    with FakeUpstream() as fake:
        yield fake


@pytest.fixture(scope="module")
def second() -> Iterator[FakeUpstream]:
    with FakeUpstream() as fake:
        yield fake


@pytest.fixture(scope="module")
def gateway(
    first: FakeUpstream, second: FakeUpstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ThreadedGateway]:
    config = providers(
        first=provider(first.url, "first", max_retries=0),
        second=provider(second.url, "second", models=["only-second", "whisper"], max_retries=0),
        routing={"default": "first"},
    )
    with threaded_gateway(tmp_path_factory.mktemp("passthrough"), config) as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh(gateway: ThreadedGateway, first: FakeUpstream, second: FakeUpstream) -> None:
    gateway.forget()
    first.forget()
    second.forget()


def test_an_id_names_its_upstream_and_gives_it_back() -> None:
    for id, upstream in (("file-abc", "local"), ("batch_1~x", "a b/ü"), ("x", "-")):
        assert split_id(owned_id(id, upstream)) == (id, upstream)
        assert "/" not in owned_id("x", upstream) and "+" not in owned_id("x", upstream)
    assert split_id("file-abc") == ("file-abc", None)


def test_a_file_is_found_again_at_the_upstream_that_took_it(
    gateway: ThreadedGateway, first: FakeUpstream, second: FakeUpstream
) -> None:
    second.answer = replies.json_reply({"id": "file-1", "object": "file", "bytes": 3})
    sent = {"purpose": (None, "batch"), "model": (None, "only-second"), "file": ("a.jsonl", b"{}\n")}
    made = gateway.client.post("/v1/files", files=sent)
    assert made.status_code == 200, made.text
    assert b'filename="a.jsonl"' in second.last.body and second.last.path == "/v1/files"
    id = made.json()["id"]
    assert id != "file-1" and made.json()["bytes"] == 3
    found = gateway.client.get(f"/v1/files/{id}")
    assert (second.last.path, found.json()["id"]) == ("/v1/files/file-1", id)
    second.answer = Reply(content_type="application/octet-stream", parts=(b"\x00\x01" * 1000,))
    content = gateway.client.get(f"/v1/files/{id}/content")
    assert content.content == b"\x00\x01" * 1000 and second.last.path == "/v1/files/file-1/content"
    second.answer = replies.json_reply({"id": "file-1", "deleted": True})
    assert gateway.client.delete(f"/v1/files/{id}").json() == {"id": id, "deleted": True}
    assert second.last.method == "DELETE" and first.requests == []


LINE = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x", "model": "only-second"}}
LINES = json.dumps(LINE) + "\n" + json.dumps(LINE | {"body": {"model": "first-model"}}) + "\n"


@pytest.mark.parametrize(
    "content",
    [
        LINES,
        json.dumps(LINE),
        "\ufeff" + LINES,
        "\r\n \n" + LINES.replace("\n", "\r\n"),
        json.dumps(LINE | {"body": {"input": "x" * 3_000_000, "model": "only-second"}}) + "\n",
        json.dumps(LINE | {"body": {"input": '\r\n"model": "fake"', "model": "only-second"}}) + "\n",
    ],
    ids=["lines", "no end", "byte order mark", "blank lines", "long", "quoted"],
)
@pytest.mark.parametrize("is_purpose_last", [False, True])
def test_a_batch_file_goes_where_the_model_of_its_first_line_is(
    gateway: ThreadedGateway, first: FakeUpstream, second: FakeUpstream, content: str, is_purpose_last: bool
) -> None:
    second.answer = replies.json_reply({"id": "file-1", "object": "file"})
    parts: list[tuple[str, Any]] = [("purpose", (None, "batch")), ("file", ("a.jsonl", content.encode()))]
    made = gateway.client.post("/v1/files", files=parts[::-1] if is_purpose_last else parts)
    assert made.status_code == 200, made.text
    assert split_id(made.json()["id"]) == ("file-1", "second")
    assert content.encode() in second.last.body and first.requests == []


@pytest.mark.parametrize(
    ("content", "purpose", "model"),
    [
        (LINES, "batch", "first-model"),
        (LINES, "fine-tune", None),
        (LINES.replace('"model": ', '"no_model": '), "batch", None),
        ("{\n" + LINES, "batch", None),
        ("[" * 5000, "batch", None),
        ("", "batch", None),
        ("\n\n", "batch", None),
        ('{"body": {"model": 5}}\n', "batch", None),
    ],
)
def test_a_file_that_names_no_model_first_or_is_sent_for_one_goes_elsewhere(
    gateway: ThreadedGateway, first: FakeUpstream, second: FakeUpstream, content: str, purpose: str, model: str | None
) -> None:
    first.answer = replies.json_reply({"id": "file-1", "object": "file"})
    sent: dict[str, Any] = {"purpose": (None, purpose), "file": ("a.jsonl", content.encode())}
    made = gateway.client.post("/v1/files", files=sent, params={"model": model} if model else None)
    assert split_id(made.json()["id"]) == ("file-1", "first")
    assert second.requests == []


NAMES = """
[upstreams.main]
base_url = "{main}/v1"
models = ["org/real-7b", "same"]
[upstreams.claude]
base_url = "{main}"
dialect = "anthropic"
models = ["opus"]
[models.small]
upstream = "main"
upstream_model = "org/real-7b"
aliases = ["tiny"]
"""


def test_the_lines_of_a_batch_get_the_names_that_their_upstream_knows(tmp_path, first: FakeUpstream) -> None:
    first.answer = replies.json_reply({"id": "file-1", "object": "file"})
    asks = '{ "custom_id": "%s", "n": 1.50, "body": {"messages": "\\u00fc \\"model\\":", "model" : "%s"} }'
    lines = [asks % ("1", "small"), asks % ("2", "tiny"), asks % ("3", "same"), "", "not JSON: small", '{"body": 5}']
    sent = "\r\n".join(lines).encode()
    wanted = sent.replace(b'"small"', b'"org/real-7b"').replace(b'"tiny"', b'"org/real-7b"')
    with threaded_gateway(tmp_path, NAMES.format(main=first.url), suffix=".toml") as own:
        form = {"purpose": (None, "batch"), "file": ("a.jsonl", sent)}
        made = own.client.post("/v1/files", files=form)
        assert made.status_code == 200, made.text
        assert wanted in first.last.body and first.last.headers["content-length"] == str(len(first.last.body))
        own.client.post("/v1/files", files=form | {"purpose": (None, "user_data")})
        assert sent in first.last.body, "only the lines of batches are looked into"


def test_an_upstream_that_has_no_such_batches_is_sent_none(tmp_path, first: FakeUpstream) -> None:
    with threaded_gateway(tmp_path, NAMES.format(main=first.url), suffix=".toml") as own:
        content = LINES.replace("only-second", "opus").encode()
        made = own.client.post("/v1/files", files={"purpose": (None, "batch"), "file": ("a.jsonl", content)})
        listed = own.client.get("/v1/batches?model=opus")
        for answer in (made, listed):
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_endpoint")
    assert first.requests == []


def test_a_batch_file_for_a_model_that_is_not_there_is_refused(gateway: ThreadedGateway, first: FakeUpstream) -> None:
    content = LINES.replace("only-second", "only-secnd").encode()
    made = gateway.client.post("/v1/files", files={"purpose": (None, "batch"), "file": ("a.jsonl", content)})
    error = made.json()["error"]
    assert (made.status_code, error["code"], error["param"]) == (404, "model_not_found", "file")
    assert "only-second" in error["message"] and "The first line of the file asks for it." in error["message"]
    assert first.requests == []


def test_a_batch_goes_where_its_file_is_and_all_its_ids_are_owned(
    gateway: ThreadedGateway, first: FakeUpstream, second: FakeUpstream
) -> None:
    batch = {
        "id": "batch_1",
        "object": "batch",
        "input_file_id": "file-1",
        "output_file_id": "file-2",
        "error_file_id": None,
    }
    file = upload(gateway.client, second, "file-1", model="only-second")
    second.answer = replies.json_reply(batch)
    made = gateway.client.post("/v1/batches", json={"input_file_id": file, "endpoint": "/v1/chat/completions"}).json()
    assert second.last.json == {"input_file_id": "file-1", "endpoint": "/v1/chat/completions"}
    assert made["id"] == owned_id("batch_1", "second") and made["input_file_id"] == file
    assert made["output_file_id"] == owned_id("file-2", "second") and made["error_file_id"] is None
    gateway.client.post(f"/v1/batches/{made['id']}/cancel")
    assert second.last.path == "/v1/batches/batch_1/cancel" and first.requests == []
    second.answer = Reply(content_type="application/octet-stream", parts=(b"{}",))
    assert gateway.client.get(f"/v1/files/{made['output_file_id']}/content").content == b"{}"


def upload(client: httpx.Client, upstream: FakeUpstream, id: str, model: str = "first-model") -> str:
    """A file that the upstream calls `id`; the id that the client gets."""
    upstream.answer = replies.json_reply({"id": id, "object": "file"})
    sent = {"purpose": (None, "batch"), "model": (None, model), "file": ("a.jsonl", b"{}\n")}
    return str(client.post("/v1/files", files=sent).json()["id"])


def test_a_list_goes_to_the_default_upstream_and_its_pages_work(gateway: ThreadedGateway, first: FakeUpstream) -> None:
    id = upload(gateway.client, first, "file-paged")
    first.answer = replies.json_reply({"object": "list", "data": [{"id": "file-paged"}], "last_id": "file-paged"})
    page = gateway.client.get("/v1/files?limit=1").json()
    assert page["data"][0]["id"] == page["last_id"] == id == owned_id("file-paged", "first")
    gateway.client.get("/v1/files", params={"after": page["last_id"], "limit": "1"})
    assert first.last.target == "/v1/files?after=file-paged&limit=1"


def test_a_key_sees_its_own_files_and_no_others(gateway: ThreadedGateway, first: FakeUpstream) -> None:
    mine = upload(gateway.client, first, "file-mine")
    with gateway.client_with(gateway.new_key("another")) as other:
        theirs = upload(other, first, "file-theirs")
        seen = len(first.requests)
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            assert gateway.client.request(method, f"/v1/files/{theirs}{path}").status_code == 404
            assert other.request(method, f"/v1/files/{mine}{path}").status_code == 404
        batch = {"input_file_id": mine, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        assert other.post("/v1/batches", json=batch).status_code == 404
        assert len(first.requests) == seen

        def pages(request: Request) -> Reply:
            items = ["file-mine"] if "after=file-theirs" in request.target else ["file-x", "file-theirs"]
            more = "after=file-theirs" not in request.target
            data = [{"id": id} for id in items]
            return replies.json_reply({"object": "list", "data": data, "has_more": more, "last_id": items[-1]})

        first.answer = pages
        page = other.get("/v1/files").json()
        assert [item["id"] for item in page["data"]] == [theirs] == [page["last_id"]] and page["has_more"]
        page = gateway.client.get("/v1/files").json()
        assert [item["id"] for item in page["data"]] == [mine] and not page["has_more"]
        first.answer = replies.json_reply({"object": "list", "data": [{"id": "file-x"}], "has_more": True})
        assert gateway.client.get("/v1/batches").json()["data"] == []


@pytest.mark.parametrize("rights", [{"budget_micros": 5}, {"tpm": 9}, {"models": ("first-model",)}])
def test_a_batch_gets_round_no_limit(gateway: ThreadedGateway, first: FakeUpstream, rights: dict[str, Any]) -> None:
    models = rights.pop("models", ())
    request = KeyRequest(name=f"bounded {rights}", models=models, limits=Limits(**rights))
    secret = gateway.ledger.store.create(request)[1]
    gateway.ledger.keys.reload()
    with gateway.client_with(secret) as client:
        answer = client.post("/v1/batches", json={"input_file_id": "file-1", "endpoint": "/v1/chat/completions"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "batch_not_allowed")
    assert first.requests == []


def test_what_is_only_passed_on_counts_as_a_request_too(gateway: ThreadedGateway, first: FakeUpstream) -> None:
    first.answer = replies.json_reply({"object": "list", "data": []})
    with gateway.client_with(gateway.new_key("slow", rpm=2)) as client:
        paths = ("/v1/files", "/v1/batches", "/v1/responses/resp_1", "/v1/files")
        assert [client.get(path).status_code for path in paths] == [200, 200, 429, 429]
        body = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
        assert client.post("/v1/messages/count_tokens", json=body).status_code == 429
    assert gateway.wait_until_idle()


@pytest.mark.parametrize("id", [owned_id("file-1", "gone"), "..", "a%2fb"])
def test_an_id_of_nowhere_is_a_404(gateway: ThreadedGateway, first: FakeUpstream, id: str) -> None:
    answer = gateway.client.get(f"/v1/files/{id}".replace("/..", "/%2e%2e"))
    assert answer.status_code == 404 and answer.headers["content-type"] == "application/json"
    assert first.requests == []


def test_a_key_does_not_reach_files_of_upstreams_it_may_not_use(gateway: ThreadedGateway, second: FakeUpstream) -> None:
    secret = gateway.ledger.store.create(KeyRequest(name="first only", models=("first-model",)))[1]
    gateway.ledger.keys.reload()
    with gateway.client_with(secret) as client:
        assert client.get(f"/v1/files/{owned_id('file-1', 'second')}").status_code == 404
    assert second.requests == []


def test_a_stored_response_is_looked_for_where_it_may_be(
    gateway: ThreadedGateway, first: FakeUpstream, second: FakeUpstream
) -> None:
    second.answer = replies.responses("found", model="only-second")
    for status in (400, 404, 500):  # who does not know the id says so in one way or another
        first.answer = replies.error(status, "no such response")
        answer = gateway.client.get("/v1/responses/resp_9?include=x")
        assert answer.status_code == 200 and answer.json()["object"] == "response"
    first.answer = replies.error(404, "no such response")
    assert answer.headers.get_list("x-gateway-upstream") == ["second"]
    assert second.last.target == "/v1/responses/resp_9?include=x"
    second.answer = replies.error(404, "no such response")
    assert gateway.client.delete("/v1/responses/resp_9").status_code == 404


LACKS_IT = replies.json_reply({"detail": "Not Found"}, 404)
NOT_FOUND = [
    ("Response with id 'resp_9' not found.", None),
    ("No such File object: file-1", None),
    ("No batch found with id 'batch_1'.", None),
    ('There is no file "file-1" on this server.', "file_not_found"),
    ("Item with id 'msg_1' not found.", None),
]


@pytest.mark.parametrize(("message", "code"), NOT_FOUND)
def test_what_an_upstream_does_not_find_is_not_found(
    gateway: ThreadedGateway, first: FakeUpstream, message: str, code: str | None
) -> None:
    missing = replies.error(404, message, code=code)
    first.script(replies.json_reply({"id": "file-1", "object": "file"}))
    id = gateway.client.post("/v1/files", files={"purpose": (None, "x"), "file": ("a", b"a")}).json()["id"]
    first.answer = missing
    file = gateway.client.get(f"/v1/files/{id}")
    answer = gateway.client.post("/v1/responses", json={"model": "fake", "input": "Hi", "previous_response_id": "r"})
    for each in (file, answer):
        assert (each.status_code, each.json()["error"]["message"]) == (404, message)
        assert each.json()["error"]["code"] == (code or "not_found")
    assert gateway.state.without_responses == set()


def test_a_response_is_not_found_where_one_keeps_none_and_the_other_has_it_not(
    gateway: ThreadedGateway, first: FakeUpstream, second: FakeUpstream
) -> None:
    missing = replies.error(404, "Response with id 'resp_9' not found.")
    for first.answer, second.answer in ((LACKS_IT, missing), (missing, LACKS_IT)):
        answer = gateway.client.get("/v1/responses/resp_9")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    first.answer, second.answer = missing, Reply(silent_end=True)
    assert gateway.client.get("/v1/responses/resp_9").json()["error"]["code"] == "upstream_unreachable"


def test_a_stored_response_is_looked_for_at_every_replica(tmp_path, first: FakeUpstream, second: FakeUpstream) -> None:
    missing = replies.error(404, "Response with id 'resp_9' not found.")
    first.answer = missing
    entry = {"urls": [first.url + "/v1", second.url + "/v1"], "models": ["fake"], "max_retries": 0}
    with threaded_gateway(tmp_path, providers(main=entry)) as own:
        for second.answer, status in ((replies.responses("found"), 200), (missing, 404)):
            got = own.client.get("/v1/responses/resp_9")
            more = [
                own.client.post(
                    "/v1/responses", json={"model": "fake", "input": text, "previous_response_id": "resp_9"}
                )
                for text in ("a", "b", "c", "d")  # wherever each of them goes first
            ]
            assert {each.status_code for each in (got, *more)} == {status}


def test_an_endpoint_that_is_lacking_is_the_upstreams_fault(gateway: ThreadedGateway, first: FakeUpstream) -> None:
    texts = ("Not Found", "Invalid URL (POST /v1/rerank)", "There is no file or route /v1/rerank", "no such endpoint")
    for reply in (LACKS_IT, *(replies.error(404, text) for text in texts)):
        first.answer = reply
        answer = gateway.client.post("/v1/rerank", json={"model": "fake", "query": "a", "documents": ["b"]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_invalid_response")


def test_a_form_goes_to_its_models_upstream_unchanged(gateway: ThreadedGateway, second: FakeUpstream) -> None:
    second.answer = replies.json_reply({"text": "hello"})
    sent = {"model": (None, "whisper"), "file": ("a.wav", b"RIFF\r\n--\x00\xff" * 100, "audio/wav")}
    answer = gateway.client.post("/v1/audio/transcriptions", files=sent)
    assert answer.json() == {"text": "hello"}
    assert b"RIFF\r\n--\x00\xff" * 100 in second.last.body
    assert second.last.headers["content-type"].startswith("multipart/form-data; boundary=")


def test_a_form_that_names_no_model_gets_the_default_one(tmp_path, first: FakeUpstream) -> None:
    first.answer = replies.json_reply({"text": "hello"})
    config = 'default_model = "small"\n' + NAMES.format(main=first.url)
    with threaded_gateway(tmp_path, config, suffix=".toml") as own:
        answer = own.client.post("/v1/audio/transcriptions", files={"file": ("a.wav", b"RIFF")})
        assert answer.json() == {"text": "hello"}
    field = b'Content-Disposition: form-data; name="model"\r\n\r\norg/real-7b\r\n'
    assert field in first.last.body and b"\r\n\r\nRIFF\r\n--" in first.last.body
    assert first.last.body.count(b" name=") == 2


def test_speech_comes_as_the_bytes_it_is(gateway: ThreadedGateway, first: FakeUpstream) -> None:
    first.answer = Reply(content_type="audio/mpeg", framing="chunked", parts=(b"\xff\xfb" * 5000, b"end"))
    answer = gateway.client.post("/v1/audio/speech", json={"model": "fake", "input": "Hi", "voice": "x"})
    assert answer.content == b"\xff\xfb" * 5000 + b"end"
    assert answer.headers["content-type"] == "audio/mpeg"


def test_bytes_that_break_off_break_off_for_the_client_too(gateway: ThreadedGateway, first: FakeUpstream) -> None:
    import httpx

    first.answer = Reply(
        content_type="audio/mpeg", framing="chunked", parts=(b"a" * 1000, b"b" * 1000), parts_sent=1, pauses_s=0.0
    )
    with pytest.raises(httpx.RemoteProtocolError):
        gateway.client.post("/v1/audio/speech", json={"model": "fake", "input": "Hi"})
    assert gateway.wait_for_events(1)[0].outcome == "truncated"


def test_rerank_and_score_are_json_that_passes(gateway: ThreadedGateway, first: FakeUpstream) -> None:
    def echo(request: Request) -> Reply:
        return replies.json_reply({"path": request.path, "got": request.json, "usage": {"total_tokens": 9}})

    first.answer = echo
    for path in ("rerank", "score", "moderations", "tokenize"):
        body: dict[str, Any] = {"model": "fake", "query": "a", "documents": ["b"]}
        answer = gateway.client.post(f"/api/v1/{path}", json=body)
        assert answer.json()["got"] == body and answer.json()["path"].endswith(path)
    assert gateway.wait_for_events(4)[0].input_tokens == 9


def test_responses_go_natively_where_the_upstream_has_them(gateway: ThreadedGateway, first: FakeUpstream) -> None:
    reply = replies.responses_stream("Hel", "lo")
    first.answer = reply
    body = {"model": "fake", "input": "Hi", "stream": True, "client_metadata": {"a": 1}, "store": False}
    answer = gateway.client.post("/v1/responses", json=body)
    assert answer.content == reply.body and first.last.json == body


def test_requests_that_find_out_at_once_that_there_are_no_responses_are_all_answered(tmp_path) -> None:
    late = LACKS_IT.slow(head_s=0.2)
    asks_chat = replies.chat("Hi")
    answer = lambda request: late if request.path.endswith("/responses") else asks_chat  # noqa: E731
    with FakeUpstream(answer) as upstream, threaded_gateway(tmp_path, providers(main=provider(upstream.url))) as own:
        with ThreadPoolExecutor(4) as pool:
            body = {"model": "fake", "input": "Hi"}
            answers = list(pool.map(lambda _: own.client.post("/v1/responses", json=body), range(4)))
        assert [each.status_code for each in answers] == [200] * 4
        assert [request.path for request in upstream.requests].count("/v1/responses") == 4


def test_responses_become_chat_where_the_upstream_has_none_and_that_is_remembered(tmp_path) -> None:
    with FakeUpstream(without=("/responses",)) as upstream:
        config = providers(main=provider(upstream.url))
        with threaded_gateway(tmp_path, config) as own:
            body = {"model": "fake", "input": "Hi", "client_metadata": {"a": 1}}
            answer = own.client.post("/v1/responses", json=body)
            assert answer.json()["object"] == "response" and answer.headers["x-gateway-attempts"] == "1"
            own.client.post("/v1/responses", json=body)
            paths = [request.path for request in upstream.requests]
            assert [path for path in paths if path != "/v1/responses"] == ["/v1/chat/completions"] * 2
            assert own.state.without_responses == {"main"}
            assert "client_metadata" not in json.loads(upstream.last.body)
