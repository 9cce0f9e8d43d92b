"""A batch's files read line by line: what is asked, what has been answered already, and so what is left to do.

Of a file of any length only one line is in memory, a byte for each line, and while it is checked digests of each
`custom_id` and of what was answered under it. Reading gives the event loop its turn every few milliseconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from headrace.protocol.batches import LineFault, LineRequest, may_be_torn, read_answer, read_line, request_digest
from headrace.protocol.errors import quoted

SLICE_S = 0.002
"""How long reading may keep the event loop."""
MAX_FAULTS = 50
"""Faults that are kept to be shown; all are counted."""
MAX_ANSWER_BYTES = 1 << 30
"""Of a line of an output file. What is longer was not written by a batch."""

CheckUrl = Callable[[LineRequest], None]
"""Raises LineFault for a url that a batch cannot ask."""


class NotAnOutputFile(Exception):
    """What is there is not what a batch has written for this input; the message says why. It was left alone."""


@dataclass
class Answered:
    """What an output file holds: by digests of `custom_id`s, and by the lines of answers without one, digests of the
    requests that were answered, None where that is not said."""

    custom_ids: dict[int, int | None] = field(default_factory=dict)
    numbers: dict[int, int | None] = field(default_factory=dict)
    models: set[str] = field(default_factory=set)
    """Digests of the models that answered, where that is said."""
    num_unsaid: int = 0
    """Answers that do not say to which request they are."""
    num_failed: int = 0
    end: int = 0
    """Bytes of whole lines; what follows is a line whose writer was killed."""

    def __len__(self) -> int:
        return len(self.custom_ids) + len(self.numbers)

    def __or__(self, other: Answered) -> Answered:
        """What two files hold together."""
        return Answered(
            self.custom_ids | other.custom_ids,
            self.numbers | other.numbers,
            self.models | other.models,
            self.num_unsaid + other.num_unsaid,
            self.num_failed + other.num_failed,
        )


@dataclass
class Asked:
    """What an input file holds. Lines are counted from 1, as editors do; blank ones ask for nothing."""

    num_requests: int = 0
    num_answered: int = 0
    is_done: bytearray = field(default_factory=bytearray)
    """For each line 1 where nothing is left to do."""
    num_faults: int = 0
    faults: list[LineFault] = field(default_factory=list)
    num_duplicates: int = 0
    others: set[str] = field(default_factory=set)
    """Fields of lines that have no effect."""

    def add_fault(self, fault: LineFault) -> None:
        self.num_faults += 1
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(fault)


class _Pace:
    def __init__(self) -> None:
        self._began = time.perf_counter()

    async def turn(self) -> None:
        """Let others run once a slice is over."""
        if time.perf_counter() - self._began > SLICE_S:
            await asyncio.sleep(0)
            self._began = time.perf_counter()


async def answered_lines(path: Path) -> Answered:
    """What has been written to `path` so far; nothing where there is no file. Raises NotAnOutputFile, OSError."""
    found = Answered()
    if not path.exists():
        return found
    pace = _Pace()
    number = 0
    with path.open("rb") as file:
        while raw := file.readline(MAX_ANSWER_BYTES):
            await pace.turn()
            number += 1
            if not raw.endswith(b"\n"):
                if not may_be_torn(raw):
                    raise NotAnOutputFile(f"line {number} of {path} was not written by a batch")
                return found
            line = read_answer(raw)
            if line is None:
                raise NotAnOutputFile(f"line {number} of {path} was not written by a batch")
            found.end += len(raw)
            to = line.to
            request = None if to is None else int(to.request, 16)
            found.num_unsaid += to is None
            if to is not None and to.model:
                found.models.add(to.model)
            if line.custom_id is not None:
                found.custom_ids[digest(line.custom_id)] = request
            elif line.error is not None and line.error.line is not None:
                found.numbers[line.error.line] = request
            found.num_failed += not line.is_success
    return found


async def asked_lines(path: Path, answered: Answered, check_url: CheckUrl, limit_bytes: int) -> Asked:
    """Reads the whole of `path` once. `limit_bytes` bounds a line. Raises OSError; NotAnOutputFile where answers are
    there to what `path` does not ask, or asks otherwise now."""
    asked = Asked()
    seen: set[int] = set()
    pace = _Pace()
    num_nameless = num_changed = first_changed = 0
    with path.open("rb") as file:
        number = 0
        while (raw := _next_line(file, limit_bytes)) is not None:
            number += 1
            await pace.turn()
            if raw.isspace():
                asked.is_done.append(1)
                continue
            asked.num_requests += 1
            custom_id, wanted = None, ""
            try:
                request = _request(number, raw, limit_bytes)
                custom_id, wanted = request.custom_id, request.digest
                if len(asked.others) < MAX_FAULTS:
                    asked.others.update(request.others)
                check_url(request)
            except LineFault as fault:
                custom_id, wanted = custom_id or fault.custom_id, wanted or fault.digest
                asked.add_fault(fault)
            if custom_id is None:
                is_done, given = number in answered.numbers, answered.numbers.get(number)
                num_nameless += is_done
            else:
                name = digest(custom_id)
                if name in seen:
                    asked.num_duplicates += 1
                    asked.add_fault(_duplicate(number, custom_id))
                seen.add(name)
                is_done, given = name in answered.custom_ids, answered.custom_ids.get(name)
            if given is not None and given != int(wanted, 16):
                num_changed += 1
                first_changed = first_changed or number
            asked.is_done.append(is_done)
            asked.num_answered += is_done
    strangers = len(answered.custom_ids.keys() - seen) + len(answered.numbers) - num_nameless
    if strangers:
        raise NotAnOutputFile(f"{strangers} of its {len(answered)} answers are to requests that {path} does not hold")
    if num_changed:
        raise NotAnOutputFile(
            f"{num_changed} of its {len(answered)} answers are to requests that {path} holds otherwise now, the first "
            f"in line {first_changed}"
        )
    return asked


async def lines_to_do(path: Path, asked: Asked, limit_bytes: int) -> AsyncIterator[LineRequest | LineFault]:
    """The lines without an answer, in order."""
    pace = _Pace()
    with path.open("rb") as file:
        for i, is_done in enumerate(asked.is_done):
            raw = _next_line(file, limit_bytes)
            await pace.turn()
            if is_done or raw is None:
                continue
            try:
                yield _request(i + 1, raw, limit_bytes)
            except LineFault as fault:
                yield fault


def digest(custom_id: str) -> int:
    """128 bits of it: among a million ids two that are equal by chance are not to be expected in this universe."""
    return int.from_bytes(blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest())


def _duplicate(number: int, custom_id: str) -> LineFault:
    message = f"Line {number}: the custom_id {quoted(custom_id)} was used before; each must be unique."
    return LineFault(number, "duplicate_custom_id", message, param="custom_id", custom_id=custom_id)


def _next_line(file: BinaryIO, limit_bytes: int) -> bytes | None:
    """One line, cut where it is longer than `limit_bytes`; None at the end of the file."""
    raw = file.readline(limit_bytes + 1)
    if not raw:
        return None
    rest = raw
    while len(rest) > limit_bytes and not rest.endswith(b"\n"):
        rest = file.readline(limit_bytes + 1)
    return raw


def _request(number: int, raw: bytes, limit_bytes: int) -> LineRequest:
    if len(raw) > limit_bytes:
        message = f"Line {number} is longer than the {limit_bytes} bytes that a request may have."
        fault = LineFault(number, "request_too_large", message)
        fault.digest = request_digest(raw)
        raise fault
    try:
        return read_line(number, raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw)
    except LineFault as fault:
        fault.digest = request_digest(raw.strip())
        raise
