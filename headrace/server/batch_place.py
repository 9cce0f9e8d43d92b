"""Where a server keeps its batches: opened when files are first asked for, or at the start where there are some."""

from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path

from headrace.config.errors import ConfigError
from headrace.config.settings import EngineSettings, ServerSettings
from headrace.protocol import batches as wire
from headrace.server.batch_call import Dispatch, call
from headrace.server.batch_store import Batches
from headrace.server.file_store import FileStore

logger = logging.getLogger("headrace.server")


class BatchPlace:
    """The batches of one server. A server that nobody asks for files leaves no trace on the disk."""

    def __init__(self, server: ServerSettings, engine: EngineSettings, dispatch: Dispatch) -> None:
        self._server = server
        self._engine = engine
        self._dispatch = dispatch
        self._batches: Batches | None = None

    @property
    def directory(self) -> Path:
        """Its own for each server: the default one is named after the model and the port. Raises OSError for a user who
        has no home, as in some containers."""
        if self._server.batch_dir is not None:
            return Path(self._server.batch_dir).expanduser()
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", self._server.served_model_names[0])[-80:].strip("-.")
        try:
            home = Path.home()
        except RuntimeError:
            raise OSError("the server's user has no home directory") from None
        return home / ".headrace" / "engine" / f"{name}-{self._server.port}"

    def resume(self) -> None:
        """Go on with what an earlier server did not finish. Raises ConfigError where that cannot be known."""
        if self._server.batch_dir is None and not self._has_some():
            return
        try:
            self._open()
        except OSError as error:
            raise ConfigError(f"--batch-dir {self.directory} cannot be used: {error.strerror or error}.") from None

    def _has_some(self) -> bool:
        try:
            return self.directory.is_dir()
        except OSError:
            return False  # who asks for files will be told

    def open(self) -> Batches:
        """Raises ApiError (500) where files cannot be kept."""
        try:
            return self._open()
        except ConfigError as error:
            raise wire.storage_failed(str(error).rstrip(".")) from None
        except OSError as error:
            logger.error("Files cannot be kept: %s", error)
            raise wire.storage_failed(error.strerror or str(error)) from None

    async def stop(self) -> None:
        if self._batches is not None:
            await self._batches.stop()

    def _open(self) -> Batches:
        if self._batches is None:
            server = self._server
            store = FileStore(
                self.directory,
                file_limit_bytes=server.batch_file_limit_bytes,
                storage_limit_bytes=server.batch_storage_limit_bytes,
            )
            in_flight = server.batch_concurrency or max(1, self._engine.max_num_seqs // 2)
            limit = server.max_body_bytes
            batches = Batches(store, partial(call, self._dispatch), num_in_flight=in_flight, line_limit_bytes=limit)
            self._batches = batches
        return self._batches
