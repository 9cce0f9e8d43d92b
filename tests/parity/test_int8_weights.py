"""--quantization int8: what it costs in quality, that both kernels mean the same by it, and what stays as it is."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from headrace.config.model_files import open_model  # noqa: E402
from headrace.config.settings import EngineSettings  # noqa: E402
from headrace.core import EngineCore  # noqa: E402
from headrace.kernels.int8_weights import to_int8  # noqa: E402
from headrace.kernels.native import NativeKernels, variants  # noqa: E402
from headrace.kernels.reference import ReferenceKernels  # noqa: E402
from headrace.kernels.weight import Weight  # noqa: E402
from headrace.text.tokenizer import Tokenizer  # noqa: E402
from tests.engine_runs import request, run, tokens  # noqa: E402
from tests.small_models import write_bundled_bfloat16, write_random_model  # noqa: E402

pytestmark = pytest.mark.timeout(600)
TEXT = Path(__file__).parents[1] / "data/text/alice.txt"
PIECE = 500
"""Tokens that are scored together."""


@pytest.fixture(scope="module")
def bfloat16_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundled_bfloat16(tmp_path_factory.mktemp("bfloat16"))


def engine(model: Path, **changes: object) -> EngineCore:
    settings = {
        "model": str(model), "device": "cpu", "kv_cache_memory_bytes": 64 << 20, "max_model_len": PIECE + 16,
        "threads": 2, "max_num_seqs": 8,
    } | changes  # fmt: skip
    return EngineCore(EngineSettings(**settings))  # type: ignore[arg-type]


def perplexity(core: EngineCore, pieces: list[list[int]]) -> float:
    sequences = run(core, [request(str(i), p, max_tokens=1, prompt_logprobs=0) for i, p in enumerate(pieces)])
    logprobs = [position.logprob for s in sequences.values() for position in s.prompt_logprobs]
    assert len(logprobs) == sum(len(piece) - 1 for piece in pieces)
    return math.exp(-sum(logprobs) / len(logprobs))


def test_perplexity_hardly_changes(bfloat16_model: Path) -> None:
    token_ids = Tokenizer.load(open_model(bfloat16_model)).encode(TEXT.read_text(), False)[: 2 * PIECE]
    pieces = [token_ids[at : at + PIECE] for at in range(0, len(token_ids), PIECE)]
    assert len(pieces) == 2
    plain = engine(bfloat16_model, kernels="native")
    exact, plain_bytes = perplexity(plain, pieces), plain.info.weight_bytes
    del plain
    core = engine(bfloat16_model, kernels="native", quantization="int8")
    quantised = perplexity(core, pieces)
    assert 3 < exact < 30
    assert abs(quantised / exact - 1) < 0.005, (exact, quantised)
    assert core.info.weight_bytes < 0.8 * plain_bytes


@pytest.mark.parametrize(("rows", "width", "out"), [(2, 64, 48), (7, 32, 5), (40, 1504, 30)])
def test_both_kernels_multiply_the_same_whole_numbers(rows: int, width: int, out: int) -> None:
    random = np.random.default_rng(width)
    x = random.standard_normal((rows, width), dtype=np.float32)
    weight = Weight((out, width), random.standard_normal((out, width), dtype=np.float32))
    x[0] = 0
    weight.values[-1] = 0
    reference = ReferenceKernels(int8_weights=True)
    expected = reference.linear(torch.from_numpy(x), reference.prepare_weight(weight), None).numpy()
    error = np.abs(expected - x @ weight.values.T).max() / np.abs(expected).max()
    assert 0 < error < 0.02
    for variant in variants():
        kernels = NativeKernels(variant=variant, int8_weights=True)
        matrix = kernels.prepare_weight(weight)
        found = kernels.evaluate(lambda _, x: kernels.linear(x, matrix, None), [x])  # noqa: B023
        if variant == "avx512_bf16":  # inputs have 8 bits there
            assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()
        else:
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_native_kernels_quantise_to_the_same_bits(dtype: str) -> None:
    random = np.random.default_rng(3)
    x = random.standard_normal((37, 96), dtype=np.float32) * 10.0 ** random.integers(-6, 3, (37, 1), dtype=np.int32)
    x = x.astype(np.float32)
    x[0] = 0
    x[1, :32] = [127, *np.arange(31) - 15.5]  # halves between two codes
    x[2, 32:64] = 1e-9  # its scale is 0 as float16
    bfloat16 = (x.view(np.uint32) >> 16).astype(np.uint16)
    values = {"float32": x, "float16": x.astype(np.float16), "bfloat16": bfloat16}[dtype]
    expected = to_int8(Weight(x.shape, values))
    for variant in variants():
        for threads in (1, 3):
            found = NativeKernels(variant=variant, threads=threads)._to_int8(x.shape, [values[:16], values[16:]])
            np.testing.assert_array_equal(found.values, expected.values)
            np.testing.assert_array_equal(found.scales, expected.scales)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_no_number_spoils_its_group_and_no_other(broken: float) -> None:
    x = np.ones((3, 64), np.float32)
    x[1, 40] = broken
    for variant in variants():
        found = NativeKernels(variant=variant)._to_int8(x.shape, [x])
        assert np.isnan(found.scales).tolist() == [[False, False], [False, True], [False, False]]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("tied", [False, True])
def test_both_kernels_say_the_same_with_int8(tmp_path: Path, family: str, tied: bool) -> None:
    model = write_random_model(tmp_path, family, dtype="bfloat16", tie_word_embeddings=tied)  # type: ignore[arg-type]
    prompts = [[5, 6, 7, 8, 9, 10, 11], [40, 41]]
    answers = []
    for kernels in ("reference", "native"):
        core = engine(model, kernels=kernels, quantization="int8", dtype="float32", max_model_len=64)
        requests = [request(str(i), p, max_tokens=6, temperature=0.0, logprobs=0) for i, p in enumerate(prompts)]
        answers.append(run(core, requests))
    assert tokens(answers[0]) == tokens(answers[1])
    for key, sequence in answers[0].items():
        found = [position.logprob for position in answers[1][key].logprobs]
        np.testing.assert_allclose(found, [position.logprob for position in sequence.logprobs], atol=0.02)


@pytest.mark.parametrize("kernels_class", [ReferenceKernels, NativeKernels])
def test_what_is_wanted_exact_and_what_has_few_bits_already_is_not_quantised(kernels_class: type) -> None:
    random = np.random.default_rng(0)
    dense = Weight((32, 64), random.standard_normal((32, 64), dtype=np.float32))
    narrow = Weight((32, 24), dense.values[:, :24].copy())
    grouped = Weight((32, 64), random.integers(0, 255, (32, 32), np.uint8), 4, 32, np.ones((32, 2), np.float32))
    plain, int8 = kernels_class(), kernels_class(int8_weights=True)

    def size(kernels: object, weight: Weight, exact: bool) -> int:
        return kernels.prepare_weight(weight, exact=exact).num_bytes  # type: ignore[attr-defined,no-any-return]

    assert size(int8, dense, False) < 0.5 * size(plain, dense, False)
    assert size(int8, narrow, False) == size(plain, narrow, False)
    assert size(int8, dense, True) == size(plain, dense, False)
    assert size(int8, grouped, False) == size(plain, grouped, False)
