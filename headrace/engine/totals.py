"""What a core counts for as long as it lives; `StepStats` tells it with every step."""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.engine.kv_cache import KVCache
from headrace.protocol.ipc import StepStats


class Totals:
    """Writes its numbers where they are told from, as each step changes a few of them only."""

    def __init__(self, kv_cache: KVCache) -> None:
        tier = kv_cache.tier
        self._kv_cache = kv_cache
        self._told = StepStats(
            step=0,
            step_s=0.0,
            num_running=0,
            num_waiting=0,
            waiting_reason="",
            num_prefill_tokens=0,
            num_decode_tokens=0,
            kv_blocks_used=0,
            kv_blocks_total=kv_cache.pool.num_blocks,
            host_blocks_total=tier.num_slots if tier is not None else 0,
            prefix_queries_total=0,
            prefix_hits_total=0,
            preemptions_total=0,
        )

    def looked_up(self, num_tokens: int, num_found: int, num_found_in_host: int) -> None:
        """A prompt was looked up in the KV cache and the host tier."""
        self._told.prefix_queries_total += num_tokens
        self._told.prefix_hits_total += num_found
        self._told.host_hits_total += num_found_in_host

    def moved(self, num_saved: int, num_loaded: int) -> None:
        """Blocks, to the host tier and back."""
        self._told.host_saved_total += num_saved
        self._told.host_loaded_total += num_loaded

    def preempted(self) -> None:
        """A sequence was."""
        self._told.preemptions_total += 1

    def stepped(self, step: int, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        """The step's number and its tokens."""
        told = self._told
        told.step, told.num_prefill_tokens, told.num_decode_tokens = step, num_prefill_tokens, num_decode_tokens

    def stats(
        self,
        step_s: float,
        num_running: int,
        num_waiting: int,
        waiting_reason: Literal["", "max_num_seqs", "kv_cache"],
        num_swapped: int,
    ) -> StepStats:
        """All of it with the present state."""
        told, tier = self._told, self._kv_cache.tier
        told.step_s = step_s
        told.num_running, told.num_waiting = num_running, num_waiting
        told.waiting_reason = waiting_reason if num_waiting else ""
        told.kv_blocks_used = self._kv_cache.pool.num_used
        if tier is not None:
            told.host_blocks_used, told.num_swapped = tier.num_used, num_swapped
        return msgspec.structs.replace(told)
