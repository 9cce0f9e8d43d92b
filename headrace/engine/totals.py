"""What a core counts for as long as it lives; `StepStats` tells it with every step."""

from __future__ import annotations

from dataclasses import dataclass


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
