"""Requests a minute, tokens a minute, concurrency and budgets of each key, its own and its plan's.

`admit` looks at every limit first and then commits to all together, so a refusal costs nothing. It returns a lease:

    with limiter.admit(record, plan, estimated_tokens=900, estimated_micros=120) as lease:
        ...                             # 900 tokens and 120 micro-units are reserved, one slot is taken
        lease.settle(tokens=412, micros=57)
    # slot and reservation are given back, whatever happened; 412 and 57 stay booked

One lease is settled once and released once, later calls change nothing. Everything is an integer, nothing here
waits or locks: one event loop calls it. The headers of an answer come from the same numbers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import TracebackType
from typing import NamedTuple

from headrace.gateway.budget import Spending, day_number, ends_at_s
from headrace.gateway.gcra import Rate
from headrace.gateway.keys import NO_LIMITS, KeyRecord
from headrace.gateway.snapshot import Dialect, Limits, Plan
from headrace.protocol import access_errors
from headrace.protocol.errors import ApiError

KINDS = ("requests", "tokens")
PARTS = ("limit", "remaining", "reset")
HEADER_NAMES: Mapping[Dialect, Sequence[tuple[bytes, ...]]] = {
    "openai": [tuple(f"x-ratelimit-{part}-{kind}".encode() for part in PARTS) for kind in KINDS],
    "anthropic": [tuple(f"anthropic-ratelimit-{kind}-{part}".encode() for part in PARTS) for kind in KINDS],
}


@dataclass(slots=True)
class _Owner:
    """The limits of the key itself, or those its plan gives to each of its keys."""

    of: str
    limits: Limits
    requests: Rate | None = None
    tokens: Rate | None = None


class _Now(NamedTuple):
    """The moment of one decision, and whose headers tell of it."""

    ns: int
    s: float
    dialect: Dialect


class _Meter:
    """All that is counted of one key."""

    __slots__ = ("in_flight", "key_limits", "owners", "plan_limits", "requests", "spending", "tokens")

    def __init__(self, spending: Spending) -> None:
        self.in_flight = 0
        self.spending = spending
        self.owners: list[_Owner] = []
        self.requests: tuple[Rate, ...] = ()
        self.tokens: tuple[Rate, ...] = ()
        self.key_limits = self.plan_limits = NO_LIMITS  # those that `owners` stands for


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLoad:
    """What a key is using now, for the console."""

    in_flight: int
    reserved_micros: int
    spent_day_micros: int
    spent_week_micros: int
    spent_month_micros: int
    spent_total_micros: int


class Limiter:
    """The limits of every key. `spending` is what keys have spent before this start.

    Of `gateways` that share the keys each lets its part of rates and concurrency through, at least one.
    """

    def __init__(
        self,
        spending: Mapping[str, Spending] | None = None,
        *,
        gateways: int = 1,
        now_ns: Callable[[], int] = time.monotonic_ns,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.now_ns = now_ns
        self.now_s = now_s
        self._gateways = gateways
        self._elsewhere: deque[tuple[str, int]] = deque()
        self._meters: dict[str, _Meter] = {key_id: _Meter(spent) for key_id, spent in (spending or {}).items()}

    def admit(
        self,
        record: KeyRecord,
        plan: Plan | None = None,
        *,
        estimated_tokens: int = 0,
        estimated_micros: int = 0,
        dialect: Dialect = "openai",
    ) -> Lease:
        """Take a slot, a request and the reservations. Raises ApiError (429) and takes nothing.

        `dialect` is that of the rate headers, also of a refusal's.
        """
        now_ns, now_s = self.now_ns(), self.now_s()
        if self._elsewhere:
            self._book_elsewhere(day_number(now_s))
        meter = self._meter(record, plan, now_ns)
        tokens = estimated_tokens if estimated_tokens > 0 else 0
        micros = estimated_micros if estimated_micros > 0 else 0
        if meter.owners:
            refusal = self._refusal(meter, tokens, micros, _Now(now_ns, now_s, dialect))
            if refusal is not None:
                raise refusal
        for rate in meter.requests:
            rate.take(1, now_ns)
        for rate in meter.tokens:
            rate.reserved += tokens
        meter.in_flight += 1
        meter.spending.reserved += micros
        return Lease(self, meter, tokens, micros, dialect)

    def spent_elsewhere(self, key_id: str, micros: int) -> None:
        """Another process has spent this on the key. May be called from any thread; it counts at the next request."""
        self._elsewhere.append((key_id, micros))

    def load(self, key_id: str) -> KeyLoad:
        meter = self._meters.get(key_id) or _Meter(Spending())
        day, spending = day_number(self.now_s()), meter.spending
        return KeyLoad(
            in_flight=meter.in_flight,
            reserved_micros=spending.reserved,
            spent_day_micros=spending.settled("day", day),
            spent_week_micros=spending.settled("week", day),
            spent_month_micros=spending.settled("month", day),
            spent_total_micros=spending.settled("total", day),
        )

    def in_flight(self) -> int:
        """Requests of all keys that hold a slot."""
        return sum(meter.in_flight for meter in list(self._meters.values()))

    def _book_elsewhere(self, day: int) -> None:
        while self._elsewhere:
            key_id, micros = self._elsewhere.popleft()
            self._meters.setdefault(key_id, _Meter(Spending())).spending.add(micros, day)

    def _meter(self, record: KeyRecord, plan: Plan | None, now_ns: int) -> _Meter:
        meter = self._meters.get(record.id)
        if meter is None:
            meter = self._meters[record.id] = _Meter(Spending())
        plan_limits = NO_LIMITS if plan is None else plan.limits
        if meter.key_limits is record.limits and meter.plan_limits is plan_limits:
            return meter
        meter.key_limits, meter.plan_limits = record.limits, plan_limits
        wanted = [self._part("API key", record.limits)] if record.limits != NO_LIMITS else []
        if plan is not None and plan_limits != NO_LIMITS:
            wanted.append(self._part(f"plan {plan.name}", plan_limits))
        if [(owner.of, owner.limits) for owner in meter.owners] != wanted:
            known = {owner.of: owner for owner in meter.owners}
            meter.owners = [_with_limits(known.get(of) or _Owner(of, limits), limits, now_ns) for of, limits in wanted]
            meter.requests = tuple([owner.requests for owner in meter.owners if owner.requests is not None])
            meter.tokens = tuple([owner.tokens for owner in meter.owners if owner.tokens is not None])
        return meter

    def _part(self, of: str, limits: Limits) -> tuple[str, Limits]:
        """What of the limits this gateway lets through, and whose they are, in words."""
        number = self._gateways
        if number == 1:
            return of, limits
        rpm, tpm, at_once = (
            None if each is None else -(-each // number) for each in (limits.rpm, limits.tpm, limits.concurrency)
        )
        return f"{of}, at each of {number} gateways,", replace(limits, rpm=rpm, tpm=tpm, concurrency=at_once)

    def _refusal(self, meter: _Meter, tokens: int, micros: int, now: _Now) -> ApiError | None:
        """The answer to a request that some limit does not let pass: the one whose waiting time is longest."""
        found: list[tuple[float, ApiError]] = []
        for owner in meter.owners:
            limits, of = owner.limits, owner.of
            if limits.budget_micros is not None and micros:
                budget = _budget_refusal(owner, meter, limits.budget_micros, micros, now)
                if budget is not None:
                    found.append(budget)
            if owner.requests is not None:
                wait_ns = owner.requests.wait_ns(1, now.ns)
                if wait_ns:
                    message = f"This {of} allows {limits.rpm} requests a minute, and they are used up."
                    found.append(_rate_refusal(message, wait_ns, meter, now))
            if owner.tokens is not None:
                wait_ns = owner.tokens.wait_ns(tokens, now.ns)
                if wait_ns is None:
                    message = (
                        f"This {of} allows {limits.tpm} tokens a minute, and this request alone may use {tokens} "
                        "(prompt and `max_tokens`). Lower `max_tokens` or shorten the prompt."
                    )
                    refusal = access_errors.rate_limit_exceeded(message, None, _text_headers(meter, now))
                    found.append((float("inf"), refusal))
                elif wait_ns:
                    message = (
                        f"This {of} allows {limits.tpm} tokens a minute; this request may use {tokens}, and "
                        f"{owner.tokens.remaining(now.ns)} are left now."
                    )
                    found.append(_rate_refusal(message, wait_ns, meter, now))
            if limits.concurrency is not None and meter.in_flight >= limits.concurrency:
                message = f"This {of} allows {limits.concurrency} requests at a time, and as many are running."
                found.append((0.0, access_errors.concurrency_exceeded(message, _text_headers(meter, now))))
        return max(found, key=lambda each: each[0])[1] if found else None


class Lease:
    """What one admitted request holds."""

    __slots__ = ("_dialect", "_limiter", "_meter", "_micros", "_rates", "_released", "_settled", "_tokens")

    def __init__(self, limiter: Limiter, meter: _Meter, tokens: int, micros: int, dialect: Dialect) -> None:
        self._limiter = limiter
        self._dialect: Dialect = dialect
        self._meter = meter
        self._rates = meter.tokens
        self._tokens = tokens  # still reserved
        self._micros = micros
        self._settled = False
        self._released = False

    def settle(self, tokens: int, micros: int) -> None:
        """Book what was really used in place of what was reserved. The first call counts."""
        if self._settled:
            return
        self._settled = True
        if not self._released:
            self._give_back()
        now_ns = self._limiter.now_ns()
        for rate in self._rates:
            rate.take(tokens if tokens > 0 else 0, now_ns)
        if micros > 0:
            self._meter.spending.add(micros, day_number(self._limiter.now_s()))

    def release(self) -> None:
        """Give the slot back, and the reservation if nothing was settled. The first call counts."""
        if self._released:
            return
        self._released = True
        self._meter.in_flight -= 1
        if not self._settled:
            self._give_back()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The rate headers of the answer, as they stand now; [] for a key without rates."""
        if not self._meter.owners:
            return []
        return _headers(self._meter, _Now(self._limiter.now_ns(), self._limiter.now_s(), self._dialect))

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _give_back(self) -> None:
        for rate in self._rates:
            rate.reserved -= self._tokens
        self._meter.spending.reserved -= self._micros


def _with_limits(owner: _Owner, limits: Limits, now_ns: int) -> _Owner:
    """The owner under new limits; what was used stays used where there is a limit before and after."""
    return _Owner(
        owner.of,
        limits,
        requests=_resized(owner.requests, limits.rpm, now_ns),
        tokens=_resized(owner.tokens, limits.tpm, now_ns),
    )


def _resized(rate: Rate | None, limit: int | None, now_ns: int) -> Rate | None:
    if limit is None:
        return None
    if rate is None:
        return Rate(limit)
    rate.change_limit(limit, now_ns)
    return rate


def _rate_refusal(message: str, wait_ns: int, meter: _Meter, now: _Now) -> tuple[float, ApiError]:
    wait_s = wait_ns / 1e9
    text = f"{message} Try again in {duration(wait_ns)}."
    return wait_s, access_errors.rate_limit_exceeded(text, wait_s, _text_headers(meter, now))


def _budget_refusal(owner: _Owner, meter: _Meter, limit: int, micros: int, now: _Now) -> tuple[float, ApiError] | None:
    period = owner.limits.budget_period or "total"
    day = day_number(now.s)
    spent = meter.spending.settled(period, day)
    if spent + meter.spending.reserved + micros <= limit:
        return None
    allowance = f"This {owner.of} may spend {money(limit)} {'in all' if period == 'total' else f'a {period}'}"
    headers = _text_headers(meter, now)
    if spent + micros <= limit:
        message = f"{allowance}; with the requests now running there is no room for this one. Try again in a second."
        return 1.0, access_errors.rate_limit_exceeded(message, 1.0, headers)
    ends_s = ends_at_s(period, day)
    renewed = f" It is renewed on {access_errors.shown_date(ends_s)}." if ends_s is not None else ""
    message = f"{allowance}, and {money(spent)} are spent; this request may cost {money(micros)}.{renewed}"
    wait_s = None if ends_s is None else ends_s - now.s
    return float("inf"), access_errors.insufficient_quota(message, wait_s, headers)


def _headers(meter: _Meter, now: _Now) -> list[tuple[bytes, bytes]]:
    """Of the key's own limit and its plan's the one that leaves less is shown."""
    pairs: list[tuple[bytes, bytes]] = []
    for names, rates in zip(HEADER_NAMES[now.dialect], (meter.requests, meter.tokens), strict=True):
        if not rates:
            continue
        tightest = rates[0] if len(rates) == 1 else min(rates, key=lambda rate: rate.remaining(now.ns))
        remaining, reset_ns = tightest.room(now.ns)
        if now.dialect == "openai":
            reset = duration(reset_ns)
        else:
            reset = datetime.fromtimestamp(now.s + reset_ns / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        pairs += (
            (names[0], b"%d" % tightest.limit),
            (names[1], b"%d" % remaining),
            (names[2], reset.encode()),
        )
    return pairs


def _text_headers(meter: _Meter, now: _Now) -> dict[str, str]:
    """Those of a refusal."""
    return {name.decode(): value.decode() for name, value in _headers(meter, now)}


def duration(nanoseconds: int) -> str:
    """As OpenAI writes it: 17ms, 1.5s, 6m0s. Rounded up."""
    milliseconds = -(-nanoseconds // 1_000_000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    seconds, thousandths = divmod(milliseconds, 1000)
    fraction = f".{thousandths:03d}".rstrip("0") if thousandths else ""
    if seconds < 60:
        return f"{seconds}{fraction}s"
    return f"{seconds // 60}m{seconds % 60}{fraction}s"


def money(micros: int) -> str:
    """Units of the currency, as exact as needed: 5.00, 0.0125."""
    units, rest = divmod(abs(micros), 10**6)
    fraction = f"{rest:06d}".rstrip("0").ljust(2, "0")
    return f"{'-' if micros < 0 else ''}{units}.{fraction}"
