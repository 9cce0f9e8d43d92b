"""`headrace run-batch` as a command: its answers, kills, mistakes."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from headrace.cli.main import main
from headrace.protocol.batches import AnswerTo, Reply, answer_line, model_digest, read_line
from tests.batch_files import asking, read_lines, write_lines
from tests.serving import HEADRACE, _limit_memory
from tests.tiny_models import tiny_llama

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


def started(*words: str | Path, log: Path) -> psutil.Popen:
    command = [str(HEADRACE), "run-batch", *map(str, words)]
    return psutil.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log.open("wb"), preexec_fn=_limit_memory
    )


def done(*words: str | Path, log: Path, status: int = 0) -> str:
    """Runs to its end; what it wrote to standard output."""
    process = started(*words, log=log)
    out, _ = process.communicate(timeout=90)
    assert process.returncode == status, log.read_text()
    assert "Traceback" not in log.read_text()
    return out.decode()


def wait_for_lines(process: psutil.Popen, output: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while not output.exists() or output.read_bytes().count(b"\n") < count:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_lines_are_answered_as_the_server_would(tmp_path: Path, model: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl",
        [
            asking("text"),
            asking("chat", "/v1/chat/completions", messages=CHAT, max_tokens=4, metadata={"a": "b"}, nonsense=1),
            asking("messages", "/v1/messages", messages=CHAT, max_tokens=4),
            asking("response", "/v1/responses", input="hi", max_output_tokens=4),
            asking("tokens", "/tokenize", prompt="ab"),
            "no json",
            asking("bad value", prompt="a", max_tokens=-3),
            asking("stream", prompt="a", stream=True),
            asking("background", "/v1/responses", input="a", background=True),
            asking("twice").replace('"prompt": "twice"', '"prompt": "twice", "prompt": "thrice"'),
            asking("no model", model="gpt-nowhere", prompt="a"),
            asking("no url", "/v1/completion"),
            asking("anthropic", "/v1/messages", messages=CHAT),
        ],
    )
    log, output = tmp_path / "log", tmp_path / "out.jsonl"
    out = done("-i", source, "-o", output, "--model", model, "--served-model-name", "tiny", "--json", log=log, status=1)
    summary = json.loads(out)
    assert (summary["requests"], summary["answered"], summary["failed"], summary["end"]) == (13, 13, 8, "done")
    assert "8 of them failed" in log.read_text()
    assert output.stat().st_mode & 0o777 == 0o600
    lines = read_lines(output.read_text())
    by_id = {line["custom_id"]: line for line in lines}
    assert len({line["id"] for line in lines}) == 13
    assert all(set(line) == {"id", "custom_id", "response", "error"} for line in lines)
    answers = {name: line["response"] for name, line in by_id.items() if line["response"] is not None}
    bodies = {name: answer["body"] for name, answer in answers.items()}
    kinds = {name: body.get("object", body.get("type")) for name, body in bodies.items()}
    assert kinds["text"] == "text_completion" and kinds["chat"] == "chat.completion"
    assert kinds["messages"] == "message" and kinds["response"] == "response"
    assert bodies["tokens"]["count"] == 2
    assert bodies["text"]["model"] == "tiny"
    assert answers["chat"]["ignored_fields"] == "nonsense"
    refused = {
        name: (answer["status_code"], bodies[name]["error"]["param"])
        for name, answer in answers.items()
        if answer["status_code"] >= 400 and name != "anthropic"
    }
    assert refused == {
        "bad value": (400, "max_tokens"),
        "stream": (400, "stream"),
        "background": (400, "background"),
        "twice": (400, "prompt"),
        "no model": (404, "model"),
    }
    assert bodies["anthropic"]["type"] == "error", "each dialect has its own errors"
    assert (by_id[None]["error"]["code"], by_id[None]["error"]["line"]) == ("invalid_json", 6)
    assert "did you mean /v1/completions?" in by_id["no url"]["error"]["message"]


def test_vectors_and_scores_come_in_batches_too(tmp_path: Path, model: Path) -> None:
    lines = [
        asking("vector", "/v1/embeddings", input=["a", "b"]),
        asking("ranks", "/v1/rerank", query="a", documents=["b", "a"]),
        asking("text"),
    ]
    source, output = write_lines(tmp_path / "in", lines), tmp_path / "out"
    done(source, output, model, "--runner", "pooling", log=tmp_path / "log", status=1)
    bodies = {line["custom_id"]: line["response"]["body"] for line in read_lines(output.read_text())}
    assert [len(vector["embedding"]) for vector in bodies["vector"]["data"]] == [64, 64]
    assert bodies["ranks"]["results"][0]["index"] == 1
    assert "ask /v1/embeddings" in bodies["text"]["error"]["message"]


def test_a_killed_run_goes_on_where_it_was_and_each_line_is_there_once(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [asking(f"r{i}", prompt=f"{i}", max_tokens=30, temperature=0) for i in range(120)]
    source = write_lines(tmp_path / "in.jsonl", [*lines, "no json", ""])
    log, output = tmp_path / "log", tmp_path / "out.jsonl"
    first = started(source, output, model, "--max-num-seqs", "4", log=log)
    wait_for_lines(first, output, 12)
    core = first.children(recursive=True)
    first.kill()
    first.wait(10)
    psutil.wait_procs(core, timeout=10)
    before = output.read_bytes()
    assert before.count(b"\n") < 120
    output.write_bytes(before + b'{"id":"batch_req_12","custom_id":"r39')

    second = started(source, output, model, "--max-num-seqs", "4", log=log)
    wait_for_lines(second, output, before.count(b"\n") + 12)
    assert main(["run-batch", str(source), str(output), str(model)]) == 1
    assert "being written by another run-batch" in capsys.readouterr().err
    second.send_signal(signal.SIGINT)
    assert second.wait(10) == 130
    assert "the same command goes on from here" in log.read_text()
    so_far = len(read_lines(output.read_text()))
    assert so_far < 100

    third = started(source, output, model, "--max-num-seqs", "4", "--json", log=log)
    wait_for_lines(third, output, so_far + 10)
    (core_process,) = third.children()
    core_process.kill()
    out, _ = third.communicate(timeout=60)
    assert third.returncode == 1, log.read_text()
    assert f"{output} has " in log.read_text() and "of the answers already" in log.read_text()
    found = read_lines(output.read_text())
    names = Counter(line["custom_id"] for line in found)
    assert names == Counter({**{f"r{i}": 1 for i in range(120)}, None: 1})
    assert [line["custom_id"] for line in found if line["error"] is not None] == [None]
    assert output.read_bytes().startswith(before)
    summary = json.loads(out)
    assert (summary["answered"], summary["failed"]) == (121, 1)
    assert summary["answered_before"] > before.count(b"\n")


def test_what_is_done_starts_no_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = write_lines(tmp_path / "in", [asking("a"), ""]), tmp_path / "out"
    answer = {"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200}, "error": None}
    output.write_text(json.dumps(answer) + "\n")
    assert main(["run-batch", str(source), str(output), "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["answered_before"] == 1
    assert "0 are left to do" in shown.err
    assert "1 answers do not say to which request of which model they are" in shown.err


@pytest.mark.parametrize(
    ("request_digest", "model_name", "status", "said"),
    [
        (None, "{own}", 0, "has 1 of the answers already"),
        (None, "/elsewhere", 2, "not all of its answers are of the model "),
        ("0" * 16, "{own}", 2, "1 of its 1 answers are to requests that {in} holds otherwise now, the first in line 1"),
    ],
)
def test_answers_count_for_the_request_and_the_model_that_they_are_of(
    tmp_path: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    request_digest: str | None,
    model_name: str,
    status: int,
    said: str,
) -> None:
    line = asking("a")
    source, output = write_lines(tmp_path / "in", [line]), tmp_path / "out"
    asked = request_digest or read_line(1, line.encode()).digest
    to = AnswerTo(asked, model_digest(model_name.replace("{own}", str(model.resolve()))))
    output.write_bytes(answer_line("a", Reply(200, "r", b"{}"), to))
    (tmp_path / "link").symlink_to(model)
    before = output.read_bytes()
    for place in (model, tmp_path / "link"):
        assert main(["run-batch", str(source), str(output), str(place)]) == status
        assert said.replace("{in}", str(source)) in capsys.readouterr().err
        assert output.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "headrace run-batch IN.jsonl OUT.jsonl"),
        (["{in}"], "headrace run-batch IN.jsonl OUT.jsonl"),
        (["-i"], "-i needs a value"),
        (["{in}", "{in}"], "name another file for the answers"),
        (["{dir}/none", "{out}"], "no such file"),
        (["{in}", "{dir}/none/out"], "no such directory"),
        (["https://x/in.jsonl", "{out}"], "files on this machine"),
        (["{in}", "{out}", "--max-modle-len", "5"], "--max-model-len"),
        (["{in}", "{out}", "a", "b"], "b: a command serves one model"),
        (["{twice}", "{out}"], 'Line 2: the custom_id "a" was used before'),
        (["{in}", "{letter}"], "belongs to something else"),
        (["{in}", "{dir}"], "is a directory: name a file for the answers"),
        (["{in}", "/dev/null"], "is no regular file: name a file for the answers"),
    ],
)
def test_a_mistake_is_told_before_anything_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    places = {
        "in": write_lines(tmp_path / "in", [asking("a")]),
        "out": tmp_path / "out",
        "dir": tmp_path,
        "twice": write_lines(tmp_path / "twice", [asking("a"), asking("a")]),
        "letter": write_lines(tmp_path / "letter", ["Dear Sir"]),
    }
    assert main(["run-batch", *(word.format(**places) for word in words)]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "letter").read_text() == "Dear Sir\n"


@pytest.mark.parametrize("text", ["", "\n", "\n  \n\n"])
def test_a_file_that_asks_for_nothing_is_answered_by_an_empty_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "in").write_text(text)
    for _ in range(2):
        assert main(["run-batch", str(tmp_path / "in"), str(tmp_path / "out"), "--json"]) == 0
        shown = capsys.readouterr()
        assert "asks for nothing" in shown.err and "answered" not in shown.err
        assert json.loads(shown.out)["requests"] == 0
        assert (tmp_path / "out").read_bytes() == b"" and (tmp_path / "out").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("place", ["in", "out", "dir/out"])
def test_files_that_this_user_may_not_use_are_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Root may do anything, so what the system says is played."""
    (tmp_path / "dir").mkdir()
    source = write_lines(tmp_path / "in", [asking("a")])
    output = tmp_path / ("out" if place == "in" else place)
    locked_up = {"in": source, "out": output, "dir/out": tmp_path / "dir"}[place]
    if place == "out":
        output.touch()
    monkeypatch.setattr("headrace.cli.run_batch.os.access", lambda path, mode: Path(path) != locked_up)
    assert main(["run-batch", str(source), str(output)]) == 2
    assert f"{source if place == 'in' else output}: this user may not" in capsys.readouterr().err


def test_flags_that_only_a_server_needs_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = write_lines(tmp_path / "in", [""]), tmp_path / "out"
    words = ["--port", "9", "--output-tmp-dir", "/tmp", "--enable-metrics", "-i", str(source), "-o", str(output)]
    assert main(["run-batch", *words]) == 0
    said = capsys.readouterr().err
    for name in ("--port 9", "--output-tmp-dir", "--enable-metrics"):
        assert f"{name} has no effect" in said
