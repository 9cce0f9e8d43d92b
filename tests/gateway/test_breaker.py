"""Circuit breakers, with a clock that the tests turn."""

from __future__ import annotations

from headrace.gateway.breaker import CONSECUTIVE, OPEN_S, PROBE_S, WINDOW_MIN, Breaker, Breakers


def opened(now_s: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(CONSECUTIVE):
        assert breaker.allows(now_s)
        breaker.failed(now_s)
    return breaker


def test_failures_in_a_row_open_it_and_one_fewer_does_not() -> None:
    breaker = Breaker()
    for _ in range(CONSECUTIVE - 1):
        breaker.failed(0.0)
    assert breaker.allows(0.0)
    breaker.failed(0.0)
    assert not breaker.allows(0.1)
    assert breaker.state(0.1) == "open"


def test_a_success_between_failures_keeps_it_closed() -> None:
    breaker = Breaker()
    for _ in range(3):
        for _ in range(CONSECUTIVE - 1):
            breaker.failed(0.0)
        for _ in range(2 * CONSECUTIVE):
            breaker.succeeded(0.0)
    assert breaker.allows(0.0)


def test_half_of_many_requests_failing_opens_it() -> None:
    breaker = Breaker()
    for number in range(WINDOW_MIN + 2):
        breaker.failed(number * 0.1) if number % 2 == 0 else breaker.succeeded(number * 0.1)
    assert breaker.state(2.2) == "open", "nor does the late success of an older request close it"


def test_old_failures_are_forgotten() -> None:
    breaker = Breaker()
    for number in range(WINDOW_MIN):
        breaker.failed(0.0) if number % 2 == 0 else breaker.succeeded(0.0)
        if number == 15:
            break
    breaker.succeeded(100.0)
    for _ in range(3):
        breaker.failed(100.0)
    assert breaker.allows(100.0)


def test_one_probe_goes_through_when_it_is_half_open() -> None:
    breaker = opened()
    assert not breaker.allows(OPEN_S - 0.1)
    assert breaker.allows(OPEN_S + 0.1)
    assert not breaker.allows(OPEN_S + 0.2)
    breaker.succeeded(OPEN_S + 0.3)
    assert breaker.state(OPEN_S + 0.3) == "closed"
    assert breaker.allows(OPEN_S + 0.3)


def test_a_failed_probe_waits_twice_as_long() -> None:
    breaker = opened()
    assert breaker.allows(OPEN_S)
    breaker.failed(OPEN_S)
    assert not breaker.allows(OPEN_S + 2 * OPEN_S - 0.1)
    assert breaker.allows(OPEN_S + 2 * OPEN_S)


def test_a_probe_that_tells_nothing_makes_room_for_the_next() -> None:
    breaker = opened()
    assert breaker.allows(OPEN_S)
    breaker.released()
    assert breaker.allows(OPEN_S)
    assert not breaker.allows(OPEN_S + 1)
    assert breaker.allows(OPEN_S + PROBE_S + 1)


def test_each_upstream_and_model_has_its_own() -> None:
    breakers = Breakers()
    for _ in range(CONSECUTIVE):
        breakers.of(("a", 0, "m")).failed(0.0)
    assert not breakers.of(("a", 0, "m")).allows(0.0)
    assert breakers.of(("a", 0, "other")).allows(0.0)
    assert breakers.of(("b", 0, "m")).allows(0.0)
    assert breakers.states(0.0)[("a", 0, "m")] == "open"
