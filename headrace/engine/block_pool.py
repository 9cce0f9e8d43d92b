"""The blocks of the KV cache: who holds each one, which are free, and what full ones contain.

Mechanism only: what to keep and whom to give it is decided in kv_cache.py. A block with no holder is on the
free list but keeps its content, and its name, until it is handed out again; so "free" and "cached" are the
same list, and the front of the list is evicted first:

    free list   [7] [2] [9 "system prompt, part 2"] [4 "system prompt, part 1"]
                 no content ......... least recently freed ........ most recently freed
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from headrace.engine.block_hash import BlockKey


class BlockPool:
    """Reference counts, a free list in eviction order and a map from content to block; all operations O(1) a block.

    A block holds one group of layers, so a content is named by the group and the key of its tokens.
    """

    def __init__(self, num_blocks: int, evicted: Callable[[int, int, BlockKey], None] | None = None) -> None:
        """`evicted(block_id, group, key)` is told of content that makes room for another."""
        self.num_blocks = num_blocks
        self._evicted = evicted
        self._ref_counts = [0] * num_blocks
        self._names: list[tuple[int, BlockKey] | None] = [None] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict((block_id, None) for block_id in range(num_blocks))
        self._by_digest: dict[tuple[int, bytes], int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Free blocks that still hold content with a name."""
        return sum(self._names[block_id] is not None for block_id in self._free)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, forgetting what the least recently freed held. The caller has checked `num_free`."""
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks asked for and {len(self._free)} are free: check num_free first")
        block_ids = []
        for _ in range(count):
            block_id, _ = self._free.popitem(last=False)
            name = self._names[block_id]
            if name is not None:
                self.forget(block_id)
                if self._evicted is not None:
                    self._evicted(block_id, *name)
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """One more holder for each block; a cached block leaves the free list."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """One holder less. Blocks nobody holds become free, in the order given: the first is evicted first."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                raise RuntimeError(f"block {block_id} was released more often than it was taken")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if self._names[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def publish(self, block_id: int, group: int, key: BlockKey) -> None:
        """Name the content of a full, computed block. If another block has that content already, that one stays."""
        if self._names[block_id] is None and (group, key.digest) not in self._by_digest:
            self._names[block_id] = group, key
            self._by_digest[group, key.digest] = block_id

    def find(self, group: int, key: BlockKey) -> int | None:
        """The block with this content. A digest that meets other tokens or another parent is no hit."""
        block_id = self._by_digest.get((group, key.digest))
        return block_id if block_id is not None and self._names[block_id] == (group, key) else None

    def forget_free(self) -> int:
        """Forget the content of every block nobody holds; returns how many had one."""
        cached = [block_id for block_id in self._free if self._names[block_id] is not None]
        for block_id in cached:
            self.forget(block_id)
        return len(cached)

    def forget(self, block_id: int) -> None:
        """Nobody will want this block's content."""
        name = self._names[block_id]
        if name is not None:
            group, key = name
            del self._by_digest[group, key.digest]
            self._names[block_id] = None

    def check_integrity(self) -> None:
        """Raise AssertionError unless list, counts and map agree with each other."""
        for block_id, count in enumerate(self._ref_counts):
            assert count >= 0, f"block {block_id} has {count} holders"
            assert (count == 0) == (block_id in self._free), f"block {block_id}: {count} holders, free list disagrees"
        named = {(name[0], name[1].digest): block_id for block_id, name in enumerate(self._names) if name is not None}
        assert named == self._by_digest, "the map from digest to block disagrees with the blocks' own keys"
        assert self.num_used + self.num_free == self.num_blocks
