"""A forward is recorded once and replayed: the buffers it shares, the rows it grows to, and what it keeps alive."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from headrace.kernels.native import NativeKernels, library, variants
from headrace.kernels.native.program import Program, Recording
from headrace.kernels.ops import Batch, Float32
from headrace.kernels.weight import Weight


def random(*shape: int, seed: int = 0) -> Float32:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def rows_batch(rows: int, sample_rows: list[int]) -> Batch:
    at = np.arange(rows, dtype=np.int32)
    return Batch(
        token_ids=at,
        positions=np.zeros(rows, np.int32),
        slot_mapping=at[None],
        query_start=np.arange(rows + 1, dtype=np.int32),
        seq_lens=np.ones(rows, np.int32),
        block_tables=np.zeros((1, rows, 1), np.int32),
        sample_rows=np.array(sample_rows, np.int32),
    )


def test_a_buffer_that_is_not_needed_any_more_lends_its_memory() -> None:
    kernels = NativeKernels()
    recording = Recording()
    x = first = recording.input(8)
    for _ in range(20):
        (x,) = recording.append("add", [x, first], [8], n=[8])
    program = Program(kernels._device.pointer, recording, x)
    values = random(3, 8)
    np.testing.assert_allclose(program(rows_batch(3, []), None, [values]), 21 * values, rtol=1e-6)
    assert len(program._arrays) == 3, "the input, what is read and what is written"


def test_an_output_is_never_written_where_an_input_of_its_operation_lies() -> None:
    kernels = NativeKernels()
    wide = random(5, 24)

    def forward(batch: object, x: object) -> object:
        a, b, c = kernels.split(x, (8, 8, 8))
        total = kernels.add(a, b)
        for _ in range(4):
            total = kernels.add(kernels.add(total, c), total)
        return total

    result = kernels.evaluate(forward, [wide])
    expected = wide[:, :8] + wide[:, 8:16]
    for _ in range(4):
        expected = expected + wide[:, 16:] + expected
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_more_rows_than_ever_before_find_room_and_fewer_give_the_same_bits() -> None:
    kernels = NativeKernels(threads=2)
    table = kernels.prepare_embedding(Weight((700, 40), random(700, 40)))
    matrix = kernels.prepare_weight(Weight((33, 40), random(33, 40, seed=1)))
    step = kernels.capture(
        lambda batch: kernels.sample_rows(kernels.linear(kernels.embedding(table, batch), matrix, None), batch)
    )
    kernels._cache = type("NoCache", (), {"pointer": None})()  # type: ignore[assignment]
    expected = random(700, 40) @ random(33, 40, seed=1).T
    for rows in (1, 40, 3, 700, 2):
        wanted = [0, rows - 1]
        result = step(rows_batch(rows, wanted)).copy()
        np.testing.assert_allclose(result, expected[wanted], atol=1e-4)
        alone = [step(rows_batch(row + 1, [row])).copy() for row in wanted]
        np.testing.assert_array_equal(result, np.concatenate(alone))
    assert step(rows_batch(4, [])).shape == (0, 33)


def test_a_captured_forward_keeps_its_weights() -> None:
    kernels = NativeKernels()
    table = kernels.prepare_embedding(Weight((9, 16), random(9, 16)))
    step = kernels.capture(lambda batch, table=table: kernels.embedding(table, batch))
    kernels._cache = type("NoCache", (), {"pointer": None})()  # type: ignore[assignment]
    del table
    gc.collect()
    np.testing.assert_array_equal(step(rows_batch(9, [])), random(9, 16))


def test_an_operation_outside_of_a_recording_is_a_mistake_that_is_told() -> None:
    kernels = NativeKernels()
    with pytest.raises(RuntimeError, match="from a forward given to `capture`"):
        kernels.add(Recording().buffer(3), Recording().buffer(3))
    table = kernels.prepare_embedding(Weight((2, 16), random(2, 16)))

    def attend(batch: object) -> object:
        x = kernels.embedding(table, batch)
        return kernels.attention(x, x, x, group=0, layer=0, num_heads=1, num_kv_heads=1, scale=1.0, batch=batch)

    step = kernels.capture(attend)
    with pytest.raises(RuntimeError, match="call allocate_kv_cache before the first step"):
        step(rows_batch(1, []))


def test_every_variant_of_this_cpu_is_there_and_others_are_refused_by_name() -> None:
    assert variants()[-1] == "portable"
    for variant in variants():
        assert NativeKernels(variant=variant).variant == variant
    with pytest.raises(ValueError, match=r"no variant sse9 .* it has .*portable"):
        NativeKernels(variant="sse9")


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ABI_VERSION", library.ABI_VERSION + 1)
    library.load.cache_clear()
    try:
        with pytest.raises(library.LibraryMissing, match="of another version of headrace"):
            library.load()
    finally:
        library.load.cache_clear()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_dense_weights_are_rounded_to_the_compute_dtype_and_kept_where_it_is_exact(dtype: str, stored: str) -> None:
    values = random(48, 20)
    if stored == "float16":
        held = values.astype(np.float16)
        exact = held.astype(np.float32)
    elif stored == "bfloat16":
        held = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        exact = (held.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        held = exact = values
    kernels = NativeKernels(dtype)
    matrix = kernels.prepare_weight(Weight((48, 20), held))
    result = kernels.evaluate(lambda batch, x: kernels.linear(x, matrix, None), [np.eye(20, dtype=np.float32)]).T
    if dtype == "float16":
        exact = exact.astype(np.float16).astype(np.float32)
    elif dtype == "bfloat16":
        bits = exact.view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        exact = (rounded & np.uint32(0xFFFF0000)).view(np.float32)
    np.testing.assert_array_equal(result, exact)
