"""The limiter: one example a rule, and random traces against what a limit means."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.budget import PERIODS, Spending, day_number, ends_at_s, first_day
from headrace.gateway.gcra import PERIOD_NS, Rate
from headrace.gateway.keys import KeyRecord
from headrace.gateway.limits import Lease, Limiter, duration, money
from headrace.gateway.snapshot import Limits, Period, Plan
from headrace.protocol.errors import ApiError

SECOND_NS = 10**9


class Clock:
    """One time for rates and budgets; it starts on Sunday, 2026-11-29, 12:00 UTC."""

    START_S = 1_795_953_600

    def __init__(self) -> None:
        self.elapsed_ns = 0

    def ns(self) -> int:
        return self.elapsed_ns

    def s(self) -> float:
        return self.START_S + self.elapsed_ns / 1e9

    def forward(self, seconds: float) -> None:
        self.elapsed_ns += int(seconds * SECOND_NS)


def limiter() -> tuple[Limiter, Clock]:
    clock = Clock()
    return Limiter(now_ns=clock.ns, now_s=clock.s), clock


def key(**limits: object) -> KeyRecord:
    return KeyRecord(id="key_1", name="ci", prefix="sk-hr-4fQ0", last4="x9Zk", limits=Limits(**limits))  # type: ignore[arg-type]


def refusal(admit: Callable[[], Lease]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        admit()
    assert caught.value.status == 429
    return caught.value


def test_requests_a_minute_come_as_a_burst_and_then_one_at_a_time() -> None:
    limits, clock = limiter()
    record = key(rpm=60)
    for _ in range(60):
        limits.admit(record).release()
    error = refusal(lambda: limits.admit(record))
    assert (error.code, error.headers["retry-after"], error.headers["retry-after-ms"]) == (
        "rate_limit_exceeded",
        "1",
        "1000",
    )
    clock.forward(1.0)
    limits.admit(record).release()
    refusal(lambda: limits.admit(record))


def test_several_gateways_together_let_through_what_a_key_may() -> None:
    clock = Clock()
    gateways = [Limiter(now_ns=clock.ns, now_s=clock.s, gateways=3) for _ in range(3)]
    record, leases = key(rpm=60, tpm=900, concurrency=6, budget_micros=100), []
    for limits in gateways:
        leases += [limits.admit(record, estimated_tokens=150) for _ in range(2)]
        error = refusal(lambda limits=limits: limits.admit(record, estimated_tokens=1))
        assert "This API key, at each of 3 gateways, allows" in error.message
    headers = dict(leases[0].headers())
    assert (headers[b"x-ratelimit-limit-requests"], headers[b"x-ratelimit-limit-tokens"]) == (b"20", b"300")
    assert len(leases) == 6, "six at once"
    leases[0].settle(tokens=0, micros=100)
    leases[0].release()
    error = refusal(lambda: gateways[0].admit(record, estimated_micros=1))
    assert error.code == "insufficient_quota", "a budget is one for all of them"


def test_a_gateway_of_many_lets_one_request_through_where_there_is_less_than_one_for_each() -> None:
    limits = Limiter(gateways=5)
    with limits.admit(key(rpm=2, concurrency=1)):
        pass


def test_waiting_for_what_retry_after_says_is_enough() -> None:
    limits, clock = limiter()
    record = key(rpm=7)
    for _ in range(7):
        limits.admit(record)
    clock.forward(int(refusal(lambda: limits.admit(record)).headers["retry-after-ms"]) / 1000)
    limits.admit(record)


def test_a_refusal_costs_nothing() -> None:
    limits, _ = limiter()
    record = key(rpm=10, tpm=1000, concurrency=1, budget_micros=100, budget_period="day")
    lease = limits.admit(record, estimated_tokens=100, estimated_micros=10)
    before = (lease.headers(), limits.load("key_1"))
    for _ in range(50):
        refusal(lambda: limits.admit(record, estimated_tokens=100, estimated_micros=10))
    assert (lease.headers(), limits.load("key_1")) == before


def test_tokens_are_reserved_and_then_settled() -> None:
    limits, _ = limiter()
    record = key(tpm=1000)
    lease = limits.admit(record, estimated_tokens=900)
    error = refusal(lambda: limits.admit(record, estimated_tokens=200))
    assert "may use 200, and 100 are left" in error.message
    lease.settle(tokens=50, micros=0)
    lease.release()
    assert dict(limits.admit(record, estimated_tokens=200).headers())[b"x-ratelimit-remaining-tokens"] == b"750"


def test_a_request_that_never_reached_an_upstream_costs_no_tokens_and_no_money() -> None:
    limits, _ = limiter()
    record = key(tpm=1000, budget_micros=100)
    limits.admit(record, estimated_tokens=1000, estimated_micros=100).release()
    limits.admit(record, estimated_tokens=1000, estimated_micros=100).release()


def test_a_request_larger_than_the_limit_is_told_that_waiting_is_useless() -> None:
    limits, _ = limiter()
    error = refusal(lambda: limits.admit(key(tpm=1000), estimated_tokens=1001))
    assert error.headers["x-should-retry"] == "false"
    assert "retry-after" not in error.headers
    assert "1000 tokens a minute" in error.message and "1001" in error.message


def test_concurrency_counts_leases_until_their_release() -> None:
    limits, _ = limiter()
    record = key(concurrency=2)
    first, second = limits.admit(record), limits.admit(record)
    error = refusal(lambda: limits.admit(record))
    assert (error.code, error.headers["retry-after"]) == ("concurrency_exceeded", "1")
    first.settle(5, 5)
    refusal(lambda: limits.admit(record))
    first.release()
    first.release()
    limits.admit(record)
    refusal(lambda: limits.admit(record))
    second.release()
    limits.admit(record)


def test_a_lease_is_released_when_its_block_raises() -> None:
    limits, _ = limiter()
    with pytest.raises(RuntimeError), limits.admit(key(concurrency=1)):
        raise RuntimeError
    assert limits.in_flight() == 0


def test_a_used_up_budget_is_insufficient_quota_that_sdks_do_not_retry() -> None:
    limits, clock = limiter()
    record = key(budget_micros=5_000_000, budget_period="day")
    with limits.admit(record, estimated_micros=5_000_000) as lease:
        lease.settle(10, 4_999_999)
    error = refusal(lambda: limits.admit(record, estimated_micros=2))
    assert (error.type, error.code) == ("insufficient_quota", "insufficient_quota")
    assert error.headers["x-should-retry"] == "false"
    assert error.headers["retry-after"] == str(12 * 3600)
    assert "5.00 a day" in error.message and "4.999999 are spent" in error.message
    assert "renewed on 2026-11-30 00:00 UTC" in error.message
    limits.admit(record, estimated_micros=1).release()
    clock.forward(12 * 3600)
    limits.admit(record, estimated_micros=5_000_000)


def test_a_budget_that_running_requests_have_reserved_is_worth_a_retry() -> None:
    limits, _ = limiter()
    record = key(budget_micros=100)
    lease = limits.admit(record, estimated_micros=80)
    error = refusal(lambda: limits.admit(record, estimated_micros=80))
    assert (error.code, error.headers["retry-after"]) == ("rate_limit_exceeded", "1")
    lease.settle(1, 10)
    lease.release()
    limits.admit(record, estimated_micros=80)


def test_a_free_request_passes_a_used_up_budget() -> None:
    limits, _ = limiter()
    record = key(budget_micros=100)
    with limits.admit(record, estimated_micros=100) as lease:
        lease.settle(1, 500)
    refusal(lambda: limits.admit(record, estimated_micros=1))
    limits.admit(record, estimated_micros=0)


def test_the_keys_own_limits_and_its_plans_both_hold() -> None:
    limits, _ = limiter()
    plan = Plan(name="coding", limits=Limits(rpm=2, budget_micros=50, budget_period="month"))
    record = key(rpm=5)
    leases = [limits.admit(record, plan) for _ in range(2)]
    assert "plan coding allows 2 requests a minute" in refusal(lambda: limits.admit(record, plan)).message
    headers = dict(leases[0].headers())
    assert (headers[b"x-ratelimit-limit-requests"], headers[b"x-ratelimit-remaining-requests"]) == (b"2", b"0")


def test_a_changed_limit_holds_at_once_and_forgets_nothing() -> None:
    limits, _ = limiter()
    for _ in range(8):
        limits.admit(key(rpm=10))
    assert "allows 5 requests" in refusal(lambda: limits.admit(key(rpm=5))).message
    for _ in range(12):
        limits.admit(key(rpm=20))
    refusal(lambda: limits.admit(key(rpm=20)))
    limits.admit(key())


def test_headers_speak_the_clients_dialect() -> None:
    limits, _ = limiter()
    record = key(rpm=60, tpm=6000)
    assert dict(limits.admit(record, estimated_tokens=3000).headers()) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"1s",
        b"x-ratelimit-limit-tokens": b"6000",
        b"x-ratelimit-remaining-tokens": b"3000",
        b"x-ratelimit-reset-tokens": b"30s",
    }
    assert dict(limits.admit(record, dialect="anthropic").headers()) == {
        b"anthropic-ratelimit-requests-limit": b"60",
        b"anthropic-ratelimit-requests-remaining": b"58",
        b"anthropic-ratelimit-requests-reset": b"2026-11-29T12:00:02Z",
        b"anthropic-ratelimit-tokens-limit": b"6000",
        b"anthropic-ratelimit-tokens-remaining": b"3000",
        b"anthropic-ratelimit-tokens-reset": b"2026-11-29T12:00:30Z",
    }
    assert limits.admit(KeyRecord(id="b", name="b", prefix="", last4="")).headers() == []


@pytest.mark.parametrize(
    ("period", "begins", "ends"),
    [("day", "2026-11-29", "2026-11-30"), ("week", "2026-11-23", "2026-11-30"), ("month", "2026-11-01", "2026-12-01")],
)
def test_periods_begin_at_midnight_on_monday_and_on_the_first(period: Period, begins: str, ends: str) -> None:
    today = day_number(Clock.START_S)

    def day_of(time_s: float) -> str:
        return datetime.fromtimestamp(time_s, UTC).date().isoformat()

    assert day_of(first_day(period, today) * 86_400) == begins
    end = ends_at_s(period, today)
    assert end is not None and day_of(end) == ends


@pytest.mark.parametrize("period", ["day", "week", "month", "total"])
def test_a_budget_is_renewed_with_its_period_and_not_before(period: Period) -> None:
    limits, clock = limiter()
    record = key(budget_micros=10, budget_period=period)
    with limits.admit(record, estimated_micros=10) as lease:
        lease.settle(1, 10)
    end = ends_at_s(period, day_number(clock.s()))
    if end is None:
        clock.forward(400 * 86_400)
        refusal(lambda: limits.admit(record, estimated_micros=1))
        return
    clock.forward(end - clock.s() - 1)
    refusal(lambda: limits.admit(record, estimated_micros=1))
    clock.forward(1)
    limits.admit(record, estimated_micros=10)


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 100)), max_size=30), start=st.integers(0, 40_000))
def test_what_is_spent_in_a_period_is_the_sum_over_its_days(steps: list[tuple[int, int]], start: int) -> None:
    spending = Spending(start)
    booked: list[tuple[int, int]] = []
    day = start
    for days_later, micros in steps:
        day += days_later
        spending.add(micros, day)
        booked.append((day, micros))
        for period in PERIODS:
            since = first_day(period, day)
            assert spending.settled(period, day) == sum(micros for when, micros in booked if when >= since)


def test_durations_and_money_read_as_people_write_them() -> None:
    written = [duration(n) for n in (0, 1, 17 * 10**6, SECOND_NS, 1_500_000_000, 360 * SECOND_NS, 61_250_000_000)]
    assert written == ["0ms", "1ms", "17ms", "1s", "1.5s", "6m0s", "1m1.25s"]
    assert [money(n) for n in (0, 5_000_000, 12_500, 1, -1_500_000)] == ["0.00", "5.00", "0.0125", "0.000001", "-1.50"]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "settle", "release", "settle twice", "release twice", "wait"]),
        st.integers(0, 30),  # which open lease, or what is estimated
        st.integers(0, 30),  # what was used, as a share of the estimate; or how long is waited
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(
    steps=STEPS,
    rpm=st.none() | st.integers(1, 20),
    tpm=st.none() | st.integers(1, 60),
    concurrency=st.none() | st.integers(1, 4),
    budget=st.none() | st.integers(1, 200),
)
def test_no_trace_gets_more_than_its_limits_and_no_lease_leaks(
    steps: list[tuple[str, int, int]], rpm: int | None, tpm: int | None, concurrency: int | None, budget: int | None
) -> None:
    limits, clock = limiter()
    record = key(rpm=rpm, tpm=tpm, concurrency=concurrency, budget_micros=budget)
    open_leases: list[tuple[Lease, int]] = []
    settled: list[Lease] = []
    requests: list[int] = []
    used: list[tuple[int, int]] = []
    spent = 0
    for verb, a, b in steps:
        if verb == "wait":
            clock.forward(b / 7)
        elif verb == "admit":
            before = limits.load("key_1")
            try:
                lease = limits.admit(record, estimated_tokens=a, estimated_micros=a)
            except ApiError:
                assert limits.load("key_1") == before
                continue
            open_leases.append((lease, a))
            requests.append(clock.ns())
            assert concurrency is None or len(open_leases) <= concurrency
        elif open_leases:
            lease, estimate = open_leases[a % len(open_leases)]
            for _ in range(2 if verb.endswith("twice") else 1):
                if verb.startswith("settle"):
                    tokens = estimate * b // 30
                    lease.settle(tokens, tokens)
                    if not any(lease is each for each in settled):
                        settled.append(lease)
                        used.append((clock.ns(), tokens))
                        spent += tokens
                else:
                    lease.release()
            if verb.startswith("release"):
                open_leases.remove((lease, estimate))
    assert limits.in_flight() == len(open_leases)
    assert budget is None or spent <= budget
    assert limits.load("key_1").spent_total_micros == spent
    if rpm is not None:
        assert_within([(at, 1) for at in requests], rpm)
    if tpm is not None:
        assert_within(used, tpm)
    for lease, _ in open_leases:
        lease.release()
    assert (limits.in_flight(), limits.load("key_1").reserved_micros) == (0, 0)
    clock.forward(3600)
    if tpm is not None:
        limits.admit(record, estimated_tokens=tpm)


def assert_within(events: list[tuple[int, int]], limit: int) -> None:
    """In any stretch of time, at most one full bucket and what flows through meanwhile."""
    for start, (begin_ns, _) in enumerate(events):
        total = 0
        for at_ns, units in events[start:]:
            total += units
            assert total * PERIOD_NS <= limit * PERIOD_NS + limit * (at_ns - begin_ns)


@settings(max_examples=100, deadline=None)
@given(limit=st.integers(1, 10**7), units=st.integers(1, 10**7), wait_ns=st.integers(0, 10**11))
def test_the_wait_a_rate_names_is_exact_to_the_nanosecond(limit: int, units: int, wait_ns: int) -> None:
    rate = Rate(limit)
    rate.take(limit, 0)
    needed = rate.wait_ns(units, wait_ns)
    if units > limit:
        assert needed is None
        return
    assert needed is not None
    assert rate.wait_ns(units, wait_ns + needed) == 0
    if needed:
        assert rate.wait_ns(units, wait_ns + needed - 1) == 1


def test_a_thousand_aborted_requests_leave_no_slot_taken() -> None:
    limits, _ = limiter()
    record = key(concurrency=8, tpm=10**9)
    for round_ in range(1000):
        lease = limits.admit(record, estimated_tokens=1000)
        if round_ % 3:
            lease.settle(round_, 0)
        lease.release()
    assert limits.in_flight() == 0
    for _ in range(8):
        limits.admit(record)
