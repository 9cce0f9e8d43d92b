"""Files and batches on disk, with a caller that answers by itself; the server may be killed at any write."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.errors import ConfigError
from headrace.config.settings import EngineSettings, ServerSettings
from headrace.protocol.batches import Batch, BatchFields, LineRequest, Reply
from headrace.protocol.errors import ApiError
from headrace.server.batch_place import BatchPlace
from headrace.server.batch_run import OutputFile
from headrace.server.batch_store import Batches
from headrace.server.file_store import FileStore
from headrace.server.multipart import Form, boundary_of
from tests.batch_files import asking, read_lines


class Killed(BaseException):
    """The process ends here: no handler of ours runs."""


async def answer(line: LineRequest) -> Reply:
    return Reply(400 if line.custom_id == "bad" else 200, "r", b"{}")


def opened(place: Path, limit: int = 1 << 20) -> FileStore:
    return FileStore(place, file_limit_bytes=1 << 20, storage_limit_bytes=limit)


def batches_in(store: FileStore) -> Batches:
    return Batches(store, answer, num_in_flight=3, line_limit_bytes=1 << 20)


def sent(batches: Batches, content: str, **more: object) -> Batch:
    upload = batches.store.upload()
    upload.write(content.encode())
    file = upload.done("in.jsonl")
    upload.close()
    return batches.create(BatchFields(input_file_id=file.id, endpoint="/v1/completions", **more))  # type: ignore[arg-type]


async def end_of(batches: Batches, batch_id: str) -> Batch:
    async with asyncio.timeout(20):
        while batches.get(batch_id).status not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(0.001)
    return batches.get(batch_id)


def lines_of(batches: Batches, batch: Batch) -> list[str | None]:
    ids = [file_id for file_id in (batch.output_file_id, batch.error_file_id) if file_id is not None]
    return [line["custom_id"] for id in ids for line in read_lines(batches.store.path(id).read_text())]


NAMES = [f"r{i}" for i in range(8)] + ["bad"]
CONTENT = "".join(asking(name) + "\n" for name in NAMES)


@pytest.mark.parametrize("call", ["write", "replace"])
async def test_a_server_killed_at_any_write_leaves_a_batch_that_the_next_one_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    real = {"write": os.write, "replace": os.replace}[call]
    num_kills = 0
    for kill_at in range(30):
        place, count = tmp_path / str(kill_at), 0
        store = opened(place)
        batches = batches_in(store)
        batch = sent(batches, CONTENT)
        killed = asyncio.Event()

        def dying(*arguments: object) -> object:
            nonlocal count
            count += 1
            if count > kill_at:  # noqa: B023
                killed.set()  # noqa: B023
                if call == "write" and len(arguments[1]) > 1:  # type: ignore[arg-type]
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])  # type: ignore[index, arg-type]
                raise Killed
            return real(*arguments)  # type: ignore[operator]

        monkeypatch.setattr(os, call, dying)
        # A kill leaves torn lines: nothing cuts them off.
        monkeypatch.setattr(OutputFile, "add", lambda self, line: os.write(self._file, line))
        task = batches._jobs[batch.id].task
        ending = asyncio.create_task(killed.wait())
        await asyncio.wait({task, ending}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(task, return_exceptions=True)
        monkeypatch.undo()
        was_killed = killed.is_set()
        ending.cancel()
        num_kills += was_killed
        store.close()
        again = batches_in(opened(place))
        done = await end_of(again, batch.id)
        assert done.status == "completed", (kill_at, done)
        assert Counter(lines_of(again, done)) == Counter(NAMES), kill_at
        assert done.request_counts.failed == 1 and done.request_counts.completed == 8
        on_disk = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        assert abs(again.store.num_bytes - on_disk) < 5000
        await again.stop()
        if not was_killed:
            break
    assert num_kills >= 3


async def test_a_batch_ends_where_the_storage_is_full_and_keeps_what_it_has(tmp_path: Path) -> None:
    batches = batches_in(opened(tmp_path, limit=len(CONTENT) + 600))
    done = await end_of(batches, sent(batches, CONTENT).id)
    assert done.status == "failed" and done.errors is not None
    assert done.errors.data[0].code == "storage_full" and "--batch-storage-limit" in done.errors.data[0].message
    assert 0 < len(lines_of(batches, done)) < len(NAMES)
    with pytest.raises(ApiError) as refused:
        sent(batches, "x" * 3000)
    assert refused.value.code == "storage_full"
    await batches.stop()


async def test_an_input_that_is_gone_fails_its_batch_and_says_why(tmp_path: Path) -> None:
    batches = batches_in(opened(tmp_path))
    batch = sent(batches, CONTENT)
    batches.store.path(batch.input_file_id).unlink()
    done = await end_of(batches, batch.id)
    assert done.status == "failed" and done.errors is not None
    assert done.errors.data[0].code == "storage_failed" and "No such file" in done.errors.data[0].message
    await batches.stop()


async def test_batches_take_turns(tmp_path: Path) -> None:
    batches = batches_in(opened(tmp_path))
    order: list[str] = []

    async def noted(line: LineRequest) -> Reply:
        order.append(line.custom_id[0])
        await asyncio.sleep(0)
        return Reply(200, "r", b"{}")

    batches._call = noted
    made = [sent(batches, "".join(asking(f"{name}{i}") + "\n" for i in range(40))) for name in "abc"]
    for batch in made:
        assert (await end_of(batches, batch.id)).status == "completed"
    assert {"b", "c"} <= set(order[:40]), "the later ones do not wait for the end of the first"
    await batches.stop()


async def test_two_servers_do_not_share_a_directory(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(ConfigError, match="used by another server"):
        opened(tmp_path)
    store.close()
    opened(tmp_path).close()


def test_directories_that_are_made_are_the_servers_alone(tmp_path: Path) -> None:
    opened(tmp_path / "a" / "b").close()
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_dir()} == {0o700}


@pytest.mark.parametrize("home", [None, "/dev/null"])
async def test_a_server_whose_user_has_no_home_starts_and_says_so_when_files_are_sent(
    monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    def no_home() -> Path:
        if home is None:
            raise RuntimeError("Could not determine home directory.")
        return Path(home) / "no" / "such"

    monkeypatch.setattr(Path, "home", no_home)

    async def dispatch(exchange: object, path: str) -> None: ...

    place = BatchPlace(ServerSettings(served_model_names=("m",), model_path="m"), EngineSettings(model="m"), dispatch)
    place.resume()
    with pytest.raises(ApiError) as refused:
        place.open()
    assert refused.value.code == "storage_failed" and "--batch-dir" in refused.value.message
    await place.stop()


async def test_records_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    batches = batches_in(opened(tmp_path))
    batch = await end_of(batches, sent(batches, CONTENT).id)
    await batches.stop()
    (tmp_path / "batches" / "batch_0.json").write_text("{")
    (tmp_path / "files" / "file-0.json").write_text("")
    (tmp_path / "files" / "file-1.part").write_text("half")
    again = batches_in(opened(tmp_path))
    assert [each.id for each in again.newest_first()] == [batch.id]
    assert len(again.store.newest_first()) == 3
    assert not (tmp_path / "files" / "file-1.part").exists()
    await again.stop()


# forms

CONTENTS = st.one_of(
    st.binary(max_size=200), st.sampled_from([b"", b"\r\n", b"--x", b"\r\n--x", b"\r\n--x\r", b"\r\n--", b"\n--xy\r\n"])
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    CONTENTS.filter(lambda content: b"\r\n--xyz" not in content),
    st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=20),
    st.lists(st.integers(0, 400), max_size=6),
    st.booleans(),
)
def test_a_form_reads_the_same_in_any_pieces(content: bytes, name: str, cuts: list[int], is_last: bool) -> None:
    file = (
        b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="' + name.encode() + b'"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n" + content + b"\r\n"
    )
    purpose = b'--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    body = b"".join([purpose, file] if is_last else [file, purpose]) + b"--xyz--\r\n"
    at = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    kept: list[bytes] = []
    form = Form(boundary_of('multipart/form-data; boundary="xyz"'), kept.append)

    async def pieces():  # type: ignore[no-untyped-def]
        for start, end in itertools.pairwise(at):
            yield body[start:end]

    asyncio.run(form.read(pieces()))
    assert b"".join(kept) == content
    assert (form.filename, form.fields) == (name, {"purpose": "batch"})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--xyz",
        b"--xyz\r\n",
        b"--xyz\r\n\r\nno name\r\n--xyz--",
        b'--xyz\r\nContent-Disposition: form-data; name="a"\r\n\r\n' + b"x" * 70_000 + b"\r\n--xyz--",
        b"--xyz\r\n" + b"h" * 10_000,
        b'--xyz\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' * 2 + b"--xyz--",
        b"".join(b'--xyz\r\nContent-Disposition: form-data; name="a%d"\r\n\r\n\r\n' % i for i in range(40))
        + b"--xyz--",
    ],
)
async def test_a_form_that_cannot_be_read_is_refused(body: bytes) -> None:
    async def pieces():  # type: ignore[no-untyped-def]
        yield body

    with pytest.raises(ApiError) as refused:
        await Form(b"xyz", lambda content: None).read(pieces())
    assert refused.value.code == "invalid_form"
