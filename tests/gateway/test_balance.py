"""Which replica takes a request."""

from __future__ import annotations

import random
from collections import Counter

from headrace.gateway.balance import GUARD_REQUESTS, Balancer, affinity_of


def balancer() -> Balancer:
    return Balancer(random.Random(1))


def test_the_less_loaded_of_two_is_taken() -> None:
    balance = balancer()
    for _ in range(5):
        balance.began("u", 0)
    assert balance.order("u", 2, None)[0] == 1


def test_load_spreads_evenly_over_equal_replicas() -> None:
    balance = balancer()
    for _ in range(400):
        balance.began("u", balance.order("u", 4, None)[0])
    counts = [balance.load("u", replica).in_flight for replica in range(4)]
    assert max(counts) - min(counts) <= 8


def test_a_slow_replica_gets_less() -> None:
    balance = balancer()
    for _ in range(30):
        for replica, ttft_s in ((0, 1.0), (1, 0.1)):
            balance.began("u", replica)
            balance.ended("u", replica, ttft_s)
    taken = Counter(balance.order("u", 2, None)[0] for _ in range(100))
    assert taken[1] == 100


def test_the_same_beginning_goes_to_the_same_replica_in_every_process() -> None:
    prompt = affinity_of(None, b"You are a helpful assistant. " * 50)
    chosen = {Balancer(random.Random(seed)).order("u", 5, prompt)[0] for seed in range(20)}
    assert len(chosen) == 1


def test_different_sessions_spread() -> None:
    balance = balancer()
    taken = Counter(balance.order("u", 4, affinity_of(b"session %d" % n, b""))[0] for n in range(400))
    assert len(taken) == 4 and min(taken.values()) > 50


def test_affinity_yields_to_load() -> None:
    balance = balancer()
    affinity = affinity_of(b"s", b"")
    preferred = balance.order("u", 2, affinity)[0]
    for _ in range(GUARD_REQUESTS + 1):
        balance.began("u", preferred)
    assert balance.order("u", 2, affinity)[0] != preferred


def test_a_session_counts_more_than_the_prompt() -> None:
    assert affinity_of(b"s", b"one") == affinity_of(b"s", b"two")
    assert affinity_of(None, b"x" * 3000 + b"a") == affinity_of(None, b"x" * 3000 + b"b")


def test_an_unhealthy_replica_is_last_and_all_unhealthy_are_all_tried() -> None:
    balance = balancer()
    balance.load("u", 0).healthy = False
    assert list(balance.order("u", 2, None)) == [1, 0]
    balance.load("u", 1).healthy = False
    assert sorted(balance.order("u", 2, None)) == [0, 1]
