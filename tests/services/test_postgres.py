"""Keys and usage on PostgreSQL: the same promises as on SQLite, against a real server."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine, text

from headrace.cli.main import main
from headrace.config.errors import ConfigError
from headrace.gateway.key_index import KeyIndex
from headrace.gateway.keys import KeyMistake, KeyRequest
from headrace.gateway.ledger import Ledger, open_ledger, open_store
from headrace.gateway.prompt_log import Transcript
from headrace.gateway.snapshot import Limits
from headrace.gateway.storage import tables, upgrade
from headrace.gateway.storage.database import open_database
from headrace.gateway.usage import UsageEvent
from headrace.gateway.usage_queries import recent_usage, spending, usage_sums
from headrace.protocol.errors import ApiError
from tests.gateway.usage_fill import fill
from tests.services.postgres import Postgres, running_postgres, wait_until

VERSION_1 = Path(__file__).parents[1] / "data" / "gateway" / "version_1.sql"

_numbers = itertools.count()


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture
def url(postgres: Postgres) -> str:
    """An empty database."""
    return postgres.create_database(f"headrace_{next(_numbers)}")


@pytest.fixture
def ledger(url: str, tmp_path: Path) -> Iterator[Ledger]:
    ledger = open_ledger(url, tmp_path)
    yield ledger
    ledger.close()


def event(**fields: object) -> UsageEvent:
    given: dict[str, object] = {"time_s": time.time(), "key_id": "k", "key_name": "ci", "model": "qwen"}
    given |= {"upstream": "local", "upstream_model": "m", "endpoint": "chat", "status": 200, "cost_micros": 3}
    return UsageEvent(**{**given, **fields})  # type: ignore[arg-type]


def code_for(index: KeyIndex, secret: str) -> str | None:
    """The code of the refusal; None = the key is taken."""
    try:
        index.authenticate({b"authorization": b"Bearer " + secret.encode()}, None)
    except ApiError as error:
        return error.code
    return None


def test_the_migrations_lead_from_nothing_to_the_tables_in_the_code(url: str, tmp_path: Path) -> None:
    database = open_database(url, tmp_path)
    with database.read() as connection:
        assert list(compare_metadata(MigrationContext.configure(connection), tables.metadata)) == []
    database.close()


def test_a_database_of_version_1_is_brought_up_and_keeps_its_rows(url: str, tmp_path: Path) -> None:
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        upgrade.upgrade(connection, "0001")
        connection.execute(text("INSERT INTO versions VALUES ('keys', 7)"))
    engine.dispose()
    database = open_database(url, tmp_path)
    with database.read() as connection:
        assert upgrade.revision(connection) == upgrade.NEWEST
        assert database.version(connection, "keys") == 7
    database.close()


def test_a_keys_life_from_creation_to_revocation(ledger: Ledger) -> None:
    limits = Limits(rpm=60, budget_micros=5_000_000, budget_period="month")
    record, old = ledger.store.create(KeyRequest(name="ci", tags=("dev",), limits=limits, allowed_ips=("10.0.0.0/8",)))
    assert ledger.store.find("ci") == record
    with pytest.raises(KeyMistake, match="in use"):
        ledger.store.create(KeyRequest(name="ci"))
    _, new = ledger.store.rotate("ci", grace_s=0)
    ledger.store.change("ci", name="renamed", allowed_ips=())
    ledger.keys.reload()
    assert (code_for(ledger.keys, old), code_for(ledger.keys, new)) == ("key_expired", None)
    ledger.store.revoke("renamed")
    ledger.store.create(KeyRequest(name="renamed"))
    ledger.keys.reload()
    assert code_for(ledger.keys, new) == "key_revoked"


REVOKE = """
import sys
from headrace.gateway.ledger import open_store

open_store(sys.argv[1], sys.argv[2]).revoke("ci")
"""


def test_a_revocation_in_one_process_is_seen_in_another_within_a_second(
    ledger: Ledger, url: str, tmp_path: Path
) -> None:
    _, secret = ledger.store.create(KeyRequest(name="ci"))
    wait_until(lambda: code_for(ledger.keys, secret) is None, 1.0)
    subprocess.run([sys.executable, "-c", REVOKE, url, str(tmp_path)], check=True, timeout=60)
    wait_until(lambda: code_for(ledger.keys, secret) == "key_revoked", 1.0)


FIRST = """
import sys
from headrace.gateway.ledger import open_store

record, secret = open_store(sys.argv[1], sys.argv[2]).first()
print(record.id, secret is not None)
"""


def test_processes_that_start_at_once_make_the_tables_and_the_first_key_once(url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", FIRST, url, str(tmp_path)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    lines = [process.communicate(timeout=60)[0].split() for process in started]
    assert len({key_id for key_id, _ in lines}) == 1
    assert sorted(made for _, made in lines) == ["False", "False", "True"]


def test_another_data_directory_is_refused_because_its_pepper_fits_no_key(url: str, tmp_path: Path) -> None:
    open_store(url, tmp_path / "a").database.close()
    with pytest.raises(ConfigError, match="another pepper") as caught:
        open_store(url, tmp_path / "b")
    assert "secret-of-the-test" not in str(caught.value)


def test_rows_and_daily_sums_say_the_same_and_budgets_survive_a_restart(
    ledger: Ledger, url: str, tmp_path: Path
) -> None:
    last = event(key_id="other", ttft_s=0.25, stream=True, estimated=True, outcome="truncated", request_id="r")
    for number in range(1200):
        ledger.usage.append(event(input_tokens=number, model=("qwen", "gpt")[number % 2]))
    assert ledger.usage.flush()
    ledger.usage.append(last)
    assert ledger.usage.flush()
    by_model = usage_sums(ledger.database, first="2020-01-01", by=("model",), key_id="k")
    assert {row.model: (row.requests, row.cost_micros) for row in by_model} == {"qwen": (600, 1800), "gpt": (600, 1800)}
    assert sum(row.input_tokens for row in by_model) == 1199 * 1200 // 2
    assert recent_usage(ledger.database, limit=1) == [last]
    spent = spending(ledger.database, time.time())["k"]
    again = open_ledger(url, tmp_path)
    assert again.limiter.load("k").spent_total_micros == spent.settled("total", 0) == 3600
    again.close()


def test_two_processes_may_add_to_the_same_sums(ledger: Ledger, url: str, tmp_path: Path) -> None:
    other = open_ledger(url, tmp_path)
    for number in range(2000):
        (ledger, other)[number % 2].usage.append(event(key_id=f"key_{number % 7}"))
    assert ledger.usage.flush() and other.usage.flush()
    other.close()
    wait_until(lambda: usage_sums(ledger.database, first="2020-01-01", by=())[0].requests == 2000, 10.0)


def test_an_event_that_no_table_can_hold_harms_no_other(ledger: Ledger) -> None:
    for number in range(9):
        ledger.usage.append(event(model="a\0b" if number == 4 else "qwen"))
    assert ledger.usage.flush()
    assert ledger.database.count(tables.usage_events) == 8


def test_while_the_server_is_away_keys_work_and_usage_waits_in_the_journal(
    postgres: Postgres, ledger: Ledger, tmp_path: Path
) -> None:
    _, secret = ledger.store.create(KeyRequest(name="ci"))
    ledger.keys.reload()
    postgres.stop()
    try:
        for _ in range(10):
            ledger.usage.append(event())
        wait_until(lambda: ledger.usage.journaled == 10, 10.0)
        wait_until(lambda: ledger.keys.reload_error is not None, 10.0)
        assert code_for(ledger.keys, secret) is None
        assert "secret-of-the-test" not in f"{ledger.usage.write_error} {ledger.keys.reload_error}"
    finally:
        postgres.start()
    wait_until(lambda: ledger.usage.write_error is None, 20.0)
    assert ledger.database.count(tables.usage_events) == 10
    assert list((tmp_path / "journal").iterdir()) == []
    ledger.store.revoke("ci")
    wait_until(lambda: code_for(ledger.keys, secret) == "key_revoked", 2.0)
    assert ledger.keys.reload_error is None


def test_sums_over_many_rows_are_read_from_the_aggregate(ledger: Ledger) -> None:
    fill(ledger.database, num_events=10_000)
    with ledger.database.write() as connection:
        connection.execute(tables.usage_events.delete())
    assert sum(row.requests for row in usage_sums(ledger.database, first="2020-01-01", by=("day", "key"))) == 10_000


def test_the_key_command_takes_the_url(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--database", url, "--data-dir", str(tmp_path)]
    assert main(["key", "create", "ci", *where]) == 0
    assert main(["key", "list", *where]) == 0
    assert "ci" in capsys.readouterr().out.splitlines()[-1]


def test_prompts_are_kept_and_removed_as_a_key_says(ledger: Ledger) -> None:
    record, _ = ledger.store.create(KeyRequest(name="keeps", prompts_kept_s=60.0))
    now_s = time.time()
    for used_s, said in ((now_s - 61, b"old"), (now_s, b'{"a": "\xc3\xa9"}'), (now_s, b"\0\xff")):
        transcript = Transcript()
        transcript.add(said)
        ledger.prompts.append(transcript.kept(event(key_id=record.id, time_s=used_s), 60.0, said))
    wait_until(lambda: len(ledger.prompts.latest(record.id, 10)) == 2, 5)
    assert [kept.answer for kept in ledger.prompts.latest(record.id, 10)] == [
        '{"a": "é"}',
        "(2 bytes that are no text)",
    ]
    ledger.prompts.prune()
    assert ledger.database.count(tables.kept_prompts) == 2
    ledger.prompts.forget(record.id)
    assert ledger.database.count(tables.kept_prompts) == 0
    assert ledger.store.change("keeps", prompts_kept_s=None).prompts_kept_s is None
