"""The gateway's memory over 100,000 requests, streamed ones and clients that leave among them: it stays flat."""

from __future__ import annotations

import json
import socket
import sys
import time
import urllib.request

import psutil
import pytest
import uvloop

from headrace.bench.gateway import free_port, our_gateway, started
from headrace.bench.gateway_load import Head, run_round
from tests.gateway.gateways import abort_many

pytestmark = pytest.mark.timeout(3600)

ROUNDS = 10
REQUESTS_A_ROUND = 10_000
STREAMS_A_ROUND = 300
LEAVERS_A_ROUND = 200
CONCURRENCY = 64
WARM_ROUNDS = 2
GROWTH_MB_A_ROUND = 1.0


def rss_mb(process: psutil.Process) -> float:
    return process.memory_info().rss / 1e6


def in_flight(port: int) -> float:
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    (line,) = [line for line in text.splitlines() if line.startswith("headrace_gateway_requests_in_flight")]
    return float(line.split()[-1])


def test_memory_is_flat_over_100_000_requests() -> None:
    upstream_port, port = free_port(), free_port()
    url = f"http://127.0.0.1:{upstream_port}"
    command = [sys.executable, "-m", "headrace.bench.gateway_upstream", str(upstream_port)]
    with started(command, upstream_port, any_answer=True), our_gateway(url, port, None) as (server, key):
        head = Head({"authorization": f"Bearer {key}"})
        body = json.dumps({"model": "bench", "messages": [{"role": "user", "content": "Hi"}], "stream": True})
        leaver = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
            f"content-length: {len(body)}\r\n\r\n{body}"
        ).encode()
        sizes = []
        for number in range(ROUNDS):
            uvloop.run(run_round(port, head, False, REQUESTS_A_ROUND, CONCURRENCY))
            uvloop.run(run_round(port, head, True, STREAMS_A_ROUND, CONCURRENCY))
            abort_many(port, leaver, LEAVERS_A_ROUND, at_once=32)
            time.sleep(2)  # usage and log are written
            assert in_flight(port) == 0
            sizes.append(rss_mb(server.process))
            print(f"after {(number + 1) * REQUESTS_A_ROUND} requests: {sizes[-1]:.1f} MB", flush=True)
        growth = (sizes[-1] - sizes[WARM_ROUNDS - 1]) / (ROUNDS - WARM_ROUNDS)
        assert growth < GROWTH_MB_A_ROUND, sizes
        assert sizes[-1] < 95, sizes
        with socket.create_connection(("127.0.0.1", port), timeout=5):  # and it still takes connections
            pass
