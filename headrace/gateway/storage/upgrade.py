"""Brings a database to today's tables when it is opened: in one transaction, by one process at a time.

Only a database of an older Headrace goes through Alembic's steps. One that is up to date is recognised with one
SELECT, and an empty one gets today's tables as they are, so that neither start loads Alembic.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Column, Connection, MetaData, PrimaryKeyConstraint, String, Table, inspect, text

from headrace.config.errors import ConfigError
from headrace.gateway.storage import tables

NEWEST = "0004"
"""The last file in migrations/versions; a test compares the two."""

_LOCK_ID = 0x4865616472616365
"""PostgreSQL's advisory lock for the time of an upgrade: the word Headrace in ASCII."""


_VERSION = Table(
    "alembic_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
"""As Alembic makes it."""


def upgrade(connection: Connection, target: str = NEWEST) -> None:
    """Apply the missing steps. `connection` must be in a write transaction of its own.

    Raises ConfigError when the database was written by a newer Headrace.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SET LOCAL statement_timeout = 0"))  # a step over many rows takes its time
        connection.execute(text("SELECT pg_advisory_xact_lock(:id)"), {"id": _LOCK_ID})
    found = revision(connection)
    if found == target:
        return
    if found is None and target == NEWEST:
        tables.metadata.create_all(connection)
        _VERSION.create(connection)
        connection.execute(_VERSION.insert().values(version_num=NEWEST))
        return

    from alembic.config import Config
    from alembic.runtime.environment import EnvironmentContext
    from alembic.runtime.migration import MigrationContext, RevisionStep
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    script = ScriptDirectory.from_config(config)
    known = {step.revision for step in script.walk_revisions()}
    if found is not None and found not in known:
        raise ConfigError(
            f"The database is at version {found}, which this Headrace (up to {max(known)}) does not know: it was "
            "written by a newer one. Update Headrace, or use another database."
        )

    def steps(current: object, context: MigrationContext) -> list[RevisionStep]:
        return list(script._upgrade_revs(target, current))  # type: ignore[arg-type]

    with EnvironmentContext(config, script, fn=steps) as environment:
        environment.configure(connection=connection, transactional_ddl=False)
        environment.run_migrations()


def revision(connection: Connection) -> str | None:
    """The version of the database's tables; None = empty."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
