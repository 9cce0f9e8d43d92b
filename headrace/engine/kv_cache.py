"""Which blocks a sequence gets: reuse what is computed already, take the rest from the pool, name what is full.

A sequence's tokens are found in up to two places, and both come to the same answer, a `Prefix`: the prefix
cache (full blocks with the right name) or a running sibling with the same prompt, whose last, partial block
is copied because the fork will write into it. Example, block size 4, prompt of 10 tokens:

    sibling   [ 0 1 2 3 ] [ 4 5 6 7 ] [ 8 9 . . ]
    fork        shared      shared      copy, then token 9 is computed again to get its logits

Each group of layers has its own blocks. Of layers with a window a sequence holds those only that its next step
needs (config/kv_blocks.py); entries of a block table before them are NO_BLOCK. A prefix is then good for a sequence
if the layers without a window have all of it, and those with one what the token after it sees:

    cached, full      [0] [1] [2] [3]        window of two blocks: 4 blocks are found, though layers with the
    cached, window     .   .  [2] [3]        window have lost the first ones; 3 are not, as block 1 is gone
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config.kv_blocks import KVBlocks
from headrace.engine.block_hash import block_key
from headrace.engine.block_pool import BlockPool
from headrace.engine.plan import NO_BLOCK
from headrace.engine.request import Sequence


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first `num_tokens` tokens of a sequence are computed: whole blocks of each group, the last ones at least,
    then perhaps part of another, to be copied from a block each."""

    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    copy_from: tuple[int, ...] = ()


class KVCache:
    """Policy over a BlockPool. Blocks are written by one sequence only; shared ones are full and only read."""

    def __init__(self, num_blocks: int, blocks: KVBlocks, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.blocks = blocks
        self.block_size = blocks.block_size
        self.enable_prefix_caching = enable_prefix_caching

    @property
    def nothing(self) -> Prefix:
        """The prefix of a sequence of which nothing is computed."""
        return Prefix(0, ((),) * len(self.blocks.windows))

    def cached_prefix(self, seq: Sequence) -> Prefix:
        """The longest cached prefix of full blocks, leaving at least one token to compute."""
        if not self.enable_prefix_caching:
            return self.nothing
        most = (len(seq.token_ids) - 1) // self.block_size
        self._extend_keys(seq, most)
        windows = self.blocks.windows
        found: list[list[int]] = [[] for _ in windows]
        runs = [0] * len(windows)
        """Blocks found without a break up to where the search is."""
        longest = 0
        for i, key in enumerate(seq.block_keys[:most]):
            for group, window in enumerate(windows):
                block_id = self.pool.find(group, key)
                runs[group] = 0 if block_id is None else runs[group] + 1
                found[group].append(NO_BLOCK if block_id is None else block_id)
                if window is None and block_id is None:
                    return self._found(found, longest)
            firsts = [self.blocks.first_seen(window, (i + 1) * self.block_size) for window in windows]
            if all(run >= i + 1 - first for run, first in zip(runs, firsts, strict=True)):
                longest = i + 1
        return self._found(found, longest)

    def _found(self, block_ids: list[list[int]], count: int) -> Prefix:
        """The first `count` blocks, as far as the token after them sees them."""
        num_tokens = count * self.block_size
        firsts = [self.blocks.first_seen(window, num_tokens) for window in self.blocks.windows]
        return Prefix(num_tokens, tuple(tuple(own[f:count]) for own, f in zip(block_ids, firsts, strict=True)))

    def forked_prefix(self, source: Sequence) -> Prefix:
        """The prompt of a running sibling without its last token, which the fork computes to get its logits; nothing
        if the sibling has gone on and given up what that token sees.

        The sibling must have its whole prompt computed (results in), and must keep its blocks until the plan
        with the copy is made; what it writes meanwhile lies behind the prompt and is never read by the fork.
        """
        num_tokens = source.num_prompt_tokens - 1
        whole, rest = divmod(num_tokens, self.block_size)
        firsts = [self.blocks.first_seen(window, num_tokens) for window in self.blocks.windows]
        if any(held > first for held, first in zip(source.first_blocks, firsts, strict=True)):
            return self.nothing
        block_ids = tuple(tuple(t[first:whole]) for t, first in zip(source.block_tables, firsts, strict=True))
        return Prefix(num_tokens, block_ids, tuple(table[whole] for table in source.block_tables) if rest else ())

    def allocate(self, seq: Sequence, prefix: Prefix, reserve: int) -> bool:
        """Give `seq` blocks for all its tokens, or as far as a step can come where a window is, the prefix's among
        them; False (and nothing done) if short.

        All at once, not chunk by chunk: two half-computed prompts can then never wait for each other's blocks.
        `reserve` free blocks of each group must be left over, for the growth of those already running.
        """
        whole, start = prefix.num_tokens // self.block_size, prefix.num_tokens
        ends = [self.blocks.end_held(window, start, seq.num_tokens) for window in self.blocks.windows]
        revived = sum(self.pool.ref_count(block_id) == 0 for own in prefix.block_ids for block_id in own)
        if sum(end - whole + reserve for end in ends) + revived > self.pool.num_free:
            return False
        for own in prefix.block_ids:
            self.pool.share(own)
        seq.first_blocks = [whole - len(own) for own in prefix.block_ids]
        seq.block_tables = [
            [NO_BLOCK] * first + [*own, *self.pool.allocate(end - whole)]
            for first, own, end in zip(seq.first_blocks, prefix.block_ids, ends, strict=True)
        ]
        seq.num_announced_blocks = [0] * len(ends)
        seq.num_planned_tokens = seq.num_computed_tokens = start
        seq.num_published_blocks = whole
        return True

    def advance(self, seq: Sequence) -> bool:
        """Before a step: give up blocks that no token from the next one on sees, and make room for every known token,
        or as far as a step can come where a window is; False if the pool is out of blocks."""
        start, missing = seq.num_planned_tokens, []
        for group, (window, table) in enumerate(zip(self.blocks.windows, seq.block_tables, strict=True)):
            first = seq.first_blocks[group]
            needed = self.blocks.first_held(window, start)
            if needed > first:
                self.pool.release(reversed(table[first:needed]))
                table[first:needed] = [NO_BLOCK] * (needed - first)
                seq.first_blocks[group] = needed
            missing.append(max(0, self.blocks.end_held(window, start, seq.num_tokens) - len(table)))
        if sum(missing) > self.pool.num_free:
            return False
        for table, count in zip(seq.block_tables, missing, strict=True):
            if count:
                table += self.pool.allocate(count)
        return True

    def room(self, seq: Sequence) -> int:
        """Tokens that the next step can compute of a sequence with the blocks it holds."""
        return min(len(table) for table in seq.block_tables) * self.block_size - seq.num_planned_tokens

    def publish(self, seq: Sequence) -> None:
        """Name the blocks that computed tokens have filled, so that others may share them."""
        full = seq.num_computed_tokens // self.block_size
        if not self.enable_prefix_caching or full <= seq.num_published_blocks:
            return
        self._extend_keys(seq, full)
        for i in range(seq.num_published_blocks, full):
            for group, table in enumerate(seq.block_tables):
                if table[i] != NO_BLOCK:
                    self.pool.publish(table[i], group, seq.block_keys[i])
        seq.num_published_blocks = full

    def free(self, seq: Sequence) -> None:
        """Let go of all blocks, last first, so that the tail of a prefix is evicted before its head."""
        for i in reversed(range(max(map(len, seq.block_tables)))):
            self.pool.release(table[i] for table in seq.block_tables if i < len(table) and table[i] != NO_BLOCK)
        seq.block_tables = []

    def _extend_keys(self, seq: Sequence, count: int) -> None:
        size = self.block_size
        for i in range(len(seq.block_keys), count):
            parent = seq.block_keys[-1].digest if seq.block_keys else seq.request.domain
            seq.block_keys.append(block_key(parent, seq.token_ids[i * size : (i + 1) * size]))
