"""Questions about usage. Sums come from the daily aggregates, never from the raw rows, and so stay fast.

All of it blocks: call it in a thread, never on the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec
from sqlalchemy import case, func, select

from headrace.gateway.budget import Spending, day_number, day_text, first_day
from headrace.gateway.storage import tables
from headrace.gateway.storage.database import Database
from headrace.gateway.usage_event import UsageEvent
from headrace.gateway.usage_rows import SUMS

Grouping = Literal["key", "model", "upstream", "day"]
GROUPINGS: tuple[Grouping, ...] = get_args(Grouping)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSum:
    """Sums over the requests that share day, key, model and upstream, as far as they were asked apart."""

    day: str | None = None
    key_id: str | None = None
    key_name: str | None = None
    model: str | None = None
    upstream: str | None = None
    requests: int = 0
    failed: int = 0
    """Requests with an outcome other than ok."""
    estimated: int = 0
    """Requests whose tokens are our count."""
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cost_micros: int = 0


def usage_sums(
    database: Database,
    *,
    first: str,
    last: str | None = None,
    by: Sequence[Grouping] = ("day",),
    key_id: str | None = None,
) -> list[UsageSum]:
    """Sums from day `first` to day `last` (2026-11-29, UTC, both included; None = today and later).

    Sorted by day where that is asked, else the dearest and busiest first. `by` () gives one line, or none.
    """
    days = tables.usage_days
    groups = [days.c["key_id" if name == "key" else name] for name in by]
    sums = [func.sum(days.c[name]).label(name) for name in SUMS]
    names = [func.max(days.c.key_name).label("key_name")] if "key" in by else []
    statement = select(*groups, *names, *sums).where(days.c.day >= first)
    if last is not None:
        statement = statement.where(days.c.day <= last)
    if key_id is not None:
        statement = statement.where(days.c.key_id == key_id)
    statement = statement.group_by(*groups)
    with database.read() as connection:
        found = [_usage_sum(dict(row._mapping)) for row in connection.execute(statement)]
    found = [row for row in found if row.requests]
    return sorted(found, key=_order)


def recent_usage(database: Database, *, limit: int = 100, key_id: str | None = None) -> list[UsageEvent]:
    """The last requests, the newest first."""
    rows = tables.usage_events
    fields = UsageEvent.__struct_fields__
    statement = select(*[rows.c[field] for field in fields]).order_by(rows.c.id.desc()).limit(limit)
    if key_id is not None:
        statement = statement.where(rows.c.key_id == key_id)
    with database.read() as connection:
        found = connection.execute(statement).all()
    return [msgspec.convert(dict(zip(fields, row, strict=True)), UsageEvent) for row in found]


def spending(database: Database, now_s: float) -> dict[str, Spending]:
    """What every key has spent so far, for the limiter's start."""
    days = tables.usage_days
    today = day_number(now_s)

    def since(day: int) -> object:
        return func.sum(case((days.c.day >= day_text(day), days.c.cost_micros), else_=0))

    month, week = first_day("month", today), first_day("week", today)
    statement = select(
        days.c.key_id,
        func.sum(days.c.cost_micros),
        since(month),
        since(week),
        since(today),  # type: ignore[call-overload]
    ).group_by(days.c.key_id)
    with database.read() as connection:
        rows = connection.execute(statement).all()
    return {
        key_id: Spending(today, total=int(total), month=int(in_month), week=int(in_week), day=int(in_day))
        for key_id, total, in_month, in_week, in_day in rows
    }


def _order(row: UsageSum) -> tuple[object, ...]:
    names = (row.key_name or "", row.model or "", row.upstream or "")
    return (row.day or "", -row.cost_micros, -row.requests, *names)


def _usage_sum(row: dict[str, object]) -> UsageSum:
    # PostgreSQL sums bigint columns as numeric.
    counted = {name: int(str(row[name] or 0)) for name in SUMS}
    return UsageSum(**{**row, **counted})  # type: ignore[arg-type]
