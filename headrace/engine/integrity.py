"""Whether the scheduler's books add up: every block, sequence and request accounted for exactly once.

Cheap enough for after every step of a test, and for whenever a core falls idle. All functions raise AssertionError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from headrace.engine.admission import SchedulerSettings
from headrace.engine.kv_cache import KVCache
from headrace.engine.plan import NO_BLOCK
from headrace.engine.queue import Queue
from headrace.engine.ranking import Ranking
from headrace.engine.request import Request, Sequence, SequenceState


def check_blocks(kv_cache: KVCache, running: Iterable[Sequence], settings: SchedulerSettings) -> None:
    """Counts of holders and block tables agree, nobody holds too much, and no block that is shared is written to."""
    pool, size = kv_cache.pool, settings.block_size
    pool.check_integrity()
    if kv_cache.tier is not None:
        kv_cache.tier.check_integrity()
    tables = [(seq, group, table) for seq in running for group, table in enumerate(seq.block_tables)]
    held = Counter(block_id for _, _, table in tables for block_id in table if block_id != NO_BLOCK)
    for block_id in range(pool.num_blocks):
        assert pool.ref_count(block_id) == held[block_id], f"block {block_id}: count and block tables disagree"
    for seq in running:
        assert len(seq.block_tables) == len(settings.windows)
        most = settings.blocks.most_held(seq.num_tokens)
        assert sum(map(len, seq.block_tables)) - sum(seq.first_blocks) <= most, f"{seq.seq_id} holds too much"
    for seq, group, table in tables:
        first = seq.first_blocks[group]
        assert [block_id == NO_BLOCK for block_id in table] == [i < first for i in range(len(table))]
        assert len(table) * size >= seq.num_planned_tokens, f"{seq.seq_id} writes beyond its blocks"
        for block_id in table[max(first, seq.num_computed_tokens // size) :]:
            assert held[block_id] == 1, f"block {block_id} is shared and {seq.seq_id} writes to it"


def check_sequences(
    requests: Mapping[str, Request],
    running: Ranking,
    queue: Queue,
    by_id: Mapping[int, Sequence],
    dropped: Mapping[int, None],
    settings: SchedulerSettings,
) -> None:
    """Every sequence is in one list, in the state it has there, and of a request that is known."""
    for seq in running:
        assert seq.state is SequenceState.RUNNING
        assert by_id[seq.seq_id] is seq
        assert seq.num_computed_tokens <= seq.num_planned_tokens <= seq.num_tokens
    for seq in queue:
        assert seq.state is SequenceState.WAITING
        assert not seq.block_tables
        assert seq.num_planned_tokens == 0
    alive = [seq for request in requests.values() for seq in request.sequences.values()]
    assert len(alive) == len(running) + len(queue), "a sequence is in no list, or in two"
    assert len(by_id) == len(running) <= settings.max_running
    assert all(request.sequences for request in requests.values()), "a request has no sequence left"
    live = [request for request in requests.values() if not request.is_background]
    assert queue.num_tokens == sum(request.num_prompt_tokens for request in live if not request.started)
    new = (seq for request in live for seq in request.sequences.values() if seq.queue_s is None)
    assert queue.num_sequences == sum(len(request.held) for request in live) + sum(1 for _ in new)
    assert not dropped.keys() & by_id.keys()
