"""The KV cache's policy: which blocks a sequence shares, copies, gets and gives back."""

from __future__ import annotations

from headrace.engine.block_hash import domain_digest
from headrace.engine.kv_cache import KVCache, Prefix
from headrace.engine.request import Request, Sequence
from headrace.protocol.ipc import AddRequest, SamplingParams

NOTHING = Prefix(0, ((),))


def sequence(token_ids: list[int], salt: str = "") -> Sequence:
    message = AddRequest(request_id="r", token_ids=token_ids, params=SamplingParams(max_tokens=8), arrival_s=0.0)
    request = Request(message, (0, 0.0, 0), domain_digest([salt]), 8)
    return Sequence(0, request, 0, list(token_ids), len(token_ids))


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
    cache = KVCache(8, 4, enable_prefix_caching=True)
    first = served(cache, list(range(10)))
    other = sequence([*range(8), 77, 78])
    assert cache.cached_prefix(other) == Prefix(8, (tuple(first.block_tables[0][:2]),))
    assert cache.cached_prefix(sequence([0, 1, 2, 3, 99, 5, 6, 7, 8])).num_tokens == 4
    assert cache.cached_prefix(sequence([99, *range(1, 9)])) == NOTHING


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    cache = KVCache(8, 4, enable_prefix_caching=True)
    served(cache, list(range(8)))
    assert cache.cached_prefix(sequence(list(range(8)))).num_tokens == 4
    assert cache.cached_prefix(sequence(list(range(9)))).num_tokens == 8


def test_a_block_is_shared_only_once_it_has_been_computed() -> None:
    cache = KVCache(8, 4, enable_prefix_caching=True)
    seq = sequence(list(range(12)))
    cache.allocate(seq, NOTHING, reserve=0)
    again = sequence(list(range(12)))
    assert cache.cached_prefix(again) == NOTHING
    compute(cache, seq, 7)
    assert cache.cached_prefix(again).num_tokens == 4


def test_salts_do_not_share() -> None:
    cache = KVCache(8, 4, enable_prefix_caching=True)
    served(cache, list(range(8)), salt="one")
    assert cache.cached_prefix(sequence(list(range(9)), salt="other")) == NOTHING
    assert cache.cached_prefix(sequence(list(range(9)), salt="one")).num_tokens == 8


def test_without_prefix_caching_nothing_is_found() -> None:
    cache = KVCache(8, 4, enable_prefix_caching=False)
    served(cache, list(range(8)))
    assert cache.cached_prefix(sequence(list(range(9)))) == NOTHING


def test_the_tail_of_a_freed_prefix_is_evicted_before_its_head() -> None:
    cache = KVCache(4, 4, enable_prefix_caching=True)
    cache.free(served(cache, list(range(16))))
    cache.pool.allocate(2)
    assert cache.cached_prefix(sequence(list(range(16)))).num_tokens == 8


def test_reviving_cached_blocks_counts_against_what_is_free() -> None:
    cache = KVCache(4, 4, enable_prefix_caching=True)
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
    cache = KVCache(8, 4, enable_prefix_caching=False)
    source = served(cache, list(range(10)))
    fork = sequence(list(range(10)))
    prefix = cache.forked_prefix(source)
    assert prefix == Prefix(9, (tuple(source.block_tables[0][:2]),), (source.block_tables[0][2],))
    assert cache.allocate(fork, prefix, reserve=0)
    assert fork.block_tables[0][:2] == source.block_tables[0][:2]
    assert fork.block_tables[0][2] != source.block_tables[0][2]
    assert cache.pool.num_used == 4


def test_a_fork_copies_nothing_when_only_the_recomputed_token_is_in_the_last_block() -> None:
    cache = KVCache(8, 4, enable_prefix_caching=False)
    source = served(cache, list(range(9)))
    assert cache.forked_prefix(source) == Prefix(8, (tuple(source.block_tables[0][:2]),))


def test_growth_takes_a_block_only_at_a_block_border() -> None:
    cache = KVCache(2, 4, enable_prefix_caching=True)
    seq = served(cache, [0, 1, 2])
    seq.token_ids.append(3)
    assert cache.grow(seq)
    assert len(seq.block_tables[0]) == 1
    seq.token_ids.append(4)
    assert cache.grow(seq)
    assert len(seq.block_tables[0]) == 2
    seq.token_ids += [5, 6, 7, 8]
    assert not cache.grow(seq)
    assert len(seq.block_tables[0]) == 2
