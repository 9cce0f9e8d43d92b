"""What people and logs see while a batch is answered."""

from __future__ import annotations

import io

import pytest

from headrace.cli import batch_progress
from headrace.cli.batch_progress import BatchProgress, line
from headrace.server.run_batch import Standing


def standing(num_answered: int, seconds: float, num_failed: int = 0, num_before: int = 0) -> Standing:
    return Standing(5000, num_answered, num_failed, num_before, 100, 2436, seconds)


def test_a_line_says_how_far_how_fast_and_how_long() -> None:
    assert line(standing(0, 0.0)) == "0 of 5,000 done"
    assert line(standing(1200, 3.0, 3)) == "1,200 of 5,000 done, 3 failed, 812 tokens/s, 0:09 left"
    assert line(standing(1200, 100.0, num_before=1150)).endswith(", 24 tokens/s, 2:06:40 left")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar_that_goes_away() -> None:
    out = Terminal()
    with BatchProgress(out) as progress:
        progress.show(standing(1200, 3.0))
        progress.show(standing(1300, 4.0))
    assert "1,300 of 5,000 done" in out.getvalue() and "\x1b[2K" in out.getvalue()


def test_a_log_has_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    with BatchProgress(out) as progress:
        for i in range(100):
            progress.show(standing(i, 1.0))
        assert out.getvalue() == ""
        monkeypatch.setattr(batch_progress, "LINE_EVERY_S", 0.0)
        progress.show(standing(1200, 3.0))
    assert out.getvalue() == "1,200 of 5,000 done, 812 tokens/s, 0:09 left\n"
