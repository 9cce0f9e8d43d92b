"""What lies in the slots of the host tier: the bytes of KV cache blocks, each in memory of its own.

Which content is in which slot, and how many slots there are, is the engine's business (engine/tiers.py). A move that
fails costs time only: the slot is empty then, a load of it fails too, and the engine computes those tokens again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.kernels.ops import Kernels

logger = logging.getLogger("headrace.core")

BLOCKS_PER_MOVE = {"cpu": 1, "cuda": 32}
"""A GPU moves many blocks as fast as one; on a CPU one at a time spares a second copy."""


class HostStore:
    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._content: dict[int, NDArray[np.uint8]] = {}

    def __len__(self) -> int:
        """Slots with content."""
        return len(self._content)

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        """From blocks to slots, in order; what cannot be read leaves its slot empty."""
        for some in self._portions(pairs):
            for _, slot in some:
                self._content.pop(slot, None)
            try:
                rows = self._kernels.read_blocks([block_id for block_id, _ in some])
                for (_, slot), row in zip(some, rows, strict=True):
                    self._content[slot] = row if len(some) == 1 else row.copy()
            except Exception:
                logger.warning("%d blocks could not be saved to host memory.", len(some), exc_info=True)

    def load(self, pairs: Sequence[tuple[int, int]]) -> frozenset[int]:
        """From slots to blocks; returns the blocks that could not be written."""
        failed: set[int] = set()
        for some in self._portions(pairs):
            block_ids = [block_id for _, block_id in some]
            try:
                rows = [self._content[slot] for slot, _ in some]
                self._kernels.write_blocks(block_ids, rows[0][None] if len(rows) == 1 else np.stack(rows))
            except Exception:
                logger.warning("%d blocks could not be loaded from host memory.", len(some), exc_info=True)
                failed.update(block_ids)
        return frozenset(failed)

    def clear(self) -> None:
        self._content.clear()

    def _portions(self, pairs: Sequence[tuple[int, int]]) -> list[Sequence[tuple[int, int]]]:
        size = BLOCKS_PER_MOVE[self._kernels.device]
        return [pairs[i : i + size] for i in range(0, len(pairs), size)]
