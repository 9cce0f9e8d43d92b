"""`headrace key` as a person and as a script use it."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import key_values
from headrace.cli.main import main
from headrace.gateway.key_index import KeyIndex
from headrace.gateway.keys import KeyMistake
from headrace.gateway.ledger import open_store
from headrace.gateway.usage_event import UsageEvent
from headrace.gateway.usage_rows import insert_usage
from tests.documents import runnable

SECRET = re.compile(r"sk-hr-[0-9A-Za-z]{43}")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def run(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `headrace key` on a data directory of its own; returns status, output, errors."""

    def run(*words: str) -> tuple[int, str, str]:
        status = main(["key", *words, "--data-dir", str(data_dir)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def answer(run: Run, *words: str) -> Any:
    status, out, err = run(*words, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


def test_a_key_is_shown_once_and_never_again(run: Run) -> None:
    status, out, _ = run("create", "vllm-local-dev")
    (secret,) = SECRET.findall(out)
    assert status == 0
    for words in (["list"], ["show", "vllm-local-dev"], ["list", "--json"], ["usage"], ["revoke", "vllm-local-dev"]):
        _, out, err = run(*words)
        assert secret[10:-4] not in out + err


def test_create_takes_everything_a_key_can_have(run: Run) -> None:
    made = answer(
        run,
        *("create", "ci", "--tag", "dev", "--tag=ci,dev", "--models", "qwen*,gpt-4o", "--expires", "30d"),
        *("--rpm", "60", "--tpm", "10000", "--concurrency", "4", "--budget", "5/month", "--allow-ip", "10.0.0.0/8"),
        *("--plan", "coding"),
    )
    assert SECRET.fullmatch(made["key"])
    (listed,) = answer(run, "list")
    assert listed == {name: value for name, value in made.items() if name != "key"}
    assert (listed["tags"], listed["models"], listed["plan"]) == (["dev", "ci"], ["qwen*", "gpt-4o"], "coding")
    assert listed["limits"] == {
        "rpm": 60,
        "tpm": 10_000,
        "concurrency": 4,
        "budget_micros": 5_000_000,
        "budget_period": "month",
    }
    assert (listed["allowed_ips"], listed["state"]) == (["10.0.0.0/8"], "active")
    row = run("list")[1].splitlines()[1]
    assert "60 rpm, 10,000 tpm, 4 at a time, 5.00/month" in row


def test_revoke_and_rotate_do_what_they_say(run: Run, data_dir: Path) -> None:
    old = answer(run, "create", "ci")["key"]
    new = answer(run, "rotate", "ci", "--grace", "0")["key"]
    store = open_store(None, data_dir)
    index = KeyIndex(store)
    assert index.authenticate({b"x-api-key": new.encode()}, None).name == "ci"
    with pytest.raises(Exception, match="rotation"):
        index.authenticate({b"x-api-key": old.encode()}, None)
    assert run("revoke", "ci")[:2] == (
        0,
        f"Revoked the key ci ({new[:10]}...{new[-4:]}). Running gateways refuse it within a second.\n",
    )
    assert answer(run, "show", "ci")["state"] == "revoked"
    assert "is revoked: create a new one" in run("rotate", "ci")[2]
    store.database.close()


def test_usage_is_summed_as_asked(run: Run, data_dir: Path) -> None:
    record = answer(run, "create", "ci")
    store = open_store(None, data_dir)
    with store.database.write() as connection:
        events = [
            UsageEvent(
                time_s=time.time(),
                key_id=record["id"],
                key_name="ci",
                model=("qwen", "gpt")[number % 3 == 0],
                upstream="local",
                upstream_model="m",
                endpoint="chat",
                status=200,
                input_tokens=1000,
                output_tokens=10,
                cost_micros=500_000,
                estimated=number == 1,
            )
            for number in range(9)
        ]
        insert_usage(store.database, connection, events)
    store.database.close()
    assert run("usage")[1] == (
        "key  requests  failed  tokens in  cached  tokens out  cost\n"
        "ci   9         0       9,000      0       90          4.50\n"
        "\nThe tokens of 1 requests are estimated: their upstream gave none.\n"
    )
    by_model = answer(run, "usage", "ci", "--by", "upstream,model", "--days", "7")
    assert [(row["model"], row["upstream"], row["requests"]) for row in by_model] == [
        ("qwen", "local", 6),
        ("gpt", "local", 3),
    ]
    assert answer(run, "show", "ci")["usage"] == {
        "requests": 9,
        "input_tokens": 9000,
        "output_tokens": 90,
        "cost_micros": 4_500_000,
    }


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lst"], "Did you mean headrace key list?"),
        (["create"], "needs the name of a key"),
        (["create", "a", "b"], "one word too many"),
        (["create", "a", "--rmp", "5"], "Did you mean --rpm?"),
        (["create", "a", "--rpm", "many"], "must be a whole number"),
        (["create", "a", "--expires", "soon"], "--expires soon: write a length of time (30d, 12h), a day"),
        (["create", "a", "--expires", "2020-01-01"], "lies in the past"),
        (["create", "a", "--budget", "5/year"], "5/month, 0.50/day, 20/week, 100/total"),
        (["create", "a", "--allow-ip", "10.0.0"], "10.0.0 is not an address"),
        (["revoke", "nobody"], "There is no key nobody"),
        (["usage", "--by", "hour"], "hour is none of key, model, upstream, day"),
        (["list", "--database", "mysql://x/y"], "kind mysql are not supported"),
    ],
)
def test_a_mistake_is_one_line_with_advice_and_status_2(run: Run, words: list[str], says: str) -> None:
    status, out, err = run(*words)
    assert (status, out) == (2, "")
    assert says in err and len(err.splitlines()) == 1


def test_the_database_comes_from_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "headrace.toml"
    folder = tmp_path / "elsewhere"
    config.write_text(
        f'[server]\ndata_dir = "{folder}"\ndatabase = "sqlite:///{folder}/keys.db"\n'
        '[upstreams.local]\nbase_url = "http://127.0.0.1:8000/v1"\n'
    )
    assert main(["key", "create", "ci", "--config", str(config)]) == 0
    assert stat.S_IMODE((folder / "keys.db").stat().st_mode) == 0o600
    assert main(["key", "create", "cj", "--plan", "codin", "--config", str(config)]) == 2
    assert "--plan codin: the configuration has the plans" in capsys.readouterr().err


def test_the_commands_of_the_keys_page_work_one_after_the_other(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HOME": str(tmp_path)}
    for block in runnable("run: keys"):
        command = ["bash", "-euo", "pipefail", "-c", block.text]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{block.place}: {result.stderr}"
    assert SECRET.fullmatch((tmp_path / "nightly.key").read_text().strip())
    assert (tmp_path / ".headrace" / "gateway.db").exists()


@pytest.mark.parametrize(
    ("text", "micros", "period"),
    [
        ("5/month", 5_000_000, "month"),
        ("0.50/day", 500_000, "day"),
        ("20/Week", 20_000_000, "week"),
        ("100", 100_000_000, "total"),
        ("0.000001/total", 1, "total"),
    ],
)
def test_a_budget_is_an_amount_and_a_period(text: str, micros: int, period: str) -> None:
    assert key_values.budget(text) == (micros, period)


@pytest.mark.parametrize(
    ("text", "ends_s"), [("30d", 2_592_000), ("12h", 43_200), ("1970-01-01", 86_400), ("2w", 1_209_600)]
)
def test_an_expiry_is_a_length_of_time_or_a_day(text: str, ends_s: float) -> None:
    assert key_values.expiry(text, 0.0) == ends_s
    assert key_values.expiry("never", 0.0) is None


@pytest.mark.parametrize("text", ["5,5/day", "-1/day", "1.0000001", "", "x/day"])
def test_a_budget_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(KeyMistake):
        key_values.budget(text)
