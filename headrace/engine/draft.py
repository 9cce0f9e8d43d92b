"""A step's plan in the making, and how large a piece of a prompt fits into it.

While decodes run, prefill takes what the step-time target leaves, in whole tiles, but never nothing.
"""

from __future__ import annotations

import msgspec

from headrace.engine.admission import SchedulerSettings
from headrace.engine.plan import NewSequence, SequenceStep
from headrace.engine.step_time import TILE_ROWS, StepLoad, StepTimeModel

MIN_CHUNK_TOKENS = 16
"""What prefill gets of a step when the target leaves it nothing: this and what fills the tile, or half of it."""

STRETCHES = ((0.2, 1.5), (0.5, 2.0))
"""The part of a step that decodes may take, and how many times the target the step may last to keep them to it."""

FIRST_LOADS = 16
"""Blocks that a step fetches while answers stream, before it is known how long that takes."""


class Draft(msgspec.Struct):
    """A plan in the making."""

    room: int
    """Tokens left of the budget."""
    target_s: float
    """What the step may take while decodes ride in it."""
    scored_room: int
    """Rows left for log-probabilities of prompt tokens."""
    serves_background: bool = True
    """What nobody waits for may be in the step."""
    rows: int = 0
    pairs: int = 0
    """Of rows and the keys they see, as step_time.py has it."""
    num_decodes: int = 0
    num_prefills: int = 0
    preempted: bool = False
    num_loads: int = 0
    """Blocks that the step fetches from the host tier."""
    short_of_blocks: bool = False
    """A running sequence with more to compute got no block for it."""
    new: list[NewSequence] = []
    block_copies: list[tuple[int, int]] = []
    steps: list[SequenceStep] = []

    @property
    def load(self) -> StepLoad:
        return StepLoad(self.rows, self.pairs)


class Chunks:
    """Sizes of prefill chunks, by the settings and by what steps have been seen to take."""

    def __init__(self, settings: SchedulerSettings, step_time: StepTimeModel) -> None:
        self._settings = settings
        self._step_time = step_time

    def target_s(self, draft: Draft, num_starting: int) -> float:
        """The step-time target, stretched by the part of all requests that wait for their first token, and where the
        decodes alone need much of it (STRETCHES), so that prefill gets its time. Otherwise a slow device would start
        requests one by one, and run nearly empty while others queue."""
        target_s = self._settings.step_time_target_s
        decodes_s = self._step_time.predict_s(draft.load) if draft.num_decodes else None
        if decodes_s is None:
            return target_s
        shared_s = target_s * (1 + num_starting / (num_starting + draft.num_decodes))
        return max(shared_s, *(min(decodes_s / part, times * target_s) for part, times in STRETCHES))

    def size(self, draft: Draft, remaining: int, context: int) -> int:
        """How many of `remaining` tokens, after `context` computed ones, this step can take; 0 = none now."""
        settings = self._settings
        if settings.enable_chunked_prefill:
            wanted = min(remaining, draft.room)
        else:
            # Whole or not at all. Only what was preempted can be longer than a step; it then takes full steps.
            wanted = min(remaining, settings.max_num_batched_tokens)
            if wanted > draft.room:
                return 0
        if draft.num_decodes == 0:
            return wanted
        load, first = draft.load, draft.num_prefills == 0
        in_time = self._step_time.largest_chunk(load, context, wanted, draft.target_s)
        if in_time == wanted:
            return wanted
        if not settings.enable_chunked_prefill:
            return wanted if first else 0
        whole_tiles = max(in_time - (load.rows + in_time) % TILE_ROWS, 0)
        if first:
            least = MIN_CHUNK_TOKENS + -(load.rows + MIN_CHUNK_TOKENS) % TILE_ROWS
            tolerable = max(self._tolerable_chunk(load, context, least), MIN_CHUNK_TOKENS // 2)
            return min(max(whole_tiles, tolerable), wanted)
        fills_tile = wanted <= -load.rows % TILE_ROWS and self._tolerable_chunk(load, context, wanted) == wanted
        return wanted if fills_tile else whole_tiles

    def most_loads(self, draft: Draft, load_s: float) -> int:
        """Blocks that the step may still fetch, each in `load_s`: any number, but while answers stream for as long as
        the target says."""
        if draft.num_decodes == 0 or not self._settings.enable_chunked_prefill:
            return self._settings.num_host_blocks
        most = FIRST_LOADS if load_s == 0.0 else max(1, int(self._settings.step_time_target_s / load_s))
        return max(0, most - draft.num_loads)

    def _tolerable_chunk(self, load: StepLoad, context: int, limit: int) -> int:
        """As many tokens up to `limit` as keep the step within twice the target, or half again what its rows cost:
        fewer after a long context, whose attention is dearer than the rows."""
        rows_s = self._step_time.predict_s(StepLoad(load.rows + limit, load.pairs))
        if rows_s is None:
            return limit
        most_s = max(2 * self._settings.step_time_target_s, 1.5 * rows_s)
        return self._step_time.largest_chunk(load, context, limit, most_s, untried=True)
