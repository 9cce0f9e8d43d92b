"""Which blocks a sequence gets: reuse what is computed already, take the rest from the pool, name what is full.

A sequence's tokens are found in up to two places, and both come to the same answer, a `Prefix`: the prefix
cache (full blocks with the right name) or a running sibling with the same prompt, whose last, partial block
is copied because the fork will write into it. Example, block size 4, prompt of 10 tokens:

    sibling   [ 0 1 2 3 ] [ 4 5 6 7 ] [ 8 9 . . ]
    fork        shared      shared      copy, then token 9 is computed again to get its logits
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.block_hash import block_key
from headrace.engine.block_pool import BlockPool
from headrace.engine.request import Sequence


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first `num_tokens` tokens of a sequence are computed: whole blocks of each group, then perhaps part of
    another, to be copied from a block each."""

    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    copy_from: tuple[int, ...] = ()


class KVCache:
    """Policy over a BlockPool. Blocks are written by one sequence only; shared ones are full and only read."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool, num_groups: int = 1) -> None:
        self.pool = BlockPool(num_blocks)
        self.groups = range(num_groups)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching

    @property
    def nothing(self) -> Prefix:
        """The prefix of a sequence of which nothing is computed."""
        return Prefix(0, ((),) * len(self.groups))

    def num_blocks_for(self, num_tokens: int) -> int:
        """Of each group."""
        return -(-num_tokens // self.block_size)

    def cached_prefix(self, seq: Sequence) -> Prefix:
        """The longest run of cached full blocks, leaving at least one token to compute."""
        if not self.enable_prefix_caching:
            return self.nothing
        most = (len(seq.token_ids) - 1) // self.block_size
        self._extend_keys(seq, most)
        found: list[list[int]] = []
        for key in seq.block_keys[:most]:
            block_ids = [block_id for g in self.groups if (block_id := self.pool.find(g, key)) is not None]
            if len(block_ids) < len(self.groups):
                break
            found.append(block_ids)
        if not found:
            return self.nothing
        return Prefix(len(found) * self.block_size, tuple(zip(*found, strict=True)))

    def forked_prefix(self, source: Sequence) -> Prefix:
        """The prompt of a running sibling without its last token, which the fork computes to get its logits.

        The sibling must have its whole prompt computed (results in), and must keep its blocks until the plan
        with the copy is made; what it writes meanwhile lies behind the prompt and is never read by the fork.
        """
        num_tokens = source.num_prompt_tokens - 1
        whole, rest = divmod(num_tokens, self.block_size)
        block_ids = tuple(tuple(table[:whole]) for table in source.block_tables)
        return Prefix(num_tokens, block_ids, tuple(table[whole] for table in source.block_tables) if rest else ())

    def allocate(self, seq: Sequence, prefix: Prefix, reserve: int) -> bool:
        """Give `seq` blocks for all its tokens, the prefix's among them; False (and nothing done) if short.

        All at once, not chunk by chunk: two half-computed prompts can then never wait for each other's blocks.
        `reserve` free blocks must be left over, for the growth of those already running.
        """
        count = self.num_blocks_for(seq.num_tokens) - prefix.num_tokens // self.block_size
        revived = sum(self.pool.ref_count(block_id) == 0 for own in prefix.block_ids for block_id in own)
        if (count + reserve) * len(self.groups) + revived > self.pool.num_free:
            return False
        for own in prefix.block_ids:
            self.pool.share(own)
        seq.block_tables = [[*own, *self.pool.allocate(count)] for own in prefix.block_ids]
        seq.num_announced_blocks = [0] * len(self.groups)
        seq.num_planned_tokens = seq.num_computed_tokens = prefix.num_tokens
        seq.num_published_blocks = prefix.num_tokens // self.block_size
        return True

    def grow(self, seq: Sequence) -> bool:
        """Make room for every known token; False if the pool is out of blocks."""
        count = self.num_blocks_for(seq.num_tokens) - len(seq.block_tables[0])
        if count <= 0:
            return True
        if count * len(self.groups) > self.pool.num_free:
            return False
        for table in seq.block_tables:
            table += self.pool.allocate(count)
        return True

    def publish(self, seq: Sequence) -> None:
        """Name the blocks that computed tokens have filled, so that others may share them."""
        full = seq.num_computed_tokens // self.block_size
        if not self.enable_prefix_caching or full <= seq.num_published_blocks:
            return
        self._extend_keys(seq, full)
        for i in range(seq.num_published_blocks, full):
            for group, table in enumerate(seq.block_tables):
                self.pool.publish(table[i], group, seq.block_keys[i])
        seq.num_published_blocks = full

    def free(self, seq: Sequence) -> None:
        """Let go of all blocks, last first, so that the tail of a prefix is evicted before its head."""
        for table in seq.block_tables:
            self.pool.release(reversed(table))
        seq.block_tables = []

    def _extend_keys(self, seq: Sequence, count: int) -> None:
        size = self.block_size
        for i in range(len(seq.block_keys), count):
            parent = seq.block_keys[-1].digest if seq.block_keys else seq.request.domain
            seq.block_keys.append(block_key(parent, seq.token_ids[i * size : (i + 1) * size]))
