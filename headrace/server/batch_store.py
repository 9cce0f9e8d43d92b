"""The server's batches: each has its task, its record on disk and its two files, and outlives the server.

    validating ─► in_progress ─► finalizing ─► completed
        │              ├─► expired        └ also after cancelling ─► cancelled
        └─► failed ◄───┘

What a batch is, is its record DIR/batches/ID.json; how far it is, are the whole lines of ID.output and ID.errors. A
server that starts takes up whatever had not ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.protocol import batches as wire
from headrace.protocol import errors
from headrace.protocol.batches import (
    ENDED,
    AnswerTo,
    Batch,
    BatchFault,
    BatchFaults,
    BatchFields,
    LineFault,
    LineRequest,
    RequestCounts,
    expired_line,
)
from headrace.protocol.errors import quoted
from headrace.server import routes
from headrace.server.batch_call import check_line
from headrace.server.batch_lines import Answered, Asked, CheckUrl, answered_lines, asked_lines, lines_to_do
from headrace.server.batch_run import BatchRun, Call, OutputFile, Window
from headrace.server.file_store import FileStore, StorageFull, new_id, write_record

logger = logging.getLogger("headrace.server")

MAX_ACTIVE = 8
"""Batches that are worked on at once; they take turns, line by line."""
MAX_OPEN = 1000
"""Batches that have not ended."""
MAX_BATCHES = 10_000
"""Records that are kept; the oldest that have ended make room."""

_decode = msgspec.json.Decoder(Batch)


@dataclass
class _Job:
    """A batch that has not ended. `run` is there while its lines are answered."""

    task: asyncio.Task[None]
    run: BatchRun | None = None


class Batches:
    """All batches of one server. Must be made and used in the event loop."""

    def __init__(self, store: FileStore, call: Call, *, num_in_flight: int, line_limit_bytes: int) -> None:
        """Reads the records and takes up what had not ended."""
        self.store = store
        self._call = call
        self._line_limit_bytes = line_limit_bytes
        self._window = Window(num_in_flight)
        self._places = asyncio.Semaphore(MAX_ACTIVE)
        self._jobs: dict[str, _Job] = {}
        self._records: dict[str, Batch] = {}
        for path in sorted(store.batches.glob("batch_*.json")):
            with contextlib.suppress(msgspec.DecodeError):
                batch = _decode.decode(path.read_bytes())
                self._records[batch.id] = batch
        for batch in self._records.values():
            if batch.status not in ENDED:
                logger.info("Batch %s (%s) goes on.", batch.id, batch.status)
                self._begin(batch)

    async def stop(self) -> None:
        """Stop all work where it is; the next server goes on with it."""
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            job.task.cancel()
        await asyncio.gather(*(job.task for job in jobs.values()), return_exceptions=True)
        self.store.close()

    # what clients ask for

    def create(self, fields: BatchFields) -> Batch:
        """Raises ApiError: 400, 404, 429."""
        if fields.output_expires_after is not None:
            raise errors.unsupported_field("output_expires_after", "Delete files that are no longer needed.")
        source = self.store.get(fields.input_file_id, "input_file_id")
        if source.purpose != "batch":
            message = f"The file {source.id} has the purpose {source.purpose}; a batch reads one of the purpose batch."
            raise errors.invalid_value("input_file_id", message)
        if routes.canonical(fields.endpoint) not in routes.BATCH_PATHS:
            raise errors.out_of_range("endpoint", fields.endpoint, f"one of {', '.join(routes.batch_endpoints())}")
        seconds = wire.window_s(fields.completion_window)
        wire.check_metadata(fields.metadata)
        if len(self._jobs) >= MAX_OPEN:
            raise errors.queue_full(f"{MAX_OPEN} batches have not ended yet. Try again when some have.", 60)
        now = int(time.time())
        batch = Batch(
            id=new_id("batch_"),
            endpoint=fields.endpoint,
            input_file_id=source.id,
            completion_window=fields.completion_window,
            status="validating",
            created_at=now,
            expires_at=now + seconds,
            metadata=fields.metadata,
        )
        self._forget_oldest()
        self._keep(batch)
        self._begin(batch)
        return batch

    def get(self, batch_id: str) -> Batch:
        """As it stands now. Raises ApiError (404)."""
        batch = self._records.get(batch_id)
        if batch is None:
            raise wire.batch_not_found(batch_id)
        job = self._jobs.get(batch_id)
        if job is None or job.run is None:
            return batch
        return msgspec.structs.replace(batch, request_counts=_counts(job.run))

    def newest_first(self) -> list[Batch]:
        return [self.get(batch_id) for batch_id in reversed(self._records)]

    def cancel(self, batch_id: str) -> Batch:
        """Raises ApiError: 404, 409 for one that has ended otherwise."""
        batch = self.get(batch_id)
        if batch.status in ("cancelling", "cancelled"):
            return batch
        if batch.status in (*ENDED, "finalizing"):
            raise errors.conflict(f"The batch {batch_id} is {batch.status} and cannot be cancelled.")
        self._change(batch_id, status="cancelling", cancelling_at=int(time.time()))
        self._jobs[batch_id].task.cancel()
        return self.get(batch_id)

    def reader_of(self, file_id: str) -> str | None:
        """The batch that still needs the file, if there is one."""
        using = (batch_id for batch_id in self._jobs if self._records[batch_id].input_file_id == file_id)
        return next(using, None)

    # records

    def _path(self, batch_id: str, kind: str) -> Path:
        return self.store.batches / f"{batch_id}.{kind}"

    def _keep(self, batch: Batch) -> None:
        write_record(self._path(batch.id, "json"), batch)
        self._records[batch.id] = batch

    def _change(self, batch_id: str, **fields: object) -> Batch:
        batch = msgspec.structs.replace(self._records[batch_id], **fields)
        self._keep(batch)
        if batch.status in ENDED:
            counts = batch.request_counts
            ends = (batch_id, batch.status, counts.completed, counts.failed, counts.total)
            logger.info("Batch %s is %s: %d requests answered, %d failed, of %d.", *ends)
        return batch

    def _forget_oldest(self) -> None:
        for batch in list(self._records.values())[: max(0, len(self._records) - MAX_BATCHES + 1)]:
            if batch.status in ENDED:
                self._path(batch.id, "json").unlink(missing_ok=True)
                del self._records[batch.id]

    # work

    def _begin(self, batch: Batch) -> None:
        self._jobs[batch.id] = _Job(asyncio.create_task(self._work(batch)))

    async def _work(self, batch: Batch) -> None:
        """The whole life of a batch, or what is left of it."""
        try:
            try:
                await self._answer_in_time(batch)
            except asyncio.CancelledError:
                if self._records[batch.id].status != "cancelling":
                    raise  # the server stops, and the next one goes on
            self._finish(batch.id)
        except _Invalid as invalid:
            self._fail(batch.id, invalid.faults)
        except OSError as error:
            code = "storage_full" if isinstance(error, StorageFull) else "storage_failed"
            logger.error("Batch %s fails: %s", batch.id, error)
            reason = error.strerror or str(error)
            self._fail(batch.id, [BatchFault(code=code, message=f"Its files could not be read or written: {reason}.")])
        except Exception:
            logger.exception("Batch %s fails.", batch.id)
            message = f"The server failed in this batch. Its log has the details under the id {batch.id}."
            self._fail(batch.id, [BatchFault(code="internal_error", message=message)])
        finally:
            self._jobs.pop(batch.id, None)

    async def _answer_in_time(self, batch: Batch) -> None:
        if batch.status not in ("validating", "in_progress") or batch.expired_at is not None:
            return
        try:
            async with asyncio.timeout(max(0.0, batch.expires_at - time.time())), self._places:
                await self._answer(batch)
        except TimeoutError:
            await self._expire(batch)

    async def _answer(self, batch: Batch) -> None:
        """Raises _Invalid for a file that is none for a batch."""
        answers, failures, asked = await self._read(batch)
        if asked.num_faults or not asked.num_requests:
            raise _Invalid(_faults(asked))
        if batch.status == "validating":
            counts = RequestCounts(total=asked.num_requests)
            self._change(batch.id, status="in_progress", in_progress_at=int(time.time()), request_counts=counts)
        if asked.others:
            names = ", ".join(sorted(asked.others))
            logger.warning("Batch %s: fields of lines without effect: %s", batch.id, names)
        with (
            OutputFile(self._path(batch.id, "output"), answers.end, self.store.take) as output,
            OutputFile(self._path(batch.id, "errors"), failures.end, self.store.take) as failed,
        ):
            run = BatchRun(
                self.store.path(batch.input_file_id),
                asked,
                answers=output,
                failures=failed,
                num_failed=(answers | failures).num_failed,
                call=self._call,
                check_url=_checks(batch.endpoint),
                window=self._window,
                limit_bytes=self._line_limit_bytes,
            )
            self._jobs[batch.id].run = run
            try:
                await run.run()
            finally:
                self._records[batch.id] = msgspec.structs.replace(self._records[batch.id], request_counts=_counts(run))

    async def _read(self, batch: Batch) -> tuple[Answered, Answered, Asked]:
        """What has been answered with success, what without, and what was asked."""
        answers = await answered_lines(self._path(batch.id, "output"))
        failures = await answered_lines(self._path(batch.id, "errors"))
        source, check = self.store.path(batch.input_file_id), _checks(batch.endpoint)
        return answers, failures, await asked_lines(source, answers | failures, check, self._line_limit_bytes)

    async def _expire(self, batch: Batch) -> None:
        """Every line that was not answered in time says so."""
        _, failures, asked = await self._read(batch)
        num_failed = 0
        with OutputFile(self._path(batch.id, "errors"), failures.end, self.store.take) as output:
            async for line in lines_to_do(self.store.path(batch.input_file_id), asked, self._line_limit_bytes):
                output.add(expired_line(line.custom_id, line.number, AnswerTo(line.digest)))
                num_failed += 1
        counts = self._records[batch.id].request_counts
        counts = RequestCounts(total=asked.num_requests, completed=counts.completed, failed=counts.failed + num_failed)
        self._change(batch.id, expired_at=int(time.time()), request_counts=counts)

    # ends

    def _finish(self, batch_id: str) -> None:
        """The files become clients' files, and the batch has ended as it was about to."""
        batch = self._records[batch_id]
        now = int(time.time())
        if batch.expired_at is not None:
            end: Mapping[str, object] = {"status": "expired"}
        elif batch.status == "cancelling":
            end = {"status": "cancelled", "cancelled_at": now}
        else:
            batch = self._change(batch_id, status="finalizing", finalizing_at=now)
            end = {"status": "completed", "completed_at": now}
        self._change(batch_id, **self._files_of(batch_id), **end)

    def _fail(self, batch_id: str, faults: list[BatchFault]) -> None:
        """With what was answered before, if anything was."""
        try:
            ids, now = self._files_of(batch_id), int(time.time())
            self._change(batch_id, status="failed", failed_at=now, errors=BatchFaults(data=faults), **ids)
        except OSError as error:
            logger.error("What has become of batch %s cannot be written: %s", batch_id, error)

    def _files_of(self, batch_id: str) -> dict[str, object]:
        """The ids of its two files, where they are not empty. Done again after a crash, it comes to the same ids."""
        ids: dict[str, object] = {}
        for kind, field in (("output", "output_file_id"), ("errors", "error_file_id")):
            path = self._path(batch_id, kind)
            file_id = f"file-{uuid.uuid5(uuid.NAMESPACE_URL, f'{batch_id}/{kind}').hex}"
            if path.exists() and path.stat().st_size == 0:
                path.unlink()
            if path.exists() or self.store.path(file_id).exists():
                ids[field] = self.store.adopt(path, file_id, f"{batch_id}_{kind}.jsonl", "batch_output").id
        return ids


class _Invalid(Exception):
    def __init__(self, faults: list[BatchFault]) -> None:
        super().__init__()
        self.faults = faults


def _faults(asked: Asked) -> list[BatchFault]:
    """What is wrong with an input file; of many faults the first, and how many there are."""
    if not asked.num_requests:
        return [_fault("empty_file", "The file asks for nothing: it has no line.")]
    found = [BatchFault(code=f.code, message=f.message, param=f.param, line=f.number) for f in asked.faults]
    more = asked.num_faults - len(found)
    return [*found, _fault("more", f"{more} more lines are wrong.")] if more else found


def _fault(code: str, message: str) -> BatchFault:
    return BatchFault(code=code, message=message)


def _counts(run: BatchRun) -> RequestCounts:
    return RequestCounts(total=run.num_requests, completed=run.num_answered - run.num_failed, failed=run.num_failed)


def _checks(endpoint: str) -> CheckUrl:
    """A batch's lines ask its endpoint and no other."""
    wanted = routes.canonical(endpoint)

    def check(line: LineRequest) -> None:
        check_line(line)
        if routes.canonical(line.url) != wanted:
            message = f"Line {line.number} asks {quoted(line.url)}, but the batch's endpoint is {endpoint}."
            raise LineFault(line.number, "mismatched_endpoint", message, param="url", custom_id=line.custom_id)

    return check
