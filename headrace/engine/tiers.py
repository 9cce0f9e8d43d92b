"""The tier behind the KV cache: which contents lie in host memory, and what it costs to move them.

A content is named by its group of layers and the key of its tokens, as in the block pool. What the pool forgets to
make room is stored here, whoever it belonged to: a finished conversation, a prompt's common beginning, a request that
was preempted. Whoever needs it later finds it by the same name, so resuming is nothing but a prefix hit.

Policy only: a slot is a number, and the runtime keeps what lies in it (runtime/host_store.py). Another tier (a disk,
another machine) is another `Tier`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

from headrace.engine.block_hash import BlockKey

TRIED_ANYWAY = 32
"""Of so many moves that were not worth it one is made, so that a rate once measured too low is measured again."""
_NEWEST_SHARE = 0.25


class Tier(Protocol):
    """Where contents go that the KV cache gives up. A slot is found, held while a plan that reads it is made, and
    belongs to another content once `store` has chosen it."""

    num_slots: int

    @property
    def num_used(self) -> int: ...

    def find(self, group: int, key: BlockKey) -> int | None:
        """The slot with this content."""
        ...

    def store(self, group: int, key: BlockKey) -> int | None:
        """The slot that is to get this content; None if it has one already, or if there is no room."""
        ...

    def hold(self, slots: Iterable[int]) -> None:
        """Let no other content into these slots until `release`."""
        ...

    def release(self) -> None: ...

    def discard(self, slot: int) -> None:
        """The content is lost, or nobody will want it."""
        ...

    def clear(self) -> int:
        """Forget everything; returns how many contents there were."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError unless its books add up."""
        ...


class HostTier:
    """A bounded number of slots; the content least recently stored or used makes room."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._by_digest: OrderedDict[tuple[int, bytes], int] = OrderedDict()
        self._names: dict[int, tuple[int, BlockKey]] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def num_used(self) -> int:
        return len(self._names)

    def find(self, group: int, key: BlockKey) -> int | None:
        """A digest that meets other tokens or another parent is no hit."""
        slot = self._by_digest.get((group, key.digest))
        return slot if slot is not None and self._names[slot] == (group, key) else None

    def store(self, group: int, key: BlockKey) -> int | None:
        at = (group, key.digest)
        if at in self._by_digest:
            self._by_digest.move_to_end(at)
            return None
        if not self._free:
            oldest = next((slot for slot in self._by_digest.values() if slot not in self._held), None)
            if oldest is None:
                return None
            self.discard(oldest)
        slot = self._free.pop()
        self._by_digest[at] = slot
        self._names[slot] = group, key
        return slot

    def hold(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._held.add(slot)
            group, key = self._names[slot]
            self._by_digest.move_to_end((group, key.digest))

    def release(self) -> None:
        self._held.clear()

    def discard(self, slot: int) -> None:
        """A slot without content is no error."""
        name = self._names.pop(slot, None)
        if name is not None:
            del self._by_digest[name[0], name[1].digest]
            self._free.append(slot)

    def clear(self) -> int:
        count = self.num_used
        for slot in list(self._names):
            self.discard(slot)
        return count

    def check_integrity(self) -> None:
        assert {slot: (group, key.digest) for slot, (group, key) in self._names.items()} == {
            slot: at for at, slot in self._by_digest.items()
        }
        assert sorted([*self._free, *self._names]) == list(range(self.num_slots)), "a slot is lost, or there twice"


class MoveTimes:
    """What moving a block takes, learnt from the moves themselves.

    Until a direction was measured it counts as free, so it is tried.
    """

    def __init__(self) -> None:
        self._save_s = 0.0
        self._load_s = 0.0
        self._declined = 0

    def saved(self, count: int, seconds: float) -> None:
        self._save_s = _mean(self._save_s, count, seconds)

    def loaded(self, count: int, seconds: float) -> None:
        self._load_s = _mean(self._load_s, count, seconds)

    @property
    def load_s(self) -> float:
        """Seconds to bring one block back."""
        return self._load_s

    @property
    def both_s(self) -> float:
        """Seconds to move one block out and back."""
        return self._save_s + self._load_s

    def tried_anyway(self) -> bool:
        """Of moves that are not worth it, this one is made all the same."""
        self._declined += 1
        return self._declined % TRIED_ANYWAY == 0


def _mean(before_s: float, count: int, seconds: float) -> float:
    """A running mean per block, in which a hiccup counts as twice the mean at most."""
    if count == 0:
        return before_s
    each = seconds / count
    return each if before_s == 0.0 else before_s + _NEWEST_SHARE * (min(each, 2 * before_s) - before_s)
