"""A multipart/form-data body read as it comes: small fields into memory, the file's bytes to whoever keeps them.

--x \\r\\n Content-Disposition: form-data; name="purpose" \\r\\n\\r\\n batch \\r\\n--x \\r\\n ... \\r\\n--x--
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from email.message import Message
from email.parser import HeaderParser

from headrace.protocol.batches import malformed_form

MAX_FIELD_BYTES = 64 << 10
MAX_PARTS = 32
MAX_HEAD_BYTES = 8 << 10

KeepFile = Callable[[bytes], None]


def boundary_of(content_type: str) -> bytes:
    """Raises ApiError (400) for a body that is no form."""
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/form-data" or not boundary:
        raise malformed_form(f"its content-type is {content_type[:80] or 'absent'}.")
    return boundary.encode("latin-1", "replace")


class Form:
    """A form being read. `keep` is given the pieces of the part named `file`; `fields` are all other parts."""

    def __init__(self, boundary: bytes, keep: KeepFile) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """Of the part named `file`; None as long as there was none."""
        self._delimiter = b"\r\n--" + boundary
        self._keep = keep
        self._unread = b"\r\n"  # the first boundary may stand at the very beginning
        self._name: str | None = None
        """Of the part whose content is being read; None before the first."""
        self._content = b""
        self._num_parts = 0

    async def read(self, pieces: AsyncIterator[bytes]) -> None:
        """Reads all of the body. Raises ApiError (400)."""
        is_over = False
        async for piece in pieces:
            if not is_over:
                self._unread += piece
                is_over = self._advance()
        if not is_over:
            raise malformed_form("it ends before its last boundary.")

    def _advance(self) -> bool:
        """Take what is unread as far as it can be understood. True after the last boundary."""
        while True:
            at = self._unread.find(self._delimiter)
            if at < 0:
                # The last bytes may be the beginning of a delimiter.
                safe = max(0, len(self._unread) - len(self._delimiter) + 1)
                self._take(self._unread[:safe])
                self._unread = self._unread[safe:]
                return False
            after = at + len(self._delimiter)
            mark = self._unread[after : after + 2]
            if mark == b"--":
                self._take(self._unread[:at])
                self._end_part()
                return True
            end = self._unread.find(b"\r\n\r\n", after)
            if end < 0:
                if len(self._unread) - after > MAX_HEAD_BYTES:
                    raise malformed_form("the head of a part is too long.")
                return False
            self._take(self._unread[:at])
            self._end_part()
            self._begin_part(self._unread[after:end])
            self._unread = self._unread[end + 4 :]

    def _begin_part(self, head: bytes) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise malformed_form(f"it has more than {MAX_PARTS} parts.")
        headers = HeaderParser().parsestr(head.decode("utf-8", "replace").lstrip())
        name = headers.get_param("name", header="content-disposition")
        if not isinstance(name, str):
            raise malformed_form("a part has no name.")
        if name in self.fields or (name == "file" and self.filename is not None):
            raise malformed_form(f"`{name[:80]}` is there twice.")
        self._name = name
        self._content = b""
        if name == "file":
            self.filename = headers.get_filename() or "file"

    def _take(self, content: bytes) -> None:
        if self._name == "file":
            if content:
                self._keep(content)
        elif self._name is not None:
            self._content += content
            if len(self._content) > MAX_FIELD_BYTES:
                raise malformed_form(f"`{self._name[:80]}` has more than {MAX_FIELD_BYTES} bytes.")

    def _end_part(self) -> None:
        if self._name not in (None, "file"):
            self.fields[str(self._name)] = self._content.decode("utf-8", "replace")
        self._name = None
