"""The KV cache's policy: which blocks a sequence shares, copies, gets and gives back."""

from __future__ import annotations

import pytest

from headrace.config.kv_blocks import KVBlocks
from headrace.engine.block_hash import domain_digest
from headrace.engine.kv_cache import KVCache, Prefix
from headrace.engine.plan import NO_BLOCK
from headrace.engine.request import Request, Sequence
from headrace.protocol.ipc import AddRequest, SamplingParams

NOTHING = Prefix(0, ((),))


def sequence(token_ids: list[int], salt: str = "") -> Sequence:
    message = AddRequest(request_id="r", token_ids=token_ids, params=SamplingParams(max_tokens=8), arrival_s=0.0)
    request = Request(message, (0, 0.0, 0), domain_digest([salt]), 8)
    return Sequence(0, request, 0, list(token_ids), len(token_ids))


def cache_of(
    num_blocks: int, *windows: int | None, enable_prefix_caching: bool = True, max_step_tokens: int = 16
) -> KVCache:
    """Blocks of 4 tokens; without windows one group that keeps everything."""
    return KVCache(num_blocks, KVBlocks(windows or (None,), 4, max_step_tokens), enable_prefix_caching)


def compute(cache: KVCache, seq: Sequence, upto: int) -> None:
    seq.num_planned_tokens = seq.num_computed_tokens = upto
    cache.publish(seq)


def served(cache: KVCache, token_ids: list[int], salt: str = "") -> Sequence:
    """A sequence whose tokens are all computed and which still holds its blocks."""
    seq = sequence(token_ids, salt)
    assert cache.allocate(seq, cache.cached_prefix(seq), reserve=0)
    compute(cache, seq, len(token_ids))
    return seq


def test_a_prefix_is_found_as_far_as_full_blocks_agree() -> None:
    cache = cache_of(8)
    first = served(cache, list(range(10)))
    other = sequence([*range(8), 77, 78])
    assert cache.cached_prefix(other) == Prefix(8, (tuple(first.block_tables[0][:2]),))
    assert cache.cached_prefix(sequence([0, 1, 2, 3, 99, 5, 6, 7, 8])).num_tokens == 4
    assert cache.cached_prefix(sequence([99, *range(1, 9)])) == NOTHING


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    cache = cache_of(8)
    served(cache, list(range(8)))
    assert cache.cached_prefix(sequence(list(range(8)))).num_tokens == 4
    assert cache.cached_prefix(sequence(list(range(9)))).num_tokens == 8


def test_a_block_is_shared_only_once_it_has_been_computed() -> None:
    cache = cache_of(8)
    seq = sequence(list(range(12)))
    cache.allocate(seq, NOTHING, reserve=0)
    again = sequence(list(range(12)))
    assert cache.cached_prefix(again) == NOTHING
    compute(cache, seq, 7)
    assert cache.cached_prefix(again).num_tokens == 4


def test_salts_do_not_share() -> None:
    cache = cache_of(8)
    served(cache, list(range(8)), salt="one")
    assert cache.cached_prefix(sequence(list(range(9)), salt="other")) == NOTHING
    assert cache.cached_prefix(sequence(list(range(9)), salt="one")).num_tokens == 8


def test_without_prefix_caching_nothing_is_found() -> None:
    cache = cache_of(8, enable_prefix_caching=False)
    served(cache, list(range(8)))
    assert cache.cached_prefix(sequence(list(range(9)))) == NOTHING


def test_the_tail_of_a_freed_prefix_is_evicted_before_its_head() -> None:
    cache = cache_of(4)
    cache.free(served(cache, list(range(16))))
    cache.pool.allocate(2)
    assert cache.cached_prefix(sequence(list(range(16)))).num_tokens == 8


def test_reviving_cached_blocks_counts_against_what_is_free() -> None:
    cache = cache_of(4)
    cache.free(served(cache, list(range(12))))
    seq = sequence([*range(12), *range(50, 54)])
    prefix = cache.cached_prefix(seq)
    assert prefix.num_tokens == 12
    assert not cache.allocate(seq, prefix, reserve=1)
    assert cache.pool.num_used == 0
    assert cache.allocate(seq, prefix, reserve=0)
    assert cache.pool.num_free == 0
    assert seq.num_computed_tokens == 12


def test_a_fork_shares_whole_blocks_and_copies_the_partial_one() -> None:
    cache = cache_of(8, enable_prefix_caching=False)
    source = served(cache, list(range(10)))
    fork = sequence(list(range(10)))
    prefix = cache.forked_prefix(source)
    assert prefix == Prefix(9, (tuple(source.block_tables[0][:2]),), (source.block_tables[0][2],))
    assert cache.allocate(fork, prefix, reserve=0)
    assert fork.block_tables[0][:2] == source.block_tables[0][:2]
    assert fork.block_tables[0][2] != source.block_tables[0][2]
    assert cache.pool.num_used == 4


def test_a_fork_copies_nothing_when_only_the_recomputed_token_is_in_the_last_block() -> None:
    cache = cache_of(8, enable_prefix_caching=False)
    source = served(cache, list(range(9)))
    assert cache.forked_prefix(source) == Prefix(8, (tuple(source.block_tables[0][:2]),))


def grow(seq: Sequence, *tokens: int) -> None:
    seq.token_ids += tokens
    seq.num_tokens = len(seq.token_ids)


def test_growth_takes_a_block_only_at_a_block_border() -> None:
    cache = cache_of(2)
    seq = served(cache, [0, 1, 2])
    grow(seq, 3)
    assert cache.advance(seq)
    assert len(seq.block_tables[0]) == 1
    grow(seq, 4)
    assert cache.advance(seq)
    assert len(seq.block_tables[0]) == 2
    grow(seq, 5, 6, 7, 8)
    assert not cache.advance(seq)
    assert len(seq.block_tables[0]) == 2


def follow(cache: KVCache, seq: Sequence, *tokens: int) -> None:
    """Decode, as the scheduler does: make room, then compute the newest token."""
    for token in tokens:
        grow(seq, token)
        assert cache.advance(seq)
        compute(cache, seq, len(seq.token_ids))


@pytest.mark.parametrize("windows", [(None,), (1,), (4,), (6,), (None, 5, 17), (2, 9)])
def test_up_to_the_settled_tokens_a_decoding_sequence_keeps_the_blocks_it_has(windows: tuple[int | None, ...]) -> None:
    cache = cache_of(60, *windows)
    seq = served(cache, list(range(3)))
    kept = 0
    for token in range(3, 60):
        before, settled = [list(table) for table in seq.block_tables], cache.settled_tokens(seq)
        follow(cache, seq, token)
        kept += seq.num_tokens <= settled
        assert (seq.block_tables == before) or seq.num_tokens > settled
    assert kept >= 57 // 4, "it must not be asked again for every token"


def test_blocks_before_the_window_are_given_up_and_entries_stay_in_place() -> None:
    cache = cache_of(20, None, 6)
    seq = served(cache, list(range(14)))
    follow(cache, seq, 14)
    full, window = seq.block_tables
    # To compute 14 a row sees 9..14; one token more is kept, for a fork.
    assert (len(full), len(window), seq.first_blocks) == (4, 4, [0, 2])
    assert window[:2] == [NO_BLOCK] * 2 and NO_BLOCK not in window[2:]
    assert cache.pool.num_used == 4 + 2
    follow(cache, seq, *range(15, 40))
    assert [len(table) - first for table, first in zip(seq.block_tables, seq.first_blocks, strict=True)] == [10, 2]
    cache.free(seq)
    assert cache.pool.num_used == 0


def test_a_long_prompt_takes_blocks_of_a_window_only_as_far_as_a_step_can_come() -> None:
    cache = cache_of(40, None, 6, max_step_tokens=8)
    seq = sequence(list(range(100)))
    assert cache.allocate(seq, cache.nothing, reserve=0)
    most = (6 + 8 + 2) // 4 + 1
    assert list(map(len, seq.block_tables)) == [25, most]
    held = []
    while seq.num_computed_tokens < 100:
        assert cache.advance(seq)
        assert cache.room(seq) >= min(8, 100 - seq.num_computed_tokens)
        held.append(len(seq.block_tables[1]) - seq.first_blocks[1])
        compute(cache, seq, min(100, seq.num_computed_tokens + 8))
    assert max(held) <= most
    assert seq.block_tables[1].count(NO_BLOCK) == seq.first_blocks[1] == 22


def test_a_hit_needs_of_a_window_only_what_the_next_token_sees() -> None:
    cache = cache_of(30, None, 6)
    first = served(cache, list(range(25)))
    cache.free(first)
    lost = [cache.pool.find(1, key) for key in first.block_keys]
    # All blocks but those of the window's group that hold 12..23 are taken for something else.
    kept = {cache.pool.find(0, key) for key in first.block_keys} | set(lost[3:])
    cache.pool.share(sorted(kept - {None}))
    cache.pool.release(reversed(cache.pool.allocate(cache.pool.num_free)))
    cache.pool.release(sorted(kept - {None}))
    hit = cache.cached_prefix(sequence([*range(24), 99]))
    assert (hit.num_tokens, len(hit.block_ids[0]), hit.block_ids[1]) == (24, 6, tuple(lost[4:]))
    # The token at 20 sees 15 and what follows: block 3 is there. At 16 it would be block 2, which is not.
    assert cache.cached_prefix(sequence([*range(20), 99])).num_tokens == 20
    assert cache.cached_prefix(sequence([*range(16), 99])).num_tokens == 0
    seq = sequence([*range(24), 99])
    assert cache.allocate(seq, hit, reserve=0)
    assert seq.first_blocks == [0, 4] and seq.block_tables[1][:4] == [NO_BLOCK] * 4


def test_a_window_of_one_token_needs_no_cached_block() -> None:
    cache = cache_of(30, None, 1)
    served(cache, list(range(9)))
    assert [len(own) for own in cache.cached_prefix(sequence(list(range(9)))).block_ids] == [2, 0]


def test_a_model_of_windows_only_finds_a_prefix_behind_one_it_has_lost() -> None:
    cache = cache_of(5, 6)
    first = served(cache, list(range(17)))
    kept = first.block_tables[0][2:]
    cache.free(first)
    cache.pool.share(kept)
    cache.pool.allocate(2)
    hit = cache.cached_prefix(sequence(list(range(17))))
    assert hit == Prefix(16, (tuple(kept[:2]),))
    assert cache.cached_prefix(sequence(list(range(13)))).num_tokens == 0


def test_a_fork_finds_its_siblings_window_in_the_step_after_the_prompt() -> None:
    for length in range(8, 20):
        cache = cache_of(60, None, 6, enable_prefix_caching=False)
        source = served(cache, list(range(length)))
        follow(cache, source, 77)
        prefix = cache.forked_prefix(source)
        assert prefix.num_tokens == length - 1
        fork = sequence(list(range(length)))
        assert cache.allocate(fork, prefix, reserve=0)
        assert len(prefix.copy_from) == (2 if (length - 1) % 4 else 0)
        follow(cache, source, *range(80, 90))
        assert cache.forked_prefix(source) == cache.nothing, "the sibling is far ahead"
