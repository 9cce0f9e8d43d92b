"""Where the output goes may be closed, full or without a reader, and Ctrl-C may come at any moment: a line at most."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.batch_files import asking
from tests.serving import HEADRACE, _limit_memory, free_port, health_status
from tests.tiny_models import tiny_llama

CLOSED = (">&-", "2>&-", "<&-", "<&- >&- 2>&-")
QUICK = ("version", "serve --help", "serve --prot 1")
NO_READER = "| true; exit ${PIPESTATUS[0]}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


def shell(command: str, folder: Path | None = None, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """`headrace COMMAND` of a shell that passes on its exit status; what it makes for itself is in `folder`."""
    return subprocess.run(
        ["bash", "-c", f"exec {HEADRACE} {command}"],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        preexec_fn=_limit_memory,
        env=os.environ | ({"TMPDIR": str(folder)} if folder else {}),
    )


@pytest.mark.parametrize("command", QUICK)
def test_closed_streams_change_no_exit_status(command: str) -> None:
    usual = shell(command).returncode
    for closed in CLOSED:
        result = shell(f"{command} {closed}")
        assert (closed, result.returncode) == (closed, usual)
        assert "Traceback" not in result.stdout + result.stderr


@pytest.mark.parametrize("command", ["version", "serve --help"])
def test_a_full_disk_is_one_line(command: str) -> None:
    result = shell(f"{command} >/dev/full")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line == f"headrace {command.split()[0]}: the output cannot be written: No space left on device."


def test_a_dry_run_to_a_full_disk_is_one_line(model: Path) -> None:
    result = shell(f"serve {model} --dry-run --kv-cache-memory-bytes 8M >/dev/full")
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)


def test_a_summary_that_cannot_be_written_blames_no_file_of_the_batch(tmp_path: Path, model: Path) -> None:
    (tmp_path / "in.jsonl").write_text(asking("r1") + "\n")
    words = f"{tmp_path}/in.jsonl {tmp_path}/out.jsonl --model {model} --kv-cache-memory-bytes 8M --json"
    result = shell(f"run-batch {words} >/dev/full")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "headrace run-batch: the output cannot be written: No space left on device."
    )
    assert (tmp_path / "out.jsonl").read_text().count("r1") == 1


def test_a_reader_that_has_seen_enough_is_no_mistake() -> None:
    result = subprocess.run(
        ["bash", "-c", f"{HEADRACE} serve --help=all | head -1 | cat"], capture_output=True, text=True, timeout=60
    )
    assert result.stderr == ""
    assert result.stdout == "headrace serve [MODEL] [flags]: serve a model behind the OpenAI API.\n"


def test_a_server_starts_and_ends_with_all_streams_closed(tmp_path: Path, model: Path) -> None:
    port = free_port()
    words = [str(model), "--port", str(port), "--kv-cache-memory-bytes", "8M"]
    words += ["--gateway-port", str(free_port()), "--data-dir", str(tmp_path / "data")]
    (tmp_path / "made").mkdir()
    process = subprocess.Popen(
        ["bash", "-c", f"exec {HEADRACE} up {' '.join(words)} <&- >&- 2>&-"],
        preexec_fn=_limit_memory,
        env=os.environ | {"TMPDIR": str(tmp_path / "made")},
    )
    try:
        deadline = time.monotonic() + 60
        while health_status(f"http://127.0.0.1:{port}") != 200:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    finally:
        process.kill()
    assert list((tmp_path / "made").iterdir()) == []


@pytest.mark.parametrize(("command", "output"), [("serve", NO_READER), ("up", ">/dev/full"), ("gateway", NO_READER)])
def test_a_server_whose_start_nobody_can_read_ends_with_one_line(
    tmp_path: Path, model: Path, command: str, output: str
) -> None:
    kept = f"--data-dir {tmp_path / 'data'}"
    words = {
        "serve": f"{model} --port {free_port()} --kv-cache-memory-bytes 8M",
        "up": f"{model} --port {free_port()} --kv-cache-memory-bytes 8M --gateway-port {free_port()} {kept}",
        "gateway": f"--port {free_port()} {kept}",
    }
    (tmp_path / "made").mkdir()
    result = subprocess.run(
        ["bash", "-c", f"{HEADRACE} {command} {words[command]} {output}"],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=_limit_memory,
        env=os.environ | {"TMPDIR": str(tmp_path / "made")},
    )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert result.stderr.count("standard output cannot be written") == 1
    assert list((tmp_path / "made").iterdir()) == []


def _limited_and_interruptible() -> None:
    _limit_memory()
    # Tests that run in the background of a script inherit that it is ignored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_at_any_moment_of_the_start_ends_it_without_a_trace(tmp_path: Path, model: Path) -> None:
    code = "import sys; from headrace.cli.main import main; print('begun', flush=True); sys.exit(main(sys.argv[1:]))"
    words = ["serve", str(model), "--port", str(free_port()), "--kv-cache-memory-bytes", "8M"]
    for delay_s in (0.01, 0.04, 0.08, 0.15, 0.25, 0.4):
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_limited_and_interruptible,
            env=os.environ | {"TMPDIR": str(tmp_path)},
        )
        try:
            assert process.stdout is not None and process.stdout.readline() == "begun\n"
            time.sleep(delay_s)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=10)
        finally:
            process.kill()
        assert process.returncode in (-signal.SIGINT, 0, 130), (delay_s, process.returncode, said)
        assert "Traceback" not in said and "KeyboardInterrupt" not in said, (delay_s, said)
        assert list(tmp_path.iterdir()) == [], delay_s
