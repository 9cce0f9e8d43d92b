"""Prompts and answers, kept for a key that was made to keep them and for as long as it says; for no other key anything.

A request's body and its answer's bytes wait in a bounded queue, and the thread that writes usage writes them into the
database, and nowhere else. They are no bill: what cannot be written is dropped and counted. What has had its time is
overwritten, not only forgotten.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
from sqlalchemy import Delete, delete, select
from sqlalchemy.exc import SQLAlchemyError

from headrace.gateway.storage import tables
from headrace.gateway.storage.database import Database
from headrace.gateway.usage_event import UsageEvent

MAX_KEPT_BYTES = 1 << 20
"""Of one request, and of one answer."""
MAX_WAITING_BYTES = 64 << 20
PATIENCE_MS = 400

logger = logging.getLogger("headrace.gateway")


class KeptPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One request and its answer, as they were sent. Times are seconds since 1970."""

    key_id: str
    time_s: float
    ends_at: float
    request_id: str
    endpoint: str
    model: str
    upstream: str
    status: int
    outcome: str
    request: str
    answer: str


class Transcript:
    """The bytes of one answer, up to MAX_KEPT_BYTES of them."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, piece: bytes) -> None:
        if self._size <= MAX_KEPT_BYTES:
            self._pieces.append(piece)
        self._size += len(piece)

    def kept(self, event: UsageEvent, kept_s: float, body: bytes) -> KeptPrompt:
        return KeptPrompt(
            key_id=event.key_id,
            time_s=event.time_s,
            ends_at=event.time_s + kept_s,
            request_id=event.request_id,
            endpoint=event.endpoint,
            model=event.model,
            upstream=event.upstream,
            status=event.status,
            outcome=event.outcome,
            request=_text(body, len(body)),
            answer=_text(b"".join(self._pieces), self._size),
        )


def _text(data: bytes, size: int) -> str:
    """What is no text, such as a form with a sound in it, is told by its size; so is the rest of a longer text."""
    kept = data[:MAX_KEPT_BYTES]
    more = f"... ({size} bytes)" if size > len(kept) else ""
    try:
        text = kept.decode("utf-8", "ignore" if more else "strict")
    except UnicodeDecodeError:
        text = "\0"
    return f"({size} bytes that are no text)" if "\0" in text else text + more


class PromptLog:
    """The queue and the rows. `append` never waits; `work` blocks and never raises."""

    def __init__(self, database: Database, *, now_s: Callable[[], float] = time.time) -> None:
        self.num_dropped = 0
        self._database = database
        self._now_s = now_s
        self._waiting: deque[KeptPrompt] = deque()
        self._waiting_bytes = 0

    def append(self, kept: KeptPrompt) -> None:
        size = len(kept.request) + len(kept.answer)
        if self._waiting_bytes + size > MAX_WAITING_BYTES:
            self.num_dropped += 1
            return
        self._waiting_bytes += size
        self._waiting.append(kept)

    def work(self) -> None:
        """Write what waits."""
        kept: list[KeptPrompt] = []
        while self._waiting:
            kept.append(self._waiting.popleft())
        if not kept:
            return
        self._waiting_bytes = 0
        try:
            with self._database.write(patience_ms=PATIENCE_MS) as connection:
                connection.execute(tables.kept_prompts.insert(), [msgspec.structs.asdict(each) for each in kept])
        except SQLAlchemyError:  # its text would quote them
            self.num_dropped += len(kept)
            logger.error("%d prompts that a key keeps could not be written, and are lost.", len(kept))

    def prune(self) -> None:
        """Overwrite what has had its time."""
        try:
            self._delete(delete(tables.kept_prompts).where(tables.kept_prompts.c.ends_at <= self._now_s()))
        except SQLAlchemyError:
            logger.error("Prompts that have had their time could not be removed; it is tried again.")

    def forget(self, key_id: str) -> None:
        """Overwrite all that is kept of a key. Raises SQLAlchemyError."""
        self._delete(delete(tables.kept_prompts).where(tables.kept_prompts.c.key_id == key_id))

    def latest(self, key_id: str, number: int) -> Sequence[KeptPrompt]:
        """The newest last."""
        kept = tables.kept_prompts
        names = KeptPrompt.__struct_fields__
        wanted = select(*[kept.c[name] for name in names]).where(kept.c.key_id == key_id)
        with self._database.read() as connection:
            rows = connection.execute(
                wanted.where(kept.c.ends_at > self._now_s()).order_by(kept.c.id.desc()).limit(number)
            )
            return [KeptPrompt(**row._mapping) for row in rows][::-1]

    def _delete(self, statement: Delete) -> None:
        with self._database.write() as connection:
            if self._database.is_sqlite:
                connection.exec_driver_sql("PRAGMA secure_delete = ON")
            removed = connection.execute(statement).rowcount
        if removed and self._database.is_sqlite:
            with contextlib.closing(self._database.engine.raw_connection()) as raw:  # no transaction is begun on it
                raw.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
