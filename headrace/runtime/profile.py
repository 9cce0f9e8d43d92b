"""Where the core's Python spends its time: a profile between two requests, written to a file for `python -m pstats`."""

from __future__ import annotations

import cProfile
import os
from pathlib import Path


class StepProfile:
    """Profiles the thread that calls it. `start` and `stop` raise ValueError when it runs already, or does not."""

    def __init__(self) -> None:
        self._profile: cProfile.Profile | None = None

    def start(self) -> None:
        if self._profile is not None:
            raise ValueError("A profile is being taken already; POST /stop_profile ends it.")
        self._profile = cProfile.Profile()
        self._profile.enable()

    def stop(self, path: Path) -> None:
        """Write what was seen to `path`, which appears whole or not at all. Raises OSError."""
        if self._profile is None:
            raise ValueError("No profile is being taken; POST /start_profile begins one.")
        profile, self._profile = self._profile, None
        profile.disable()
        unfinished = path.with_name(f".{path.name}")
        profile.dump_stats(unfinished)
        os.replace(unfinished, path)
