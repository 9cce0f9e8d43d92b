"""How a batch gets on: a bar for people, now and then a line for logs."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from headrace.server.run_batch import Standing

LINE_EVERY_S = 10.0


class BatchProgress:
    """Shows standings on `out` while it is open. The time left is as much for each request as so far."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._shown_at = time.monotonic()
        self._bar = _Bar(out) if out.isatty() else None

    def __enter__(self) -> BatchProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, standing: Standing) -> None:
        if self._bar is not None:
            self._bar.show(standing)
        elif time.monotonic() - self._shown_at >= LINE_EVERY_S:
            self._shown_at = time.monotonic()
            print(line(standing), file=self._out, flush=True)


class _Bar:
    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (BarColumn(bar_width=20), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=Console(file=out, highlight=False), transient=True)
        self._task = self._progress.add_task("", total=None)
        self._is_shown = False

    def show(self, standing: Standing) -> None:
        if not self._is_shown:
            self._progress.start()  # not before: while the model loads, that is shown
            self._is_shown = True
        self._progress.update(
            self._task, completed=standing.num_answered, total=standing.num_requests, description=line(standing)
        )

    def close(self) -> None:
        if self._is_shown:
            self._progress.stop()


def line(standing: Standing) -> str:
    """`1,200 of 5,000 done, 3 failed, 812 tokens/s, 1:02:05 left`"""
    parts = [f"{standing.num_answered:,} of {standing.num_requests:,} done"]
    if standing.num_failed:
        parts.append(f"{standing.num_failed:,} failed")
    if standing.seconds > 0:
        num_tokens = standing.generated_tokens or standing.prompt_tokens  # vectors and scores generate none
        parts.append(f"{num_tokens / standing.seconds:,.0f} tokens/s")
    now = standing.num_answered - standing.num_before
    if now > 0:
        left_s = int(standing.seconds / now * (standing.num_requests - standing.num_answered))
        hours, minutes, seconds = left_s // 3600, left_s // 60 % 60, left_s % 60
        parts.append(f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left")
    return ", ".join(parts)
