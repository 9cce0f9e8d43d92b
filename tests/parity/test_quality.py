"""What weights of 4 bits and inputs of 8 cost in quality, on a little text; tests/long/test_quality.py has the rest."""

from __future__ import annotations

import pytest

from headrace.kernels.native import NativeKernels
from tests.quality import compare, english, reader
from tests.small_models import bundled_gguf

pytestmark = pytest.mark.timeout(300)


def test_four_bits_multiplied_as_whole_numbers_say_what_they_say_as_floats() -> None:
    model = bundled_gguf()
    exact = reader(model, NativeKernels("float32", 2))
    moved = compare(exact, {"Q4_1": reader(model, NativeKernels("bfloat16", 2))}, english(model, 768))["Q4_1"]
    assert abs(moved.change) < 0.005, moved
    assert moved.same_best >= 0.98, moved
    assert moved.divergence < 0.001, moved
