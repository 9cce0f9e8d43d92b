"""Plans that continue the last one give what plans that do not give, whatever happens in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from headrace.config.model_files import open_model  # noqa: E402
from headrace.engine.plan import NewSequence, Plan, SequenceStep, StepResult  # noqa: E402
from headrace.kernels.native import NativeKernels  # noqa: E402
from headrace.kernels.ops import InvalidLogits, Kernels  # noqa: E402
from headrace.kernels.reference import ReferenceKernels  # noqa: E402
from headrace.protocol.ipc import SamplingParams  # noqa: E402
from headrace.runtime.runner import BrokenSequences, Runner  # noqa: E402
from tests.tiny_models import tiny_llama  # noqa: E402

SIZE = 4
GREEDY: list[dict[str, object]] = [{}, {}, {}]
DRAWN: list[dict[str, object]] = [{"temperature": 1.0}, {}, {"temperature": 0.8, "top_p": 0.9}]
PENALISED: list[dict[str, object]] = [{"repetition_penalty": 1.3}, {"temperature": 1.0}, {"presence_penalty": 0.5}]
RULED: list[dict[str, object]] = [{"bad_words": ((5,), (3, 4))}, {"temperature": 1.0}, {"logprobs": 2}]
REPORTED: list[dict[str, object]] = [{"logprobs": 2}, {"temperature": 1.0}, {}]


class Conversation:
    """Three sequences in one runner."""

    def __init__(self, path: Path, kernels: Kernels, asked: list[dict[str, object]], *, continues: bool) -> None:
        self.runner = Runner(open_model(path), kernels)
        self.runner.load()
        self.runner.allocate_kv_cache(64, SIZE)
        self.continues = continues
        self.number = 0
        self.free = list(range(63, 0, -1))
        self.tokens: dict[int, list[int]] = {}
        self.held: dict[int, int] = {}
        self.new = [
            NewSequence(
                seq_id, tuple(range(3 + seq_id, 9 + 3 * seq_id)), 6 + 2 * seq_id, 0,
                SamplingParams(**{"max_tokens": 99, "temperature": 0.0, "seed": seq_id, **params}),  # type: ignore[arg-type]
            )
            for seq_id, params in enumerate(asked)
        ]  # fmt: skip

    def plan(self, seq_ids: list[int], *, continues: bool = True, dropped: tuple[int, ...] = ()) -> Plan:
        new = tuple(self.new[seq_id] for seq_id in seq_ids if seq_id not in self.tokens)
        for sequence in new:
            self.tokens[sequence.seq_id] = list(sequence.token_ids)
        starting, steps = {sequence.seq_id for sequence in new}, []
        for seq_id in seq_ids:
            count = len(self.tokens[seq_id])
            start = 0 if seq_id in starting else count - 1
            held = self.held.get(seq_id, 0)
            blocks = tuple(self.free.pop() for _ in range(held, -(-count // SIZE)))
            self.held[seq_id] = held + len(blocks)
            steps.append(SequenceStep(seq_id, start, count - start, (blocks,), True))
        self.number += 1
        return Plan(self.number, dropped, new, (), tuple(steps), continues=self.continues and continues)

    def take(self, plan: Plan, result: StepResult) -> None:
        tokens = result.token_ids or [entry.token_ids[0] for entry in result.sampled]
        for step, token_id in zip(plan.steps, tokens, strict=True):
            self.tokens[step.seq_id].append(token_id)

    def do(self, seq_ids: list[int], **more: object) -> StepResult:
        plan = self.plan(seq_ids, **more)  # type: ignore[arg-type]
        result = self.runner.execute(plan)
        self.take(plan, result)
        return result


def native() -> Kernels:
    return NativeKernels()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


def told(path: Path, make: Callable[[], Kernels], asked: list[dict[str, object]], *, continues: bool) -> object:
    """Sequences come, go on together, are joined, aborted, and go on."""
    talk = Conversation(path, make(), asked, continues=continues)
    results = [talk.do([0, 1], continues=False) for _ in range(2)]
    results += [talk.do([0, 1]) for _ in range(9)]
    results += [talk.do([0, 1, 2], continues=False) for _ in range(2)]
    results += [talk.do([0, 1, 2]) for _ in range(6)]
    results += [talk.do([0, 2], continues=False, dropped=(1,))]
    results += [talk.do([0, 2]) for _ in range(70)]
    table = talk.runner._table
    talk.runner.release_kv_cache()
    rows = {
        seq_id: table.tokens[table.row(seq_id), : table.num_tokens[table.row(seq_id)]].tolist() for seq_id in (0, 2)
    }
    assert rows == {seq_id: talk.tokens[seq_id] for seq_id in (0, 2)}
    logprobs = [[entry.logprobs for entry in result.sampled if entry.logprobs is not None] for result in results]
    return talk.tokens, logprobs


@pytest.mark.parametrize("make", [ReferenceKernels, native])
@pytest.mark.parametrize("asked", [GREEDY, DRAWN, PENALISED, RULED, REPORTED])
def test_sequences_that_go_on_get_the_tokens_of_steps_built_afresh(
    path: Path, make: Callable[[], Kernels], asked: list[dict[str, object]]
) -> None:
    assert told(path, make, asked, continues=True) == told(path, make, asked, continues=False)


@pytest.mark.parametrize("make", [ReferenceKernels, native])
def test_a_step_that_fails_among_others_that_went_on_is_done_again_in_parts(
    path: Path, make: Callable[[], Kernels], monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = Conversation(path, make(), DRAWN, continues=True)
    for step in range(16):
        calm.do([0, 1, 2], continues=step > 1)
    troubled = Conversation(path, make(), DRAWN, continues=True)
    for step in range(9):
        troubled.do([0, 1, 2], continues=step > 1)
    plan = troubled.plan([0, 1, 2])
    decoder = troubled.runner._decodes._decoder  # type: ignore[union-attr]

    def broken() -> list[int]:
        decoder.advance()
        raise InvalidLogits([1])

    monkeypatch.setattr(decoder, "step", broken)
    before = {seq_id: list(tokens) for seq_id, tokens in troubled.tokens.items()}
    with pytest.raises(BrokenSequences, match="for sequence 1"):
        troubled.runner.execute(plan)
    table = troubled.runner._table
    for seq_id, tokens in before.items():
        row = table.row(seq_id)
        assert table.tokens[row, : table.num_tokens[row]].tolist() == tokens
    for part in (plan.steps[:1], plan.steps[1:]):
        half = msgspec.structs.replace(plan, steps=part, continues=False)
        troubled.take(half, troubled.runner.execute(half))
    # What the last part left is not what this plan continues.
    for _ in range(6):
        troubled.do([0, 1, 2])
    assert troubled.tokens == calm.tokens


@pytest.mark.parametrize("make", [ReferenceKernels, native])
def test_one_call_does_a_step_of_sequences_that_go_on(path: Path, make: Callable[[], Kernels]) -> None:
    talk = Conversation(path, make(), DRAWN, continues=True)
    results = [talk.do([0, 1, 2], continues=step > 1) for step in range(12)]
    assert [len(result.token_ids) for result in results] == [0, 0] + [3] * 10
    assert all(np.array(result.token_ids).dtype == np.int64 for result in results[2:])
    assert all(result.seconds > 0 for result in results)
