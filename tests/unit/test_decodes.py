"""A batch that goes on in place is the batch that would be built."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from headrace.engine.plan import NO_BLOCK, NewSequence, SequenceStep
from headrace.protocol.ipc import SamplingParams
from headrace.runtime.batch import build_batch
from headrace.runtime.choosing import ask
from headrace.runtime.decodes import SPARE_BLOCKS, Decodes
from headrace.runtime.table import SequenceTable

SIZE = 4


class Streams:
    """Sequences 0.. with prompts of the given lengths, which decode; blocks are handed out in no order."""

    def __init__(self, lengths: list[int], num_groups: int = 1, **params: object) -> None:
        self.table = SequenceTable(num_groups)
        self.free = list(np.random.default_rng(0).permutation(5000).tolist())
        self.lengths = list(lengths)
        asked = SamplingParams(**{"max_tokens": 9, "temperature": 0.0, **params})  # type: ignore[arg-type]
        for seq_id, length in enumerate(lengths):
            own = msgspec.structs.replace(asked, seed=seq_id)
            self.table.add(NewSequence(seq_id, tuple(range(length)), length, 0, own))
        self.rows = [self.table.row(seq_id) for seq_id in range(len(lengths))]

    def steps(self, ahead: int = 0) -> list[SequenceStep]:
        """The last token of each, in blocks for it and `ahead` more, which are in the table then."""
        steps = []
        for seq_id, (row, length) in enumerate(zip(self.rows, self.lengths, strict=True)):
            held = self.table.num_blocks[:, row]
            new = [
                [self.free.pop() for _ in range(held[g], -(-(length + ahead) // SIZE))]
                for g in range(len(self.table.blocks))
            ]
            self.table.append_blocks(row, new)
            steps.append(SequenceStep(seq_id, length - 1, 1, tuple(map(tuple, new)), True))
        return steps

    def built(self, steps: list[SequenceStep]):
        return build_batch(self.table, np.array(self.rows), steps, SIZE)

    def decodes(self, steps: list[SequenceStep]) -> Decodes:
        return Decodes(self.table, self.rows, steps, self.built(steps), SIZE)

    def take(self, step: int) -> None:
        """A token for each."""
        self.table.append_tokens(self.rows, [1000 * step + row for row in self.rows])
        self.lengths = [length + 1 for length in self.lengths]


@pytest.mark.parametrize(("lengths", "num_groups", "ahead"), [([1], 1, 0), ([3, 8, 17], 1, 0), ([5, 40, 4, 1], 2, 9)])
def test_a_batch_that_goes_on_is_the_batch_that_would_be_built(lengths: list[int], num_groups: int, ahead: int) -> None:
    streams = Streams(lengths, num_groups)
    decodes = streams.decodes(streams.steps(ahead))
    for step in range(SPARE_BLOCKS * SIZE - ahead - 1):
        streams.take(step)
        steps = streams.steps(ahead)
        assert decodes.advance(steps)
        wanted, found = streams.built(steps), decodes.batch
        for name in ("token_ids", "positions", "slot_mapping", "query_start", "seq_lens", "sample_rows"):
            assert getattr(found, name).tolist() == getattr(wanted, name).tolist(), name
        for place, length in enumerate(streams.lengths):
            held = -(-length // SIZE)
            assert found.block_tables[:, place, :held].tolist() == wanted.block_tables[:, place, :held].tolist()


def test_without_a_column_for_the_next_block_a_batch_is_built_afresh() -> None:
    streams = Streams([3])
    decodes = streams.decodes(streams.steps())
    went_on = 0
    for step in range(10 * SPARE_BLOCKS * SIZE):
        streams.take(step)
        if not decodes.advance(streams.steps()):
            break
        went_on += 1
    assert went_on == (SPARE_BLOCKS + 1) * SIZE - 3


def changed(place: int, **changes: object):
    def change(steps: list[SequenceStep]) -> list[SequenceStep]:
        return [*steps[:place], msgspec.structs.replace(steps[place], **changes), *steps[place + 1 :]]

    return change


@pytest.mark.parametrize(
    "other",
    [
        lambda steps: steps[:-1],
        lambda steps: [*steps, SequenceStep(9, 0, 1, ((),), True)],
        lambda steps: steps[::-1],
        changed(1, seq_id=7),
        changed(1, start=3),
        changed(2, num_tokens=2),
        changed(0, samples=False),
    ],
)
def test_anything_but_the_next_token_of_the_same_sequences_is_built_afresh(other) -> None:
    streams = Streams([6, 9, 2])
    decodes = streams.decodes(streams.steps())
    streams.take(0)
    assert not decodes.advance(other(streams.steps()))


@pytest.mark.parametrize("hole", [False, True])
def test_a_sequence_without_its_next_block_is_no_decode(hole: bool) -> None:
    streams = Streams([4])
    decodes = streams.decodes(streams.steps())
    streams.take(0)
    if hole:
        streams.table.append_blocks(streams.rows[0], ((NO_BLOCK,),))
    assert not decodes.advance([SequenceStep(0, 4, 1, ((),), True)])


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5, "top_p": 0.8},
        {"logprobs": 2},
        {"logit_bias": {3: 1.0}},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1, "temperature": 1.0},
    ],
)
def test_what_is_asked_for_again_is_what_would_be_asked(params: dict[str, object]) -> None:
    streams = Streams([6, 9], **params)
    steps = streams.steps()
    decodes = streams.decodes(steps)
    decodes.keep(ask(streams.table, list(zip(steps, streams.rows, strict=True)), (), 50))
    assert decodes.asked is not None
    for step in range(5):
        streams.take(step)
        steps = streams.steps()
        assert decodes.advance(steps)
        wanted = ask(streams.table, list(zip(steps, streams.rows, strict=True)), (), 50)
        assert decodes.asked.rows.uniforms.tolist() == wanted.rows.uniforms.tolist()
        assert decodes.asked.rows.temperature.tolist() == wanted.rows.temperature.tolist()
        assert repr(replace(decodes.asked.rows, uniforms=None)) == repr(replace(wanted.rows, uniforms=None))


@pytest.mark.parametrize(
    "params",
    [
        {"min_tokens": 3, "stop_token_ids": (1,)},
        {"bad_words": ((1, 2),)},
        {"allowed_token_ids": (1, 2)},
    ],
)
def test_what_depends_on_the_tokens_is_asked_anew(params: dict[str, object]) -> None:
    streams = Streams([6, 9], **params)
    steps = streams.steps()
    decodes = streams.decodes(steps)
    decodes.keep(ask(streams.table, list(zip(steps, streams.rows, strict=True)), (), 50))
    assert decodes.asked is None
