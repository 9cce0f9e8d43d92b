"""The one thread that writes usage down, and how it never loses any.

    append (any thread, never waits)  ->  queue  ->  writer thread: one transaction per 0.5 s or 500 events, rows
                                            |          and daily sums together
                                            +-> journal file, when the queue is full or the database fails

A process that is killed loses what was appended since the last write, at most a second's worth. What is in a journal
is counted when the database can be written again, or at the next start, exactly once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from headrace.gateway.journal import Journal, replay
from headrace.gateway.prompt_log import PromptLog
from headrace.gateway.spent_elsewhere import Report, SpentElsewhere
from headrace.gateway.storage.database import Database
from headrace.gateway.usage_event import Outcome, UsageEvent, cost_micros
from headrace.gateway.usage_rows import count_journal, insert_usage, prune

__all__ = ["Outcome", "UsageEvent", "UsageWriter", "cost_micros"]

INTERVAL_S = 0.5
BATCH_EVENTS = 500
QUEUE_EVENTS = 20_000
PATIENCE_MS = 400
"""How long the writer waits for another process's lock before a batch goes to the journal."""
RETRY_S = 2.0
"""After a failed write the database is tried again so often; until then everything goes to the journal."""
PRUNE_INTERVAL_S = 600.0
LOOK_INTERVAL_S = 5.0
"""How often it is looked what other processes have spent."""
CLOSE_PATIENCE_S = 10.0
DAY_S = 86_400

logger = logging.getLogger("headrace.gateway.usage")


class UsageWriter:
    """Takes events and writes them in batches. Journals of earlier processes are counted in the constructor."""

    def __init__(
        self,
        database: Database,
        journal_dir: Path,
        *,
        retention_days: int | None = None,
        prompts: PromptLog | None = None,
        interval_s: float = INTERVAL_S,
        batch_events: int = BATCH_EVENTS,
        queue_events: int = QUEUE_EVENTS,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.written = 0
        self.journaled = 0
        self.write_error: str | None = None
        """Why the database does not take usage now; None = it does."""
        self._database = database
        self._retention_days = retention_days
        self._prompts = prompts
        self._interval_s = interval_s
        self._batch_events = batch_events
        self._queue_events = queue_events
        self._now_s = now_s
        self._queue: deque[UsageEvent] = deque()
        self._journal = Journal(journal_dir)
        self._wake = threading.Event()
        self._overflow = threading.Event()
        self._closing = False
        # Each is held while its thread has events that are neither in the queue nor written.
        self._writing = threading.Lock()
        self._spilling = threading.Lock()
        self._failed_at: float | None = None
        self._pruned_at = time.monotonic()
        self._elsewhere: SpentElsewhere | None = None
        self._look_interval_s = LOOK_INTERVAL_S
        self._looked_at = time.monotonic()
        try:
            replay(journal_dir, self._count)
        except SQLAlchemyError as error:
            logger.error("Journals of earlier processes cannot be counted yet: %s", error)
        self._threads = [
            threading.Thread(target=self._write_batches, name="headrace-usage", daemon=True),
            threading.Thread(target=self._spill, name="headrace-overflow", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Events in the queue."""
        return len(self._queue)

    def append(self, event: UsageEvent) -> None:
        """Take an event. Never waits, never fails."""
        self._queue.append(event)
        waiting = len(self._queue)
        if waiting >= self._queue_events:
            self._overflow.set()
        elif waiting == self._batch_events:
            self._wake.set()

    def report_spending(self, report: Report, interval_s: float = LOOK_INTERVAL_S) -> None:
        """From now on tell `report` what other processes spend on which key. Blocks for one query."""
        self._look_interval_s = interval_s
        self._elsewhere = SpentElsewhere(self._database, report, self._now_s())

    def flush(self, timeout_s: float = CLOSE_PATIENCE_S) -> bool:
        """Wait until everything appended so far is in the database or a journal. Blocks. False = not in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._wake.set()
            if self._writing.acquire(timeout=max(0.0, deadline - time.monotonic())):
                with self._spilling:
                    is_empty = not self._queue
                self._writing.release()
                if is_empty:
                    return True
            time.sleep(0.002)
        return False

    def close(self) -> None:
        """Write what is left and end the threads. Blocks; what the database does not take goes to the journal."""
        self._closing = True
        self._wake.set()
        self._overflow.set()
        for thread in self._threads:
            thread.join(CLOSE_PATIENCE_S)
        self._to_journal(self._taken(len(self._queue)))
        self._journal.close()

    def _write_batches(self) -> None:
        while True:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            closing = self._closing
            while self._queue:
                with self._writing:
                    self._write(self._taken(self._batch_events))
            if self._prompts is not None:
                self._prompts.work()
            if closing:
                return
            self._recover()
            self._look()
            self._prune()

    def _write(self, events: Sequence[UsageEvent]) -> None:
        if self._is_failing():
            self._to_journal(events)
            return
        try:
            with self._database.write(patience_ms=PATIENCE_MS) as connection:
                written = insert_usage(self._database, connection, events)
        except Exception as error:
            # Whatever it is, this thread must live: everything would pile up behind it.
            self._failed(error)
            self._to_journal(events)
        else:
            self._wrote(written, events)
            self._failed_at = self.write_error = None

    def _wrote(self, written: int, events: Sequence[UsageEvent]) -> None:
        self.written += written
        if self._elsewhere is not None:
            self._elsewhere.wrote(events)

    def _is_failing(self) -> bool:
        return self._failed_at is not None and time.monotonic() - self._failed_at < RETRY_S

    def _failed(self, error: Exception) -> None:
        text = " ".join(str(getattr(error, "orig", None) or error).split())
        if self.write_error is None:
            logger.error("Usage cannot be written to the database and goes to a journal file: %s", text)
        self._failed_at, self.write_error = time.monotonic(), text

    def _recover(self) -> None:
        """Count the journal once the database works again."""
        if self._journal.is_empty or self._is_failing():
            return
        self._journal.finish()
        try:
            replay(self._journal.folder, self._count)
        except Exception as error:
            self._failed(error)
        else:
            logger.info("The database takes usage again, and the journal is counted.")
            self._failed_at = self.write_error = None

    def _count(self, name: str, events: Sequence[UsageEvent]) -> None:
        written = count_journal(self._database, name, events, self._batch_events)
        self._wrote(written, events if self._journal.is_own(name) and written else ())

    def _spill(self) -> None:
        """Keep the queue bounded while the writer waits for the database."""
        while not self._closing:
            self._overflow.wait()
            self._overflow.clear()
            with self._spilling:
                surplus = len(self._queue) - self._queue_events // 2
                if surplus > 0 and not self._closing:
                    self._to_journal(self._taken(surplus))

    def _taken(self, most: int) -> list[UsageEvent]:
        events: list[UsageEvent] = []
        try:
            while len(events) < most:
                events.append(self._queue.popleft())
        except IndexError:
            pass
        return events

    def _to_journal(self, events: Sequence[UsageEvent]) -> None:
        if not events:
            return
        try:
            self._journal.append(events)
            self.journaled += len(events)
        except OSError as error:
            # Only the log is left; the numbers in it are enough to bill by hand.
            logger.critical("Usage can be written neither to the database nor to a journal: %s", error)
            for event in events:
                logger.critical("Unwritten usage: %s", msgspec.json.encode(event).decode())

    def _look(self) -> None:
        elapsed_s = time.monotonic() - self._looked_at
        if self._elsewhere is None or elapsed_s < self._look_interval_s or self._is_failing():
            return
        self._looked_at = time.monotonic()
        try:
            self._elsewhere.look()
        except SQLAlchemyError as error:
            self._failed(error)

    def _prune(self) -> None:
        if time.monotonic() - self._pruned_at < PRUNE_INTERVAL_S:
            return
        self._pruned_at = time.monotonic()
        if self._prompts is not None:
            self._prompts.prune()
        if self._retention_days is None:
            return
        try:
            prune(self._database, self._now_s() - self._retention_days * DAY_S)
        except SQLAlchemyError as error:
            logger.warning("Old usage rows could not be removed: %s", error)
