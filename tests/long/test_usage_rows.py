"""A million usage rows: the console's questions stay under 50 ms, and writing goes on as before."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

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
