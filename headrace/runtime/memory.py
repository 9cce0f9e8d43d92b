"""How much memory a device offers and how much of it is taken: before any weight is loaded, and on a GPU after it.

There what a step takes besides is not worked out but tried: the widest step that the settings allow, with a KV cache
that just holds it. What the device then has less is what such a step takes, down to the libraries' own buffers.
"""

from __future__ import annotations

import logging

from headrace.config.settings import SCORED_ROWS_PER_STEP, EngineSettings
from headrace.engine.plan import NewSequence, Plan, SequenceStep
from headrace.planner import host
from headrace.planner.memory import step_size
from headrace.protocol.ipc import PoolingParams, SamplingParams
from headrace.runtime.runner import Runner

logger = logging.getLogger("headrace.core")

BLOCK_SIZE = 16
"""Of the KV cache of the trial."""
WIDEST = SamplingParams(
    max_tokens=1, temperature=1.0, top_p=0.9, min_p=1e-3, logit_bias={0: 1.0}, logprobs=20, prompt_logprobs=20
)
"""Whatever makes the sampler keep another copy of the logits."""


def device_memory_bytes(device: str) -> tuple[int, int]:
    """(offered, taken). `device` is cpu or cuda.

    On a CPU what others and this process hold is not offered in the first place, so nothing counts as taken. On
    a GPU the whole is offered, and what others, the driver and this process hold is taken.
    """
    if device == "cpu":
        return host.available_memory_bytes(), 0
    import torch

    free, total = torch.cuda.mem_get_info()
    return total, total - free


def measure(runner: Runner, settings: EngineSettings) -> tuple[int, int | None]:
    """Of a GPU with the weights loaded: bytes taken besides weights, and bytes that the widest step takes; None for
    these where it found no memory."""
    kernels, config = runner.kernels, runner.files.config
    kernels.release_kv_cache()
    taken_bytes = max(0, device_memory_bytes(kernels.device)[1] - kernels.weight_bytes)
    num_tokens, num_seqs = step_size(config, settings, "cuda")
    longest = min(num_tokens, settings.max_model_len or config.max_position_embeddings)
    if settings.pooler is not None:
        num_seqs = num_tokens // longest
    plan = _trial([min(longest, num_tokens // num_seqs)] * num_seqs, len(config.layer_groups), _params(settings))
    step_bytes = None
    try:
        num_blocks = sum(len(own) for step in plan.steps for own in step.new_block_ids)
        runner.allocate_kv_cache(num_blocks, BLOCK_SIZE)
        before_bytes = device_memory_bytes(kernels.device)[1]
        runner.execute(plan)
        step_bytes = max(0, device_memory_bytes(kernels.device)[1] - before_bytes)
    except (MemoryError, RuntimeError) as error:
        logger.warning("A trial step of %d tokens in %d sequences failed: %s", num_tokens, num_seqs, error)
    finally:
        runner.execute(Plan(0, tuple(new.seq_id for new in plan.new if new.seq_id in runner), (), (), ()))
        runner.release_kv_cache()
    return taken_bytes, step_bytes


def _params(settings: EngineSettings) -> SamplingParams:
    if settings.pooler is None:
        return WIDEST
    return SamplingParams(max_tokens=1, pooling=PoolingParams(task=settings.pooler.task, every_row=True))


def _trial(lengths: list[int], num_groups: int, params: SamplingParams) -> Plan:
    """A step that computes new sequences of these lengths whole, samples of each and scores as much as is allowed."""
    new, steps, next_block, left = [], [], 0, 0 if params.prompt_logprobs is None else SCORED_ROWS_PER_STEP
    for seq_id, length in enumerate(lengths):
        new.append(NewSequence(seq_id, (0,) * length, length, 0, params))
        blocks = []
        for _ in range(num_groups):
            end = next_block - (-length // BLOCK_SIZE)
            blocks.append(tuple(range(next_block, end)))
            next_block = end
        num_scored = min(left, length - 1)
        left -= num_scored
        steps.append(SequenceStep(seq_id, 0, length, tuple(blocks), True, num_scored))
    return Plan(0, (), tuple(new), (), tuple(steps))
