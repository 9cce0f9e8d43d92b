"""A core is started before anybody knows what it is for: it serves whoever asks first, or it ends unseen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from headrace.cli import main as cli
from headrace.server.core_start import EarlyCore


def descendants_named_core() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "headrace.core" in child.cmdline()]


def test_the_first_core_asked_for_is_the_one_that_waits_and_the_next_is_another() -> None:
    with EarlyCore() as early:
        (waiting,) = descendants_named_core()
        first, second = early.start(), early.start()
        assert first.process.pid == waiting.pid
        assert second.process.pid != waiting.pid
        assert len(descendants_named_core()) == 2
    assert first.process.poll() is None  # it belongs to who took it
    first.end()
    second.end()
    assert descendants_named_core() == []


def test_a_core_that_nobody_wanted_is_gone_at_the_end() -> None:
    with EarlyCore():
        (waiting,) = descendants_named_core()
    assert not waiting.is_running()
    assert descendants_named_core() == []


def test_a_core_whose_server_went_without_a_word_ends_by_itself() -> None:
    with EarlyCore() as early:
        started = early.start()
        started.socket.close()
        assert started.process.wait(20) == 1


@pytest.mark.parametrize("command", ["serve", "up"])
@pytest.mark.parametrize(
    "flags", [["--no-such-flag"], ["--port", "many"], ["/no/such/model"], ["--config", "/no/file"]]
)
def test_a_refused_command_says_its_mistakes_and_nothing_else(command: str, flags: list[str], tmp_path: Path) -> None:
    words = [sys.executable, "-m", "headrace", command, *flags]
    run = subprocess.run(words, capture_output=True, text=True, timeout=60, env={"TMPDIR": str(tmp_path)}, check=False)
    assert run.returncode == 2
    assert all(line.startswith(f"headrace {command}: ") for line in run.stderr.splitlines())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["--help"], ["--dry-run"], ["-h"], ["--dry_run=true"]])
def test_no_core_is_started_where_nothing_is_served(words: list[str]) -> None:
    with cli._core_at_once(words):
        assert descendants_named_core() == []


def test_no_core_is_started_where_the_engine_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    with cli._core_at_once([]):
        assert descendants_named_core() == []
