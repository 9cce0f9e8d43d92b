"""Opens the database: SQLite in the data directory unless a URL says otherwise, PostgreSQL by URL.

Requests never come here: what they need is in memory, what they leave behind goes through the usage writer's
thread. SQLite runs in WAL mode, so that readers and the one writer do not wait for each other.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, OperationalError, SQLAlchemyError
from sqlalchemy.sql.schema import Table

from headrace.config.errors import ConfigError
from headrace.config.gateway_defaults import DATA_DIR
from headrace.gateway.storage import tables
from headrace.gateway.storage.upgrade import NEWEST, revision, upgrade

FILE_NAME = "gateway.db"

BUSY_TIMEOUT_MS = 5000
"""How long a SQLite writer waits for another one before it gives up."""
UPGRADE_PATIENCE_MS = 120_000
"""How long a start waits for another process that upgrades the same database."""
CONNECT_TIMEOUT_S = 5
STATEMENT_TIMEOUT_MS = 30_000

_PATIENCE_MS = "headrace_patience_ms"
"""Option of a connection that is going to write."""


class Database:
    """An open database whose tables are today's. Safe to use from several threads."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.is_sqlite = engine.dialect.name == "sqlite"
        self.insert: Callable[[Table], Any] = sqlite.insert if self.is_sqlite else postgresql.insert
        """An INSERT that knows ON CONFLICT, in the database's own dialect."""

    @property
    def shown_url(self) -> str:
        """The address without its password, for messages."""
        return self.engine.url.render_as_string(hide_password=True)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that sees one state of the database."""
        with self.engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self, patience_ms: int = BUSY_TIMEOUT_MS) -> Iterator[Connection]:
        """A transaction that is committed at the end of the block, rolled back if it raises.

        `patience_ms`: how long another writer's lock is waited for.
        """
        with self.engine.connect().execution_options(**{_PATIENCE_MS: patience_ms}) as connection, connection.begin():
            if not self.is_sqlite:
                connection.exec_driver_sql(f"SET LOCAL lock_timeout = {patience_ms:d}")
            yield connection

    def version(self, connection: Connection, name: str) -> int:
        """How often `bump` was called for `name`."""
        statement = select(tables.versions.c.value).where(tables.versions.c.name == name)
        return connection.execute(statement).scalar() or 0

    def bump(self, connection: Connection, name: str) -> None:
        """Say that what `name` stands for has changed; other processes look at the number."""
        statement = self.insert(tables.versions).values(name=name, value=1)
        counted = {"value": tables.versions.c.value + 1}
        connection.execute(statement.on_conflict_do_update(index_elements=["name"], set_=counted))

    def count(self, table: Table) -> int:
        with self.read() as connection:
            return connection.execute(select(func.count()).select_from(table)).scalar_one()

    def close(self) -> None:
        self.engine.dispose()


def prepare_data_dir(data_dir: str | Path = DATA_DIR) -> Path:
    """The data directory, made if it is missing, readable by nobody else. Raises ConfigError."""
    path = Path(data_dir).expanduser()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_mode & 0o077:
            path.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"--data-dir {path}: cannot be used: {error.strerror}. Name a directory of yours.") from None
    return path


def open_database(url: str | None, data_dir: Path) -> Database:
    """Open and upgrade the database at `url`; None = `gateway.db` in `data_dir`. Raises ConfigError."""
    parsed = _parse(url, data_dir)
    is_sqlite = parsed.get_backend_name() == "sqlite"
    if is_sqlite:
        _create_file(Path(str(parsed.database)))
    try:
        engine = _sqlite_engine(parsed) if is_sqlite else _postgresql_engine(parsed)
    except ImportError:
        raise ConfigError(
            "A PostgreSQL database needs the package psycopg: pip install 'headrace[gateway,postgres]'."
        ) from None
    database = Database(engine)
    try:
        with database.read() as connection:
            is_current = revision(connection) == NEWEST
        if not is_current:
            with database.write(UPGRADE_PATIENCE_MS) as connection:
                upgrade(connection)
    except SQLAlchemyError as error:
        engine.dispose()
        raise ConfigError(_advice(database, error)) from None
    except BaseException:
        engine.dispose()
        raise
    return database


def _parse(url: str | None, data_dir: Path) -> URL:
    if url is None:
        return URL.create("sqlite", database=str(data_dir / FILE_NAME))
    example = "sqlite:////var/lib/headrace/gateway.db or postgresql://user:password@host/database"
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ConfigError(f"The database URL is not one; write it like {example}.") from None
    name = parsed.drivername.partition("+")[0]
    if name == "sqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise ConfigError(f"The database URL names no file; write it like {example}.")
        return URL.create("sqlite", database=parsed.database)
    if name in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    raise ConfigError(f"Databases of the kind {name} are not supported; write the URL like {example}.")


def _create_file(path: Path) -> None:
    """SQLite gives the files beside the database (-wal, -shm) the database's own mode."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise ConfigError(f"The database file {path} cannot be opened: {error.strerror}.") from None


def _sqlite_engine(url: URL) -> Engine:
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_MS / 1000})

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, record: object) -> None:
        connection.isolation_level = None  # transactions are begun below, not guessed by the driver
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A writer takes its lock at once: a reader that turns into a writer later could only fail.
        patience_ms = connection.get_execution_options().get(_PATIENCE_MS)
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {patience_ms or BUSY_TIMEOUT_MS:d}")
        connection.exec_driver_sql("BEGIN" if patience_ms is None else "BEGIN IMMEDIATE")

    return engine


def _postgresql_engine(url: URL) -> Engine:
    options = f"-c statement_timeout={STATEMENT_TIMEOUT_MS} -c timezone=UTC"
    arguments = {"connect_timeout": CONNECT_TIMEOUT_S, "options": options, "application_name": "headrace"}
    return create_engine(url, connect_args=arguments, pool_pre_ping=True)


def _advice(database: Database, error: SQLAlchemyError) -> str:
    cause = " ".join(str(getattr(error, "orig", None) or error).split())
    where = database.shown_url
    if database.is_sqlite:
        if isinstance(error, OperationalError):
            return f"The database {where} cannot be used: {cause}. Is the disk full, or the file another user's?"
        if isinstance(error, DatabaseError):
            return f"The database {where} cannot be used: {cause}. Is it a SQLite file?"
    return f"The database {where} cannot be used: {cause}"
