"""The batch API's wire types: a line that asks, the line that answers it, and what a batch and a file are told as.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}
    {"id": "batch_req_1_9f86d081884c7d65_4a44dc15", "custom_id": "a", "error": null,
     "response": {"status_code": 200, "request_id": "2", "body": {...}}}

Lines are answered in any order; `custom_id` says which is which. What an answer is to, digests of the request and the
model, stands in its id, which clients take as it is: so a run that goes on knows a line that was changed meanwhile.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import msgspec

from headrace.protocol import errors
from headrace.protocol.errors import ApiError, quoted

MAX_CUSTOM_ID_CHARS = 512

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ENDED: tuple[BatchStatus, ...] = ("failed", "completed", "expired", "cancelled")
"""A batch in one of these stays in it."""

_FIELDS = frozenset({"custom_id", "method", "url", "body"})
_ANSWER_PREFIX = b'{"id":"batch_req_'
_ID = re.compile(r"batch_req_[0-9a-f]+_(?P<request>[0-9a-f]{16})(?:_(?P<model>[0-9a-f]{8}))?")

_encode = msgspec.json.Encoder().encode
_outermost = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class LineRequest:
    """One line of an input file that asks for something. `url` is as written; `others` are fields without effect."""

    number: int
    custom_id: str
    url: str
    body: bytes
    others: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """16 hexadecimal digits of what is asked, as it was sent."""
        return request_digest(self.url.encode("utf-8", "surrogatepass") + b"\n" + self.body)


class LineFault(Exception):
    """Why a line asks for nothing that could be answered. `custom_id` is there where the line has one, `digest` where
    the line cannot be read as a request."""

    def __init__(
        self, number: int, code: str, message: str, *, param: str | None = None, custom_id: str | None = None
    ) -> None:
        super().__init__(message)
        self.number = number
        self.code = code
        self.message = message
        self.param = param
        self.custom_id = custom_id
        self.digest = ""

    def wire(self) -> dict[str, object]:
        return {"code": self.code, "message": self.message, "param": self.param, "line": self.number}


def read_line(number: int, raw: bytes) -> LineRequest:
    """A line of an input file, which is not blank. Whether its url exists is not looked at. Raises LineFault."""
    try:
        fields = _outermost.decode(raw)
    except msgspec.ValidationError:
        raise LineFault(number, "invalid_line", f"Line {number} is not a JSON object.") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _not_json(number, raw, str(error)) from None
    custom_id = _text(number, raw, fields, "custom_id", None)
    if not custom_id or len(custom_id) > MAX_CUSTOM_ID_CHARS:
        message = f"Line {number}: `custom_id` has {len(custom_id)} characters; 1 to {MAX_CUSTOM_ID_CHARS} are allowed."
        raise LineFault(number, "invalid_value", message, param="custom_id")
    method = _text(number, raw, fields, "method", custom_id)
    if method != "POST":
        message = f"Line {number}: `method` is {quoted(method)}; a batch sends POST only."
        raise LineFault(number, "invalid_method", message, param="method", custom_id=custom_id)
    url = _text(number, raw, fields, "url", custom_id)
    body = fields.get("body")
    if body is None or not bytes(body).lstrip().startswith(b"{"):
        message = f"Line {number}: `body` must be a JSON object: the request's own fields."
        code = "missing_field" if body is None else "invalid_type"
        raise LineFault(number, code, message, param="body", custom_id=custom_id)
    return LineRequest(number, custom_id, url, bytes(body), tuple(fields.keys() - _FIELDS))


def _text(number: int, line: bytes, fields: dict[str, msgspec.Raw], name: str, custom_id: str | None) -> str:
    raw = fields.get(name)
    if raw is None:
        message = f"Line {number} has no `{name}`."
        raise LineFault(number, "missing_field", message, param=name, custom_id=custom_id)
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.ValidationError:
        message = f"Line {number}: `{name}` must be a string."
        raise LineFault(number, "invalid_type", message, param=name, custom_id=custom_id) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _not_json(number, line, str(error), param=name, custom_id=custom_id) from None


def _not_json(
    number: int, line: bytes, problem: str, *, param: str | None = None, custom_id: str | None = None
) -> LineFault:
    """`problem`: the parser's words, which are of no use where a string is no text."""
    try:
        msgspec.json.encode(json.loads(line))
    except UnicodeDecodeError as error:
        problem = f"byte {error.start} is not UTF-8"
    except UnicodeEncodeError:
        problem = "a string holds half of a surrogate pair (such as \\ud83d alone)"
    except (ValueError, RecursionError):
        pass
    message = f"Line {number} is not JSON: {problem}."
    return LineFault(number, "invalid_json", message, param=param, custom_id=custom_id)


def request_digest(asked: bytes) -> str:
    return blake2b(asked, digest_size=8).hexdigest()


def model_digest(model: str) -> str:
    """8 hexadecimal digits of where the model lies."""
    return blake2b(model.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()


# what is written


@dataclass(frozen=True, slots=True)
class AnswerTo:
    """What an answer's id says: digests of the request and, where batches may move between models, of the model."""

    request: str
    model: str = ""

    def new_id(self) -> str:
        return "_".join(["batch_req", uuid.uuid4().hex, self.request, *([self.model] if self.model else [])])


@dataclass(frozen=True, slots=True)
class Reply:
    """What one line's request was answered with. `ignored` are fields of its body that had no effect."""

    status: int
    request_id: str
    body: bytes
    ignored: str = ""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


def answer_line(custom_id: str, reply: Reply, to: AnswerTo) -> bytes:
    response: dict[str, object] = {"status_code": reply.status, "request_id": reply.request_id}
    if reply.ignored:
        response["ignored_fields"] = reply.ignored
    return _line(to, custom_id, response | {"body": msgspec.Raw(reply.body)}, None)


def fault_line(fault: LineFault, to: AnswerTo) -> bytes:
    return _line(to, fault.custom_id, None, fault.wire())


def expired_line(custom_id: str | None, number: int, to: AnswerTo) -> bytes:
    """The request was not done in the batch's time."""
    message = "This request was not done before the batch's completion window ended."
    return _line(to, custom_id, None, {"code": "batch_expired", "message": message, "param": None, "line": number})


def _line(to: AnswerTo, custom_id: str | None, response: object, error: object) -> bytes:
    named = {"id": to.new_id(), "custom_id": custom_id, "response": response, "error": error}
    return _encode(named) + b"\n"


# what is read back


class _Response(msgspec.Struct, frozen=True):
    status_code: int


class _Error(msgspec.Struct, frozen=True):
    line: int | None = None


class AnsweredLine(msgspec.Struct, frozen=True):
    """A line that was written before. Without a `custom_id` its error names the line."""

    id: str
    custom_id: str | None
    response: _Response | None = None
    error: _Error | None = None

    @property
    def is_success(self) -> bool:
        return self.response is not None and 200 <= self.response.status_code < 300

    @property
    def to(self) -> AnswerTo | None:
        """What it answers; None where its id does not say so, as older ones and other programs' do not."""
        match = _ID.fullmatch(self.id)
        return None if match is None else AnswerTo(match["request"], match["model"] or "")


_answered = msgspec.json.Decoder(AnsweredLine)


def read_answer(raw: bytes) -> AnsweredLine | None:
    """A whole line of an output file; None for what no batch has written."""
    try:
        line = _answered.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    nameless = line.custom_id is None and (line.error is None or line.error.line is None)
    return None if nameless else line


def may_be_torn(raw: bytes) -> bool:
    """Could this be the beginning of an answer, whose writer was killed?"""
    start = raw[: len(_ANSWER_PREFIX)]
    return start == _ANSWER_PREFIX[: len(start)]


# the two objects of the API


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"
    expires_at: int | None = None
    status_details: str | None = None


class BatchFault(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchFaults(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchFault]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Times are whole seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchFaults | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None


class BatchFields(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, object] | None = None


_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST_WINDOW_S = 30 * 86400


def window_s(text: str) -> int:
    """A completion window such as 24h, in seconds. Raises ApiError (400)."""
    number, unit = text[:-1], _UNITS_S.get(text[-1:], 0)
    seconds = int(number) * unit if number.isascii() and number.isdigit() and len(number) < 9 else 0
    if not 1 <= seconds <= _LONGEST_WINDOW_S:
        message = f"`completion_window` is {quoted(text)}; give a number and s, m, h or d, such as 24h; at most 30d."
        raise errors.invalid_value("completion_window", message)
    return seconds


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Raises ApiError (400) beyond the limits that OpenAI's clients know."""
    for name, value in (metadata or {}).items():
        if len(name) > 64 or len(value) > 512:
            raise errors.invalid_value(
                "metadata", f"`metadata`: {quoted(name)}: a name has at most 64 characters, a value 512."
            )
    if len(metadata or {}) > 16:
        raise errors.invalid_value("metadata", f"`metadata` has {len(metadata or {})} entries; at most 16 are kept.")


def malformed_form(detail: str) -> ApiError:
    advice = "Send multipart/form-data, as `curl -F file=@FILE -F purpose=batch` does."
    return ApiError(400, f"The form cannot be read: {detail} {advice}", code="invalid_form")


def file_not_found(file_id: str, param: str = "file_id") -> ApiError:
    return ApiError(404, f"There is no file {quoted(file_id)} on this server.", code="file_not_found", param=param)


def batch_not_found(batch_id: str) -> ApiError:
    message = f"There is no batch {quoted(batch_id)} on this server."
    return ApiError(404, message, code="batch_not_found", param="batch_id")


def file_in_use(file_id: str, batch_id: str) -> ApiError:
    message = f"The file {file_id} is read by the batch {batch_id}: cancel it first, or wait until it has ended."
    return ApiError(409, message, code="file_in_use", param="file_id")


def file_too_large(limit_bytes: int) -> ApiError:
    message = f"The file is larger than the {limit_bytes} bytes that this server takes (--batch-file-limit)."
    return ApiError(413, message, code="file_too_large", param="file")


def storage_full(limit_bytes: int) -> ApiError:
    message = (
        f"The files on this server fill the {limit_bytes} bytes they may have (--batch-storage-limit). Delete some."
    )
    return ApiError(413, message, code="storage_full")


def storage_failed(reason: str) -> ApiError:
    """`reason` names the directory: whoever runs the server must hear of it, and clients of a batch are trusted."""
    message = f"Files cannot be kept: {reason}. The server's --batch-dir says where they go."
    return ApiError(500, message, type="server_error", code="storage_failed")
