"""Usage on its way into the tables: rows and daily sums change in one transaction, so they can never disagree."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import msgspec
from sqlalchemy import Connection, Dialect, Table, delete, select
from sqlalchemy.exc import DataError, IntegrityError, InterfaceError, ProgrammingError

from headrace.gateway.budget import day_number, day_text
from headrace.gateway.storage import tables
from headrace.gateway.storage.database import Database
from headrace.gateway.usage_event import UsageEvent

SUMS = ("requests", "failed", "estimated", "input_tokens", "output_tokens", "cached_tokens", "cost_micros")

PRUNE_ROWS = 2000

# What a single event can be to blame for; anything else is the database's state.
_EVENTS_OWN_FAULT = (DataError, IntegrityError, InterfaceError, ProgrammingError, OverflowError)

logger = logging.getLogger("headrace.gateway.usage")


def insert_usage(database: Database, connection: Connection, events: Sequence[UsageEvent]) -> int:
    """Write some events in the caller's transaction; returns how many.

    An event that no table can hold (a number beyond 64 bits, a NUL in a name) goes to the log and harms no other.
    """
    if not events:
        return 0
    try:
        with connection.begin_nested():
            _insert(database, connection, events)
    except _EVENTS_OWN_FAULT as error:
        if len(events) == 1:
            logger.critical("Usage that cannot be stored: %s (%s)", msgspec.json.encode(events[0]).decode(), error)
            return 0
        middle = len(events) // 2
        return sum(insert_usage(database, connection, half) for half in (events[:middle], events[middle:]))
    return len(events)


def count_journal(database: Database, name: str, events: Sequence[UsageEvent], batch_events: int) -> int:
    """Write a journal's events unless this journal was counted before; returns how many were written."""
    done = tables.replayed_journals
    written = 0
    with database.write() as connection:
        mark = database.insert(done).values(name=name, replayed_at=time.time())
        if connection.execute(mark.on_conflict_do_nothing(index_elements=["name"])).rowcount == 0:
            return 0
        for start in range(0, len(events), batch_events):
            written += insert_usage(database, connection, events[start : start + batch_events])
    return written


def prune(database: Database, before_s: float) -> int:
    """Remove rows of requests before that time, some at a time; the daily sums stay. Returns how many. Blocks."""
    rows = tables.usage_events
    removed = 0
    while True:
        some = select(rows.c.id).where(rows.c.time_s < before_s).limit(PRUNE_ROWS)
        with database.write() as connection:
            count = connection.execute(delete(rows).where(rows.c.id.in_(some))).rowcount
        removed += count
        if count < PRUNE_ROWS:
            return removed


def _insert(database: Database, connection: Connection, events: Sequence[UsageEvent]) -> None:
    rows, as_parameters = _row_statement(database.engine.dialect)
    connection.exec_driver_sql(rows, [as_parameters(event) for event in events])
    connection.execute(_day_statement(database.insert), _daily_sums(events))


@functools.lru_cache(maxsize=4)
def _row_statement(dialect: Dialect) -> tuple[str, Callable[[UsageEvent], Any]]:
    """The statement is SQLAlchemy's, its parameters go to the driver as they are: a fifth of the time a row."""
    statement = tables.usage_events.insert().compile(dialect=dialect, column_keys=list(UsageEvent.__struct_fields__))
    order = statement.positiontup
    return str(statement), msgspec.structs.asdict if order is None else attrgetter(*order)


@functools.lru_cache(maxsize=4)
def _day_statement(insert_into: Callable[[Table], Any]) -> Any:
    days = tables.usage_days
    insert = insert_into(days)
    added = {name: days.c[name] + insert.excluded[name] for name in SUMS}
    return insert.on_conflict_do_update(
        index_elements=["day", "key_id", "model", "upstream"],
        set_={**added, "key_name": insert.excluded.key_name},
    )


def _daily_sums(events: Sequence[UsageEvent]) -> list[dict[str, object]]:
    """One row for each day, key, model and upstream, in a fixed order so that two processes cannot deadlock."""
    sums: dict[tuple[str, str, str, str], list[int]] = {}
    names: dict[str, str] = {}
    days: dict[int, str] = {}
    for event in events:
        number = day_number(event.time_s)
        day = days.get(number) or days.setdefault(number, day_text(number))
        place = (day, event.key_id, event.model, event.upstream)
        row = sums.get(place) or sums.setdefault(place, [0] * len(SUMS))
        names[event.key_id] = event.key_name
        row[0] += 1
        row[1] += event.outcome != "ok"
        row[2] += event.estimated
        row[3] += event.input_tokens
        row[4] += event.output_tokens
        row[5] += event.cached_tokens
        row[6] += event.cost_micros
    return [
        {
            "day": day,
            "key_id": key_id,
            "model": model,
            "upstream": upstream,
            "key_name": names[key_id],
            **dict(zip(SUMS, row, strict=True)),
        }
        for (day, key_id, model, upstream), row in sorted(sums.items())
    ]
