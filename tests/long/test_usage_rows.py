"""A million usage rows: the console's questions stay under 50 ms, and requests and writing go on as before."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

import pytest
import uvloop

from headrace.bench.gateway import free_port, our_gateway, started
from headrace.bench.gateway_load import Head, run_round
from headrace.gateway.storage import tables
from headrace.gateway.storage.database import open_database
from headrace.gateway.usage import UsageWriter
from headrace.gateway.usage_queries import recent_usage
from tests.gateway.usage_fill import fill, slowest_question_s


@pytest.mark.timeout(900)
def test_questions_about_a_million_rows_take_under_50_ms(tmp_path: Path) -> None:
    database = open_database(None, tmp_path)
    fill(database, num_events=1_000_000)
    assert database.count(tables.usage_events) == 1_000_000
    assert slowest_question_s(database) < 0.05
    (event,) = recent_usage(database, limit=1)
    writer = UsageWriter(database, tmp_path / "journal")
    began = time.monotonic()
    for _ in range(5000):
        writer.append(event)
    assert writer.flush(20)
    assert time.monotonic() - began < 5.0
    assert writer.journaled == 0
    writer.close()
    database.close()


@pytest.mark.timeout(900)
def test_requests_take_no_longer_with_a_million_rows(tmp_path: Path) -> None:
    database = open_database(None, tmp_path / "full")
    fill(database, num_events=1_000_000)
    database.close()
    upstream_port, ports = free_port(), {"new": free_port(), "full": free_port()}
    url = f"http://127.0.0.1:{upstream_port}"
    command = [sys.executable, "-m", "headrace.bench.gateway_upstream", str(upstream_port)]
    with (
        started(command, upstream_port, any_answer=True),
        our_gateway(url, ports["new"], None, tmp_path / "new") as (_, new_key),
        our_gateway(url, ports["full"], None, tmp_path / "full") as (_, full_key),
    ):
        heads = {
            "new": Head({"authorization": f"Bearer {new_key}"}),
            "full": Head({"authorization": f"Bearer {full_key}"}),
        }
        seconds: dict[str, list[float]] = {"new": [], "full": []}
        for _ in range(10):
            for name, port in ports.items():
                done = uvloop.run(run_round(port, heads[name], False, 200, 1))
                seconds[name].append(median(done.latencies_s))
        new_s, full_s = median(seconds["new"]), median(seconds["full"])
    print(f"p50 of a request: {1e3 * new_s:.2f} ms with no row, {1e3 * full_s:.2f} ms with a million")
    assert full_s < 1.05 * new_s
