"""Which replica of an upstream takes a request.

Two are drawn and the less loaded taken: requests in flight, ours and those that the engine counts besides, times the
expected time to the first token, more where its KV cache is nearly full. Before that, what a replica has read lately
draws what begins alike: the one that knows most of a prompt's beginning is preferred, and for a beginning that none
knows, or a session, rendezvous hashing names one, so that all workers agree without talking. A replica that has much
more to do than the idlest loses that preference.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

EWMA = 0.2
UNKNOWN_TTFT_S = 0.2
LEAST_ROOM = 0.05
GUARD_FACTOR = 1.5
GUARD_REQUESTS = 4
"""The preferred replica is taken while its requests <= 1.5 x the idlest's + 4."""
BLOCK_BYTES = 1024
MAX_PROMPT_BYTES = 64 * BLOCK_BYTES
"""Of a prompt's beginning, as it is compared."""
MAX_BLOCKS = 8192
"""Remembered of each replica; some million tokens."""

Replica = tuple[str, int]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine says of itself."""

    running: int
    waiting: int
    kv_use: float
    """Of its KV cache, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Affinity:
    """What a request has in common with those that one replica should answer."""

    name: bytes
    """The session, or the first of the prompt."""
    blocks: tuple[int, ...] = ()
    """Of the prompt, each hashed with all before it; () where the session decides."""
    stays: bool = False
    """With its replica however much that has to do."""


@dataclass(slots=True)
class Load:
    in_flight: int = 0
    ttft_s: float = UNKNOWN_TTFT_S
    healthy: bool = True
    elsewhere: int = 0
    """Requests that the engine has from others."""
    waiting: int = 0
    """Of all its requests those in its queue."""
    room: float = 1.0
    """Of its KV cache."""
    known: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Blocks of the prompts it was sent, the latest last."""

    @property
    def busy(self) -> int:
        return self.in_flight + self.elsewhere + self.waiting

    @property
    def cost(self) -> float:
        return (self.busy + 1) * self.ttft_s / max(self.room, LEAST_ROOM)

    def num_known(self, blocks: Sequence[int]) -> int:
        """How many blocks of a prompt's beginning it was sent."""
        for number, block in enumerate(blocks):
            if block not in self.known:
                return number
        return len(blocks)

    def learn(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):  # a beginning is forgotten after what followed it
            self.known[block] = None
            self.known.move_to_end(block)
        while len(self.known) > MAX_BLOCKS:
            self.known.popitem(last=False)


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

    def order(self, upstream: str, num_replicas: int, affinity: Affinity | None) -> Sequence[int]:
        """All replicas, the chosen one first; unhealthy ones last."""
        if num_replicas == 1:
            return (0,)
        loads = [self.load(upstream, replica) for replica in range(num_replicas)]
        healthy = [replica for replica in range(num_replicas) if loads[replica].healthy]
        candidates = healthy or list(range(num_replicas))
        first = self._choose(loads, candidates, affinity)
        if affinity is not None:
            loads[first].learn(affinity.blocks)
        rest = sorted((r for r in candidates if r != first), key=lambda r: loads[r].cost)
        return [first, *rest, *(r for r in range(num_replicas) if r not in candidates)]

    def _choose(self, loads: Sequence[Load], candidates: Sequence[int], affinity: Affinity | None) -> int:
        if affinity is not None:
            preferred = _preferred(loads, candidates, affinity)
            idlest = min(loads[r].busy for r in candidates)
            if affinity.stays or loads[preferred].busy <= GUARD_FACTOR * idlest + GUARD_REQUESTS:
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

    def told(self, upstream: str, replica: int, engine: EngineLoad | None) -> None:
        """What its engine has just said; None: it says nothing, and only our own requests are known."""
        load = self.load(upstream, replica)
        if engine is None:
            load.elsewhere, load.waiting, load.room = 0, 0, 1.0
            return
        load.elsewhere = max(0, engine.running + engine.waiting - load.in_flight)
        load.waiting = engine.waiting
        load.room = 1.0 - engine.kv_use


def _preferred(loads: Sequence[Load], candidates: Sequence[int], affinity: Affinity) -> int:
    numbers = {r: loads[r].num_known(affinity.blocks) for r in candidates} if affinity.blocks else {}
    most = max(numbers.values(), default=0)
    if most:
        return min((r for r in candidates if numbers[r] == most), key=lambda r: loads[r].cost)
    return max(candidates, key=lambda r: _weight(affinity.name, r))


def _weight(name: bytes, replica: int) -> bytes:
    return blake2b(name, digest_size=8, salt=replica.to_bytes(4, "big")).digest()


def affinity_of(session: bytes | None, prompt: bytes, model: str = "", *, stays: bool = False) -> Affinity:
    """By the session where there is one, else by the beginning of the prompt, at most MAX_PROMPT_BYTES of it."""
    if session:
        return Affinity(b"s" + session, stays=stays)
    blocks: list[int] = []
    above = hash(model)
    for end in range(BLOCK_BYTES, len(prompt) + 1, BLOCK_BYTES):
        above = hash((above, prompt[end - BLOCK_BYTES : end]))
        blocks.append(above)
    return Affinity(b"p" + prompt[:2048], tuple(blocks))
