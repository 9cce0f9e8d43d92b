"""What a request costs the gateway, in bytecodes: unlike microseconds they are the same at any load.

A feature that is off must cost nothing. Who needs more for a good reason raises the number, and says why.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.gateway import replies
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.gateways import ThreadedGateway, provider, providers, threaded_gateway

MAX_BYTECODES = 5_800
"""Of a request that is answered whole, for a key with limits and a budget; it needs 5,520."""
REQUESTS = 40


class Counter:
    """Counts the bytecodes of Python that a thread executes in frames that begin while `is_on`."""

    def __init__(self, thread: str) -> None:
        self.thread = thread
        self.is_on = False
        self.num_bytecodes = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "call":
            if not self.is_on or threading.current_thread().name != self.thread:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            self.num_bytecodes += 1
        return self


@pytest.fixture
def counter() -> Iterator[Counter]:
    counter = Counter("gateway")
    threading.settrace(counter)
    yield counter
    threading.settrace(None)  # type: ignore[arg-type]


def bytecodes(gateway: ThreadedGateway, counter: Counter, secret: str) -> int:
    """The least of many requests: some see the server's own clock tick, or get their answer in pieces."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "Why?"}]}
    needed = []
    with gateway.client_with(secret) as client:
        for _ in range(REQUESTS):
            counter.is_on, counter.num_bytecodes = True, 0
            assert client.post("/v1/chat/completions", json=body).status_code == 200
            assert gateway.wait_until_idle()
            counter.is_on = False
            needed.append(counter.num_bytecodes)
    return min(needed)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions have other bytecodes")
def test_a_request_costs_no_more_than_it_must(counter: Counter, tmp_path: Path) -> None:
    with FakeUpstream() as upstream:
        upstream.answer = replies.chat("Because.")
        with threaded_gateway(tmp_path, providers(main=provider(upstream.url))) as gateway:
            limits = {"rpm": 10**6, "tpm": 10**9, "concurrency": 100, "budget_micros": 10**9}
            needed = bytecodes(gateway, counter, gateway.new_key("limited", **limits))
    assert 1_000 < needed < MAX_BYTECODES
