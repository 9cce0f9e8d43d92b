"""A batch that goes on in place is the batch that would be built, and asks what would be asked."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")

from headrace.engine.plan import NO_BLOCK, NewSequence, SequenceStep
from headrace.kernels.ops import Batch, DecodeState, SampledRows, SamplingRows
from headrace.kernels.reference.decode import Decoder
from headrace.protocol.ipc import SamplingParams
from headrace.runtime.batch import build_batch
from headrace.runtime.choosing import Asked, ask
from headrace.runtime.decodes import SPARE_BLOCKS, Decodes
from headrace.runtime.table import SequenceTable

SIZE = 4
VOCAB = 50


class Streams:
    """Sequences 0.. with prompts of the given lengths, which decode; blocks are handed out in no order."""

    def __init__(self, lengths: list[int], num_groups: int = 1, **params: object) -> None:
        self.table = SequenceTable(num_groups)
        self.free = list(np.random.default_rng(0).permutation(5000).tolist())
        self.lengths = list(lengths)
        self.held = [0] * len(lengths)
        asked = SamplingParams(**{"max_tokens": 9, "temperature": 0.0, **params})  # type: ignore[arg-type]
        for seq_id, length in enumerate(lengths):
            own = msgspec.structs.replace(asked, seed=seq_id)
            self.table.add(NewSequence(seq_id, tuple(range(length)), length, 0, own))
        self.rows = [self.table.row(seq_id) for seq_id in range(len(lengths))]
        self.device = Device(self)

    def steps(self, ahead: int = 0, *, told: bool = True) -> list[SequenceStep]:
        """The last token of each, in blocks for it and `ahead` more; the table is `told` of these."""
        steps = []
        for seq_id, (row, length) in enumerate(zip(self.rows, self.lengths, strict=True)):
            wanted = -(-(length + ahead) // SIZE)
            count, self.held[seq_id] = wanted - self.held[seq_id], wanted
            new = tuple(tuple(self.free.pop() for _ in range(count)) for _ in range(len(self.table.blocks)))
            if told:
                self.table.append_blocks(row, new)
            steps.append(SequenceStep(seq_id, length - 1, 1, new, True))
        return steps

    def built(self, steps: list[SequenceStep]):
        return build_batch(self.table, np.array(self.rows), steps, SIZE)

    def asked(self, steps: list[SequenceStep]) -> Asked:
        return ask(self.table, [(step.seq_id, row) for step, row in zip(steps, self.rows, strict=True)], (), VOCAB)

    def decodes(self) -> Decodes:
        """After a first step, with a token for each."""
        steps = self.steps()
        batch, asked = self.built(steps), self.asked(steps)
        tokens = self.took(self.next_tokens())
        return Decodes(self.table, batch, asked, np.array(tokens, np.int32), SIZE, self.device, VOCAB)

    def grow(self, decodes: Decodes, ahead: int = 0) -> list[SequenceStep]:
        steps = self.steps(ahead, told=False)
        assert decodes.grow(steps)
        return steps

    def next_tokens(self) -> list[int]:
        return [(7 * length + row) % VOCAB for row, length in zip(self.rows, self.lengths, strict=True)]

    def took(self, tokens: list[int], *, told: bool = True) -> list[int]:
        if told:
            self.table.append_tokens(self.rows, tokens)
        self.lengths = [length + 1 for length in self.lengths]
        return tokens


class Device:
    """Notes the batches it is given and what its sampler is asked; chooses what `streams` have next."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.batch: Batch | None = None
        self.rows: SamplingRows | None = None

    def __call__(self, batch: Batch) -> None:
        self.batch = batch

    def sample(self, logits: None, rows: SamplingRows) -> SampledRows:
        self.rows = rows
        return SampledRows(np.array(self.streams.next_tokens(), np.int32))

    def decoder(self, state: DecodeState) -> Decoder:
        return Decoder(state, self, self.sample)


def assert_goes_on_as_built(found: Batch | None, streams: Streams, steps: list[SequenceStep]) -> None:
    wanted = streams.built(steps)
    assert found is not None
    for name in ("token_ids", "positions", "slot_mapping", "query_start", "seq_lens", "sample_rows"):
        assert getattr(found, name).tolist() == getattr(wanted, name).tolist(), name
    for place, length in enumerate(streams.lengths):
        held = -(-length // SIZE)
        assert found.block_tables[:, place, :held].tolist() == wanted.block_tables[:, place, :held].tolist()


@pytest.mark.parametrize(("lengths", "num_groups", "ahead"), [([1], 1, 0), ([3, 8, 17], 1, 0), ([5, 40, 4, 1], 2, 9)])
def test_a_batch_that_goes_on_is_the_batch_that_would_be_built(lengths: list[int], num_groups: int, ahead: int) -> None:
    streams = Streams(lengths, num_groups)
    decodes = streams.decodes()
    assert decodes.plain
    for _ in range(SPARE_BLOCKS * SIZE - ahead - 2):
        steps = streams.grow(decodes, ahead)
        tokens = streams.next_tokens()
        before = streams.table.num_tokens.copy()
        assert decodes.step() == tokens
        assert streams.table.num_tokens.tolist() == before.tolist(), "the table learns of it at the end"
        decodes.leave()
        # What was computed came before these tokens.
        streams.table.num_tokens[streams.rows] -= 1
        assert_goes_on_as_built(streams.device.batch, streams, steps)
        streams.table.num_tokens[streams.rows] += 1
        streams.took(tokens, told=False)


def test_the_table_learns_of_all_tokens_when_a_batch_is_left() -> None:
    streams = Streams([3, 250])
    decodes = streams.decodes()
    taken = []
    for _ in range(20):
        streams.grow(decodes)
        taken.append(streams.took(decodes.step(), told=False))
    decodes.leave()
    decodes.leave()
    for place, (row, length) in enumerate(zip(streams.rows, [3, 250], strict=True)):
        assert streams.table.num_tokens[row] == length + 21
        assert streams.table.tokens[row, length + 1 : length + 21].tolist() == [tokens[place] for tokens in taken]
    streams.took(streams.next_tokens())


def test_without_a_column_for_the_next_block_a_batch_is_built_afresh() -> None:
    decodes = Streams([3]).decodes()
    assert decodes.grow([SequenceStep(0, 3, 1, (tuple(range(SPARE_BLOCKS)),), True)])
    assert not decodes.grow([SequenceStep(0, 4, 1, ((9,),), True)])


def test_what_is_no_block_makes_no_batch() -> None:
    streams = Streams([4])
    decodes = streams.decodes()
    assert not decodes.grow([SequenceStep(0, 4, 1, ((NO_BLOCK,),), True)])
    with pytest.raises(ValueError, match="without a block"):
        decodes.step()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5, "top_p": 0.8},
        {"logprobs": 2},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 9, "stop_token_ids": (1,)},
        {"bad_words": ((1, 2), (3,))},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1, "temperature": 1.0},
    ],
)
def test_what_is_asked_for_again_is_what_would_be_asked(params: dict[str, object]) -> None:
    streams = Streams([6, 9], **params)
    decodes = streams.decodes()
    for _ in range(5):
        wanted = streams.asked(streams.grow(decodes)).rows
        if decodes.plain:
            decodes.step()
            decodes.leave()
            streams.took([], told=False)
        else:
            asked, chosen = decodes.choose(streams.device)  # type: ignore[arg-type]
            assert asked.rows is streams.device.rows
            streams.took(chosen.token_ids.tolist())
        found = streams.device.rows
        assert found is not None
        assert found.uniforms.tolist() == wanted.uniforms.tolist()
        assert found.temperature.tolist() == wanted.temperature.tolist()
        assert repr(replace(found, uniforms=None)) == repr(replace(wanted, uniforms=None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "plain"),
    [
        ({"top_k": 5}, True),
        ({"logprobs": 0}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"min_tokens": 3, "stop_token_ids": (1,)}, False),
        ({"bad_words": ((1, 2),)}, False),
        ({"allowed_token_ids": (1, 2)}, False),
    ],
)
def test_one_call_does_for_what_stays_the_same_and_needs_no_report(params: dict[str, object], plain: bool) -> None:
    assert Streams([6, 9], **params).decodes().plain == plain
