"""Files that clients keep on the server, on disk: what is uploaded for batches, and what batches have answered.

    DIR/lock                 held by the one server that uses DIR
    DIR/files/ID             a file's bytes, DIR/files/ID.json what is known of it
    DIR/batches/             the batches' own (batch_store.py)

Clients name files by id only, and ids are looked up in a table, so no name of theirs ever becomes a path.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import time
from pathlib import Path, PurePath
from typing import Literal

import msgspec

from headrace.config.errors import ConfigError
from headrace.protocol import batches as wire
from headrace.protocol.batches import FileObject

logger = logging.getLogger("headrace.server")

MAX_FILENAME_CHARS = 255

_decode = msgspec.json.Decoder(FileObject)


class StorageFull(OSError):
    """The files have as many bytes as they may."""


def new_id(prefix: str) -> str:
    """An id that nobody guesses; ids sort as they were made."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"


def write_record(path: Path, record: msgspec.Struct) -> None:
    """Replace a small file at once, so that whoever reads it, after a kill too, reads the one or the other."""
    beside = path.with_suffix(".tmp")
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, msgspec.json.encode(record))
    finally:
        os.close(file)
    os.replace(beside, path)


class FileStore:
    """All files of one server. Raises OSError where the disk says no."""

    def __init__(self, directory: Path, *, file_limit_bytes: int, storage_limit_bytes: int) -> None:
        """Takes `directory` for this process, makes it where there is none, and reads what is known of its files.

        Raises ConfigError where another server uses it, OSError where it cannot be used.
        """
        self.directory = directory
        self.batches = directory / "batches"
        self.file_limit_bytes = file_limit_bytes
        self.storage_limit_bytes = storage_limit_bytes
        self._files = directory / "files"
        for folder in (*reversed(directory.absolute().parents), directory, self._files, self.batches):
            folder.mkdir(mode=0o700, exist_ok=True)  # with `parents` those would be open to all
        self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            message = f"--batch-dir {directory} is used by another server; give each one its own."
            raise ConfigError(message) from None
        self._known: dict[str, FileObject] = {}
        for path in sorted(self._files.glob("file-*.json")):
            with contextlib.suppress(msgspec.DecodeError):
                known = _decode.decode(path.read_bytes())
                if self.path(known.id).exists():
                    self._known[known.id] = known
        for path in self._files.iterdir():
            if path.suffix in (".part", ".tmp"):
                path.unlink()
        sizes = [path.stat().st_size for folder in (self._files, self.batches) for path in folder.iterdir()]
        self.num_bytes = sum(sizes)

    def close(self) -> None:
        os.close(self._lock)

    def path(self, file_id: str) -> Path:
        return self._files / file_id

    def get(self, file_id: str, param: str = "file_id") -> FileObject:
        """Raises ApiError (404)."""
        found = self._known.get(file_id)
        if found is None:
            raise wire.file_not_found(file_id, param)
        return found

    def newest_first(self) -> list[FileObject]:
        return list(reversed(self._known.values()))

    def take(self, num_bytes: int) -> None:
        """So many bytes more are kept. Raises StorageFull."""
        if self.num_bytes + num_bytes > self.storage_limit_bytes:
            raise StorageFull(f"the files fill the {self.storage_limit_bytes} bytes of --batch-storage-limit")
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes

    def delete(self, file_id: str) -> None:
        """Raises ApiError (404)."""
        known = self.get(file_id)
        self._described(file_id).unlink(missing_ok=True)
        self.path(file_id).unlink(missing_ok=True)
        del self._known[file_id]
        self.give_back(known.bytes)

    def adopt(self, path: Path, file_id: str, filename: str, purpose: Literal["batch", "batch_output"]) -> FileObject:
        """Make a finished file, whose bytes have been taken, one of the store's. Done twice, it is done once."""
        if path.exists():
            os.replace(path, self.path(file_id))
        num_bytes = self.path(file_id).stat().st_size
        made = FileObject(
            id=file_id, bytes=num_bytes, created_at=int(time.time()), filename=_safe(filename), purpose=purpose
        )
        write_record(self._described(file_id), made)
        self._known[file_id] = made
        return made

    def upload(self) -> Upload:
        return Upload(self, self._files / f"{new_id('file-')}.part")

    def _described(self, file_id: str) -> Path:
        return self._files / f"{file_id}.json"


class Upload:
    """A file that is arriving. Left without `done`, it never was."""

    def __init__(self, store: FileStore, path: Path) -> None:
        self._store = store
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._num_bytes = 0
        self._is_done = False

    def write(self, content: bytes) -> None:
        """Raises ApiError (413) over a limit, OSError."""
        if self._num_bytes + len(content) > self._store.file_limit_bytes:
            raise wire.file_too_large(self._store.file_limit_bytes)
        try:
            self._store.take(len(content))
        except StorageFull:
            raise wire.storage_full(self._store.storage_limit_bytes) from None
        self._num_bytes += len(content)
        view = memoryview(content)
        while view:
            view = view[os.write(self._file, view) :]

    def done(self, filename: str) -> FileObject:
        made = self._store.adopt(self._path, self._path.stem, filename, "batch")
        self._is_done = True
        return made

    def close(self) -> None:
        os.close(self._file)
        if not self._is_done:
            self._path.unlink(missing_ok=True)
            self._store.give_back(self._num_bytes)


def _safe(filename: str) -> str:
    """A client's name for a file, to be shown: its last part, printable and not endless."""
    name = re.sub(r"[\x00-\x1f\x7f]", "", PurePath(filename.replace("\\", "/")).name)
    return name[-MAX_FILENAME_CHARS:] or "file"
