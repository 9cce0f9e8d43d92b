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

With a tier behind the cache (tiers.py) a block may also lie there: what the pool evicts is saved to it, what a
sequence finds there is loaded into blocks of its own, and both are moves of the next plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, product

from headrace.config.kv_blocks import KVBlocks
from headrace.engine.block_hash import BlockKey, block_key
from headrace.engine.block_pool import BlockPool
from headrace.engine.plan import NO_BLOCK
from headrace.engine.request import Sequence
from headrace.engine.tiers import MoveTimes, Tier


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first `num_tokens` tokens of a sequence are computed: whole blocks of each group, the last ones at least,
    then perhaps part of another, to be copied from a block each. `loads` (group, place in the block table, slot) are
    blocks that lie in the host tier; `block_ids` has NO_BLOCK for them."""

    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    copy_from: tuple[int, ...] = ()
    loads: tuple[tuple[int, int, int], ...] = ()
    more: bool = False
    """The tier has blocks behind it, for `extend`."""

    @property
    def own_blocks(self) -> list[int]:
        """Those that are in the KV cache."""
        return [block_id for own in self.block_ids for block_id in own if block_id != NO_BLOCK]


@dataclass(frozen=True, slots=True)
class _Found:
    """Where one group's blocks of a sequence are, from its first block on: each in the cache, in a slot or nowhere."""

    block_ids: list[int]
    slots: list[int | None]

    def has(self, i: int) -> bool:
        return self.block_ids[i] != NO_BLOCK or self.slots[i] is not None


class KVCache:
    """Policy over a BlockPool and the tier behind it. Blocks are written by one sequence only; shared ones are full and
    only read.

    `compute_s(n)` is what computing the first n tokens of a sequence would take, which moving blocks is weighed
    against.
    """

    def __init__(
        self,
        num_blocks: int,
        blocks: KVBlocks,
        enable_prefix_caching: bool,
        tier: Tier | None = None,
        compute_s: Callable[[int], float] = lambda num_tokens: math.inf,
    ) -> None:
        self.pool = BlockPool(num_blocks, None if tier is None else self._store)
        self.tier = tier
        self.moves = MoveTimes()
        self.blocks = blocks
        self.block_size = blocks.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._compute_s = compute_s
        self._saves: list[tuple[int, int]] = []

    @property
    def nothing(self) -> Prefix:
        """The prefix of a sequence of which nothing is computed."""
        return Prefix(0, ((),) * len(self.blocks.windows))

    @property
    def names_blocks(self) -> bool:
        """Without prefix caching a sequence's blocks still have names, its own, if it can find them in the tier."""
        return self.enable_prefix_caching or self.tier is not None

    def cached_prefix(self, seq: Sequence, most_loads: int | None = None) -> Prefix:
        """The cached prefix of full blocks that saves most time, leaving at least one token to compute: the longest,
        unless computing its end again is faster than fetching that from the tier. Of one that would need more than
        `most_loads` blocks from there, as much as they are enough for, or the least that is possible."""
        if not self.names_blocks:
            return self.nothing
        most = (len(seq.token_ids) - 1) // self.block_size
        self._extend_keys(seq, most)
        found, end = [], most
        for group, window in enumerate(self.blocks.windows):
            found.append(self._find(group, seq.block_keys[:end], unbroken=window is None))
            end = len(found[-1].block_ids)
        longest = next(self._lengths(found, end), 0)
        if not any(slot is not None for own in found for slot in own.slots):
            return self._prefix(found, longest)
        num_loads = self._num_loads(found)
        best = max([*self._lengths(found, end), 0], key=lambda count: self._gain_s(count, num_loads(count)))
        if best < longest and not self.moves.tried_anyway():
            longest = best
        if most_loads is None or num_loads(longest) <= most_loads:
            return self._prefix(found, longest)
        chosen = longest
        for count in self._lengths(found, longest - 1):
            chosen = count
            if num_loads(count) <= most_loads:
                break
        return replace(self._prefix(found, chosen), more=chosen < longest)

    def _find(self, group: int, keys: list[BlockKey], unbroken: bool) -> _Found:
        """As far as all are found if `unbroken`."""
        found = _Found([], [])
        for key in keys:
            block_id, slot = self.pool.find(group, key), None
            if block_id is None:
                slot = self.tier.find(group, key) if self.tier is not None else None
                if slot is None and unbroken:
                    break
            found.block_ids.append(NO_BLOCK if block_id is None else block_id)
            found.slots.append(slot)
        return found

    def _lengths(self, found: list[_Found], end: int) -> Iterator[int]:
        """For how many of the blocks up to `end` a sequence could start behind them, the most first."""
        runs = [
            (window, list(accumulate(map(own.has, range(end)), lambda run, has: (run + 1) * has, initial=0)))
            for own, window in zip(found, self.blocks.windows, strict=True)
            if window is not None
        ]
        for count in range(end, 0, -1):
            start = count * self.block_size
            if all(run[count] >= count - self.blocks.first_seen(window, start) for window, run in runs):
                yield count

    def _num_loads(self, found: list[_Found]) -> Callable[[int], int]:
        """How many blocks must be fetched to start behind so many."""
        sums = [list(accumulate((slot is not None for slot in own.slots), initial=0)) for own in found]
        return lambda count: sum(s[count] - s[first] for s, first in zip(sums, self._firsts(count), strict=True))

    def _gain_s(self, count: int, num_loads: int) -> float:
        """What starting behind `count` blocks saves; of equal ones the longest is looked at first."""
        return self._compute_s(count * self.block_size) - num_loads * self.moves.load_s

    def _firsts(self, count: int) -> list[int]:
        """Of each group, the first block that the token after `count` blocks sees."""
        return [self.blocks.first_seen(window, count * self.block_size) for window in self.blocks.windows]

    def _prefix(self, found: list[_Found], count: int) -> Prefix:
        firsts = self._firsts(count)
        return Prefix(
            count * self.block_size,
            tuple(tuple(own.block_ids[first:count]) for own, first in zip(found, firsts, strict=True)),
            loads=tuple(
                (group, i, slot)
                for group, (own, first) in enumerate(zip(found, firsts, strict=True))
                for i, slot in enumerate(own.slots[first:count], first)
                if slot is not None
            ),
        )

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
        revived = sum(self.pool.ref_count(block_id) == 0 for block_id in prefix.own_blocks)
        if sum(end - whole + reserve for end in ends) + len(prefix.loads) + revived > self.pool.num_free:
            return False
        self.pool.share(prefix.own_blocks)
        if self.tier is not None:
            self.tier.hold(slot for _, _, slot in prefix.loads)
        seq.first_blocks = [whole - len(own) for own in prefix.block_ids]
        seq.block_tables = [
            [NO_BLOCK] * first + [*own, *self.pool.allocate(end - whole)]
            for first, own, end in zip(seq.first_blocks, prefix.block_ids, ends, strict=True)
        ]
        for (group, i, slot), block_id in zip(prefix.loads, self.pool.allocate(len(prefix.loads)), strict=True):
            seq.block_tables[group][i] = block_id
            seq.loads.append((slot, block_id))
        seq.fetching = prefix.more
        seq.num_announced_blocks = [0] * len(ends)
        seq.num_planned_tokens = seq.num_computed_tokens = start
        seq.num_published_blocks = min((i for _, i, _ in prefix.loads), default=whole)
        return True

    def extend(self, seq: Sequence, most_loads: int) -> None:
        """Fetch, into blocks that a running sequence has, what lies in the tier behind what it has planned, up to
        `most_loads` blocks or the least that is possible; its next step then starts behind that. One token at least is
        left to compute with the blocks it has."""
        assert self.tier is not None
        first = seq.num_planned_tokens // self.block_size
        end = min((len(seq.token_ids) - 1) // self.block_size, min(map(len, seq.block_tables)) - 1)
        windows = self.blocks.windows
        slots: list[list[int | None]] = [[] for _ in windows]
        runs = [0] * len(windows)
        chosen: list[tuple[int, int]] = []
        for i in range(first, end):
            for group in range(len(windows)):
                slots[group].append(self.tier.find(group, seq.block_keys[i]))
                runs[group] = 0 if slots[group][-1] is None else runs[group] + 1
            # All that it will hold behind the new start: what is held is given a name.
            firsts = [max(first, self.blocks.first_held(window, (i + 1) * self.block_size)) for window in windows]
            if chosen and sum(i + 1 - f for f in firsts) > most_loads:
                break
            if all(run >= i + 1 - f for run, f in zip(runs, firsts, strict=True)):
                chosen = [(g, j) for g, f in enumerate(firsts) for j in range(f, i + 1)]
                seq.num_planned_tokens = (i + 1) * self.block_size
        else:
            seq.fetching = False
        loads = [(slots[g][j - first], seq.block_tables[g][j]) for g, j in chosen]
        seq.loads = [(slot, block_id) for slot, block_id in loads if slot is not None]
        seq.num_settled_tokens = 0
        self.tier.hold(slot for slot, _ in seq.loads)

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

    def settled_tokens(self, seq: Sequence) -> int:
        """Up to how many tokens known `advance` has nothing to do for the computing of the last one."""
        size = self.block_size
        settled = (
            len(table) * size if window is None else min(len(table) * size, (first + 1) * size + window)
            for window, table, first in zip(self.blocks.windows, seq.block_tables, seq.first_blocks, strict=True)
        )
        return min(settled, default=0)

    def room(self, seq: Sequence) -> int:
        """Tokens that the next step can compute of a sequence with the blocks it holds."""
        return min(len(table) for table in seq.block_tables) * self.block_size - seq.num_planned_tokens

    def publish(self, seq: Sequence) -> None:
        """Name the blocks that computed tokens have filled, so that others may share them."""
        full = seq.num_computed_tokens // self.block_size
        if not self.names_blocks or full <= seq.num_published_blocks:
            return
        self._extend_keys(seq, full)
        for i in range(seq.num_published_blocks, full):
            for group, table in enumerate(seq.block_tables):
                if table[i] != NO_BLOCK:
                    self.pool.publish(table[i], group, seq.block_keys[i])
        seq.num_published_blocks = full

    def free(self, seq: Sequence) -> None:
        """Let go of all blocks, last first, so that the tail of a prefix is evicted before its head."""
        for i in reversed(range(max(map(len, seq.block_tables), default=0))):
            self.pool.release([t[i] for t in seq.block_tables if i < len(t) and t[i] != NO_BLOCK])
        seq.block_tables = []

    def forget(self, seq: Sequence) -> None:
        """Nobody will ask for what a sequence has computed."""
        for group, key in product(range(len(self.blocks.windows)), seq.block_keys):
            block_id = self.pool.find(group, key)
            if block_id is not None:
                self.pool.forget(block_id)
            if self.tier is not None and (slot := self.tier.find(group, key)) is not None:
                self.tier.discard(slot)

    # the tier

    def take_saves(self) -> tuple[tuple[int, int], ...]:
        """Those (block, slot) that the next plan must do. What it loads is in that plan already."""
        saves = tuple(self._saves)
        self._saves.clear()
        if self.tier is not None:
            self.tier.release()
        return saves

    def lose(self, loads: Iterable[tuple[int, int]]) -> None:
        """What was to come from these slots, or to go there, is not to be had; nor is it worth asking again."""
        for slot, _ in loads:
            if self.tier is not None:
                self.tier.discard(slot)

    def is_swapped(self, seq: Sequence) -> bool:
        """Of a preempted sequence: does the end of what it had lie in the tier?"""
        if self.tier is None or not seq.num_kept_blocks:
            return False
        key = seq.block_keys[seq.num_kept_blocks - 1]
        return any(self.tier.find(group, key) is not None for group in range(len(self.blocks.windows)))

    def reset(self) -> int:
        """Forget every content that no sequence holds, in the cache and in the tier; returns how many there were."""
        return self.pool.forget_free() + (self.tier.clear() if self.tier is not None else 0)

    def _store(self, block_id: int, group: int, key: BlockKey) -> None:
        """A block makes room: save its content, if fetching it again would be faster than computing it."""
        assert self.tier is not None
        move_s = self.moves.both_s * len(self.blocks.windows)
        if move_s <= self._compute_s(self.block_size) or self.moves.tried_anyway():
            slot = self.tier.store(group, key)
            if slot is not None:
                self._saves.append((block_id, slot))

    def _extend_keys(self, seq: Sequence, count: int) -> None:
        size = self.block_size
        for i in range(len(seq.block_keys), count):
            parent = seq.block_keys[-1].digest if seq.block_keys else seq.request.domain
            seq.block_keys.append(block_key(parent, seq.token_ids[i * size : (i + 1) * size]))
