"""How long a step will take: learnt from the steps themselves, used to size the prefill share of a step.

    seconds = a + b * rows + c * pairs         a, b, c >= 0

`rows` are the step's tokens, padded to whole tiles (a tile's cost does not depend on how full it is); `pairs`
are (query, key) pairs of attention. Observations are kept as running means in a small table, one cell for
each order of magnitude of rows and of context, and the line is fitted over cells. A thousand decode steps
then fill one cell and cannot wash out what was learnt from prefill, which plain recursive least squares does.

No line is right everywhere (a row costs more in a small step than in a large one) or at once when the device slows
down, so a prediction is moved by as much as the line is wrong about the cell of the newest step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from headrace.engine.plan import SequenceStep

TILE_ROWS = 8
MOST_UNREAD = 64
"""Steps noted and not learnt from."""
_NEWEST_SHARE = 0.25
_STALE_STEPS = 200.0
_PREFERENCE = (1e-3, 1e-6, 1e-3)
"""Ridge on (a, b, c), in relative terms: while steps of one kind only have been seen, their time is put down to rows,
so a larger step is expected to take proportionally longer."""


def chunk_pairs(num_tokens: int, context: int) -> int:
    """Of so many tokens after `context` earlier ones."""
    return num_tokens * context + num_tokens * (num_tokens + 1) // 2


class StepLoad(NamedTuple):
    """The work in one step."""

    rows: int = 0
    pairs: int = 0

    def plus(self, num_tokens: int, context: int) -> StepLoad:
        return StepLoad(self.rows + num_tokens, self.pairs + chunk_pairs(num_tokens, context))

    @staticmethod
    def of(steps: Iterable[SequenceStep]) -> StepLoad:
        load = StepLoad()
        for step in steps:
            load = load.plus(step.num_tokens, step.start)
        return load

    @property
    def padded_rows(self) -> int:
        return -(-self.rows // TILE_ROWS) * TILE_ROWS


@dataclass(slots=True)
class _Cell:
    rows: float
    pairs: float
    seconds: float
    count: int
    last_step: int


class StepTimeModel:
    """Online estimate of step time. Steps are noted, and learnt from when a prediction is wanted."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._num_steps = 0
        self._most_rows = 0
        self._most_pairs = 0
        self._newest = _Cell(0.0, 0.0, 0.0, 0, 0)
        self._fit: tuple[float, float, float] | None = None
        self._unread: list[tuple[tuple[int, int], float]] = []

    def observe(self, load: tuple[int, int], seconds: float) -> None:
        """Take note of a finished step of so many rows and pairs. One that took more than twice its cell's mean counts
        as twice: a hiccup moves the estimate by a quarter, a lasting change is followed within about ten steps."""
        self._unread.append((load, seconds))
        if len(self._unread) >= MOST_UNREAD:
            self._read()

    def _read(self) -> None:
        for (rows, pairs), seconds in self._unread:
            if rows > 0 and seconds > 0:
                self._learn(StepLoad(rows, pairs), seconds)
        self._unread.clear()

    def _learn(self, load: StepLoad, seconds: float) -> None:
        self._num_steps += 1
        self._most_rows = max(self._most_rows, load.padded_rows)
        self._most_pairs = max(self._most_pairs, load.pairs)
        self._fit = None
        at = (load.padded_rows.bit_length(), (load.pairs // load.rows).bit_length() // 2)
        cell = self._cells.get(at)
        if cell is None:
            self._newest = self._cells[at] = _Cell(load.padded_rows, load.pairs, seconds, 1, self._num_steps)
            return
        self._newest = cell
        cell.count += 1
        cell.last_step = self._num_steps
        share = max(1 / cell.count, _NEWEST_SHARE)
        cell.rows += share * (load.padded_rows - cell.rows)
        cell.pairs += share * (load.pairs - cell.pairs)
        cell.seconds += share * (min(seconds, 2 * cell.seconds) - cell.seconds)

    @property
    def coefficients(self) -> tuple[float, float, float] | None:
        """(a, b, c) in seconds, seconds per row and seconds per pair; None before the first step."""
        self._read()
        if self._fit is None and self._cells:
            self._fit = self._fitted()
        return self._fit

    def predict_s(self, load: StepLoad) -> float | None:
        fit = self.coefficients
        if fit is None:
            return None
        a, b, c = fit
        newest = self._newest
        seconds = a + b * load.padded_rows + c * load.pairs
        return seconds * newest.seconds / (a + b * newest.rows + c * newest.pairs)

    def compute_s(self, num_tokens: int) -> float:
        """What the first `num_tokens` of a sequence add to steps; infinite before anything was measured."""
        fit = self.coefficients
        load = StepLoad().plus(num_tokens, 0)
        return math.inf if fit is None else fit[1] * load.rows + fit[2] * load.pairs

    def fits(self, load: StepLoad, target_s: float, untried: bool = False) -> bool:
        """Is a step of this load expected to stay within the target? Without `untried`, a load far beyond what was
        seen is not: more than twice the rows or four times the pairs (twice the chunk) of any step so far."""
        self._read()
        if not untried and (load.padded_rows > 2 * self._most_rows or load.pairs > 4 * self._most_pairs):
            return False
        predicted = self.predict_s(load)
        return predicted is not None and predicted <= target_s

    def largest_chunk(self, load: StepLoad, context: int, limit: int, target_s: float, untried: bool = False) -> int:
        """The most tokens, up to `limit`, that one sequence with `context` tokens done can add to `load` in time.

        Costs rise with the chunk, so the border is found by halving.
        """
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits(load.plus(middle, context), target_s, untried):
                low = middle
            else:
                high = middle - 1
        return low

    def _fitted(self) -> tuple[float, float, float]:
        """Least squares of relative errors, older cells weighing less; a negative coefficient is set to zero."""
        normal = [[0.0] * 3 for _ in range(3)]
        right = [0.0] * 3
        for cell in self._cells.values():
            weight = 1 / (1 + (self._num_steps - cell.last_step) / _STALE_STEPS)
            x = (1 / cell.seconds, cell.rows / cell.seconds, cell.pairs / cell.seconds)
            for i in range(3):
                right[i] += weight * x[i]
                for j in range(3):
                    normal[i][j] += weight * x[i] * x[j]
        for i in range(3):
            normal[i][i] *= 1 + _PREFERENCE[i]
        free = [0, 1, 2]
        while True:
            values = _solve([[normal[i][j] for j in free] for i in free], [right[i] for i in free])
            least = min(range(len(free)), key=values.__getitem__)
            if values[least] >= 0:
                solution = dict(zip(free, values, strict=True))
                return solution.get(0, 0.0), solution.get(1, 0.0), solution.get(2, 0.0)
            del free[least]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small positive definite system by elimination; both arguments are used up."""
    n = len(right)
    for i in range(n):
        for row in range(i + 1, n):
            factor = matrix[row][i] / matrix[i][i]
            right[row] -= factor * right[i]
            for column in range(i, n):
                matrix[row][column] -= factor * matrix[i][column]
    values = [0.0] * n
    for i in reversed(range(n)):
        values[i] = (right[i] - sum(matrix[i][j] * values[j] for j in range(i + 1, n))) / matrix[i][i]
    return values
