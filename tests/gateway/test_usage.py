"""Usage: written in batches, never lost beyond a second, counted exactly once, and summed quickly."""

from __future__ import annotations

import logging
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from headrace.gateway.budget import day_number
from headrace.gateway.journal import Journal
from headrace.gateway.ledger import open_ledger
from headrace.gateway.snapshot import Limits, Price
from headrace.gateway.storage import tables
from headrace.gateway.storage.database import Database, open_database
from headrace.gateway.usage import UsageEvent, UsageWriter, cost_micros
from headrace.gateway.usage_queries import UsageSum, recent_usage, spending, usage_sums
from headrace.gateway.usage_rows import prune
from headrace.protocol.errors import ApiError
from tests.gateway.usage_fill import fill, slowest_question_s

NOON_S = 1_795_953_600.0
"""2026-11-29 12:00 UTC"""


def event(**fields: object) -> UsageEvent:
    given: dict[str, object] = {
        "time_s": NOON_S,
        "key_id": "key_1",
        "key_name": "ci",
        "model": "qwen",
        "upstream": "local",
        "upstream_model": "Qwen2",
        "endpoint": "chat",
        "status": 200,
        "input_tokens": 10,
        "output_tokens": 5,
        "cost_micros": 3,
        "total_s": 0.5,
    }
    return msgspec.convert({**given, **fields}, UsageEvent)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = open_database(None, tmp_path)
    yield database
    database.close()


@pytest.fixture
def journal_dir(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def wait_until(holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("price", "tokens", "micros"),
    [
        (Price(input_micros_per_mtok=3_000_000, output_micros_per_mtok=15_000_000), (1000, 200, 0), 6000),
        (Price(input_micros_per_mtok=3_000_000, cached_input_micros_per_mtok=300_000), (1000, 0, 900), 570),
        (Price(input_micros_per_mtok=3_000_000), (1000, 0, 900), 3000),
        (Price(input_micros_per_mtok=150_000), (3, 0, 0), 0),
        (Price(input_micros_per_mtok=150_000), (4, 0, 0), 1),
        (Price(output_micros_per_mtok=10**12), (0, 10**9, 0), 10**15),
        (Price(input_micros_per_mtok=1_000_000, cached_input_micros_per_mtok=0), (10, 0, 99), 0),
    ],
)
def test_cost_is_the_price_times_the_tokens_in_whole_micro_units(
    price: Price, tokens: tuple[int, int, int], micros: int
) -> None:
    assert cost_micros(price, *tokens) == micros


def test_an_event_is_in_the_database_within_a_second(database: Database, journal_dir: Path) -> None:
    writer = UsageWriter(database, journal_dir)
    began = time.monotonic()
    writer.append(event())
    wait_until(lambda: database.count(tables.usage_events) == 1)
    assert time.monotonic() - began < 1.0
    writer.close()


def test_rows_and_daily_sums_say_the_same(database: Database, journal_dir: Path) -> None:
    writer = UsageWriter(database, journal_dir, batch_events=7)
    for number in range(100):
        writer.append(
            event(
                model=("qwen", "gpt")[number % 2],
                time_s=NOON_S + 86_400 * (number % 3),
                outcome=("ok", "client_left")[number % 10 == 0],
                estimated=number % 4 == 0,
                cached_tokens=number % 5,
                request_id=f"r{number}",
            )
        )
    writer.close()
    assert database.count(tables.usage_events) == writer.written == 100
    (total,) = usage_sums(database, first="2026-11-29", by=())
    assert total == UsageSum(
        requests=100, failed=10, estimated=25, input_tokens=1000, output_tokens=500, cached_tokens=200, cost_micros=300
    )
    assert [(row.day, row.model, row.requests) for row in usage_sums(database, first="0", by=("day", "model"))] == [
        ("2026-11-29", "gpt", 17),
        ("2026-11-29", "qwen", 17),
        ("2026-11-30", "gpt", 17),
        ("2026-11-30", "qwen", 16),
        ("2026-12-01", "qwen", 17),
        ("2026-12-01", "gpt", 16),
    ]
    assert [row.requests for row in usage_sums(database, first="2026-11-30", last="2026-11-30")] == [33]
    assert usage_sums(database, first="2026-11-29", key_id="key_2") == []


def test_what_comes_back_is_what_went_in(database: Database, journal_dir: Path) -> None:
    writer = UsageWriter(database, journal_dir)
    first = event(ttft_s=0.25, stream=True, estimated=True, outcome="truncated", attempts=3, request_id="abc")
    second = event(key_id="key_2", key_name="other")
    writer.append(first)
    writer.append(second)
    writer.close()
    assert recent_usage(database) == [second, first]
    assert recent_usage(database, key_id="key_1") == [first]
    (row,) = usage_sums(database, first="2026-11-29", by=("key",), key_id="key_2")
    assert (row.key_id, row.key_name, row.requests) == ("key_2", "other", 1)


WRITE_UNTIL_KILLED = """
import sys, time
from headrace.gateway.ledger import open_ledger
from headrace.gateway.usage import UsageEvent

ledger = open_ledger(None, sys.argv[1])
number = 0
while True:
    ledger.usage.append(UsageEvent(time_s=time.time(), key_id="k", key_name="k", model="m", upstream="u",
        upstream_model="m", endpoint="chat", status=200, cost_micros=1))
    number += 1
    print(number, time.time(), flush=True)
    time.sleep(0.002)
"""


def test_a_writer_that_is_killed_loses_at_most_the_last_second(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITE_UNTIL_KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line.split())
            if float(line.split()[1]) - float(lines[0][1]) > 2.0:
                break
        process.send_signal(signal.SIGKILL)
        lines += [line.split() for line in process.stdout if line.endswith("\n")]
    killed_at = max(float(at) for _, at in lines)
    older = sum(float(at) < killed_at - 1.0 for _, at in lines)
    ledger = open_ledger(None, tmp_path)
    try:
        written = ledger.database.count(tables.usage_events)
        (total,) = usage_sums(ledger.database, first="2000-01-01", by=())
    finally:
        ledger.close()
    assert older <= written == total.requests == total.cost_micros <= len(lines) + 2


def test_while_another_process_holds_the_database_usage_goes_to_the_journal_and_comes_back(
    database: Database, journal_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocker = sqlite3.connect(tmp_path / "gateway.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    writer = UsageWriter(database, journal_dir, interval_s=0.05)
    for _ in range(10):
        writer.append(event())
    wait_until(lambda: writer.journaled == 10)
    (journal,) = journal_dir.iterdir()
    assert journal.stat().st_mode & 0o777 == 0o600
    assert "locked" in str(writer.write_error)
    blocker.execute("ROLLBACK")
    blocker.close()
    wait_until(lambda: database.count(tables.usage_events) == 10)
    wait_until(lambda: writer.write_error is None)
    assert list(journal_dir.iterdir()) == []
    writer.close()
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == 1


def test_a_full_queue_spills_to_the_journal_and_appending_never_waits(
    database: Database, journal_dir: Path, tmp_path: Path
) -> None:
    writer = UsageWriter(database, journal_dir, interval_s=0.05, queue_events=100, batch_events=10)
    blocker = sqlite3.connect(tmp_path / "gateway.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    slowest_s = 0.0
    for _ in range(5000):
        began = time.perf_counter()
        writer.append(event())
        slowest_s = max(slowest_s, time.perf_counter() - began)
    assert slowest_s < 0.3
    wait_until(lambda: writer.waiting < 100)
    blocker.execute("ROLLBACK")
    blocker.close()
    wait_until(lambda: database.count(tables.usage_events) == 5000)
    writer.close()
    (total,) = usage_sums(database, first="2026-11-29", by=())
    assert total.requests == 5000


def test_a_journal_of_a_killed_process_is_counted_at_the_next_start_once(database: Database, journal_dir: Path) -> None:
    dead = Journal(journal_dir)
    dead.append([event() for _ in range(3)])
    dead.close()
    (path,) = journal_dir.iterdir()
    with path.open("ab") as file:
        file.write(b'{"time_s": 17')  # the line it was writing
    copy = path.read_bytes()
    UsageWriter(database, journal_dir).close()
    assert database.count(tables.usage_events) == 3
    assert not path.exists()
    path.write_bytes(copy)  # as if its removal had failed
    UsageWriter(database, journal_dir).close()
    assert database.count(tables.usage_events) == 3
    assert usage_sums(database, first="2026-11-29", by=())[0].requests == 3


def test_the_journal_of_a_living_process_is_left_to_it(database: Database, journal_dir: Path) -> None:
    living = Journal(journal_dir)
    living.append([event()])
    UsageWriter(database, journal_dir).close()
    assert database.count(tables.usage_events) == 0
    living.close()
    UsageWriter(database, journal_dir).close()
    assert database.count(tables.usage_events) == 1


def test_an_event_that_no_table_can_hold_harms_no_other(
    database: Database, journal_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = UsageWriter(database, journal_dir)
    for number in range(9):
        writer.append(event(input_tokens=2**63 if number == 4 else 1))
    writer.close()
    assert database.count(tables.usage_events) == 8
    assert usage_sums(database, first="2026-11-29", by=())[0].input_tokens == 8
    assert any("9223372036854775808" in record.getMessage() for record in caplog.records)


def test_budgets_survive_a_restart(tmp_path: Path) -> None:
    ledger = open_ledger(None, tmp_path)
    record, _ = ledger.store.first()
    for days_ago, micros in ((0, 5), (1, 7), (400, 11)):
        ledger.usage.append(event(time_s=time.time() - days_ago * 86_400, key_id=record.id, cost_micros=micros))
    ledger.close()
    again = open_ledger(None, tmp_path)
    try:
        load = again.limiter.load(record.id)
        assert (load.spent_day_micros, load.spent_total_micros) == (5, 23)
        limited = replace(record, limits=Limits(budget_micros=23, budget_period="total"))
        with pytest.raises(ApiError, match=r"0\.000023 are spent"):
            again.limiter.admit(limited, estimated_micros=1)
    finally:
        again.close()


def test_a_budget_holds_over_two_processes(tmp_path: Path) -> None:
    here, there = open_ledger(None, tmp_path), open_ledger(None, tmp_path)
    try:
        here.usage.report_spending(here.limiter.spent_elsewhere, interval_s=0.1)
        record, _ = here.store.first()
        record = replace(record, limits=Limits(budget_micros=100, budget_period="day"))
        for ledger, micros in ((here, 30), (there, 60), (here, 9)):
            with ledger.limiter.admit(record, estimated_micros=micros) as lease:
                lease.settle(1, micros)
            ledger.usage.append(event(time_s=time.time(), key_id=record.id, cost_micros=micros))
        assert here.usage.flush() and there.usage.flush()

        def spent() -> int:
            here.limiter.admit(record).release()
            return here.limiter.load(record.id).spent_day_micros

        wait_until(lambda: spent() == 99)
        time.sleep(0.3)
        assert spent() == 99
        with pytest.raises(ApiError, match="a day"):
            here.limiter.admit(record, estimated_micros=2)
    finally:
        here.close()
        there.close()


def test_spending_is_split_by_period(database: Database, journal_dir: Path) -> None:
    writer = UsageWriter(database, journal_dir)
    # Sunday the 29th: the day; the week from Monday the 23rd; the month from the 1st.
    for days_ago, micros in ((0, 1), (6, 10), (7, 100), (28, 1000), (29, 10_000)):
        writer.append(event(time_s=NOON_S - days_ago * 86_400, cost_micros=micros))
    writer.close()
    spent = spending(database, NOON_S)["key_1"]
    today = day_number(NOON_S)
    assert [spent.settled(period, today) for period in ("day", "week", "month", "total")] == [1, 11, 1111, 11_111]


def test_old_rows_are_forgotten_and_their_sums_are_not(database: Database, journal_dir: Path) -> None:
    writer = UsageWriter(database, journal_dir)
    for days_ago in range(10):
        writer.append(event(time_s=NOON_S - days_ago * 86_400))
    writer.close()
    assert prune(database, NOON_S - 4.5 * 86_400) == 5
    assert database.count(tables.usage_events) == 5
    assert usage_sums(database, first="2026-01-01", by=())[0].requests == 10


def test_sums_read_the_aggregate_and_never_the_rows(database: Database) -> None:
    fill(database, num_events=50_000)
    assert slowest_question_s(database) < 0.05
    with database.write() as connection:
        connection.execute(tables.usage_events.delete())
    assert sum(row.requests for row in usage_sums(database, first="2020-01-01", by=("key",))) == 50_000
    by_model = usage_sums(database, first="2026-11-01", by=("model",))
    assert {row.model for row in by_model} == {f"model-{number}" for number in range(5)}
