"""The quality that every form of weights and of the KV cache keeps, on 20,000 tokens of English: ten minutes.

The table in docs/performance.md is made of what this prints.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.kernels.native import NativeKernels
from tests.quality import Moved, compare, english, reader
from tests.small_models import bundled_gguf, write_bundled_bfloat16

pytestmark = pytest.mark.timeout(7200)
TOKENS = 20_000


def figures(moved: dict[str, Moved]) -> str:
    """Rows of the table in docs/performance.md."""
    return "\n".join(
        f"| {name} | {m.perplexity:.2f} | {100 * m.change:+.2f} % | {100 * m.same_best:.1f} % | {m.divergence:.5f} |"
        for name, m in moved.items()
    )


def test_four_bits_of_a_file() -> None:
    model = bundled_gguf()
    exact = reader(model, NativeKernels("float32", 2))
    moved = compare(exact, {"Q4_1": reader(model, NativeKernels("bfloat16", 2))}, english(model, TOKENS))
    print(figures(moved))
    assert abs(moved["Q4_1"].change) < 0.003
    assert moved["Q4_1"].same_best >= 0.98


def test_int8_weights_and_eight_bits_of_the_cache(tmp_path: Path) -> None:
    model = write_bundled_bfloat16(tmp_path)
    others = {"int8": reader(model, NativeKernels("bfloat16", 2, int8_weights=True))}
    for dtype in ("int8", "fp8_e4m3", "fp8_e5m2"):
        others[f"KV {dtype}"] = reader(model, NativeKernels("bfloat16", 2, kv_cache_dtype=dtype))
    moved = compare(reader(model, NativeKernels("bfloat16", 2)), others, english(model, TOKENS))
    print(figures(moved))
    assert abs(moved["int8"].change) < 0.005
    assert abs(moved["KV int8"].change) < 0.003
    assert abs(moved["KV fp8_e4m3"].change) < 0.01
    assert abs(moved["KV fp8_e5m2"].change) < 0.05
