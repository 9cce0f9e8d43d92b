"""Many usage rows, with the sums that belong to them, for tests of queries."""

from __future__ import annotations

import time

from headrace.gateway.storage.database import Database
from headrace.gateway.usage_event import UsageEvent
from headrace.gateway.usage_queries import recent_usage, usage_sums
from headrace.gateway.usage_rows import insert_usage

LAST_S = 1_795_953_600.0
"""2026-11-29 12:00 UTC"""
NUM_DAYS = 90


def fill(database: Database, num_events: int, *, num_keys: int = 50, batch: int = 10_000) -> None:
    """Spread over 90 days, `num_keys` keys, 5 models and 2 upstreams."""
    for start in range(0, num_events, batch):
        events = []
        for number in range(start, min(start + batch, num_events)):
            key = number * 7919 % num_keys
            events.append(
                UsageEvent(
                    time_s=LAST_S - (number * 104_729 % (NUM_DAYS * 86_400)),
                    key_id=f"key_{key}",
                    key_name=f"key number {key}",
                    model=f"model-{number % 5}",
                    upstream=f"upstream-{number // 5 % 2}",
                    upstream_model="m",
                    endpoint="chat",
                    status=200,
                    input_tokens=100,
                    output_tokens=20,
                    cost_micros=number % 100,
                    total_s=1.0,
                )
            )
        with database.write() as connection:
            insert_usage(database, connection, events)


def slowest_question_s(database: Database) -> float:
    """The slowest of the console's questions, each the best of five tries: the work counts, not the machine."""
    questions = [
        lambda: usage_sums(database, first="2026-08-01", by=("day",)),
        lambda: usage_sums(database, first="2026-08-01", by=("key",)),
        lambda: usage_sums(database, first="2026-08-01", by=("model", "upstream")),
        lambda: usage_sums(database, first="2026-11-01", by=("day", "model")),
        lambda: usage_sums(database, first="2026-08-01", by=("day",), key_id="key_7"),
        lambda: recent_usage(database, limit=100),
    ]
    slowest_s = 0.0
    for question in questions:
        times_s = []
        for _ in range(5):
            began = time.perf_counter()
            assert question()
            times_s.append(time.perf_counter() - began)
        slowest_s = max(slowest_s, min(times_s))
    return slowest_s
