"""What passes between policy and device: a Plan says what one step computes, a StepResult what came of it.

Both are plain values, so a step can be printed, compared in a test, recorded, or sent to another rank; structs, not
dataclasses, as those take ten times as long to make. The runtime keeps a table of the sequences it has been told of:
`new` adds rows, `steps` advances them, `dropped` removes them. A sequence that was preempted is dropped and later
comes back as new.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.protocol.ipc import SamplingParams, TokenLogprobs

NO_BLOCK = -1
"""In place of a block that no step will read: it lies before the window of its group of layers."""


class NewSequence(msgspec.Struct, frozen=True):
    """A sequence the runtime has not seen (or was told to drop).

    `token_ids` are all tokens known, of which the first `num_prompt_tokens` are the prompt; the rest were
    generated before a preemption. `index` is the sequence's place among the n of its request.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    index: int
    params: SamplingParams


class SequenceStep(msgspec.Struct, frozen=True, gc=False):
    """Compute tokens [start, start + num_tokens) of a sequence.

    `new_block_ids`, one tuple for each group of layers, are appended to the sequence's block tables before the step.
    With `samples` the logits of the last row choose the next token, which the runtime appends to its own row as
    well. The logits of the first `num_scored` rows give the log-probabilities of the prompt tokens that follow
    them; how many a step may have is bounded, because each takes a row of the vocabulary's width.
    """

    seq_id: int
    start: int
    num_tokens: int
    new_block_ids: tuple[tuple[int, ...], ...]
    samples: bool
    num_scored: int = 0
    loads: tuple[tuple[int, int], ...] = ()
    """(slot of the host tier, block of the sequence): what lies before `start` and is fetched, not computed."""


class Plan(msgspec.Struct, frozen=True):
    """One step. Order: `dropped` is forgotten, `saves` (block, slot of the host tier) are done, `new` is added, then
    come the loads of `steps` and `block_copies` (source, target), and every entry of `steps` is computed in one flat
    batch. A slot may be saved and loaded in one plan."""

    step: int
    dropped: tuple[int, ...]
    new: tuple[NewSequence, ...]
    block_copies: tuple[tuple[int, int], ...]
    steps: tuple[SequenceStep, ...]
    saves: tuple[tuple[int, int], ...] = ()
    continues: bool = False
    """With nothing but new blocks and `saves`, the sequences of the last plan, in its order, compute the tokens it gave
    them. The runtime need not find that out by itself."""

    @property
    def loads(self) -> list[tuple[int, int]]:
        return [pair for step in self.steps for pair in step.loads]

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.steps)


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """Tokens a sequence got from one step (one, until speculation exists), with log-probabilities if asked.

    `complete`: its grammar allows nothing after them. `dead_end` says why its grammar leaves no token at all; then
    there is none here either.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    complete: bool = False
    dead_end: str | None = None
    pooled: bytes | None = None
    """In place of tokens, what was asked for of the sequence's rows (`SamplingParams.pooling`)."""


class Scored(msgspec.Struct, frozen=True):
    """Log-probabilities of the prompt tokens behind a step's first `num_scored` rows, in order."""

    seq_id: int
    logprobs: tuple[TokenLogprobs, ...]


class StepResult(msgspec.Struct, frozen=True):
    """What a step computed, in `seconds`, and what moving blocks took besides.

    `sampled` and `scored` are in the order of the plan's steps. `lost` are sequences whose blocks could not be loaded:
    nothing was computed for them, and the runtime has dropped them. A save that fails is told of when somebody tries
    to load it.
    """

    step: int
    seconds: float
    sampled: tuple[Sampled, ...]
    scored: tuple[Scored, ...] = ()
    lost: tuple[int, ...] = ()
    saved_s: float = 0.0
    loaded_s: float = 0.0
    token_ids: Sequence[int] = ()
    """In place of `sampled`, of a plan that continues: a token for each step, where nothing else was asked for."""
