"""Steps that sequences go on with: the library's are those of its twin, and of the parts one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from headrace.kernels.draws import random_stream  # noqa: E402
from headrace.kernels.native import NativeKernels, variants  # noqa: E402
from headrace.kernels.native.decode import Captured  # noqa: E402
from headrace.kernels.ops import Batch, DecodeState, InvalidLogits, SamplingRows  # noqa: E402
from headrace.kernels.reference.decode import Eager, advance  # noqa: E402
from headrace.kernels.weight import Weight  # noqa: E402

VOCAB = 61
WIDTH = 16


def state_of(
    lengths: list[int], groups: int = 1, size: int = 4, temperature: float = 0.0, **asked: object
) -> DecodeState:
    """Sequences of these lengths, with blocks for ten more tokens in no order."""
    chance, count = np.random.default_rng(sum(lengths)), len(lengths)
    seq_lens = np.array(lengths, np.int32)
    held = -(-(seq_lens + 10) // size)
    tables = chance.integers(1, 500, (groups, count, held.max() + 2)).astype(np.int32)
    batch = Batch(
        token_ids=chance.integers(0, VOCAB, count).astype(np.int32),
        positions=seq_lens - 1,
        slot_mapping=np.zeros((groups, count), np.int32),
        query_start=np.arange(count + 1, dtype=np.int32),
        seq_lens=seq_lens,
        block_tables=tables,
        sample_rows=np.arange(count, dtype=np.int32),
    )
    streams = np.array([random_stream(7 * i - 3, i) for i in range(count)], np.uint64)
    rows = SamplingRows(np.full(count, temperature, np.float32), np.zeros(count, np.float32), **asked)  # type: ignore[arg-type]
    chosen = chance.integers(0, VOCAB, count).astype(np.int32)
    num_blocks = np.tile(held, (groups, 1)).astype(np.int32)
    return DecodeState(batch, num_blocks, size, chosen, rows, streams if temperature > 0 else None)


def copied(state: DecodeState) -> DecodeState:
    batch = Batch(**{name: getattr(state.batch, name).copy() for name in Batch.__slots__})
    assert state.rows is not None
    rows = replace(state.rows, uniforms=state.rows.uniforms.copy())
    return replace(state, batch=batch, rows=rows, chosen=state.chosen.copy())


def kernels_of(variant: str | None = None, threads: int = 1) -> tuple[NativeKernels, Captured]:
    """A model whose logits depend on the token and the position."""
    kernels = NativeKernels(variant=variant, threads=threads)
    kernels._cache = type("NoCache", (), {"pointer": None})()  # type: ignore[assignment]
    chance = np.random.default_rng(3)

    def weight(*shape: int) -> Weight:
        return Weight(shape, chance.standard_normal(shape, dtype=np.float32))

    tokens, places = kernels.prepare_embedding(weight(VOCAB, WIDTH)), kernels.prepare_embedding(weight(99, WIDTH))
    output = kernels.prepare_weight(weight(VOCAB, WIDTH))

    def forward(batch: object) -> object:
        x = kernels.add(kernels.embedding(tokens, batch), kernels.position_embedding(places, batch))
        return kernels.linear(kernels.sample_rows(x, batch), output, None)

    return kernels, kernels.capture(forward)


def assert_same(found: DecodeState, wanted: DecodeState) -> None:
    for name in Batch.__slots__:
        np.testing.assert_array_equal(getattr(found.batch, name), getattr(wanted.batch, name), name)
    assert found.rows is not None
    assert wanted.rows is not None
    assert found.rows.uniforms.tolist() == wanted.rows.uniforms.tolist()
    assert found.chosen.tolist() == wanted.chosen.tolist()


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("lengths", [[1], [3, 8, 17, 4], [5, 40, 4, 1, 16] * 7])
def test_a_batch_moves_on_as_its_twin_does(lengths: list[int], groups: int) -> None:
    _, captured = kernels_of()
    found = state_of(lengths, groups, temperature=1.0)
    wanted = copied(found)
    decoder = captured.decoder(found)
    for step in range(10):
        found.chosen[:] = wanted.chosen[:] = (np.arange(len(lengths)) * 5 + step) % VOCAB
        decoder.advance()
        advance(wanted)
        assert_same(found, wanted)


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("temperature", "asked"),
    [(0.0, {}), (1.0, {}), (0.7, {"top_p": np.full(5, 0.9, np.float32), "top_k": np.array([0, 3, 0, 9, 1], np.int32)})],
)
def test_one_call_gives_what_its_parts_give(
    variant: str, threads: int, temperature: float, asked: dict[str, object]
) -> None:
    kernels, captured = kernels_of(variant, threads)
    found = state_of([3, 8, 17, 4, 1], temperature=temperature, **asked)
    wanted = copied(found)
    whole = captured.decoder(found)
    _, parts_forward = kernels_of(variant, threads)
    parts = Eager(parts_forward, kernels.sample).decoder(wanted)
    tokens = [(whole.step(), parts.step()) for _ in range(10)]
    assert all(one == other for one, other in tokens)
    assert len({str(one) for one, _ in tokens}) > 5, "tokens that change"
    assert_same(found, wanted)


def test_without_a_block_there_is_no_step() -> None:
    _, captured = kernels_of()
    for way in ("step", "advance", "twin"):
        state = state_of([3, 8])
        state.num_blocks[0, 1] = 2
        with pytest.raises(ValueError, match="without a block for its token"):
            advance(state) if way == "twin" else getattr(captured.decoder(state), way)()


def test_logits_that_are_no_numbers_are_told_by_row() -> None:
    kernels = NativeKernels()
    kernels._cache = type("NoCache", (), {"pointer": None})()  # type: ignore[assignment]
    values = np.ones((VOCAB, WIDTH), np.float32)
    values[7] = np.nan
    table = kernels.prepare_embedding(Weight(values.shape, values))
    captured = kernels.capture(lambda batch: kernels.sample_rows(kernels.embedding(table, batch), batch))
    state = state_of([2, 2, 2])
    state.chosen[:] = 1, 7, 2
    with pytest.raises(InvalidLogits) as error:
        captured.decoder(state).step()
    assert error.value.rows == (1,)
