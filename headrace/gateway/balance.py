"""Which replica of an upstream takes a request.

Two are drawn and the less loaded taken (requests in flight x expected time to the first token). Requests that begin
alike, or belong to one session, prefer one replica, whose prefix cache knows them: rendezvous hashing names it, so
all workers agree without talking. A replica that has much more to do than the idlest loses that preference.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

EWMA = 0.2
UNKNOWN_TTFT_S = 0.2
GUARD_FACTOR = 1.5
GUARD_REQUESTS = 4
"""The preferred replica is taken while in flight <= 1.5 x the idlest + 4."""

Replica = tuple[str, int]


@dataclass(slots=True)
class Load:
    in_flight: int = 0
    ttft_s: float = UNKNOWN_TTFT_S
    healthy: bool = True

    @property
    def cost(self) -> float:
        return (self.in_flight + 1) * self.ttft_s


class Balancer:
    """Loads of all replicas. One loop uses it, so it needs no lock."""

    def __init__(self, draw: random.Random | None = None) -> None:
        self._loads: dict[Replica, Load] = {}
        self._random = draw or random.Random()

    def load(self, upstream: str, replica: int) -> Load:
        load = self._loads.get((upstream, replica))
        if load is None:
            load = self._loads[(upstream, replica)] = Load()
        return load

    def order(self, upstream: str, num_replicas: int, affinity: bytes | None) -> Sequence[int]:
        """All replicas, the chosen one first; unhealthy ones last."""
        if num_replicas == 1:
            return (0,)
        loads = [self.load(upstream, replica) for replica in range(num_replicas)]
        healthy = [replica for replica in range(num_replicas) if loads[replica].healthy]
        candidates = healthy or list(range(num_replicas))
        first = self._choose(loads, candidates, affinity)
        rest = sorted((r for r in candidates if r != first), key=lambda r: loads[r].cost)
        return [first, *rest, *(r for r in range(num_replicas) if r not in candidates)]

    def _choose(self, loads: Sequence[Load], candidates: Sequence[int], affinity: bytes | None) -> int:
        if affinity is not None:
            preferred = max(candidates, key=lambda r: _weight(affinity, r))
            idlest = min(loads[r].in_flight for r in candidates)
            if loads[preferred].in_flight <= GUARD_FACTOR * idlest + GUARD_REQUESTS:
                return preferred
        pair = self._random.sample(list(candidates), min(2, len(candidates)))
        return min(pair, key=lambda r: loads[r].cost)

    def began(self, upstream: str, replica: int) -> None:
        self.load(upstream, replica).in_flight += 1

    def ended(self, upstream: str, replica: int, ttft_s: float | None) -> None:
        """`ttft_s` None: it gave no first token."""
        load = self.load(upstream, replica)
        load.in_flight -= 1
        if ttft_s is not None:
            load.ttft_s += EWMA * (ttft_s - load.ttft_s)


def _weight(affinity: bytes, replica: int) -> bytes:
    return blake2b(affinity, digest_size=8, salt=replica.to_bytes(4, "big")).digest()


def affinity_of(session: bytes | None, prompt: bytes) -> bytes:
    """What keeps alike requests together: the session where there is one, else the first 2 KB of the prompt."""
    return b"s" + session if session else b"p" + prompt[:2048]
