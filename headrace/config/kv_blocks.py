"""How many blocks of the KV cache a sequence holds, by what its model's groups of layers see.

Layers without a window keep a sequence's every token. Layers with one need, of a step that computes tokens
[start, stop), the tokens from start + 1 - window on; blocks before them go to others. Window 6, blocks of 4:

    computing 11 and 12     [ 0 1 2 3 ] [ 4 5 6 7 ] [ 8 9 10 11 ] [ 12 . . . ]      11 sees 6..11, 12 sees 7..12
                              given up     held          held         held
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVBlocks:
    """`windows`: of each group of layers, None for one that sees everything. A step computes at most
    `max_step_tokens` tokens of a sequence."""

    windows: tuple[int | None, ...]
    block_size: int
    max_step_tokens: int

    def count(self, num_tokens: int) -> int:
        """Blocks of so many tokens, of one group that keeps them all."""
        return -(-num_tokens // self.block_size)

    def first_seen(self, window: int | None, start: int) -> int:
        """The first block that the token at `start` sees, and so any after it."""
        return 0 if window is None else max(0, start + 1 - window) // self.block_size

    def first_held(self, window: int | None, start: int) -> int:
        """The first block kept while the token at `start` is computed: as if the one before it were. A fork computes
        its sibling's last prompt token again, and needs what that saw."""
        return self.first_seen(window, start - 1)

    def end_held(self, window: int | None, start: int, num_tokens: int) -> int:
        """One past the last block held then by a sequence of `num_tokens`: for all of them, or as far as the next step
        can come."""
        last = self.count(num_tokens)
        return last if window is None else min(last, self.first_held(window, start) + self._most(window))

    def most_held(self, num_tokens: int) -> int:
        """Blocks, of all groups, that a sequence of so many tokens never exceeds."""
        whole = self.count(num_tokens)
        return sum(whole if window is None else min(whole, self._most(window)) for window in self.windows)

    def longest(self, num_blocks: int, limit: int) -> int:
        """Tokens, at most `limit`, of the longest sequence for which so many blocks are enough."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.most_held(middle) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def _most(self, window: int) -> int:
        """Blocks that `window` tokens and a step's touch, wherever in a block the first of them lies."""
        return (window + self.max_step_tokens + self.block_size - 2) // self.block_size + 1
