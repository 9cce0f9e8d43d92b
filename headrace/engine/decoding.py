"""The short way of nearly every step: the sequences of the last plan decode once more, and need nothing.

What comes of it is what the scheduler's long way would come to (`tests/unit/test_decoding.py` compares them); it only
touches less, which is what a step costs whose caches the forward has swept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from headrace.engine.accept import taken_in
from headrace.engine.draft import Draft
from headrace.engine.kv_cache import KVCache
from headrace.engine.plan import Sampled, SequenceStep
from headrace.engine.request import Sequence as Running
from headrace.protocol.ipc import SequenceOutput


class Decoding:
    """Knows the sequences of the last plan if all of them decoded; none otherwise."""

    def __init__(self, no_blocks: tuple[tuple[int, ...], ...]) -> None:
        """`no_blocks`: the new blocks of a step that needs none, of every group."""
        self._seq_ids: list[int] = []
        self._no_blocks = no_blocks

    def goes_on(self, draft: Draft) -> bool:
        """Whether the draft is of decodes of the same sequences. Takes note of it as the last plan."""
        last, self._seq_ids = self._seq_ids, []
        if draft.num_decodes == len(draft.steps):
            self._seq_ids = [step.seq_id for step in draft.steps]
        return bool(last) and self._seq_ids == last

    def next_steps(self, running: Sequence[Running]) -> tuple[SequenceStep, ...] | None:
        """Those of the last plan's sequences, if these are all that are `running`, nothing has come or gone since, and
        none of them needs a block or is done; None otherwise, and nothing is changed."""
        if not self._seq_ids or len(running) != len(self._seq_ids):
            return None
        steps = []
        for seq in running:
            num_tokens = seq.num_tokens
            if num_tokens > seq.num_settled_tokens or num_tokens >= seq.most_tokens:
                return None
            steps.append(SequenceStep(seq.seq_id, num_tokens - 1, 1, self._no_blocks, True))
        for seq in running:
            seq.num_planned_tokens = seq.num_tokens
            seq.num_tokens += 1
        return tuple(steps)


def take_tokens(
    steps: Sequence[SequenceStep],
    token_ids: Sequence[int],
    by_id: Mapping[int, Running],
    kv_cache: KVCache,
    end: Callable[[Running], None],
) -> tuple[list[SequenceOutput], int]:
    """What `StepResult.token_ids` do to the sequences of a plan that continues, and the steps' pairs of attention."""
    size = kv_cache.block_size
    pairs = 0
    outputs = []
    for step, token_id in zip(steps, token_ids, strict=True):
        computed = step.start + 1
        pairs += computed
        seq = by_id.get(step.seq_id)
        if seq is None:
            continue
        seq.num_computed_tokens = computed
        if computed // size > seq.num_published_blocks:
            kv_cache.publish(seq)
        own, params = seq.token_ids, seq.params
        if token_id in params.stop_token_ids or len(own) + 1 >= seq.most_tokens or params.repetition_detection:
            output = taken_in(seq, Sampled(step.seq_id, (token_id,)), None)
            if output.finish_reason is not None:
                end(seq)
        else:
            own.append(token_id)
            output = SequenceOutput(
                request_id=seq.name, index=seq.index, token_ids=[token_id], num_preemptions=seq.num_preemptions
            )
        outputs.append(output)
    return outputs, pairs
