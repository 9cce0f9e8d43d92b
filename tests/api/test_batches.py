"""/v1/files and /v1/batches through OpenAI's SDK, on a real server of a tiny model that is stopped and killed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai.types import Batch

from tests.batch_files import asking, read_lines
from tests.serving import HEADRACE, Server, free_port, running_server
from tests.tiny_models import tiny_llama

FLAGS = ("--served-model-name", "tiny", "--batch-file-limit", "200k", "--batch-storage-limit", "620k")
FEW = ("--batch-concurrency", "16")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"), max_positions=4096)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept") / "batches"


@pytest.fixture(scope="module")
def own_server(model: Path, place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with running_server(log, (str(model), "--batch-dir", str(place), *FLAGS, *FEW)) as running:
        yield running
        # It ends cleanly and soon whatever batches it is at.
        with connected(running) as client:
            long = asking("long", prompt="a", max_tokens=4000, ignore_eos=True)
            batch = sent(client, [long])
            while client.batches.retrieve(batch.id).status != "in_progress":
                time.sleep(0.02)


@pytest.fixture(scope="module")
def client(own_server: Server) -> Iterator[openai.OpenAI]:
    with connected(own_server) as made:
        yield made


def connected(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key="unused", max_retries=0)


def sent(client: openai.OpenAI, lines: list[str], **more: object) -> Batch:
    """A batch of these lines."""
    content = "".join(line + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    fields = {"endpoint": "/v1/completions", "completion_window": "24h"} | more
    return client.batches.create(input_file_id=file.id, **fields)  # type: ignore[arg-type]


def ended(client: openai.OpenAI, batch: Batch, timeout_s: float = 60) -> Batch:
    deadline = time.monotonic() + timeout_s
    while batch.status not in ("failed", "completed", "expired", "cancelled"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def until(client: openai.OpenAI, batch: Batch, count: int) -> None:
    """So many of its requests are answered."""
    deadline = time.monotonic() + 60
    while (batch.request_counts is None) or batch.request_counts.completed < count:
        assert time.monotonic() < deadline and batch.status in ("validating", "in_progress"), batch
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)


def test_a_batch_from_upload_to_download(client: openai.OpenAI, place: Path) -> None:
    lines = [asking(f"r{i}") for i in range(5)] + [asking("bad", prompt="a", max_tokens=-1)]
    batch = sent(client, lines, metadata={"for": "a test"})
    assert (batch.status, batch.metadata) == ("validating", {"for": "a test"})
    assert batch.expires_at == batch.created_at + 86400
    batch = ended(client, batch)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 6, "completed": 5, "failed": 1}
    assert batch.in_progress_at and batch.finalizing_at and batch.completed_at
    assert batch.output_file_id and batch.error_file_id
    found = read_lines(client.files.content(batch.output_file_id).text)
    assert sorted(line["custom_id"] for line in found) == [f"r{i}" for i in range(5)]
    (first,) = [line for line in found if line["custom_id"] == "r0"]
    assert first["response"]["status_code"] == 200 and first["error"] is None
    alone = client.completions.create(model="tiny", prompt="r0", max_tokens=10, temperature=0)
    assert first["response"]["body"]["choices"][0]["text"] == alone.choices[0].text
    (failed,) = read_lines(client.files.content(batch.error_file_id).text)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("bad", 400)
    assert failed["response"]["body"]["error"]["param"] == "max_tokens"
    output = client.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert output.bytes == len(client.files.content(batch.output_file_id).content)
    assert client.files.retrieve(batch.input_file_id).filename == "in.jsonl"
    modes = {path.stat().st_mode & 0o777 for path in place.rglob("*") if path.is_file()}
    assert modes == {0o600}
    assert {path.stat().st_mode & 0o777 for path in [place, *place.rglob("*")] if path.is_dir()} == {0o700}


@pytest.mark.parametrize(
    ("url", "body", "kind"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}, "chat.completion"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 3}, "response"),
    ],
)
def test_other_endpoints_answer_in_batches_too(
    client: openai.OpenAI, url: str, body: dict[str, object], kind: str
) -> None:
    batch = ended(client, sent(client, [asking("a", url, **body)], endpoint=url))
    assert batch.output_file_id
    (line,) = read_lines(client.files.content(batch.output_file_id).text)
    assert line["response"]["body"]["object"] == kind


def test_a_file_with_bad_lines_fails_with_the_number_of_each(client: openai.OpenAI) -> None:
    lines = [asking("a"), "{", asking("a"), asking("b", "/v1/chat/completions", messages=[]), asking("c", "/nowhere")]
    batch = ended(client, sent(client, lines))
    assert batch.status == "failed" and batch.failed_at and batch.errors and batch.errors.data
    assert [(fault.line, fault.code) for fault in batch.errors.data] == [
        (2, "invalid_json"),
        (3, "duplicate_custom_id"),
        (4, "mismatched_endpoint"),
        (5, "invalid_url"),
    ]
    assert batch.output_file_id is None
    batch = ended(client, sent(client, ["", ""]))
    assert batch.errors and batch.errors.data and batch.errors.data[0].code == "empty_file"
    many = ended(client, sent(client, ["{"] * 70))
    assert many.errors and many.errors.data and many.errors.data[-1].message == "20 more lines are wrong."


def test_a_cancelled_batch_keeps_what_it_has(client: openai.OpenAI) -> None:
    lines = [asking(f"r{i}", prompt="a", max_tokens=1 if i < 5 else 3000, ignore_eos=True) for i in range(40)]
    batch = sent(client, lines)
    until(client, batch, 5)
    with pytest.raises(openai.ConflictError, match="read by the batch"):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch)
    assert batch.status == "cancelled" and batch.cancelling_at and batch.cancelled_at
    assert batch.output_file_id and batch.request_counts
    found = read_lines(client.files.content(batch.output_file_id).text)
    assert 5 <= len(found) == batch.request_counts.completed < 40
    assert client.batches.cancel(batch.id).status == "cancelled"
    assert client.files.delete(batch.input_file_id).deleted


def test_what_is_not_done_in_time_says_so(client: openai.OpenAI) -> None:
    lines = [asking(f"r{i}", prompt="a", max_tokens=1 if i < 5 else 4000, ignore_eos=True) for i in range(40)]
    batch = ended(client, sent(client, lines, completion_window="4s"))
    assert batch.status == "expired" and batch.expired_at
    assert batch.output_file_id and batch.error_file_id and batch.request_counts
    done = read_lines(client.files.content(batch.output_file_id).text)
    late = read_lines(client.files.content(batch.error_file_id).text)
    assert len(done) == batch.request_counts.completed and len(late) == batch.request_counts.failed
    assert {line["custom_id"] for line in done + late} == {f"r{i}" for i in range(40)}
    assert {line["error"]["code"] for line in late} == {"batch_expired"}


def test_lists_have_pages(client: openai.OpenAI) -> None:
    made = [sent(client, [asking("a")]).id for _ in range(3)]
    page = client.batches.list(limit=2)
    assert [batch.id for batch in page.data] == made[:0:-1] and page.has_more
    assert next(iter(client.batches.list(limit=2, after=made[1]).data)).id == made[0]
    every = [batch.id for batch in client.batches.list(limit=3)]
    assert every[:3] == made[::-1] and len(every) == len(set(every)) > 3
    files = [file.id for file in client.files.list(purpose="batch", limit=2, order="asc")]
    assert len(files) == len(set(files)) > 3
    assert {file.purpose for file in client.files.list(purpose="batch_output")} == {"batch_output"}


def test_requests_that_cannot_be_are_refused(client: openai.OpenAI, own_server: Server) -> None:
    file = client.files.create(file=("a.jsonl", asking("a").encode()), purpose="batch")

    def refused(code: str, status: int, **fields: object) -> None:
        body = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"} | fields
        answer = httpx.post(own_server.base_url + "/batches", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text

    refused("file_not_found", 404, input_file_id="file-none")
    refused("file_not_found", 404, input_file_id="../../etc/passwd")
    refused("invalid_value", 400, endpoint="/v1/nowhere")
    refused("invalid_value", 400, endpoint="/v1/files")
    refused("invalid_value", 400, completion_window="soon")
    refused("invalid_value", 400, completion_window="31d")
    refused("invalid_type", 400, metadata={"a": 1})
    refused("invalid_value", 400, metadata={str(i): "x" for i in range(17)})
    refused("invalid_value", 400, metadata={"a": "x" * 513})
    refused("unsupported_parameter", 400, output_expires_after={"anchor": "created_at", "seconds": 3600})
    for call in (client.batches.retrieve, client.batches.cancel, client.files.retrieve, client.files.content):
        with pytest.raises(openai.NotFoundError):
            call("batch_x/../x")
    for path in ("/files/..%2f..%2fetc%2fpasswd", "/files/../../etc/passwd/content", "/files/%2e%2e/content"):
        assert httpx.get(own_server.base_url + path).status_code == 404
    head = httpx.head(f"{own_server.base_url}/files/{file.id}/content")
    assert (head.status_code, head.headers["content-length"]) == (200, str(len(asking("a"))))
    with pytest.raises(openai.BadRequestError, match="files for `batch` only"):
        client.files.create(file=("a", b"x"), purpose="fine-tune")
    batch = ended(client, sent(client, [asking("a")]))
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    assert batch.output_file_id
    with pytest.raises(openai.BadRequestError, match="has the purpose batch_output"):
        client.batches.create(input_file_id=batch.output_file_id, endpoint="/v1/completions", completion_window="24h")


@pytest.mark.parametrize(
    ("headers", "body", "code"),
    [
        ({"content-type": "application/json"}, b"{}", "invalid_form"),
        ({"content-type": "multipart/form-data"}, b"", "invalid_form"),
        ({"content-type": "multipart/form-data; boundary=x"}, b"--x\r\n", "invalid_form"),
        ({"content-type": "multipart/form-data; boundary=x"}, b"--x\r\n\r\nno name\r\n--x--", "invalid_form"),
        ({"content-type": "multipart/form-data; boundary=x"}, b"--x--\r\n", "missing_field"),
    ],
)
def test_a_form_that_is_none_is_told(own_server: Server, headers: dict[str, str], body: bytes, code: str) -> None:
    answer = httpx.post(own_server.base_url + "/files", headers=headers, content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


def test_files_are_bounded_one_by_one_and_together(client: openai.OpenAI, place: Path) -> None:
    def parts() -> set[Path]:
        return {path for path in place.rglob("*") if path.suffix == ".part"}

    with pytest.raises(openai.APIStatusError) as large:
        client.files.create(file=("big", b"x" * 2_000_000), purpose="batch")
    assert large.value.status_code == 413 and "--batch-file-limit" in large.value.message
    big = ("big", b"x" * 150_000)
    kept = [client.files.create(file=big, purpose="batch") for _ in range(3)]
    with pytest.raises(openai.APIStatusError) as full:
        client.files.create(file=("more", b"x" * 180_000), purpose="batch")
    assert full.value.status_code == 413 and "--batch-storage-limit" in full.value.message
    assert not parts()
    for file in kept:
        client.files.delete(file.id)
    client.files.delete(client.files.create(file=big, purpose="batch").id)


def test_a_live_request_does_not_wait_for_a_batch(client: openai.OpenAI) -> None:
    lines = [asking(f"r{i}", prompt="a", max_tokens=4000, ignore_eos=True) for i in range(40)]
    batch = sent(client, lines)
    while client.batches.retrieve(batch.id).status != "in_progress":
        time.sleep(0.02)
    time.sleep(0.3)
    began = time.monotonic()
    client.completions.create(model="tiny", prompt="live", max_tokens=20, temperature=0)
    assert time.monotonic() - began < 10
    assert client.batches.retrieve(batch.id).status == "in_progress"
    client.batches.cancel(batch.id)
    ended(client, batch)


def test_a_batch_outlives_its_server(model: Path, tmp_path: Path) -> None:
    place = tmp_path / "kept"
    flags = (str(model), "--batch-dir", str(place), "--max-num-seqs", "8", *FLAGS)
    lines = [asking(f"r{i}", prompt=f"{i}", max_tokens=40, temperature=0, ignore_eos=True) for i in range(80)]
    with running_server(tmp_path / "first.log", flags, clean_exit=False) as server, connected(server) as client:
        batch = sent(client, lines)
        until(client, batch, 4)
        core = server.children()
        server.process.kill()
        for process in core:
            process.kill()
    with running_server(tmp_path / "second.log", flags) as server, connected(server) as client:
        assert f"Batch {batch.id} (in_progress) goes on." in server.log()
        batch = ended(client, client.batches.retrieve(batch.id))
        assert batch.status == "completed" and batch.output_file_id
        found = read_lines(client.files.content(batch.output_file_id).text)
        assert sorted(line["custom_id"] for line in found) == sorted(f"r{i}" for i in range(80))
        assert batch.request_counts and batch.request_counts.completed == 80


def test_a_directory_has_one_server(own_server: Server, model: Path, place: Path) -> None:
    words = ["serve", str(model), "--port", str(free_port()), "--batch-dir", str(place)]
    result = subprocess.run([str(HEADRACE), *words], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "is used by another server; give each one its own" in result.stderr
