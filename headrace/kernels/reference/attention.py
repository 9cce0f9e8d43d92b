"""Paged causal attention made of work items of one fixed shape, so that a row's bits never depend on the batch.

An item is one KV head and QUERY_TILE consecutive positions of one sequence, aligned to the sequence's start:
position p is always slot p % 8 of its item, whatever chunk it came in. Keys and values are taken in tiles of
KEY_TILE positions, first to last, by an online softmax; both products are one matrix shape for ever, and
what must not be seen adds exact zeros. A chunk of positions 5..10 of a sequence, x = not in this step:

    item 0: x x x x x 5 6 7     item 1: 8 9 10 x x x x x     (times the number of KV heads)

Short chunks of many sequences share groups, each item gathering its own keys: sorted by how many key tiles they
need, longest first, those still active at their tile j are a prefix. The items of a long chunk read the same
keys, so there a group is one head of one sequence, last position first, and its keys are gathered once; with
a window the first items are done with the first tiles before they begin:

    window 200, key tiles of 128     item at 512..519: tiles 2 3 4     item at 384..391: tiles 1 2 3
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.kernels.ops import Batch
from headrace.kernels.reference.kv_cache import CachePart

QUERY_TILE = 8
KEY_TILE = 128
# Sequences with more query tiles than this in a step get groups of their own.
MAX_SHARED_TILES = 4
# Bounds the keys, values and scores in memory at once: some tens of MB for heads of 128.
MAX_GROUP_ITEMS = 192

_offsets = np.arange(KEY_TILE)
_slots = np.arange(QUERY_TILE)


@dataclass(frozen=True, slots=True)
class KeyTile:
    """`rows` of the cache to gather, one key tile for each of the items [start, stop) of a group (or one for all of
    them); items from `masked_from` on see `hidden` [items, QUERY_TILE, 1, KEY_TILE] of it not."""

    rows: Tensor
    start: int
    stop: int
    masked_from: int
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """Items [start, stop)."""

    start: int
    stop: int
    key_tiles: tuple[KeyTile, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What one step's attention computes, the same for every layer.

    `slots` [rows * num_kv_heads]: where each (row, KV head) lies among the items' slots.
    """

    num_items: int
    slots: Tensor
    groups: tuple[Group, ...]


def plan_attention(
    batch: Batch,
    *,
    num_kv_heads: int,
    block_size: int,
    empty_slot: int,
    device: str,
    group: int = 0,
    window: int | None = None,
) -> AttentionPlan:
    """Of the layers of `group`. `empty_slot` is a slot of the cache that holds zeros, read for positions past a
    sequence's end and for those before all that its rows of this step see, whose blocks may be others' by now.

    With a `window` a row sees that many positions, its own the last. Key tiles that no row of an item sees are
    left out, and which these are is told by the item's position alone.
    """
    block_tables = batch.block_tables[group]
    query_start = batch.query_start.astype(np.int64)
    num_queries = np.diff(query_start)
    seq_lens = batch.seq_lens.astype(np.int64)
    first_tile = (seq_lens - num_queries) // QUERY_TILE
    lowest_seen = np.zeros_like(seq_lens) if window is None else seq_lens - num_queries + 1 - window
    num_tiles = (seq_lens - 1) // QUERY_TILE - first_tile + 1
    tile_start = np.concatenate([[0], np.cumsum(num_tiles)])
    tile_seq = np.repeat(np.arange(len(seq_lens)), num_tiles)
    tile_index = np.arange(tile_start[-1]) - tile_start[tile_seq] + first_tile[tile_seq]
    last_key_tile = tile_index * QUERY_TILE // KEY_TILE
    lowest_key = tile_index * QUERY_TILE + 1 - (window or 0)
    first_key_tile = np.zeros_like(last_key_tile) if window is None else np.maximum(lowest_key, 0) // KEY_TILE

    def key_slots(seqs: NDArray[np.int64], key_tiles: NDArray[np.int64]) -> NDArray[np.int64]:
        """[sequences, KEY_TILE] slots of the cache."""
        positions = key_tiles[:, None] * KEY_TILE + _offsets[None, :]
        blocks = np.minimum(positions // block_size, block_tables.shape[1] - 1)
        slots = block_tables[seqs[:, None], blocks].astype(np.int64) * block_size + positions % block_size
        seen = (positions >= lowest_seen[seqs][:, None]) & (positions < seq_lens[seqs][:, None])
        return np.where(seen, slots, empty_slot)

    heads = np.arange(num_kv_heads)
    item_of_tile = np.empty((tile_start[-1], num_kv_heads), np.int64)
    groups: list[Group] = []
    num_items = 0

    def add_group(tiles: NDArray[np.int64], head: int | None) -> None:
        """Tiles with every head, each gathering its keys, or with one head and shared keys."""
        nonlocal num_items
        per_tile = 1 if head is not None else num_kv_heads
        items = num_items + np.arange(len(tiles) * per_tile).reshape(len(tiles), per_tile)
        if head is None:
            item_of_tile[tiles] = items
        else:
            item_of_tile[tiles, head] = items[:, 0]
        first, last = first_key_tile[tiles], last_key_tile[tiles]
        # Of shared keys step j is tile j of the sequence, of an item's own keys the item's j-th.
        steps = np.arange(first.min(), last.max() + 1) if head is not None else np.arange((last - first).max() + 1)
        key_tiles = []
        for j in steps.tolist():
            begin = int(np.count_nonzero(first > j)) if head is not None else 0
            left = last - j if head is not None else last - first - j
            end, masked = int(np.count_nonzero(left >= 0)), int(np.count_nonzero(left > 0))
            if window is not None:
                masked = begin
            if head is None:
                rows = key_slots(tile_seq[tiles[:end]], first[:end] + j)[:, None, :] * num_kv_heads
                rows = rows + heads[None, :, None]
            else:
                rows = key_slots(tile_seq[tiles[:1]], np.array([j])) * num_kv_heads + head
            at = (first[masked:end] + j) if head is None else np.full(end - masked, j)
            hidden = _hidden(tile_index[tiles[masked:end]] * QUERY_TILE - at * KEY_TILE, window)
            key_tiles.append(
                KeyTile(
                    torch.from_numpy(rows.reshape(-1)).to(device),
                    begin * per_tile,
                    end * per_tile,
                    masked * per_tile,
                    torch.from_numpy(np.repeat(hidden, per_tile, axis=0)[:, :, None, :]).to(device),
                )
            )
        groups.append(Group(num_items, num_items + items.size, tuple(key_tiles)))
        num_items += items.size

    shared = np.flatnonzero((num_tiles <= MAX_SHARED_TILES)[tile_seq])
    shared = shared[np.argsort(first_key_tile[shared] - last_key_tile[shared], kind="stable")]
    step = max(1, MAX_GROUP_ITEMS // num_kv_heads)
    for start in range(0, len(shared), step):
        add_group(shared[start : start + step], None)
    for seq in np.flatnonzero(num_tiles > MAX_SHARED_TILES):
        tiles = np.arange(tile_start[seq], tile_start[seq + 1])[::-1]
        for start in range(0, len(tiles), MAX_GROUP_ITEMS):
            for head in range(num_kv_heads):
                add_group(tiles[start : start + MAX_GROUP_ITEMS], head)

    positions = batch.positions.astype(np.int64)
    row_seq = np.repeat(np.arange(len(seq_lens)), num_queries)
    row_tile = tile_start[row_seq] + positions // QUERY_TILE - first_tile[row_seq]
    slots = item_of_tile[row_tile] * QUERY_TILE + (positions % QUERY_TILE)[:, None]
    return AttentionPlan(num_items, torch.from_numpy(slots.reshape(-1)).to(device), tuple(groups))


def _hidden(distance: NDArray[np.int64], window: int | None) -> NDArray[np.bool_]:
    """[items, QUERY_TILE, KEY_TILE]: is a key hidden from a query, whose items begin `distance` after the key tile?"""
    query = distance[:, None, None] + _slots[None, :, None]
    hidden = _offsets[None, None, :] > query
    if window is not None:
        hidden |= _offsets[None, None, :] <= query - window
    return hidden


def attend(
    q: Tensor, keys: CachePart, values: CachePart, plan: AttentionPlan, *, num_kv_heads: int, scale: float
) -> Tensor:
    """q [rows, num_heads * head_dim] -> the same shape.

    keys and values are a layer's cache, this step's rows stored already.
    """
    rows, head_dim = q.shape[0], keys.numbers.shape[1]
    shared_heads = q.shape[1] // (num_kv_heads * head_dim)
    # A KV head's queries lie side by side in a row, so (slot, head of the group) are the rows of an item.
    queries = torch.zeros(plan.num_items * QUERY_TILE, shared_heads * head_dim, device=q.device)
    queries[plan.slots] = q.float().mul(scale).view(rows * num_kv_heads, -1)
    queries = queries.view(plan.num_items, -1, head_dim)
    out = torch.zeros_like(queries)
    for group in plan.groups:
        _attend_group(queries[group.start : group.stop], out[group.start : group.stop], keys, values, group)
    gathered = out.view(plan.num_items * QUERY_TILE, -1).index_select(0, plan.slots)
    return gathered.view(rows, -1).to(q.dtype)


def _attend_group(queries: Tensor, out: Tensor, keys: CachePart, values: CachePart, group: Group) -> None:
    """Online softmax over the group's key tiles; `out` holds zeros and gets the result."""
    items, item_rows, head_dim = queries.shape
    # The lowest number and not -infinity: a row that sees nothing of a tile must add zeros, not 0 * infinity.
    maximum = queries.new_full((items, item_rows, 1), torch.finfo(torch.float32).min)
    total = queries.new_zeros(items, item_rows, 1)
    for tile in group.key_tiles:
        active, n = slice(tile.start, tile.stop), tile.stop - tile.start
        k = keys.read(tile.rows).view(-1, KEY_TILE, head_dim).expand(n, -1, -1)
        v = values.read(tile.rows).view(-1, KEY_TILE, head_dim).expand(n, -1, -1)
        scores = torch.bmm(queries[active], k.transpose(1, 2))
        if tile.masked_from < tile.stop:
            by_position = scores.view(n, QUERY_TILE, -1, KEY_TILE)
            by_position[tile.masked_from - tile.start :].masked_fill_(tile.hidden, -torch.inf)
        new_maximum = torch.maximum(maximum[active], scores.amax(-1, keepdim=True))
        weights = scores.sub_(new_maximum).exp_()
        decay = (maximum[active] - new_maximum).exp_()
        maximum[active] = new_maximum
        total[active].mul_(decay).add_(weights.sum(-1, keepdim=True))
        out[active].mul_(decay).baddbmm_(weights, v)
    out.div_(total)
