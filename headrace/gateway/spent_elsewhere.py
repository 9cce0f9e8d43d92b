"""What other processes spend on the same keys, learnt from the database they all write to.

    spent elsewhere = the key's sum in the database - what this process has written there

The usage writer's thread asks between two of its batches, when both numbers stand still; the limiter is told of
the growth. So budgets hold over several gateways, late by the few seconds between two looks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy import func, select

from headrace.gateway.budget import day_number, day_text
from headrace.gateway.storage import tables
from headrace.gateway.storage.database import Database
from headrace.gateway.usage_event import UsageEvent

Report = Callable[[str, int], None]
"""Takes a key's id and micro-units that were spent on it elsewhere."""


class SpentElsewhere:
    """Begins to count when it is made; what was spent before is in the limiter already. Blocks."""

    def __init__(self, database: Database, report: Report, now_s: float) -> None:
        self._database = database
        self._report = report
        self._first_day = day_text(day_number(now_s))
        self._own: dict[str, int] = {}
        self._seen = self._sums()

    def wrote(self, events: Sequence[UsageEvent]) -> None:
        """These events of this process are in the database now."""
        for event in events:
            if event.cost_micros:
                self._own[event.key_id] = self._own.get(event.key_id, 0) + event.cost_micros

    def look(self) -> None:
        """Report what is new. Raises SQLAlchemyError."""
        for key_id, total in self._sums().items():
            elsewhere = total - self._own.get(key_id, 0)
            grown = elsewhere - self._seen.get(key_id, 0)
            if grown > 0:
                self._seen[key_id] = elsewhere
                self._report(key_id, grown)

    def _sums(self) -> dict[str, int]:
        days = tables.usage_days
        statement = select(days.c.key_id, func.sum(days.c.cost_micros)).where(days.c.day >= self._first_day)
        with self._database.read() as connection:
            return {key_id: int(total) for key_id, total in connection.execute(statement.group_by(days.c.key_id))}
