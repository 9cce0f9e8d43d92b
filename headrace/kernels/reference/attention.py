"""Paged causal attention made of work items of one fixed shape, so that a row's bits never depend on the batch.

An item is one KV head and QUERY_TILE consecutive positions of one sequence, aligned to the sequence's start:
position p is always slot p % 8 of its item, whatever chunk it came in. Keys and values are taken in tiles of
KEY_TILE positions, first to last, by an online softmax; both products are one matrix shape for ever, and
what must not be seen adds exact zeros. A chunk of positions 5..10 of a sequence, x = not in this step:

    item 0: x x x x x 5 6 7     item 1: 8 9 10 x x x x x     (times the number of KV heads)

Items are sorted by how many key tiles they need, longest first: those still active at tile j are a prefix.
Short chunks of many sequences share groups, each item gathering its own keys. The items of a long chunk
read the same keys, so there a group is one head of one sequence and its keys are gathered once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.kernels.ops import Batch

QUERY_TILE = 8
KEY_TILE = 128
# Sequences with more query tiles than this in a step get groups of their own.
MAX_SHARED_TILES = 4
# Bounds the keys, values and scores in memory at once: some tens of MB for heads of 128.
MAX_GROUP_ITEMS = 192

_offsets = np.arange(KEY_TILE)
# _HIDDEN[i, slot, offset]: is a key hidden from a query, in the key tile that holds both, i query tiles into it?
_HIDDEN = (
    _offsets[None, None, :]
    > (np.arange(KEY_TILE // QUERY_TILE) * QUERY_TILE)[:, None, None] + np.arange(QUERY_TILE)[None, :, None]
)


@dataclass(frozen=True, slots=True)
class KeyTile:
    """`rows` of the cache to gather, one key tile for each of the first `active` items of a group (or one for
    all of them); of those, items from `last_from` on have here their last key tile, which needs the mask."""

    rows: Tensor
    active: int
    last_from: int


@dataclass(frozen=True, slots=True)
class Group:
    """Items [start, stop), longest first. `hidden` [items, QUERY_TILE, 1, KEY_TILE] masks their last key tile."""

    start: int
    stop: int
    key_tiles: tuple[KeyTile, ...]
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What one step's attention computes, the same for every layer.

    `slots` [rows * num_kv_heads]: where each (row, KV head) lies among the items' slots.
    """

    num_items: int
    slots: Tensor
    groups: tuple[Group, ...]


def plan_attention(batch: Batch, *, num_kv_heads: int, block_size: int, empty_slot: int, device: str) -> AttentionPlan:
    """`empty_slot` is a slot of the cache that holds zeros, read for positions past a sequence's end."""
    query_start = batch.query_start.astype(np.int64)
    num_queries = np.diff(query_start)
    seq_lens = batch.seq_lens.astype(np.int64)
    first_tile = (seq_lens - num_queries) // QUERY_TILE
    num_tiles = (seq_lens - 1) // QUERY_TILE - first_tile + 1
    tile_start = np.concatenate([[0], np.cumsum(num_tiles)])
    tile_seq = np.repeat(np.arange(len(seq_lens)), num_tiles)
    tile_index = np.arange(tile_start[-1]) - tile_start[tile_seq] + first_tile[tile_seq]

    def key_slots(seqs: NDArray[np.int64], key_tile: int) -> NDArray[np.int64]:
        """[sequences, KEY_TILE] slots of the cache."""
        positions = key_tile * KEY_TILE + _offsets[None, :]
        blocks = np.minimum(positions // block_size, batch.block_tables.shape[1] - 1)
        slots = batch.block_tables[seqs[:, None], blocks].astype(np.int64) * block_size + positions % block_size
        return np.where(positions < seq_lens[seqs][:, None], slots, empty_slot)

    heads = np.arange(num_kv_heads)
    item_of_tile = np.empty((tile_start[-1], num_kv_heads), np.int64)
    groups: list[Group] = []
    num_items = 0

    def add_group(tiles: NDArray[np.int64], head: int | None) -> None:
        """Tiles, longest first: with every head, each gathering its keys, or with one head and shared keys."""
        nonlocal num_items
        per_tile = 1 if head is not None else num_kv_heads
        items = num_items + np.arange(len(tiles) * per_tile).reshape(len(tiles), per_tile)
        if head is None:
            item_of_tile[tiles] = items
        else:
            item_of_tile[tiles, head] = items[:, 0]
        last = tile_index[tiles] * QUERY_TILE // KEY_TILE
        key_tiles = []
        for j in range(int(last[0]) + 1):
            active = int(np.count_nonzero(last >= j))
            if head is None:
                rows = key_slots(tile_seq[tiles[:active]], j)[:, None, :] * num_kv_heads + heads[None, :, None]
            else:
                rows = key_slots(tile_seq[tiles[:1]], j) * num_kv_heads + head
            gather = torch.from_numpy(rows.reshape(-1)).to(device)
            key_tiles.append(KeyTile(gather, active * per_tile, int(np.count_nonzero(last > j)) * per_tile))
        variant = tile_index[tiles] * QUERY_TILE % KEY_TILE // QUERY_TILE
        hidden = torch.from_numpy(_HIDDEN[np.repeat(variant, per_tile)][:, :, None, :]).to(device)
        groups.append(Group(num_items, num_items + items.size, tuple(key_tiles), hidden))
        num_items += items.size

    shared = np.flatnonzero((num_tiles <= MAX_SHARED_TILES)[tile_seq])
    shared = shared[np.argsort(-tile_index[shared], kind="stable")]
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


def attend(q: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, *, num_kv_heads: int, scale: float) -> Tensor:
    """q [rows, num_heads * head_dim] -> the same shape.

    keys and values [slots * num_kv_heads, head_dim] are a layer's cache, this step's rows stored already.
    """
    rows, head_dim = q.shape[0], keys.shape[1]
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


def _attend_group(queries: Tensor, out: Tensor, keys: Tensor, values: Tensor, group: Group) -> None:
    """Online softmax over the group's key tiles; `out` holds zeros and gets the result."""
    items, item_rows, head_dim = queries.shape
    maximum = queries.new_full((items, item_rows, 1), -torch.inf)
    total = queries.new_zeros(items, item_rows, 1)
    for tile in group.key_tiles:
        n = tile.active
        k = keys.index_select(0, tile.rows).view(-1, KEY_TILE, head_dim).float().expand(n, -1, -1)
        v = values.index_select(0, tile.rows).view(-1, KEY_TILE, head_dim).float().expand(n, -1, -1)
        scores = torch.bmm(queries[:n], k.transpose(1, 2))
        if tile.last_from < n:
            by_position = scores.view(n, QUERY_TILE, -1, KEY_TILE)
            by_position[tile.last_from :].masked_fill_(group.hidden[tile.last_from : n], -torch.inf)
        new_maximum = torch.maximum(maximum[:n], scores.amax(-1, keepdim=True))
        weights = scores.sub_(new_maximum).exp_()
        decay = (maximum[:n] - new_maximum).exp_()
        maximum[:n] = new_maximum
        total[:n].mul_(decay).add_(weights.sum(-1, keepdim=True))
        out[:n].mul_(decay).baddbmm_(weights, v)
    out.div_(total)
