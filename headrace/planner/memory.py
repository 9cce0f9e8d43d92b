"""What fits: pure arithmetic from the model's shape and the memory at hand to the size of the KV cache.

Everything is counted in whole blocks of the KV cache. One block of 32 tokens of a model with 30 layers, 3
key/value heads of 64 and float32 values:

    2 (K and V) x 30 x 3 x 64 x 4 bytes = 46,080 bytes a token, x 32 tokens = 1,474,560 bytes a block
    4 GiB / 1,474,560 = 2,912 blocks = 93,184 tokens = 11 requests of 8,192 tokens at once

A configuration that cannot work is refused with the one value that would.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from headrace.config.errors import ConfigError
from headrace.config.model import ModelConfig
from headrace.config.settings import SCORED_ROWS_PER_STEP, EngineSettings

GIB = 1 << 30

CPU_KV_CACHE_BYTES = 4 * GIB
"""The KV cache on a CPU unless asked otherwise: memory that other programs also want is not taken wholesale."""

BLOCK_SIZE = {"cpu": 32, "cuda": 16}
MAX_NUM_BATCHED_TOKENS = {"cpu": 256, "cuda": 2048}
"""Tokens a step may compute. On a CPU 128 already reach full speed, and more only make others wait longer."""

HIGHEST_UTILIZATION = 0.98
"""Never advise more: the driver and short-lived buffers need the rest."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    num_blocks: int
    block_size: int
    kv_cache_bytes: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    notes: tuple[str, ...]
    """What was chosen in place of what one might expect, one sentence each."""

    @property
    def kv_cache_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def max_concurrency(self) -> float:
        return self.kv_cache_tokens / self.max_model_len


def plan_memory(
    config: ModelConfig,
    settings: EngineSettings,
    *,
    weight_bytes: int,
    available_bytes: int,
    kv_bytes_per_value: float,
    overhead_bytes: int = 0,
    device: Literal["cpu", "cuda"] = "cpu",
) -> MemoryPlan:
    """Sizes of the KV cache and of a step.

    `available_bytes` is what the device offered before anything was loaded; `gpu_memory_utilization` of it is
    the ceiling. `overhead_bytes` is what the process takes besides weights, KV cache and the buffers of a step.
    Raises ConfigError when no KV cache, or not one request of an explicit `max_model_len`, fits.
    """
    notes: list[str] = []
    block_size = settings.block_size or BLOCK_SIZE[device]
    block_bytes = config.kv_bytes_per_token(kv_bytes_per_value) * block_size
    num_groups = len(config.layer_groups)
    batched_tokens = _batched_tokens(config, settings, device)
    step_bytes = step_buffer_bytes(config, batched_tokens, min(settings.max_num_seqs, batched_tokens))
    fixed_bytes = weight_bytes + overhead_bytes + step_bytes
    room = _Room(settings.gpu_memory_utilization, available_bytes, fixed_bytes, block_bytes)

    wanted_len = settings.max_model_len
    if settings.kv_cache_memory_bytes is not None:
        pool_bytes = _exact_pool(settings.kv_cache_memory_bytes, room)
    else:
        pool_bytes = room.bytes
        if device == "cpu":
            longest = block_bytes * num_groups * math.ceil((wanted_len or 0) / block_size)
            pool_bytes = min(pool_bytes, max(CPU_KV_CACHE_BYTES, longest))
    num_blocks = max(0, pool_bytes) // block_bytes
    if num_blocks == 0:
        raise ConfigError(_no_block(settings, room))

    capacity = num_blocks // num_groups * block_size
    if wanted_len is None:
        max_model_len = min(config.max_position_embeddings, capacity)
        if max_model_len < config.max_position_embeddings:
            notes.append(
                f"max_model_len is {max_model_len:,}, not the model's {config.max_position_embeddings:,}: "
                f"the KV cache of {_gib(num_blocks * block_bytes)} GiB holds no more."
            )
        if not settings.enable_chunked_prefill and max_model_len > batched_tokens:
            max_model_len = batched_tokens
            notes.append(
                f"max_model_len is {max_model_len:,}: without chunked prefill a prompt must fit one step of "
                f"--max-num-batched-tokens {batched_tokens}."
            )
    else:
        if wanted_len > capacity:
            raise ConfigError(_too_long(settings, room, wanted_len, block_size, num_blocks, num_groups))
        max_model_len = wanted_len

    if not settings.enable_chunked_prefill and max_model_len > batched_tokens:
        raise ConfigError(
            f"max_num_batched_tokens ({batched_tokens}) is smaller than max_model_len ({max_model_len}), and without "
            f"chunked prefill a prompt must fit one step. Use --max-num-batched-tokens {max_model_len}, "
            f"or drop --no-enable-chunked-prefill."
        )

    max_num_seqs = min(settings.max_num_seqs, num_blocks // num_groups, batched_tokens)
    if max_num_seqs < settings.max_num_seqs:
        reason = (
            f"the KV cache has {num_blocks:,} blocks and every running request needs one"
            if num_blocks <= batched_tokens
            else f"a step computes at most {batched_tokens:,} tokens"
        )
        notes.append(f"max_num_seqs is {max_num_seqs}, not {settings.max_num_seqs}: {reason}.")

    if config.sliding_window is not None and max_model_len > config.sliding_window:
        notes.append(
            f"{sum(config.sliding_layers)} of {config.num_layers} layers see {config.sliding_window:,} tokens only; "
            "the KV cache keeps all tokens for them too."
        )

    return MemoryPlan(
        num_blocks=num_blocks,
        block_size=block_size,
        kv_cache_bytes=num_blocks * block_bytes,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched_tokens,
        notes=tuple(notes),
    )


def step_buffer_bytes(config: ModelConfig, num_tokens: int, num_seqs: int) -> int:
    """Bytes of the widest moment of a step: activations of all rows, and logits with the sampler's copies.

    float32 throughout, the widest any device computes in.
    """
    heads = (config.num_heads + 2 * config.num_kv_heads + config.num_heads) * config.head_dim
    routed = config.num_experts_per_token * (config.hidden_size + 3 * config.expert_intermediate_size)
    row = 2 * config.hidden_size + max(heads, 3 * config.intermediate_size, routed)
    logits = 3 * max(num_seqs, SCORED_ROWS_PER_STEP) * config.vocab_size
    return 4 * (num_tokens * row + logits)


@dataclass(frozen=True, slots=True)
class _Room:
    """Memory that is left for the KV cache at a given utilization."""

    utilization: float
    available_bytes: int
    fixed_bytes: int
    block_bytes: int

    @property
    def bytes(self) -> int:
        return int(self.utilization * self.available_bytes) - self.fixed_bytes

    def utilization_for(self, pool_bytes: int) -> float | None:
        """The smallest utilization, in hundredths, that leaves `pool_bytes`; None if none sensible does."""
        if self.available_bytes <= 0:
            return None
        needed = math.ceil(100 * (self.fixed_bytes + pool_bytes) / self.available_bytes) / 100
        return needed if needed <= HIGHEST_UTILIZATION else None


def _batched_tokens(config: ModelConfig, settings: EngineSettings, device: str) -> int:
    if settings.max_num_batched_tokens is not None:
        return settings.max_num_batched_tokens
    if settings.enable_chunked_prefill:
        return MAX_NUM_BATCHED_TOKENS[device]
    return max(MAX_NUM_BATCHED_TOKENS[device], settings.max_model_len or config.max_position_embeddings)


def _exact_pool(wanted_bytes: int, room: _Room) -> int:
    left = room.available_bytes - room.fixed_bytes
    if wanted_bytes <= left:
        return wanted_bytes
    fits = max(0, left) // room.block_bytes * room.block_bytes
    raise ConfigError(
        f"--kv-cache-memory-bytes {wanted_bytes} ({_gib(wanted_bytes)} GiB) is more than the {_gib(max(0, left))} GiB "
        f"left beside the model's {_gib(room.fixed_bytes)} GiB in the {_gib(room.available_bytes)} GiB available. "
        + (f"Use --kv-cache-memory-bytes {fits}." if fits else "Use a smaller or more strongly quantised model.")
    )


def _no_block(settings: EngineSettings, room: _Room) -> str:
    if settings.kv_cache_memory_bytes is not None:
        return (
            f"No available memory for the cache blocks: one block takes {room.block_bytes} bytes and "
            f"--kv-cache-memory-bytes is {settings.kv_cache_memory_bytes}. "
            f"Use --kv-cache-memory-bytes {16 * room.block_bytes} or more."
        )
    better = room.utilization_for(16 * room.block_bytes)
    facts = (
        f"No available memory for the cache blocks: weights and buffers take {_gib(room.fixed_bytes)} GiB of the "
        f"{_gib(int(room.utilization * room.available_bytes))} GiB that gpu_memory_utilization "
        f"{room.utilization:.2f} allows of {_gib(room.available_bytes)} GiB. "
    )
    if better is not None:
        return facts + f"Try increasing `gpu_memory_utilization`: --gpu-memory-utilization {better:.2f} would do."
    return facts + "No utilization is enough: use a smaller or more strongly quantised model, or free memory."


def _too_long(
    settings: EngineSettings, room: _Room, wanted_len: int, block_size: int, num_blocks: int, num_groups: int
) -> str:
    needed_bytes = math.ceil(wanted_len / block_size) * num_groups * room.block_bytes
    pool = _gib(num_blocks * room.block_bytes)
    facts = (
        f"To serve at least one request with the model's max seq len ({wanted_len}), {_gib(needed_bytes)} GiB KV "
        f"cache is needed, which is larger than the available KV cache memory ({pool} GiB). "
    )
    fits = num_blocks // num_groups * block_size
    shorter = f"the estimated maximum model length is {fits}: use --max-model-len {fits}."
    if settings.kv_cache_memory_bytes is not None:
        if needed_bytes <= room.available_bytes - room.fixed_bytes:
            return facts + f"Use --kv-cache-memory-bytes {needed_bytes}."
        return facts + "Based on the available memory, " + shorter
    better = room.utilization_for(needed_bytes)
    if better is not None and better > settings.gpu_memory_utilization:
        return facts + f"Use --gpu-memory-utilization {better:.2f}."
    return facts + "Based on the available memory, " + shorter


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}"
