"""What fits: pure arithmetic from the model's shape and the memory at hand to the size of the KV cache.

Everything is counted in whole blocks of the KV cache. One block of 32 tokens of a model with 30 layers, 3
key/value heads of 64 and float32 values:

    2 (K and V) x 30 x 3 x 64 x 4 bytes = 46,080 bytes a token, x 32 tokens = 1,474,560 bytes a block
    4 GiB / 1,474,560 = 2,912 blocks = 93,184 tokens = 11 requests of 8,192 tokens at once

Layers of two kinds, some with a window, are in groups (config/model.py) and a block is one group's. A request then
takes blocks of every group: of those with a window no more than the window and a step's tokens need.

A configuration that cannot work is refused with the one value that would.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from headrace.config.errors import ConfigError
from headrace.config.kv_blocks import KVBlocks
from headrace.config.model import ModelConfig
from headrace.config.settings import SCORED_ROWS_PER_STEP, EngineSettings

GIB = 1 << 30

CPU_KV_CACHE_BYTES = 4 * GIB
"""The KV cache on a CPU unless asked otherwise: memory that other programs also want is not taken wholesale."""

BLOCK_SIZE = {"cpu": 32, "cuda": 16}
MAX_NUM_BATCHED_TOKENS = {"cpu": 256, "cuda": 2048}
"""Tokens a step may compute. On a CPU 128 already reach full speed, and more only make others wait longer."""

ENCODER_BATCHED_TOKENS = 512
"""Of an encoder's step at least, on any device: its longest text sets the number where that is longer."""

SWAP_SPACE_BYTES = {"cpu": 0, "cuda": 4 * GIB}
"""Host memory behind the KV cache unless asked otherwise. On a CPU the cache is in that memory itself."""
MOST_OF_THE_HOST = 0.7
"""Of the memory at hand, what a GPU's swap space may take: the server and other programs need some too."""

SHORTEST = 2
"""Tokens of a request at least: one of the prompt and one of the answer."""

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
    kv_cache_tokens: int
    """Tokens of requests of `max_model_len` that fit together."""
    num_host_blocks: int
    """Of the tier in host memory."""
    notes: tuple[str, ...]
    """What was chosen in place of what one might expect, one sentence each."""

    @property
    def max_concurrency(self) -> float:
        return self.kv_cache_tokens / self.max_model_len


def plan_memory(
    config: ModelConfig,
    settings: EngineSettings,
    *,
    weight_bytes: int,
    available_bytes: int,
    kv_cache_dtype: str,
    overhead_bytes: int = 0,
    step_bytes: int | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    host_bytes: int = 0,
) -> MemoryPlan:
    """Sizes of the KV cache and of a step.

    With a GPU, `host_bytes` are available besides in the host's memory. `step_bytes` are the buffers of a step of
    `step_size`, where they were measured.

    `available_bytes` is what the device offered before anything was loaded; `gpu_memory_utilization` of it is
    the ceiling. `overhead_bytes` is what the process takes besides weights, KV cache and the buffers of a step.
    Raises ConfigError when no KV cache, or not one request of an explicit `max_model_len`, fits.
    """
    batched_tokens, num_seqs = step_size(config, settings, device)
    if step_bytes is None:
        step_bytes = step_buffer_bytes(config, batched_tokens, num_seqs)
    fixed_bytes = weight_bytes + overhead_bytes + step_bytes
    if config.is_encoder:
        return _plan_encoder(config, settings, fixed_bytes, available_bytes)
    notes: list[str] = []
    block_size = settings.block_size or BLOCK_SIZE[device]
    block_bytes = config.kv_bytes_per_token(kv_cache_dtype) * block_size
    windows = tuple(group.window for group in config.layer_groups)
    blocks = KVBlocks(windows, block_size, batched_tokens)
    swap_bytes = settings.swap_space_bytes if settings.swap_space_bytes is not None else SWAP_SPACE_BYTES[device]
    if device == "cuda":
        swap_bytes = _swap_beside_a_gpu(settings, swap_bytes, host_bytes, notes)
    elif swap_bytes:
        least_bytes = settings.kv_cache_memory_bytes or block_bytes * blocks.most_held(settings.max_model_len or 1)
        share = 1.0 if settings.kv_cache_memory_bytes else settings.gpu_memory_utilization
        _check_swap(swap_bytes, int(share * available_bytes) - fixed_bytes - least_bytes)
        fixed_bytes += swap_bytes
        notes.append(
            "on a CPU the KV cache is in the same memory as the swap space, and moving blocks takes time: "
            "--kv-cache-memory-bytes is the better place for it."
        )
    num_host_blocks = swap_bytes // block_bytes
    if swap_bytes and not num_host_blocks:
        notes.append(f"--swap-space holds no block of the KV cache, each of which takes {block_bytes:,} bytes.")
    room = _Room(settings.gpu_memory_utilization, available_bytes, fixed_bytes, block_bytes)

    wanted_len = settings.max_model_len
    if settings.kv_cache_memory_bytes is not None:
        pool_bytes = _exact_pool(settings.kv_cache_memory_bytes, room)
    else:
        pool_bytes = room.bytes
        if device == "cpu":
            longest = block_bytes * blocks.most_held(wanted_len or 0)
            pool_bytes = min(pool_bytes, max(CPU_KV_CACHE_BYTES, longest))
    num_blocks = max(0, pool_bytes) // block_bytes
    if num_blocks < max(len(windows), blocks.most_held(SHORTEST)):
        raise ConfigError(_no_block(settings, room, max(len(windows), blocks.most_held(wanted_len or SHORTEST))))

    if wanted_len is None:
        max_model_len = blocks.longest(num_blocks, config.max_position_embeddings)
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
        if blocks.most_held(wanted_len) > num_blocks:
            block_of_8_bits = config.kv_bytes_per_token("fp8_e4m3") * block_size
            raise ConfigError(_too_long(settings, room, wanted_len, blocks, num_blocks, block_of_8_bits))
        max_model_len = wanted_len
    if max_model_len < SHORTEST:
        raise ConfigError(
            f"max_model_len is {max_model_len}, and a prompt and its answer need {SHORTEST} tokens at least. "
            f"Use --max-num-batched-tokens {MAX_NUM_BATCHED_TOKENS[device]}, or drop --no-enable-chunked-prefill."
        )

    if not settings.enable_chunked_prefill and max_model_len > batched_tokens:
        raise ConfigError(
            f"max_num_batched_tokens ({batched_tokens}) is smaller than max_model_len ({max_model_len}), and without "
            f"chunked prefill a prompt must fit one step. Use --max-num-batched-tokens {max_model_len}, "
            f"or drop --no-enable-chunked-prefill."
        )

    max_num_seqs = min(settings.max_num_seqs, num_blocks // len(windows), batched_tokens)
    if max_num_seqs < settings.max_num_seqs:
        reason = (
            f"the KV cache has {num_blocks:,} blocks and every running request needs {_number(len(windows))}"
            if num_blocks // len(windows) <= batched_tokens
            else f"a step computes at most {batched_tokens:,} tokens"
        )
        notes.append(f"max_num_seqs is {max_num_seqs}, not {settings.max_num_seqs}: {reason}.")

    return MemoryPlan(
        num_blocks=num_blocks,
        block_size=block_size,
        kv_cache_bytes=num_blocks * block_bytes,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched_tokens,
        kv_cache_tokens=num_blocks * blocks.count(max_model_len) * block_size // blocks.most_held(max_model_len),
        num_host_blocks=num_host_blocks,
        notes=tuple(notes),
    )


def _plan_encoder(config: ModelConfig, settings: EngineSettings, needed_bytes: int, available_bytes: int) -> MemoryPlan:
    """Without a KV cache: a step must have room for the longest text, which is computed in one."""
    longest = settings.max_model_len or config.max_position_embeddings
    batched_tokens = _batched_tokens(config, settings, "cpu")
    if batched_tokens < longest:
        raise ConfigError(
            f"max_num_batched_tokens ({batched_tokens}) is smaller than max_model_len ({longest}), and an encoder "
            f"reads a text in one step. Use --max-num-batched-tokens {longest}, or --max-model-len {batched_tokens}."
        )
    allowed_bytes = int(settings.gpu_memory_utilization * available_bytes)
    if needed_bytes > allowed_bytes:
        raise ConfigError(
            f"The model and the buffers of a step take {_gib(needed_bytes)} GiB, more than the "
            f"{_gib(allowed_bytes)} GiB that gpu_memory_utilization {_share(settings.gpu_memory_utilization)} allows "
            f"of {_gib(available_bytes)} GiB. Free memory, or use a smaller --max-num-batched-tokens than "
            f"{batched_tokens}."
        )
    return MemoryPlan(
        num_blocks=0,
        block_size=1,
        kv_cache_bytes=0,
        max_model_len=longest,
        max_num_seqs=min(settings.max_num_seqs, batched_tokens),
        max_num_batched_tokens=batched_tokens,
        kv_cache_tokens=0,
        num_host_blocks=0,
        notes=(),
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


def step_size(config: ModelConfig, settings: EngineSettings, device: str) -> tuple[int, int]:
    """(tokens, sequences) of the widest step, if the KV cache has room for them. An encoder's rows give no logits."""
    batched_tokens = _batched_tokens(config, settings, device)
    return batched_tokens, 1 if config.is_encoder else min(settings.max_num_seqs, batched_tokens)


def _batched_tokens(config: ModelConfig, settings: EngineSettings, device: str) -> int:
    if settings.max_num_batched_tokens is not None:
        return settings.max_num_batched_tokens
    if config.is_encoder:
        return max(ENCODER_BATCHED_TOKENS, settings.max_model_len or config.max_position_embeddings)
    if settings.enable_chunked_prefill:
        return MAX_NUM_BATCHED_TOKENS[device]
    return max(MAX_NUM_BATCHED_TOKENS[device], settings.max_model_len or config.max_position_embeddings)


def _swap_beside_a_gpu(settings: EngineSettings, swap_bytes: int, host_bytes: int, notes: list[str]) -> int:
    """The swap space, or less where none was asked for and the host is small."""
    most_bytes = int(MOST_OF_THE_HOST * host_bytes)
    if settings.swap_space_bytes is not None:
        _check_swap(swap_bytes, most_bytes)
    elif swap_bytes > most_bytes:
        notes.append(
            f"the swap space is {_gib(most_bytes)} GiB, not {_gib(swap_bytes)}: the host has no more to spare."
        )
        return most_bytes
    return swap_bytes


def _check_swap(swap_bytes: int, most_bytes: int) -> None:
    if swap_bytes > most_bytes:
        fits = math.floor(100 * max(0, most_bytes) / GIB) / 100
        raise ConfigError(
            f"--swap-space {swap_bytes / GIB:g} is {_gib(swap_bytes)} GiB of host memory, and beside all else "
            f"{_gib(max(0, most_bytes))} GiB can be had: use --swap-space {fits:g}."
        )


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


def _no_block(settings: EngineSettings, room: _Room, least_blocks: int) -> str:
    if settings.kv_cache_memory_bytes is not None:
        least_bytes = least_blocks * room.block_bytes
        length = settings.max_model_len
        request = "a request" if length is None else f"a request of --max-model-len {length} tokens"
        return (
            f"No available memory for the cache blocks: {request} takes at least {least_bytes} bytes and "
            f"--kv-cache-memory-bytes is {settings.kv_cache_memory_bytes}. "
            f"Use --kv-cache-memory-bytes {least_bytes} or more."
        )
    some_bytes = 16 * least_blocks * room.block_bytes
    better = room.utilization_for(some_bytes)
    facts = (
        f"No available memory for the cache blocks: weights and buffers take {_gib(room.fixed_bytes)} GiB of the "
        f"{_gib(int(room.utilization * room.available_bytes))} GiB that gpu_memory_utilization "
        f"{_share(room.utilization)} allows of {_gib(room.available_bytes)} GiB. "
    )
    if better is not None:
        return facts + f"Try increasing `gpu_memory_utilization`: --gpu-memory-utilization {better:.2f} would do."
    return facts + "No utilization is enough: use a smaller or more strongly quantised model, or free memory."


def _too_long(
    settings: EngineSettings, room: _Room, wanted_len: int, blocks: KVBlocks, num_blocks: int, block_of_8_bits: int
) -> str:
    needed_bytes = blocks.most_held(wanted_len) * room.block_bytes
    pool = _gib(num_blocks * room.block_bytes)
    facts = (
        f"To serve at least one request with the model's max seq len ({wanted_len}), {_gib(needed_bytes)} GiB KV "
        f"cache is needed, which is larger than the available KV cache memory ({pool} GiB). "
    )
    fits = blocks.longest(num_blocks, wanted_len)
    shorter = f"the estimated maximum model length is {fits}: use --max-model-len {fits}."
    if blocks.most_held(wanted_len) * block_of_8_bits <= num_blocks * room.block_bytes:
        shorter = f"{shorter[:-1]}, or --kv-cache-dtype fp8, which holds it."
    if settings.kv_cache_memory_bytes is not None:
        if needed_bytes <= room.available_bytes - room.fixed_bytes:
            return facts + f"Use --kv-cache-memory-bytes {needed_bytes}."
        return facts + "Based on the available memory, " + shorter
    better = room.utilization_for(needed_bytes)
    if better is not None and better > settings.gpu_memory_utilization:
        return facts + f"Use --gpu-memory-utilization {better:.2f}."
    return facts + "Based on the available memory, " + shorter


def _number(count: int) -> str:
    return "one" if count == 1 else str(count)


def _share(part: float) -> str:
    return f"{part:.2f}" if part >= 0.01 else f"{part:g}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}"
