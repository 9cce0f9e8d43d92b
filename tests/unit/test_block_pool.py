"""The block pool's promises: reference counts, eviction order, names of content."""

from __future__ import annotations

import pytest

from headrace.engine.block_hash import DIGEST_BYTES, block_key, domain_digest
from headrace.engine.block_pool import BlockPool

ROOT = domain_digest([])


def test_a_fresh_pool_hands_out_every_block_once() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(3) + pool.allocate(2)) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 5)
    pool.check_integrity()


def test_a_shared_block_becomes_free_with_its_last_holder() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.share([block])
    pool.release([block])
    assert (pool.num_used, pool.ref_count(block)) == (1, 1)
    pool.release([block])
    assert pool.num_used == 0


def test_a_free_block_keeps_its_content_until_it_is_handed_out() -> None:
    pool = BlockPool(2)
    key = block_key(ROOT, [1, 2])
    [block] = pool.allocate(1)
    pool.publish(block, 0, key)
    pool.release([block])
    assert pool.find(0, key) == block
    assert pool.num_cached == 1
    pool.allocate(2)
    assert pool.find(0, key) is None
    pool.check_integrity()


def test_blocks_without_content_go_first_then_the_one_freed_longest_ago() -> None:
    pool = BlockPool(4)
    a, b, c, d = pool.allocate(4)
    for block in (a, b, d):
        pool.publish(block, 0, block_key(ROOT, [block]))
    pool.release([b])
    pool.release([a])
    pool.release([c])
    pool.release([d])
    assert pool.allocate(4) == [c, b, a, d]


def test_sharing_a_cached_block_takes_it_out_of_reach_of_eviction() -> None:
    pool = BlockPool(2)
    key = block_key(ROOT, [1])
    [block] = pool.allocate(1)
    pool.publish(block, 0, key)
    pool.release([block])
    pool.share([block])
    assert pool.num_free == 1
    assert pool.allocate(1) != [block]
    assert pool.find(0, key) == block
    pool.check_integrity()


def test_the_first_block_with_a_content_keeps_the_name() -> None:
    pool = BlockPool(2)
    key = block_key(ROOT, [1])
    first, second = pool.allocate(2)
    pool.publish(first, 0, key)
    pool.publish(second, 0, key)
    assert pool.find(0, key) == first
    pool.release([second])
    assert pool.num_cached == 0
    pool.check_integrity()


def test_a_digest_that_collides_is_no_hit() -> None:
    pool = BlockPool(1)
    key = block_key(ROOT, [1, 2, 3])
    pool.publish(pool.allocate(1)[0], 0, key)
    assert pool.find(0, key._replace(tokens=block_key(ROOT, [1, 2, 4]).tokens)) is None
    assert pool.find(0, key._replace(parent=bytes(DIGEST_BYTES))) is None
    assert pool.find(0, key) == 0


def test_forgetting_spares_what_is_held() -> None:
    pool = BlockPool(3)
    keys = [block_key(ROOT, [i]) for i in range(3)]
    blocks = pool.allocate(3)
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, 0, key)
    pool.release(blocks[:2])
    assert pool.forget_free() == 2
    assert [pool.find(0, key) for key in keys] == [None, None, blocks[2]]
    assert pool.forget_free() == 0
    pool.check_integrity()


def test_misuse_is_an_exception_not_a_wrong_block() -> None:
    pool = BlockPool(1)
    with pytest.raises(RuntimeError, match="2 blocks asked for and 1 are free"):
        pool.allocate(2)
    [block] = pool.allocate(1)
    pool.release([block])
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release([block])


def test_a_key_depends_on_everything_before_the_block_and_on_the_domain() -> None:
    def chain(tokens: list[int], *domain: str) -> bytes:
        first = block_key(domain_digest(domain), tokens[:2])
        return block_key(first.digest, tokens[2:]).digest

    base = chain([1, 2, 3, 4])
    assert base == chain([1, 2, 3, 4])
    others = [chain([9, 2, 3, 4]), chain([1, 2, 3, 9]), chain([1, 2, 3, 4], "salt"), chain([1, 2, 3, 4], "sal", "t")]
    assert len({base, *others}) == 5
    assert len(base) * 8 >= 128
