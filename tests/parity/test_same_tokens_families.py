"""The same answer every time where more than the prefix decides: layers with a window, and experts that rows share."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from headrace.config.model_files import open_model
from tests.engine_runs import run, tokens
from tests.parity.test_same_tokens_tiny import engine, requests
from tests.small_models import Family, write_random_model

SMALL = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "initializer_range": 0.2}
MODELS: dict[str, tuple[Family, dict[str, object]]] = {
    "window and full": ("gemma3", {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"]}),
    "window and experts": ("mixtral", {"sliding_window": 19, "num_local_experts": 4}),
}
SMALLEST_CACHE = {"gemma3": 56, "mixtral": 40}
"""Tokens of every layer that are as much memory as one request of 80 needs."""
Tokens = dict[tuple[str, int], list[int]]
REQUESTS = requests()[::2] + requests()[1::6]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = MODELS[request.param]
    return write_random_model(tmp_path_factory.mktemp(family), family, **SMALL, **overrides)


@pytest.fixture(scope="module")
def alone(model: Path) -> Tokens:
    core = engine(model, enable_prefix_caching=False)
    results: Tokens = {}
    for r in REQUESTS:
        results |= tokens(run(core, [r]))
    assert len({token for found in results.values() for token in found}) > 50
    return results


def test_together_cached_and_in_chunks_gives_the_same_tokens(model: Path, alone: Tokens) -> None:
    core = engine(model, max_num_batched_tokens=11)
    assert tokens(run(core, REQUESTS)) == alone
    assert tokens(run(core, REQUESTS)) == alone, "the second time, when prefixes are cached"


def test_constant_preemption_gives_the_same_tokens(model: Path, alone: Tokens) -> None:
    core = engine(model, SMALLEST_CACHE[open_model(model).config.family], max_model_len=80, max_num_batched_tokens=16)
    sequences = run(core, REQUESTS)
    assert tokens(sequences) == alone
    assert sum(s.num_preemptions for s in sequences.values()) >= 2
