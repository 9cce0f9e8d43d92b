"""What a core counts for as long as it lives; `StepStats` tells it with every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.engine.kv_cache import KVCache
from headrace.protocol.ipc import StepStats


@dataclass(slots=True)
class Totals:
    """Hits are prompt tokens, `host_saved` and `host_loaded` blocks, `preemptions` sequences."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    host_hits: int = 0
    host_saved: int = 0
    host_loaded: int = 0
    preemptions: int = 0

    def looked_up(self, num_tokens: int, num_found: int, num_found_in_host: int) -> None:
        """A prompt was looked up in the KV cache and the host tier."""
        self.prefix_queries += num_tokens
        self.prefix_hits += num_found
        self.host_hits += num_found_in_host

    def moved(self, num_saved: int, num_loaded: int) -> None:
        self.host_saved += num_saved
        self.host_loaded += num_loaded

    def stats(
        self,
        kv_cache: KVCache,
        *,
        last_step: tuple[int, int, int],
        step_s: float,
        num_running: int,
        num_waiting: int,
        waiting_reason: Literal["", "max_num_seqs", "kv_cache"],
        num_swapped: int,
    ) -> StepStats:
        """All of it with the present state. `last_step`: its number, and its tokens of prefills and of decodes."""
        step, num_prefill_tokens, num_decode_tokens = last_step
        tier = kv_cache.tier
        return StepStats(
            step=step,
            step_s=step_s,
            num_running=num_running,
            num_waiting=num_waiting,
            waiting_reason=waiting_reason,
            num_prefill_tokens=num_prefill_tokens,
            num_decode_tokens=num_decode_tokens,
            kv_blocks_used=kv_cache.pool.num_used,
            kv_blocks_total=kv_cache.pool.num_blocks,
            host_blocks_used=tier.num_used if tier is not None else 0,
            host_blocks_total=tier.num_slots if tier is not None else 0,
            num_swapped=num_swapped,
            prefix_queries_total=self.prefix_queries,
            prefix_hits_total=self.prefix_hits,
            host_hits_total=self.host_hits,
            host_saved_total=self.host_saved,
            host_loaded_total=self.host_loaded,
            preemptions_total=self.preemptions,
        )
