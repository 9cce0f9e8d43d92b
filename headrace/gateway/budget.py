"""What a key has spent in the current day, week, month and in all, in integer micro-units.

Days begin at midnight UTC, weeks on Monday, months on the first. The sums come from the daily aggregates at the
start (`usage_queries.spending`), so a restart forgets nothing; from then on they are counted here.
"""

from __future__ import annotations

from datetime import date, timedelta

from headrace.gateway.snapshot import Period

DAY_S = 86_400
PERIODS: tuple[Period, ...] = ("day", "week", "month", "total")

_EPOCH = date(1970, 1, 1)


def day_number(time_s: float) -> int:
    """Days since 1970-01-01."""
    return int(time_s // DAY_S)


def day_text(number: int) -> str:
    """2026-11-29"""
    return (_EPOCH + timedelta(days=number)).isoformat()


def first_day(period: Period, day: int) -> int:
    """The day on which the period that `day` lies in began; "total" began at the beginning."""
    if period == "day":
        return day
    if period == "week":
        return day - (day + 3) % 7
    if period == "month":
        return day - (_EPOCH + timedelta(days=day)).day + 1
    return 0


def ends_at_s(period: Period, day: int) -> float | None:
    """When the period that `day` lies in is over, in seconds since 1970; None = never."""
    if period == "day":
        return float((day + 1) * DAY_S)
    if period == "week":
        return float((first_day("week", day) + 7) * DAY_S)
    if period == "month":
        return float(first_day("month", first_day("month", day) + 31) * DAY_S)
    return None


class Spending:
    """Money of one key: settled by period, and reserved by running requests."""

    __slots__ = ("_day", "_settled", "reserved")

    def __init__(self, today: int = 0, *, day: int = 0, week: int = 0, month: int = 0, total: int = 0) -> None:
        self.reserved = 0
        self._day = today
        self._settled: dict[Period, int] = {"day": day, "week": week, "month": month, "total": total}

    def settled(self, period: Period, day: int) -> int:
        """Micro-units spent in the period that `day` lies in."""
        self._turn_to(day)
        return self._settled[period]

    def add(self, micros: int, day: int) -> None:
        """Book what was spent on `day`."""
        self._turn_to(day)
        for period in PERIODS:
            self._settled[period] += micros

    def _turn_to(self, day: int) -> None:
        """Begin new periods. A clock that goes back begins none: what is spent stays spent."""
        if day > self._day:
            for period in PERIODS:
                if first_day(period, day) > self._day:
                    self._settled[period] = 0
            self._day = day
