"""Products with packed matrices against their formulas in float64, in every variant this CPU runs: every form of
weight, odd sizes, any number of rows, and the promise that a row's bits depend on nothing but the row."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from headrace.kernels.native import NativeKernels, variants
from headrace.kernels.native.kernels import Matrix
from headrace.kernels.ops import Batch
from headrace.kernels.weight import Weight

VARIANTS = variants()

DENSE_SHAPES = [(1, 1), (16, 64), (33, 35), (47, 256), (100, 515)]
GROUPED_SHAPES = [(16, 128), (33, 256), (50, 640)]
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 31, 140)
OFFSETS = ("none", "minus eight", "any")


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, as float32."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)


def dense(out: int, width: int, form: str) -> Weight:
    values = np.random.default_rng(out).standard_normal((out, width)).astype(np.float32) * np.float32(0.05)
    if form == "bfloat16":
        return Weight((out, width), (bfloat16(values).view(np.uint32) >> 16).astype(np.uint16))
    return Weight((out, width), values.astype(form))


def grouped(out: int, width: int, bits: int, group_size: int, offsets: str, half: bool = True) -> Weight:
    random = np.random.default_rng(out + group_size)
    scales = random.random((out, width // group_size)) * 0.02 + 0.001
    scales32 = scales.astype(np.float16 if half else np.float32).astype(np.float32)
    shifts = {
        "none": None,
        "minus eight": scales32 * np.float32(-8),
        "any": random.standard_normal(scales.shape).astype(np.float16 if half else np.float32).astype(np.float32),
    }[offsets]
    if bits == 4:
        values = random.integers(0, 256, (out, width // 2), dtype=np.uint8)
    else:
        values = random.integers(-128, 128, (out, width)).astype(np.int8)
    return Weight((out, width), values, bits, group_size, scales32, shifts)


def inputs(rows: int, width: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, width), dtype=np.float32)


def uneven(rows: int, width: int) -> np.ndarray:
    """Inputs of which some stand out, as they do in language models."""
    random = np.random.default_rng(rows + 1)
    return inputs(rows, width) * np.where(random.random((rows, width)) < 0.03, np.float32(50), np.float32(1))


def rounded(x: np.ndarray, group_size: int, codes: int) -> np.ndarray:
    """x [rows, width] as whole numbers up to `codes`, a scale a row and group, as float64."""
    groups = x.reshape(len(x), -1, group_size)
    largest = np.abs(groups).max(-1, keepdims=True)
    inverse = np.divide(np.float32(codes), largest, out=np.zeros_like(largest), where=largest > 0)
    whole = np.rint(groups * inverse).astype(np.float64)
    return (whole * (largest / np.float32(codes))).reshape(x.shape)


def rounded_but_for_singles(x: np.ndarray, group_size: int) -> np.ndarray:
    """x in 8 bits, but that an input more than 2.5 times the next largest of its group stays as it is."""
    groups = x.reshape(len(x), -1, group_size)
    sizes = np.abs(groups)
    largest, following = np.sort(sizes, -1)[..., -1:], np.sort(sizes, -1)[..., -2:-1]
    single = (following < np.float32(0.4) * largest) & (sizes == largest)
    others = rounded(np.where(single, 0, groups).reshape(x.shape), group_size, 127)
    return np.where(single.reshape(x.shape), x, others)


def seen(x: np.ndarray, group_size: int, bits: int, variant: str) -> np.ndarray:
    """What products with weights of so many bits make of their inputs."""
    if bits == 8 and variant != "avx512_bf16":
        return rounded(x, group_size, 4095)
    return rounded_but_for_singles(x, group_size)


def product(kernels: NativeKernels, x: np.ndarray, matrix: Matrix, bias: np.ndarray | None = None) -> np.ndarray:
    return kernels.evaluate(lambda _, rows: kernels.linear(rows, matrix, bias), [x])


def stored(kernels: NativeKernels, matrix: Matrix) -> np.ndarray:
    """Every row of the packed matrix, as the embedding gives it."""
    out = matrix.shape[0]
    tokens, zeros = np.arange(out, dtype=np.int32), np.zeros(out, np.int32)
    batch = Batch(
        tokens,
        zeros,
        zeros[None],
        np.arange(out + 1, dtype=np.int32),
        zeros + 1,
        np.zeros((1, out, 1), np.int32),
        tokens,
    )
    return kernels.evaluate(lambda b: kernels.embedding(matrix, b), batch=batch)


def assert_is_product(got: np.ndarray, x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> None:
    """Within what the order of float32 additions can do."""
    exact = x.astype(np.float64) @ weight.T.astype(np.float64) + bias
    size = np.abs(x).astype(np.float64) @ np.abs(weight.T).astype(np.float64) + np.abs(bias)
    assert np.max(np.abs(got - exact) / size) < 2e-6


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("form", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", DENSE_SHAPES)
def test_dense_products_are_exact_but_for_the_additions(variant: str, form: str, shape: tuple[int, int]) -> None:
    kernels = NativeKernels("float32", variant=variant)
    weight = dense(*shape, form)
    matrix, bias = kernels._pack(weight, "float"), inputs(1, shape[0])[0]
    np.testing.assert_array_equal(stored(kernels, matrix), weight.to_float32())
    for rows in (1, 5, 40):
        x = inputs(rows, shape[1])
        assert_is_product(product(kernels, x, matrix, bias), x, weight.to_float32(), bias)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", DENSE_SHAPES)
def test_bfloat16_products_hold_rounded_weights(variant: str, shape: tuple[int, int]) -> None:
    kernels = NativeKernels("bfloat16", variant=variant)
    for form in ("float32", "bfloat16"):
        weight = dense(*shape, form)
        matrix, bias = kernels.prepare_weight(weight), inputs(1, shape[0])[0]
        rounded = bfloat16(weight.to_float32())
        np.testing.assert_array_equal(stored(kernels, matrix), rounded)
        for rows in (1, 5, 40):
            x = inputs(rows, shape[1])
            seen = bfloat16(x) if variant == "avx512_bf16" else x
            assert_is_product(product(kernels, x, matrix, bias), seen, rounded, bias)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", GROUPED_SHAPES)
def test_groups_are_multiplied_exactly_or_with_inputs_of_eight_bits(
    variant: str, bits: int, shape: tuple[int, int]
) -> None:
    exact, rounding = NativeKernels("float32", variant=variant), NativeKernels("bfloat16", variant=variant)
    bias, x = inputs(1, shape[0])[0], uneven(9, shape[1])
    for group_size, offsets, half in itertools.product((16, 32, 64, 128), OFFSETS, (True, False)):
        weight = grouped(*shape, bits, group_size, offsets, half)
        for kernels, taken in ((exact, x), (rounding, seen(x, group_size, bits, variant))):
            matrix = kernels.prepare_weight(weight)
            np.testing.assert_array_equal(stored(kernels, matrix), weight.to_float32())
            assert_is_product(product(kernels, x, matrix, bias), taken, weight.to_float32(), bias)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("place", [0, 1, 5, 14, 15, 16, 31])
def test_an_input_that_stands_out_does_not_cost_its_group_its_precision(variant: str, bits: int, place: int) -> None:
    kernels = NativeKernels("bfloat16", variant=variant)
    weight = grouped(40, 64, bits, 32, "any")
    matrix, x = kernels.prepare_weight(weight), inputs(6, 64)
    x[:, place] = np.array([300, -300, 1e4, -1e30, 1e-20, 0])
    x[5, :32] = 0
    x[5, place] = -1e-25
    assert_is_product(product(kernels, x, matrix), seen(x, 32, bits, variant), weight.to_float32(), np.zeros(40))
    exact = x[:2] @ weight.to_float32().T
    error = np.abs(product(kernels, x, matrix)[:2] - exact).max()
    assert error < 0.1 * np.abs(rounded(x[:2], 32, 127) @ weight.to_float32().T - exact).max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_offsets_and_halves_that_need_not_be_held_take_no_memory(variant: str) -> None:
    kernels = NativeKernels("bfloat16", variant=variant)

    def held(offsets: str, half: bool) -> int:
        return kernels.prepare_weight(grouped(64, 256, 4, 32, offsets, half)).num_bytes

    values, numbers = 64 * 256 // 2, 64 * 256 // 32
    assert held("none", True) == held("minus eight", True) == values + 2 * numbers
    assert held("any", True) == values + 4 * numbers
    assert held("any", False) == values + 8 * numbers


CASES = {
    "float32": lambda: ("float32", dense(50, 700, "float32"), "float"),
    "bfloat16": lambda: ("bfloat16", dense(50, 515, "bfloat16"), "bfloat16"),
    "4 bits, exact": lambda: ("float32", grouped(50, 640, 4, 32, "any"), "float"),
    "4 bits": lambda: ("bfloat16", grouped(50, 640, 4, 32, "minus eight"), "int8"),
    "4 bits in long groups": lambda: ("bfloat16", grouped(50, 640, 4, 128, "any"), "int8"),
    "8 bits": lambda: ("bfloat16", grouped(50, 640, 8, 16, "none"), "int8"),
    "8 bits in long groups": lambda: ("bfloat16", grouped(50, 640, 8, 128, "any"), "int8"),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES)
def test_a_row_has_the_same_bits_alone_in_any_batch_and_on_any_threads(variant: str, case: str) -> None:
    dtype, weight, scheme = CASES[case]()
    x, bias = uneven(140, weight.shape[1]), inputs(1, weight.shape[0])[0]
    one = NativeKernels(dtype, variant=variant)
    matrix = one._pack(weight, scheme)
    whole = product(one, x, matrix, bias)
    for threads in (1, 2, 3):
        kernels = one if threads == 1 else NativeKernels(dtype, threads, variant=variant)
        for rows in ROWS:
            first = (rows * 37) % (141 - rows)
            part = product(kernels, np.ascontiguousarray(x[first : first + rows]), matrix, bias)
            np.testing.assert_array_equal(part, whole[first : first + rows])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES)
def test_what_is_not_a_number_stays_in_its_row(variant: str, case: str) -> None:
    dtype, weight, scheme = CASES[case]()
    kernels = NativeKernels(dtype, variant=variant)
    matrix, x = kernels._pack(weight, scheme), inputs(9, weight.shape[1])
    clean = product(kernels, x, matrix)
    x[3, 100], x[5, 0] = np.nan, np.inf
    broken = product(kernels, x, matrix)
    assert np.isnan(broken[3]).all()
    assert not np.isfinite(broken[5]).any()
    others = [0, 1, 2, 4, 6, 7, 8]
    np.testing.assert_array_equal(broken[others], clean[others])


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_zeros_and_weights_of_zeros_give_zeros(variant: str) -> None:
    kernels = NativeKernels("float32", variant=variant)
    for bits in (4, 8):
        matrix = kernels._pack(grouped(20, 64, bits, 32, "any"), "int8")
        assert not product(kernels, np.zeros((3, 64), np.float32), matrix).any()
    nothing = Weight((20, 64), np.zeros((20, 64), np.int8), 8, 32, np.zeros((20, 2), np.float32))
    assert not product(kernels, inputs(3, 64), kernels._pack(nothing, "int8")).any()
