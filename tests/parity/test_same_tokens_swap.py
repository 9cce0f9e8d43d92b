"""The same answer every time where a request's keys and values go to host memory and come back."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from headrace.core import EngineCore
from headrace.runtime.host_store import HostStore
from tests.engine_runs import run, tokens
from tests.parity.test_same_tokens_families import SMALL
from tests.parity.test_same_tokens_tiny import engine, requests
from tests.small_models import Family, write_random_model

MODELS: dict[str, tuple[Family, dict[str, object], int]] = {
    "full": ("llama", {}, 80),
    "window and full": (
        "gemma3",
        {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"]},
        56,
    ),
}
"""Overrides, and the size of a cache that one request of 80 tokens just fits."""
REQUESTS = requests()[::2]
Tokens = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    family, overrides, num_tokens = MODELS[request.param]
    return write_random_model(tmp_path_factory.mktemp(family), family, **SMALL, **overrides), num_tokens


@pytest.fixture(scope="module")
def alone(model: tuple[Path, int]) -> Tokens:
    core = engine(model[0], enable_prefix_caching=False)
    results: Tokens = {}
    for r in REQUESTS:
        results |= tokens(run(core, [r]))
    return results


def crowded(model: tuple[Path, int], swap_space_bytes: int, **changes: object) -> EngineCore:
    """So small a cache that somebody is preempted all the time."""
    path, num_tokens = model
    return engine(
        path, num_tokens, max_model_len=80, max_num_batched_tokens=16, swap_space_bytes=swap_space_bytes, **changes
    )


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("swap_space_bytes", [20_000, 1 << 24])
def test_constant_swapping_gives_the_same_tokens(
    model: tuple[Path, int], alone: Tokens, swap_space_bytes: int, caching: bool
) -> None:
    core = crowded(model, swap_space_bytes, enable_prefix_caching=caching)
    sequences = run(core, REQUESTS)
    stats = core._scheduler.stats(0.0)
    assert tokens(sequences) == alone
    assert sum(s.num_preemptions for s in sequences.values()) >= 2
    assert stats.host_saved_total > 0
    if swap_space_bytes > 1 << 20:
        assert stats.host_loaded_total > 0
        assert tokens(run(core, REQUESTS)) == alone, "the second time, when prefixes come from the tier"


def test_moves_that_fail_now_and_then_change_no_token(
    model: tuple[Path, int], alone: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(4)
    for name in ("read_blocks", "write_blocks"):
        real = getattr(type(crowded(model, 0)._runner.kernels), name)

        def sometimes(*arguments: object, real: object = real) -> object:
            if draw.random() < 0.3:
                raise MemoryError("no memory for it")
            return real(*arguments)  # type: ignore[operator]

        monkeypatch.setattr(type(crowded(model, 0)._runner.kernels), name, sometimes)
    core = crowded(model, 1 << 24)
    for _ in range(2):
        assert tokens(run(core, REQUESTS)) == alone
    assert isinstance(core._runner._host, HostStore)
    assert core._scheduler.stats(0.0).host_loaded_total > 0
