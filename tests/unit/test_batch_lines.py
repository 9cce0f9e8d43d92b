"""Batch files as they are read and written, with a caller that answers by itself: no engine, no server."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import tracemalloc
from pathlib import Path

import pytest

from headrace.protocol.batches import AnswerTo, LineFault, LineRequest, Reply, answer_line, read_line
from headrace.server.batch_call import check_line
from headrace.server.batch_lines import Answered, NotAnOutputFile, answered_lines, asked_lines
from headrace.server.batch_run import BatchRun, Call, OutputFile, Window
from tests.batch_files import asking, read_lines, write_lines

LIMIT = 10_000


async def echo(line: LineRequest) -> Reply:
    return Reply(200, "r", line.body)


async def run(source: Path, output: Path, call: Call = echo, window: int = 4) -> BatchRun:
    """A run of the batch, or the next one; `run.num_answered` counts all of them."""
    answered = await answered_lines(output)
    asked = await asked_lines(source, answered, check_line, LIMIT)
    with OutputFile(output, answered.end) as file:
        batch = BatchRun(
            source,
            asked,
            answers=file,
            failures=file,
            num_failed=answered.num_failed,
            call=call,
            check_url=check_line,
            window=Window(window),
            limit_bytes=LIMIT,
        )
        await batch.run()
    return batch


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        ("{", "invalid_json", None),
        ("\udcff", "invalid_json", None),
        ("[1]", "invalid_line", None),
        ('"text"', "invalid_line", None),
        ("[" * 5000, "invalid_line", None),
        ("{}", "missing_field", "custom_id"),
        ('{"custom_id": 7}', "invalid_type", "custom_id"),
        ('{"custom_id": ""}', "invalid_value", "custom_id"),
        (json.dumps({"custom_id": "x" * 513}), "invalid_value", "custom_id"),
        ('{"custom_id": "a"}', "missing_field", "method"),
        ('{"custom_id": "a", "method": "GET"}', "invalid_method", "method"),
        ('{"custom_id": "a", "method": "POST"}', "missing_field", "url"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/completions"}', "missing_field", "body"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": "x"}', "invalid_type", "body"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": null}', "invalid_type", "body"),
    ],
)
def test_a_bad_line_says_what_is_wrong_with_it(line: str, code: str, param: str | None) -> None:
    with pytest.raises(LineFault) as raised:
        read_line(12, line.encode("utf-8", "surrogateescape"))
    assert (raised.value.code, raised.value.param, raised.value.number) == (code, param, 12)
    assert "ine 12" in raised.value.message


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"custom_id": "\\ud83d"}', "a string holds half of a surrogate pair"),
        (b'{"custom_id": "a", "body": {"prompt": "\\udc00 and more"}}', "a string holds half of a surrogate pair"),
        (b'{"\\ud800": 1}', "a string holds half of a surrogate pair"),
        (b'{"custom_id": "a\xff"}', "byte 16 is not UTF-8"),
        (b'{"custom_id": "a", "method": "POST\xff"}', "byte 34 is not UTF-8"),
        (b'{"custom_id": "a", "method": "POST", "url": "\xff"}', "byte 45 is not UTF-8"),
        (b'{"\xff": 1}', "byte 2 is not UTF-8"),
    ],
)
def test_a_string_that_is_no_text_is_told_in_these_words(line: bytes, said: str) -> None:
    with pytest.raises(LineFault, match=f"^Line 3 is not JSON: {said}") as raised:
        read_line(3, line)
    assert raised.value.code == "invalid_json"


@pytest.mark.parametrize("url", ["/v1/chat/completion", "/v1/models", "/v1/files", "/v1/batches", "/sleep", "", "/"])
def test_a_url_that_no_batch_can_ask_is_a_fault_with_the_nearest(url: str) -> None:
    with pytest.raises(LineFault) as raised:
        check_line(read_line(3, asking("a", url).encode()))
    assert (raised.value.code, raised.value.custom_id) == ("invalid_url", "a")
    assert "did you mean" in raised.value.message or "a batch can ask /v1/chat/completions" in raised.value.message


@pytest.mark.parametrize(
    "url", ["/v1/chat/completions", "/chat/completions/", "/v1/completions", "/v1/responses", "/tokenize"]
)
def test_whatever_answers_a_post_with_json_can_be_asked(url: str) -> None:
    check_line(read_line(1, asking("a", url).encode()))


async def test_every_line_is_answered_once_and_bad_ones_do_not_stop_the_rest(tmp_path: Path) -> None:
    lines = ["\ufeff" + asking("first"), "", "   ", "{", asking("a"), "[]", asking("b", "/no"), "x" * (LIMIT + 50)]
    source = write_lines(tmp_path / "in", [*lines, asking("last")])
    source.write_text(source.read_text().rstrip("\n"), "utf-8")  # the last line needs no end
    batch = await run(source, tmp_path / "out")
    assert (batch.num_requests, batch.num_answered, batch.num_failed) == (7, 7, 4)
    found = read_lines((tmp_path / "out").read_text())
    assert {line["custom_id"] for line in found if line["error"] is None} == {"first", "a", "last"}
    faults = {line["error"]["line"]: line["error"]["code"] for line in found if line["error"] is not None}
    assert faults == {4: "invalid_json", 6: "invalid_line", 7: "invalid_url", 8: "request_too_large"}
    before = (tmp_path / "out").read_bytes()
    again = await run(source, tmp_path / "out")
    assert (again.num_answered, again.num_failed) == (7, 4)
    assert (tmp_path / "out").read_bytes() == before


@pytest.mark.parametrize("cut", [1, 20, 60])
async def test_a_line_that_was_torn_is_cut_off_and_answered_again(tmp_path: Path, cut: int) -> None:
    source = write_lines(tmp_path / "in", [asking(str(i)) for i in range(6)])
    await run(source, tmp_path / "out")
    whole = (tmp_path / "out").read_bytes()
    (tmp_path / "out").write_bytes(whole[:-cut])
    await run(source, tmp_path / "out")
    found = [line["custom_id"] for line in read_lines((tmp_path / "out").read_text())]
    assert sorted(found) == [str(i) for i in range(6)]


@pytest.mark.parametrize(
    "text",
    [
        "a letter to a friend",
        "one line\n",
        '{"id": 1}\n',
        answer_line("else", Reply(200, "r", b"{}"), AnswerTo("0" * 16)).decode(),
    ],
)
async def test_a_file_that_is_not_this_batchs_output_is_left_alone(tmp_path: Path, text: str) -> None:
    source = write_lines(tmp_path / "in", [asking("a")])
    (tmp_path / "out").write_text(text)
    with pytest.raises(NotAnOutputFile):
        await run(source, tmp_path / "out")
    assert (tmp_path / "out").read_text() == text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (asking("a", prompt="x"), asking("a", prompt="y")),
        (asking("a", prompt="x"), asking("a", prompt="x", max_tokens=3)),
        (asking("a", "/v1/completions", model="m", prompt="x"), asking("a", "/v1/completions", model="n", prompt="x")),
        (asking("a", "/v1/completions", prompt="x"), asking("a", "/tokenize", prompt="x")),
        (asking("a", "/nowhere", prompt="x"), asking("a", "/tokenize", prompt="x")),
        ('{"custom_id": "a"}', asking("a")),
        (asking("a"), '{"custom_id": "a"}'),
        ("{", "["),
        ("x" * (LIMIT + 9), "y" * (LIMIT + 9)),
    ],
)
async def test_a_line_that_was_changed_is_not_taken_for_answered(tmp_path: Path, before: str, after: str) -> None:
    source = write_lines(tmp_path / "in", [asking("same"), "", before])
    await run(source, tmp_path / "out")
    answers = (tmp_path / "out").read_text()
    write_lines(source, [asking("same"), "", after])
    with pytest.raises(NotAnOutputFile, match=r"^1 of its 2 answers .* holds otherwise now, the first in line 3$"):
        await run(source, tmp_path / "out")
    assert (tmp_path / "out").read_text() == answers


async def test_a_file_in_another_order_asks_the_same(tmp_path: Path) -> None:
    lines = [asking(str(i)) for i in range(5)]
    await run(write_lines(tmp_path / "in", lines), tmp_path / "out")
    again = await run(write_lines(tmp_path / "in", ["", *reversed(lines), asking("more")]), tmp_path / "out")
    assert (again.num_requests, again.num_answered) == (6, 6)


async def test_answers_of_an_older_version_count_by_their_custom_id(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", [asking("a"), asking("b")])
    old = {"id": "batch_req_0123abcd", "custom_id": "a", "response": {"status_code": 200, "body": {}}, "error": None}
    write_lines(tmp_path / "out", [json.dumps(old)])
    answered = await answered_lines(tmp_path / "out")
    assert (len(answered), answered.num_unsaid) == (1, 1)
    assert (await asked_lines(source, answered, check_line, LIMIT)).num_answered == 1


async def test_a_custom_id_that_comes_twice_is_found(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", [asking("a"), asking("b"), asking("a"), asking("a")])
    asked = await asked_lines(source, Answered(), check_line, LIMIT)
    assert asked.num_duplicates == 2
    assert [fault.number for fault in asked.faults] == [3, 4]


async def test_a_busy_engine_is_asked_again(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", [asking(str(i)) for i in range(8)])
    refusals = iter([429, 503, 503, 429])

    async def busy(line: LineRequest) -> Reply:
        return Reply(next(refusals, 200), "r", b"{}")

    batch = await run(source, tmp_path / "out", busy)
    assert (batch.num_answered, batch.num_failed) == (8, 0)


async def test_so_many_are_in_flight_and_no_more(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", [asking(str(i)) for i in range(40)])
    running = most = 0

    async def slow(line: LineRequest) -> Reply:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return Reply(200, "r", b"{}")

    await run(source, tmp_path / "out", slow, window=5)
    assert most == 5


async def test_a_full_disk_ends_the_run_and_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "in", [asking(str(i)) for i in range(20)])
    room, write = 1000, os.write

    def full(file: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(file, data[:room])
        room -= written
        return written

    monkeypatch.setattr("headrace.server.batch_run.os.write", full)
    with pytest.raises(OSError, match="No space left"):
        await run(source, tmp_path / "out")
    assert len(read_lines((tmp_path / "out").read_text())) < 20
    room = 10**6
    await run(source, tmp_path / "out")
    assert len(read_lines((tmp_path / "out").read_text())) == 20


async def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    source = tmp_path / "in"
    with source.open("w") as file:
        file.writelines(asking(str(i), prompt="x" * 4000) + "\n" for i in range(2000))
    tracemalloc.start()
    try:
        batch = await run(source, tmp_path / "out")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert batch.num_answered == 2000
    assert source.stat().st_size > 8e6
    assert peak < 2.5e6


async def test_the_window_lets_batches_take_turns_and_bounds_bytes() -> None:
    window = Window(2, num_bytes=100)
    order: list[str] = []

    async def enter(name: str, num_bytes: int) -> None:
        await window.enter(num_bytes)
        order.append(name)

    await enter("a", 60)
    tasks = [asyncio.create_task(enter(name, size)) for name, size in (("b", 60), ("c", 10), ("huge", 500), ("d", 1))]
    await asyncio.sleep(0)
    assert order == ["a"], "60 more bytes do not fit, and nobody overtakes"
    tasks[0].cancel()
    await asyncio.sleep(0.01)
    assert order == ["a", "c"]
    window.leave(60)
    await asyncio.sleep(0.01)
    assert order == ["a", "c"], "what is larger than the window goes alone"
    window.leave(10)
    await asyncio.sleep(0.01)
    assert order == ["a", "c", "huge"]
    window.leave(500)
    await asyncio.gather(*tasks[1:])
    assert order == ["a", "c", "huge", "d"]
