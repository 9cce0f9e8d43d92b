"""The database: where it lies, who may read it, and how an older one becomes today's."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, create_engine, inspect, text

from headrace.config.errors import ConfigError
from headrace.gateway.ledger import open_store
from headrace.gateway.storage import tables, upgrade
from headrace.gateway.storage.database import open_database, prepare_data_dir

VERSION_1 = Path(__file__).parents[1] / "data" / "gateway" / "version_1.sql"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def differences(engine: Engine) -> list[object]:
    with engine.connect() as connection:
        return list(compare_metadata(MigrationContext.configure(connection), tables.metadata))


def test_nobody_else_can_read_the_data_directory_or_the_database(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        folder = prepare_data_dir(tmp_path / "data")
        database = open_database(None, folder)
        with database.write() as connection:
            database.bump(connection, "keys")
            modes = {path.name: mode(path) for path in folder.iterdir()}
        database.close()
    finally:
        os.umask(before)
    assert mode(folder) == 0o700
    assert modes == {"gateway.db": 0o600, "gateway.db-wal": 0o600, "gateway.db-shm": 0o600}


def test_sqlite_runs_in_wal_mode_with_normal_syncs_and_patience(tmp_path: Path) -> None:
    database = open_database(None, tmp_path)
    with database.read() as connection:
        found = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous")]
        patience_ms = connection.exec_driver_sql("PRAGMA busy_timeout").scalar()
    database.close()
    assert found == ["wal", 1]
    assert patience_ms == 5000


def test_the_migrations_lead_from_nothing_to_the_tables_in_the_code(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'gateway.db'}")
    with engine.begin() as connection:
        upgrade.upgrade(connection, "0001")
        upgrade.upgrade(connection)
        assert upgrade.revision(connection) == upgrade.NEWEST
    assert differences(engine) == []
    engine.dispose()


def test_an_empty_database_gets_the_tables_that_the_migrations_lead_to(tmp_path: Path) -> None:
    migrated = create_engine(f"sqlite:///{tmp_path / 'migrated.db'}")
    with migrated.begin() as connection:
        upgrade.upgrade(connection, "0001")
        upgrade.upgrade(connection)
    database = open_database(None, tmp_path)
    assert differences(database.engine) == []
    with migrated.begin() as expected, database.read() as found:
        columns = {}
        for connection in (expected, found):
            inspector = inspect(connection)
            columns[connection] = {
                table: sorted((c["name"], str(c["type"]), c["nullable"]) for c in inspector.get_columns(table))
                for table in inspector.get_table_names()
            }
        assert columns[found] == columns[expected] and "alembic_version" in columns[found]
        assert upgrade.revision(found) == upgrade.NEWEST
    migrated.dispose()
    database.close()


def test_a_database_of_version_1_is_brought_up_and_keeps_its_rows(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'gateway.db'}")
    with engine.begin() as connection:
        for statement in VERSION_1.read_text().split(";\n"):
            connection.execute(text(statement))
    engine.dispose()
    database = open_database(None, tmp_path)
    assert differences(database.engine) == []
    with database.read() as connection:
        assert upgrade.revision(connection) == upgrade.NEWEST
        assert connection.execute(text("SELECT name FROM keys")).scalars().all() == ["vllm-local-dev"]
        assert connection.execute(text("SELECT input_tokens, request_id FROM usage_events")).all() == [(12, "")]
    database.close()


def test_the_newest_version_is_the_last_migration() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(upgrade.__file__).parent / "migrations"))
    assert ScriptDirectory.from_config(config).get_heads() == [upgrade.NEWEST]


def test_a_database_from_the_future_is_refused_and_left_alone(tmp_path: Path) -> None:
    database = open_database(None, tmp_path)
    with database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9000'"))
    database.close()
    with pytest.raises(ConfigError, match=rf"version 9000.*up to {upgrade.NEWEST}.*Update Headrace"):
        open_database(None, tmp_path)


def test_two_processes_that_start_at_once_make_one_database_one_pepper_and_one_first_key(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from headrace.gateway.ledger import open_store\n"
        "record, secret = open_store(None, sys.argv[1]).first()\n"
        "print(record.id, secret is not None)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "data")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    lines = [process.communicate(timeout=60)[0].split() for process in started]
    assert len({key_id for key_id, _ in lines}) == 1
    assert sorted(made for _, made in lines) == ["False", "False", "True"]


def test_an_up_to_date_database_is_opened_without_loading_alembic(tmp_path: Path) -> None:
    open_store(None, tmp_path).database.close()
    code = (
        "import sys\n"
        "from headrace.gateway.ledger import open_store\n"
        "open_store(None, sys.argv[1])\n"
        "print('alembic' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


def test_a_start_does_not_wait_for_a_process_that_is_writing(tmp_path: Path) -> None:
    open_store(None, tmp_path).database.close()
    writer = sqlite3.connect(tmp_path / "gateway.db", isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    store = open_store(None, tmp_path)
    assert store.records() == []
    store.database.close()
    writer.close()


def test_another_data_directory_with_the_same_database_is_refused_because_no_key_would_fit(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    open_store(url, tmp_path / "a").database.close()
    with pytest.raises(ConfigError, match="another pepper"):
        open_store(url, tmp_path / "b")


def test_a_broken_pepper_is_refused_rather_than_replaced(tmp_path: Path) -> None:
    open_store(None, tmp_path).database.close()
    (tmp_path / "pepper").write_text("abc")
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        open_store(None, tmp_path)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("mysql://host/x", "kind mysql are not supported"),
        ("nonsense", "postgresql://user:password@host/database"),
        ("sqlite://", "names no file"),
        ("postgresql://u:hunter2@127.0.0.1:1/x", r"postgresql\+psycopg://u:\*\*\*@127.0.0.1:1/x cannot be used"),
    ],
)
def test_a_database_url_that_cannot_work_says_so_without_its_password(url: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        open_database(url, tmp_path)
    assert "hunter2" not in str(caught.value)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gateway.db").write_text("not a database, but long enough to be looked at\n" * 100)
    with pytest.raises(ConfigError, match="Is it a SQLite file"):
        open_database(None, tmp_path)
