"""Hot reload: look at the configuration's files twice a second, and move one pointer when a new valid one is there.

The file, its settings.json and every `${file:...}` are watched, so an upstream's key changes without a restart. A bad
file changes nothing: the old snapshot stays and the mistakes are kept for /health and the log. Environment variables
belong to the process and are not read again; nor does a new [server] address or database take effect, which is said.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.gateway.config_load import NO_OVERRIDES, InvalidConfig, Overrides, load_config
from headrace.gateway.snapshot import Snapshot

POLL_S = 0.5
NOT_HOT = ("host", "port", "database_url", "data_dir", "log_level", "page_url", "retention_days", "gateways", "traces")
"""Of `[server]`: what is read at the start only."""

log = logging.getLogger("headrace.gateway.reload")

Stamp = tuple[int, int, int] | None
"""(modified at, inode, bytes) of a file; None when it is not there."""


@dataclass(slots=True)
class Reloader:
    """`take` is called with each new snapshot, on the event loop; requests under way keep the one they began with."""

    snapshot: Snapshot
    environment: Mapping[str, str]
    take: Callable[[Snapshot], None]
    overrides: Overrides = NO_OVERRIDES
    report: Callable[[str | None], None] = lambda problem: None
    """Called with what is wrong with the changed file, and with None once it is mended."""
    problems: tuple[str, ...] = ()
    """Why the file as it is now cannot be used; () when the snapshot in use is the file's."""
    restart_needed: tuple[str, ...] = ()
    """Settings whose new value waits for a restart."""
    _stamps: dict[str, Stamp] = field(default_factory=dict)
    _listen_at_start: Snapshot | None = None

    async def run(self, poll_s: float = POLL_S) -> None:
        """Watch until cancelled. Files are read in a thread."""
        while True:
            try:
                await self.check()
            except Exception:
                log.exception("The configuration could not be looked at; trying again.")
            await asyncio.sleep(poll_s)

    async def check(self) -> bool:
        """Look once; True when a new snapshot has been taken."""
        if self.snapshot.path is None:
            return False
        stamps = await asyncio.to_thread(_stamps, self._watched())
        if stamps == self._stamps:
            return False
        self._stamps = stamps
        try:
            found = await asyncio.to_thread(self._load)
        except InvalidConfig as error:
            self._stamps |= await asyncio.to_thread(_stamps, set(error.sources) - self._stamps.keys())
            if error.problems != self.problems:
                self.problems = error.problems
                log.error("The changed configuration is not used, the one before stays:\n%s", error)
                self.report(str(error))
            return False
        self._stamps |= await asyncio.to_thread(_stamps, set(found.sources) - self._stamps.keys())
        if self.problems:
            self.problems = ()
            self.report(None)
        if replace(found, generation=self.snapshot.generation) == self.snapshot:
            return False
        self._note_restart(found)
        self.snapshot = found
        self.take(found)
        log.info("Configuration %d is in use (%s).", found.generation, found.path)
        return True

    def _load(self) -> Snapshot:
        return load_config(
            self.snapshot.path,
            self.environment,
            overrides=self.overrides,
            generation=self.snapshot.generation + 1,
        )

    def _watched(self) -> Iterable[str]:
        return {*self.snapshot.sources, *self._stamps}

    def _note_restart(self, found: Snapshot) -> None:
        first = self._listen_at_start = self._listen_at_start or self.snapshot
        waiting = [name for name in NOT_HOT if getattr(found.listen, name) != getattr(first.listen, name)]
        if found.engines != first.engines:
            waiting.append("engine")
        if waiting and tuple(waiting) != self.restart_needed:
            log.warning("Restart the gateway for the new values of: %s.", ", ".join(waiting))
        self.restart_needed = tuple(waiting)


def _stamps(paths: Iterable[str]) -> dict[str, Stamp]:
    return {path: _stamp(Path(path)) for path in paths}


def _stamp(path: Path) -> Stamp:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
