"""Something goes wrong in the middle of a step, in every part of it and of every kind: one request is hurt, no other.

A core in process, three requests together, a fourth whose prompt begins with GUILTY. From the step in which that one
has `at` tokens on, `fault` makes one part of the step fail whenever it takes part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from headrace.config.settings import EngineSettings
from headrace.core import EngineCore
from headrace.engine.plan import Plan
from headrace.kernels.reference import ReferenceKernels, decode
from headrace.protocol.ipc import AddRequest, SamplingParams, SequenceOutput
from headrace.runtime import choosing, runner
from headrace.runtime.runner import Runner
from headrace.runtime.table import SequenceTable
from tests.tiny_models import tiny_llama

GUILTY = 77
PREFILL, DECODE = 6, 11
"""Tokens that the guilty one has in the step that fails: its prompt is as long as the first."""


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> EngineCore:
    model = tiny_llama(tmp_path_factory.mktemp("tiny"))
    settings = EngineSettings(
        model=str(model), dtype="float32", threads=1, kv_cache_memory_bytes=2 << 20, kernels="reference", block_size=4
    )
    return EngineCore(settings)


def run(core: EngineCore, *, guilty: bool, n: int = 1) -> dict[str, list[SequenceOutput]]:
    prompts = {f"good{i}": [i + 1, 5, 9, 2 * i, 3, 4, 8][: 4 + i % 3] for i in range(3)}
    if guilty:
        prompts["guilty"] = [GUILTY, 5, 9, 2, 3, 4]
    outputs: dict[str, list[SequenceOutput]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        more = {"n": n, "logprobs": 1} if name == "guilty" else {}
        params = SamplingParams(max_tokens=10, temperature=0.0, **more)
        assert core.add(AddRequest(request_id=name, token_ids=prompt, params=params, arrival_s=0.0)) is None
    for _ in range(400):
        step = core.step()
        core.check_integrity()
        for output in step.outputs if step is not None else ():
            outputs[output.request_id].append(output)
        if not core.has_work:
            break
    assert not core.has_work
    assert step.stats.kv_blocks_used == 0
    core.reset_prefix_cache()
    return outputs


def tokens(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@dataclass
class Moment:
    """The step that runs: whether the guilty one takes part with at least `at` tokens, and in which rows of logits."""

    at: int
    now: bool = False
    rows: list[int] = field(default_factory=list)


def watch(patch: pytest.MonkeyPatch, moment: Moment, change: Callable[[Plan, int], Plan] | None) -> None:
    """Have `moment` follow the steps; `change` what the runner is told of the guilty one's (its place is given)."""
    real = Runner.execute
    ids: set[int] = set()

    def execute(self: Runner, plan: Plan):
        ids.update(new.seq_id for new in plan.new if new.token_ids[0] == GUILTY)
        due = [s.seq_id in ids and s.start + s.num_tokens >= moment.at for s in plan.steps]
        moment.now = any(due)
        sampling = [is_due for step, is_due in zip(plan.steps, due, strict=True) if step.samples]
        moment.rows = [row for row, is_due in enumerate(sampling) if is_due]
        if change is not None and moment.now:
            plan = change(plan, due.index(True))
        return real(self, plan)

    patch.setattr(Runner, "execute", execute)


def raises(owner: object, name: str, error: Exception) -> Callable[[pytest.MonkeyPatch, Moment], None]:
    """A part of the step that fails while the guilty one is in it."""

    def install(patch: pytest.MonkeyPatch, moment: Moment) -> None:
        real = getattr(owner, name)

        def part(*arguments, **more):
            if moment.now:
                raise error
            return real(*arguments, **more)

        patch.setattr(owner, name, part)

    return install


def logits_become(value: float) -> Callable[[pytest.MonkeyPatch, Moment], None]:
    def install(patch: pytest.MonkeyPatch, moment: Moment) -> None:
        real = ReferenceKernels.sample

        def sample(self, logits, rows):
            if moment.now:
                logits = logits.clone()
                logits[moment.rows] = value
            return real(self, logits, rows)

        patch.setattr(ReferenceKernels, "sample", sample)

    return install


def no_copy(patch: pytest.MonkeyPatch, moment: Moment) -> None:
    real = ReferenceKernels.copy_blocks

    def copy_blocks(self, pairs):
        if pairs and moment.now:
            raise OUT_OF_MEMORY
        real(self, pairs)

    patch.setattr(ReferenceKernels, "copy_blocks", copy_blocks)


def cache_rots(patch: pytest.MonkeyPatch, moment: Moment) -> None:
    """After the step the guilty one's blocks hold NaN, and so do they when others get them."""
    real = Runner.execute

    def execute(self: Runner, plan: Plan):
        result = real(self, plan)
        if moment.now:
            for step in plan.steps:
                row = self._table.row(step.seq_id)
                if self._table.tokens[row, 0] == GUILTY:
                    blocks = self._table.blocks[0, row, : self._table.num_blocks[0, row]].tolist()
                    rotten = np.full_like(self.kernels.read_blocks(blocks).view(np.float32), np.nan)
                    self.kernels.write_blocks(blocks, rotten.view(np.uint8))
        return result

    patch.setattr(Runner, "execute", execute)


def new_steps(**changes: object) -> Callable[[Plan, int], Plan]:
    """Such a plan does not continue the last one: one that says so is the scheduler's word."""

    def change(plan: Plan, place: int) -> Plan:
        steps = list(plan.steps)
        steps[place] = msgspec.structs.replace(steps[place], **changes)
        return msgspec.structs.replace(plan, steps=tuple(steps), continues=False)

    return change


K = ReferenceKernels
OUT_OF_MEMORY = MemoryError("tried to allocate 900 GiB")
DEVICE_ERROR = RuntimeError("CUDA error: an illegal memory access was encountered")

RAISED = {
    "embedding, at the prompt": (K, "embedding", DEVICE_ERROR, PREFILL),
    "embedding, while answering": (K, "embedding", IndexError("token 999 is outside the table"), DECODE),
    "norm": (K, "rms_norm", FloatingPointError("overflow"), PREFILL),
    "second norm": (K, "add_rms_norm", DEVICE_ERROR, DECODE),
    "product out of memory, at the prompt": (K, "linear", OUT_OF_MEMORY, PREFILL),
    "product, while answering": (K, "linear", ZeroDivisionError("division by zero"), DECODE),
    "rotation": (K, "rope", IndexError("position 600 of 512"), DECODE),
    "attention out of memory, at the prompt": (K, "attention", OUT_OF_MEMORY, PREFILL),
    "attention, while answering": (K, "attention", DEVICE_ERROR, DECODE),
    "activation": (K, "silu_mul", OUT_OF_MEMORY, DECODE),
    "batch on its way to the device": (K, "load_batch", OUT_OF_MEMORY, PREFILL),
    "batch cannot be built": (runner, "build_batch", ValueError("the plan and the table disagree"), PREFILL),
    "rows to sample": (K, "sample_rows", IndexError("row 12 of 8"), PREFILL),
    "sampler, first token": (K, "sample", OUT_OF_MEMORY, PREFILL),
    "sampler, sixth token": (K, "sample", RuntimeError("probabilities do not sum to one"), DECODE),
    "sampling parameters": (choosing, "sampling_rows", KeyError("grammar"), PREFILL),
    "report of log-probabilities": (choosing, "_report", TypeError("None is no number"), DECODE),
    "a new row of the table": (SequenceTable, "add", OUT_OF_MEMORY, PREFILL),
    "blocks of the table": (SequenceTable, "append_blocks", OUT_OF_MEMORY, PREFILL),
}
OTHER = {
    "a KV cache that rots": (cache_rots, None, DECODE, "not numbers"),
    "logits that are not numbers, at the prompt": (logits_become(float("nan")), None, PREFILL, "not numbers"),
    "logits that are not numbers, while answering": (logits_become(float("nan")), None, DECODE, "not numbers"),
    "logits that allow no token": (logits_become(float("-inf")), None, DECODE, "not numbers"),
    "a plan for tokens that are not there": (None, new_steps(num_tokens=300), DECODE, "has 11 tokens"),
    "a plan from before the beginning": (None, new_steps(start=-3), DECODE, "from -3"),
    "a plan with a block that does not exist": (None, new_steps(new_block_ids=((10**6,),)), 13, "IndexError"),
}


def hurts_one(core: EngineCore, says: str) -> dict[str, list[int]]:
    """What the others got."""
    got = run(core, guilty=True)
    failed = got.pop("guilty")[-1]
    assert failed.finish_reason == "error"
    assert says in failed.error
    assert "BrokenSequences" not in failed.error, "a name of ours, of which the client knows nothing"
    return {name: tokens(outputs) for name, outputs in got.items()}


@pytest.fixture(scope="module")
def expected(core) -> dict[str, list[int]]:
    return {name: tokens(outputs) for name, outputs in run(core, guilty=False).items()}


@pytest.mark.parametrize("fault", RAISED)
def test_a_part_of_the_step_that_fails_hurts_one_request(core, expected, fault: str, monkeypatch) -> None:
    owner, name, error, at = RAISED[fault]
    moment = Moment(at)
    with monkeypatch.context() as patch:
        watch(patch, moment, None)
        raises(owner, name, error)(patch, moment)
        assert hurts_one(core, type(error).__name__) == expected
    assert all(len(tokens(outputs)) == 10 for outputs in run(core, guilty=True).values())


@pytest.mark.parametrize("fault", OTHER)
def test_values_and_plans_that_are_wrong_hurt_one_request(core, expected, fault: str, monkeypatch) -> None:
    install, change, at, says = OTHER[fault]
    moment = Moment(at)
    with monkeypatch.context() as patch:
        watch(patch, moment, change)
        if install is not None:
            install(patch, moment)
        assert hurts_one(core, says) == expected
    assert all(len(tokens(outputs)) == 10 for outputs in run(core, guilty=True).values())


def test_a_copy_that_fails_hurts_the_one_that_needed_it(core, expected, monkeypatch) -> None:
    """The second of two answers to one prompt begins with a copy of the first one's last block."""
    moment = Moment(PREFILL)
    with monkeypatch.context() as patch:
        watch(patch, moment, None)
        no_copy(patch, moment)
        got = run(core, guilty=True, n=2)
    ends = {output.index: output for output in got.pop("guilty") if output.finish_reason is not None}
    assert (ends[0].finish_reason, ends[1].finish_reason) == ("length", "error")
    assert "MemoryError" in ends[1].error
    assert {name: tokens(outputs) for name, outputs in got.items()} == expected


def test_a_batch_that_cannot_go_on_is_built_afresh_and_hurts_nobody(core, expected, monkeypatch) -> None:
    real, failed = decode.advance, []

    def fails_once(state):
        if not failed:
            failed.append(state)
            raise DEVICE_ERROR
        real(state)

    with monkeypatch.context() as patch:
        patch.setattr(decode, "advance", fails_once)
        got = run(core, guilty=True)
    assert failed and len(tokens(got.pop("guilty"))) == 10
    assert {name: tokens(outputs) for name, outputs in got.items()} == expected


def test_a_slow_step_hurts_nobody(core, expected, monkeypatch) -> None:
    moment = Moment(DECODE)
    with monkeypatch.context() as patch:
        watch(patch, moment, None)
        real = ReferenceKernels.sample
        patch.setattr(K, "sample", lambda *a: time.sleep(0.1 if moment.now else 0) or real(*a))
        got = run(core, guilty=True)
    assert len(tokens(got.pop("guilty"))) == 10
    assert {name: tokens(outputs) for name, outputs in got.items()} == expected
