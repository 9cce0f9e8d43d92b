"""The states of the engine as the server sees it, and what a request is told in each: one table for all routes."""

from __future__ import annotations

from typing import Literal

from headrace.protocol import errors
from headrace.protocol.errors import ApiError
from headrace.protocol.ipc import Loading

State = Literal["loading", "ready", "restarting", "draining", "sleeping", "failed"]

SLEEP_S = 10
"""When to look again whether a sleeping engine was woken."""
RELOAD_S = 2
"""What a restart takes besides its delay, as a first guess."""


def state_refusal(
    state: State, *, loading: Loading | None = None, last_death: str = "", restart_in_s: float = 0.0
) -> ApiError | None:
    """The 503 that a request for text gets in this state; None in the state that takes it.

    `last_death` is how the core ended, as a sentence without its full stop; `restart_in_s` is below zero once the
    next core has been started.
    """
    progress = f" ({loading.phase}, {100 * loading.done // loading.total} %)" if loading and loading.total else ""
    match state:
        case "ready":
            return None
        case "loading":
            return errors.unavailable("engine_loading", f"The model is still loading{progress}.")
        case "draining":
            return errors.unavailable("draining", "The server is shutting down and takes no new requests.")
        case "sleeping":
            waking = f" It is waking up{progress}." if loading else ""
            return errors.unavailable("sleeping", f"The engine sleeps until POST /wake_up.{waking}", SLEEP_S)
        case "failed":
            return errors.unavailable("engine_failed", "The engine could not start; see the server's log.", 30)
    how = last_death or "The engine process died"
    when = f"restarted in {restart_in_s:.1f} s" if restart_in_s > 0 else f"being restarted{progress}"
    wait_s = max(1, round(max(0.0, restart_in_s) + RELOAD_S))
    return errors.unavailable("engine_restarting", f"{how}. It is {when}.", wait_s)
