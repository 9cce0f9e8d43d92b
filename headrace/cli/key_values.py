"""How people write what a key is given: 30d, 5/month, dev,ci. Errors say what would have been understood."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import get_args

from headrace.gateway.keys import KeyMistake
from headrace.gateway.snapshot import Period

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400, "y": 365 * 86_400}
_MICROS = 10**6
_PERIODS: tuple[Period, ...] = get_args(Period)


def seconds(text: str) -> float:
    """30d, 12h, 90m, 2w, 1y; 0. Raises KeyMistake."""
    match = re.fullmatch(r"(\d+)\s*([smhdwy])", text.strip().lower())
    if match is not None:
        return float(int(match[1]) * _UNITS_S[match[2]])
    if text.strip() == "0":
        return 0.0
    raise KeyMistake(f"{text} is not a length of time such as 30d, 12h or 90m.")


def expiry(text: str | None, now_s: float) -> float | None:
    """A length of time from now, a day (its end, UTC) or `never`. Raises KeyMistake."""
    if text is None or text.lower() == "never":
        return None
    if re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
        try:
            return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() + _UNITS_S["d"]
        except ValueError:
            pass
    try:
        return now_s + seconds(text)
    except KeyMistake:
        raise KeyMistake(f"--expires {text}: write a length of time (30d, 12h), a day (2026-12-31) or never.") from None


def budget(text: str | None) -> tuple[int | None, Period | None]:
    """`5/month` as (5000000, "month"); `5` is for ever. Raises KeyMistake."""
    if text is None:
        return None, None
    amount, _, period = text.partition("/")
    match = re.fullmatch(r"\d{1,12}(\.\d{1,6})?", amount.strip())
    name = next((each for each in _PERIODS if each == (period.strip().lower() or "total")), None)
    if match is None or name is None:
        raise KeyMistake(f"--budget {text}: write an amount and a period: 5/month, 0.50/day, 20/week, 100/total.")
    return int(Decimal(amount.strip()) * _MICROS), name


def words(text: str | None) -> tuple[str, ...]:
    """The parts between commas, each once."""
    parts = [part.strip() for part in (text or "").split(",")]
    return tuple(dict.fromkeys(part for part in parts if part))
