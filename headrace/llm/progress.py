"""How far a batch is: a bar on a terminal, a line every ten seconds anywhere else, both on standard error."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_EVERY_S = 10.0


class BatchProgress:
    """A context manager. `total` None: nobody knows how many prompts there are."""

    def __init__(self, total: int | None, *, shown: bool, out: TextIO | None = None) -> None:
        self._total = total
        self._shown = shown
        self._out = out if out is not None else sys.stderr
        self._started = self._told = time.monotonic()
        self._prompts = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> BatchProgress:
        if self._shown and self._out.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("Prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("{task.description}"), console=Console(file=self._out))
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._shown and self._told > self._started and kind is None:
            print(self.line(), file=self._out, flush=True)

    def add_prompt(self, prompt_tokens: int) -> None:
        """A prompt is done."""
        self._prompts += 1
        self._prompt_tokens += prompt_tokens

    def add_tokens(self, count: int) -> None:
        """A step generated so many."""
        self._generated_tokens += count
        if not self._shown:
            return
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._prompts, description=self._speed())
        elif time.monotonic() - self._told >= LINE_EVERY_S:
            self._told = time.monotonic()
            print(self.line(), file=self._out, flush=True)

    def line(self) -> str:
        """`12 of 100 prompts, 431 tokens/s in, 87 tokens/s out`"""
        of = "" if self._total is None else f" of {self._total:,}"
        return f"{self._prompts:,}{of} prompts, {self._speed()}"

    def _speed(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-3)
        return f"{self._prompt_tokens / seconds:,.0f} tokens/s in, {self._generated_tokens / seconds:,.0f} tokens/s out"
