"""Which replica takes a request."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from headrace.gateway.balance import (
    BLOCK_BYTES,
    GUARD_REQUESTS,
    MAX_BLOCKS,
    Affinity,
    Balancer,
    EngineLoad,
    affinity_of,
)
from headrace.gateway.engine_load import engine_load
from tests.gateway import replies
from tests.gateway.fake_upstream import FakeUpstream, Request, automatic
from tests.gateway.gateways import provider, providers, running_gateway


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


# What begins alike


def test_a_conversation_goes_on_where_it_began() -> None:
    """Many conversations begin with the same long instructions; each has a history of its own behind them."""
    balance = balancer()
    instructions = b"You are a helpful assistant. " * 100
    histories = {n: instructions + b"%d" % n * 3000 for n in range(12)}
    for replica, n in enumerate([*range(4)] * 3):
        balance.load("u", replica % 4).learn(affinity_of(None, histories[replica]).blocks)
        assert n == replica % 4
    for n, history in histories.items():
        longer = affinity_of(None, history + b"and then? " * 300)
        assert balance.order("u", 4, longer)[0] == n % 4


def test_of_replicas_that_know_the_same_beginning_the_least_loaded_is_taken() -> None:
    balance = balancer()
    prompt = affinity_of(None, b"x" * 5 * BLOCK_BYTES)
    for replica in (1, 2):
        balance.load("u", replica).learn(prompt.blocks)
    balance.began("u", 1)
    assert balance.order("u", 3, prompt)[0] == 2


def test_a_beginning_that_a_replica_was_sent_once_is_known_there_the_next_time() -> None:
    balance = balancer()
    other = affinity_of(None, b"a different question " * 500)
    for seed in range(20):
        prompt = affinity_of(None, b"%d" % seed + b"text " * 1000)
        first = balance.order("u", 5, prompt)[0]
        balance.order("u", 5, other)
        assert balance.order("u", 5, prompt)[0] == first


def test_prompts_for_other_models_have_nothing_in_common() -> None:
    text = b"x" * 3 * BLOCK_BYTES
    assert len(affinity_of(None, text, "a").blocks) == 3
    assert not set(affinity_of(None, text, "a").blocks) & set(affinity_of(None, text, "b").blocks)


def test_what_is_remembered_is_bounded_and_the_oldest_goes_first() -> None:
    load = balancer().load("u", 0)
    for n in range(MAX_BLOCKS + 500):
        load.learn((n,))
    assert len(load.known) == MAX_BLOCKS
    assert load.num_known((0,)) == 0 and load.num_known((MAX_BLOCKS + 499,)) == 1


def test_a_session_that_stays_does_so_under_load() -> None:
    balance = balancer()
    session = Affinity(b"s", stays=True)
    preferred = balance.order("u", 3, session)[0]
    for _ in range(100):
        balance.began("u", preferred)
    assert balance.order("u", 3, session)[0] == preferred
    balance.load("u", preferred).healthy = False
    assert balance.order("u", 3, session)[0] != preferred


# What engines say


def test_what_others_have_sent_to_an_engine_counts() -> None:
    balance = balancer()
    balance.began("u", 0)
    balance.told("u", 0, EngineLoad(running=3, waiting=0, kv_use=0.1))
    balance.told("u", 1, EngineLoad(running=0, waiting=0, kv_use=0.1))
    assert (balance.load("u", 0).elsewhere, balance.load("u", 0).busy) == (2, 3)
    assert {balance.order("u", 2, None)[0] for _ in range(20)} == {1}


def test_a_queue_and_a_full_cache_make_an_engine_dear() -> None:
    balance = balancer()
    for running, waiting, kv_use in ((4, 4, 0.5), (8, 0, 0.99)):
        balance.told("u", 0, EngineLoad(running=running, waiting=waiting, kv_use=kv_use))
        balance.told("u", 1, EngineLoad(running=8, waiting=0, kv_use=0.5))
        assert {balance.order("u", 2, None)[0] for _ in range(20)} == {1}


def test_an_engine_that_says_nothing_is_known_by_our_requests_only() -> None:
    balance = balancer()
    balance.told("u", 0, EngineLoad(running=50, waiting=50, kv_use=1.0))
    balance.told("u", 0, None)
    assert balance.load("u", 0).cost == balance.load("u", 1).cost


EXPOSITION = """# HELP vllm:num_requests_running Requests being computed.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a"} 3.0
vllm:num_requests_running{engine="1",model_name="a"} 1.0
vllm:num_requests_waiting{engine="0",model_name="a"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="a",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a"} 0.5
"""


def test_the_gauges_of_several_engines_are_added() -> None:
    assert engine_load(EXPOSITION.encode()) == EngineLoad(running=4, waiting=2, kv_use=0.5)
    older = EXPOSITION.replace("kv_cache", "gpu_cache").encode()
    assert engine_load(older) == EngineLoad(running=4, waiting=2, kv_use=0.5)


@pytest.mark.parametrize(
    "text",
    ["", "<html></html>", "vllm:num_requests_running NaN\n", "vllm:num_requests_running 1e999\n",
     "vllm:num_requests_waiting -3\n", "vllm:num_requests_waiting 1-1\n", "other_num_requests_waiting 3\n"],
)  # fmt: skip
def test_what_tells_no_load_is_none(text: str) -> None:
    assert engine_load(text.encode()) is None


@pytest.fixture
def engines() -> Iterator[list[FakeUpstream]]:
    """Two equal servers whose /metrics say what their `waiting` is."""
    with ExitStack() as stack:
        yield [stack.enter_context(FakeUpstream(lambda request: reply_of(request, 0))) for _ in range(2)]


def reply_of(request: Request, waiting: int) -> replies.Reply:
    if request.path == "/metrics":
        text = (
            f'vllm:num_requests_running{{model_name="a"}} 1.0\nvllm:num_requests_waiting{{model_name="a"}} {waiting}\n'
        )
        return replies.Reply(content_type="text/plain", parts=(text.encode(),))
    return automatic(request)


def chats(engine: FakeUpstream) -> int:
    return sum(request.path.endswith("/chat/completions") for request in engine.requests)


def test_a_gateway_sends_requests_to_the_engine_with_the_shorter_queue(
    tmp_path: Path, engines: list[FakeUpstream]
) -> None:
    urls = [engine.url + "/v1" for engine in engines]
    entry = {name: value for name, value in provider("").items() if name != "base_url"}
    with running_gateway(tmp_path, providers(main={**entry, "urls": urls})) as gateway:
        body = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
        for idle in (0, 1):
            for number, engine in enumerate(engines):
                waiting = 0 if number == idle else 40
                engine.answer = lambda request, waiting=waiting: reply_of(request, waiting)
                engine.requests.clear()
            for engine in engines:
                assert engine.wait_for(lambda e: sum(r.path == "/metrics" for r in e.requests) > 0)
            time.sleep(0.2)
            for _ in range(10):
                assert httpx.post(gateway.url + "/v1/chat/completions", json=body, headers=gateway.auth).is_success
            assert (chats(engines[idle]), chats(engines[1 - idle])) == (10, 0)
            shown = httpx.get(gateway.url + "/metrics").text
            assert f'headrace_gateway_replica_requests_waiting{{replica="{1 - idle}",upstream="main"}} 40.0' in shown
            assert f'headrace_gateway_replica_healthy{{replica="{idle}",upstream="main"}} 1.0' in shown
