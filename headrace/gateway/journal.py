"""A file for usage that the database does not take: one JSON object a line, appended, read back once.

    journal/usage-<random>.jsonl        the writer that owns it holds a lock on it as long as it lives

A journal whose lock can be had has no living owner; whoever gets the lock counts it and removes it. The database
remembers the name, so a journal whose removal failed is not counted twice. A last line without its end, which a
killed process leaves, is dropped.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from headrace.gateway.usage_event import UsageEvent

logger = logging.getLogger("headrace.gateway.usage")

PATTERN = "usage-*.jsonl"


class Journal:
    """The journal that this process writes; its file exists only while there is something in it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self._path: Path | None = None
        self._descriptor = -1
        self._lock = threading.Lock()
        self._names: set[str] = set()

    @property
    def is_empty(self) -> bool:
        return self._path is None

    def is_own(self, name: str) -> bool:
        """Whether this process wrote the journal of that name."""
        return name in self._names

    def append(self, events: Sequence[UsageEvent]) -> None:
        """Raises OSError."""
        lines = b"".join(msgspec.json.encode(event) + b"\n" for event in events)
        with self._lock:
            if self._path is None:
                path = self.folder / f"usage-{secrets.token_hex(12)}.jsonl"
                self._descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o600)
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
                self._path = path
                self._names.add(path.name)
            view = memoryview(lines)
            while view:
                view = view[os.write(self._descriptor, view) :]

    def finish(self) -> None:
        """End the file and give up its lock, so that `replay` takes it; what comes next goes to a new one."""
        with self._lock:
            if self._path is not None:
                os.close(self._descriptor)
                self._path = None

    def close(self) -> None:
        """Leave what is in it to the next start."""
        self.finish()


def replay(folder: Path, count: Callable[[str, Sequence[UsageEvent]], None]) -> None:
    """Count and remove every journal without a living owner. What `count` raises leaves the journal in place."""
    for path in sorted(folder.glob(PATTERN)):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists():
                events = list(_events(path.read_bytes(), path))
                count(path.name, events)
                path.unlink(missing_ok=True)
                logger.info("Counted %d usage events of the journal %s.", len(events), path.name)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)


def _events(text: bytes, path: Path) -> Iterator[UsageEvent]:
    whole, _, _ = text.rpartition(b"\n")
    for number, line in enumerate(whole.split(b"\n"), 1):
        if not line:
            continue
        try:
            yield msgspec.json.decode(line, type=UsageEvent)
        except msgspec.MsgspecError as error:
            logger.error("Line %d of the journal %s is not a usage event and is left out: %s", number, path, error)
