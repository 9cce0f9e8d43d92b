"""The core in process with a device that fails: what breaks a step ends alone, refused memory is not fatal."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config.errors import ConfigError
from headrace.config.settings import EngineSettings
from headrace.core import EngineCore, parts
from headrace.engine.plan import NewSequence, Plan, SequenceStep
from headrace.kernels.ops import KVCacheLayout
from headrace.kernels.reference import ReferenceKernels
from headrace.protocol.ipc import AddRequest, SamplingParams, SequenceOutput
from tests.tiny_models import tiny_llama

POISON = 77
"""A prompt with this token breaks every step it takes part in."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


def load(model: Path, **changes) -> EngineCore:
    values = {"model": str(model), "kernels": "reference", "dtype": "float32", "threads": 1}
    values["kv_cache_memory_bytes"] = 2 << 20
    return EngineCore(EngineSettings(**{**values, **changes}))


def run(core: EngineCore, prompts: dict[str, list[int]], max_tokens: int = 8) -> dict[str, list[SequenceOutput]]:
    outputs: dict[str, list[SequenceOutput]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        assert core.add(AddRequest(request_id=name, token_ids=prompt, params=params, arrival_s=0.0)) is None
    for _ in range(500):
        step = core.step()
        core.check_integrity()
        for output in step.outputs if step is not None else ():
            outputs[output.request_id].append(output)
        if not core.has_work:
            return outputs
    raise AssertionError("the requests did not end")


def tokens(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.fixture
def poisoned(monkeypatch):
    """The device runs out of memory whenever the batch holds the poison token."""
    real = ReferenceKernels.load_batch

    def load_batch(self, batch):
        if POISON in batch.token_ids:
            raise RuntimeError("out of memory: tried to allocate 900 GiB")
        return real(self, batch)

    monkeypatch.setattr(ReferenceKernels, "load_batch", load_batch)


def test_a_request_that_breaks_its_steps_ends_alone(model, poisoned):
    good = {f"good{i}": [i + 1, 5, 9] for i in range(5)}
    core = load(model)
    expected = {name: tokens(outputs) for name, outputs in run(core, good).items()}
    core.reset_prefix_cache()
    got = run(core, {**good, "bad": [3, POISON, 4]})
    assert {name: tokens(got[name]) for name in good} == expected
    (failed,) = got["bad"]
    assert (failed.finish_reason, failed.token_ids) == ("error", [])
    assert "tried to allocate 900 GiB" in failed.error
    assert run(core, {"later": [1, 5, 9]})["later"][-1].finish_reason is not None


def test_a_plan_in_parts_does_each_thing_once():
    params = SamplingParams(max_tokens=5)
    steps = tuple(SequenceStep(i, 0, 4, ((10 + i,),), True) for i in range(5))
    new = tuple(NewSequence(i, (1, 2, 3, 4), 4, 0, params) for i in (1, 4))
    plan = Plan(step=3, dropped=(9,), new=new, block_copies=((2, 14), (2, 11)), steps=steps)
    first, second = parts(plan, frozenset())
    assert first.steps + second.steps == steps
    assert (first.dropped, second.dropped) == ((9,), ())
    assert ([n.seq_id for n in first.new], [n.seq_id for n in second.new]) == ([1], [4])
    assert (first.block_copies, second.block_copies) == (((2, 11),), ((2, 14),))
    rest, guilty = parts(plan, frozenset({3}))
    assert [s.seq_id for s in rest.steps] == [0, 1, 2, 4] and [s.seq_id for s in guilty.steps] == [3]


def test_a_kv_cache_that_cannot_be_allocated_is_made_smaller_and_told(model, monkeypatch):
    real = ReferenceKernels.allocate_kv_cache

    def allocate(self, layout: KVCacheLayout):
        if layout.num_blocks > 80:
            raise MemoryError
        real(self, layout)

    monkeypatch.setattr(ReferenceKernels, "allocate_kv_cache", allocate)
    core = load(model)
    assert 60 <= core.info.num_blocks <= 80
    assert any("could not be allocated" in note for note in core.info.notes)
    assert len(tokens(run(core, {"r": [1, 2, 3]})["r"])) == 8


def test_a_device_that_never_gives_memory_ends_in_advice(model, monkeypatch):
    monkeypatch.setattr(ReferenceKernels, "allocate_kv_cache", lambda self, layout: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(ConfigError, match="No available memory for the cache blocks"):
        load(model)


def test_an_aborted_request_gives_back_its_blocks(model):
    core = load(model)
    params = SamplingParams(max_tokens=100, temperature=0.0)
    core.add(AddRequest(request_id="r", token_ids=[1, 2, 3], params=params, arrival_s=0.0))
    assert core.step().stats.kv_blocks_used == 1
    core.abort("r")
    while core.has_work:
        last = core.step()
    assert (last.stats.num_running, last.stats.kv_blocks_used) == (0, 0)
