"""Hot reload: a new valid file is in force at once, a bad one changes nothing and says why."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace.gateway.config_load import Overrides, load_config
from headrace.gateway.reload import Reloader
from headrace.gateway.snapshot import Snapshot

TEXT = '[upstreams.u]\nbase_url = "http://one/v1"\napi_key = "${file:key}"\n[server]\nport = 8080\n'


@dataclass
class Gateway:
    """What a reload reaches: the snapshots that were taken and the problems that were reported."""

    folder: Path
    taken: list[Snapshot] = field(default_factory=list)
    reported: list[str | None] = field(default_factory=list)

    def start(self, text: str = TEXT, **overrides: int) -> Reloader:
        (self.folder / "key").write_text("sk-1")
        self.write(text)
        given = Overrides(**overrides)
        snapshot = load_config(self.folder / "g.toml", {"A": "b"}, overrides=given)
        return Reloader(snapshot, {"A": "b"}, self.taken.append, given, self.reported.append)

    def write(self, text: str, name: str = "g.toml") -> None:
        """Replace a file as editors and deployments do: a new file in the old one's place."""
        fresh = self.folder / "fresh"
        fresh.write_text(text)
        os.replace(fresh, self.folder / name)


@pytest.fixture
def gateway(tmp_path: Path) -> Gateway:
    return Gateway(tmp_path)


async def test_a_changed_file_is_in_force_with_the_next_generation(gateway: Gateway) -> None:
    reloader = gateway.start()
    assert not await reloader.check()
    gateway.write(TEXT.replace("one", "two"))
    assert await reloader.check()
    assert [(s.generation, s.upstreams["u"].base_url) for s in gateway.taken] == [(2, "http://two/v1")]
    assert not await reloader.check()


async def test_what_is_removed_from_the_file_is_gone(gateway: Gateway) -> None:
    reloader = gateway.start(TEXT + '[upstreams.v]\nbase_url = "http://v"\n')
    gateway.write(TEXT)
    await reloader.check()
    assert list(reloader.snapshot.upstreams) == ["u"]


async def test_a_change_between_the_start_and_the_first_look_is_seen(gateway: Gateway) -> None:
    reloader = gateway.start()
    gateway.write(TEXT.replace("one", "two"))
    assert await reloader.check()


async def test_an_upstream_s_key_in_a_file_changes_without_a_restart(gateway: Gateway) -> None:
    reloader = gateway.start()
    await reloader.check()
    gateway.write("sk-2\n", "key")
    assert await reloader.check()
    assert gateway.taken[-1].upstreams["u"].api_key == "sk-2"


async def test_a_bad_file_keeps_the_old_snapshot_and_says_why_until_it_is_mended(gateway: Gateway) -> None:
    reloader = gateway.start()
    await reloader.check()
    gateway.write(TEXT + "[upstream.v]\n")
    assert not await reloader.check()
    assert not await reloader.check()
    assert reloader.snapshot.upstreams["u"].base_url == "http://one/v1"
    assert len(reloader.problems) == 1
    assert "g.toml:6: unknown key upstream. Did you mean upstreams?" in reloader.problems[0]
    gateway.write(TEXT)
    assert not await reloader.check()
    assert reloader.problems == ()
    assert gateway.taken == []
    assert len(gateway.reported) == 2
    assert "unknown key upstream" in str(gateway.reported[0])
    assert gateway.reported[1] is None


async def test_a_file_that_vanishes_is_a_bad_file(gateway: Gateway) -> None:
    reloader = gateway.start()
    (gateway.folder / "g.toml").unlink()
    assert not await reloader.check()
    assert "cannot be read" in reloader.problems[0]
    gateway.write(TEXT.replace("one", "back"))
    assert await reloader.check()


async def test_a_secret_that_vanishes_is_looked_for_until_it_is_back(gateway: Gateway) -> None:
    reloader = gateway.start()
    await reloader.check()
    (gateway.folder / "key").unlink()
    assert not await reloader.check()
    assert "needs the file" in reloader.problems[0]
    gateway.write("sk-3", "key")
    assert await reloader.check()
    assert reloader.snapshot.upstreams["u"].api_key == "sk-3"


async def test_a_file_that_is_only_touched_makes_no_new_generation(gateway: Gateway) -> None:
    reloader = gateway.start()
    await reloader.check()
    gateway.write(TEXT + "# a comment\n")
    assert not await reloader.check()
    assert gateway.taken == []


async def test_settings_that_wait_for_a_restart_are_named(gateway: Gateway) -> None:
    reloader = gateway.start()
    gateway.write(TEXT.replace("8080", "9090"))
    await reloader.check()
    assert reloader.restart_needed == ("port",)
    gateway.write(TEXT + "# and back\n")
    await reloader.check()
    assert reloader.restart_needed == ()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('log_level = "debug"', "log_level"),
        ('page_url = "https://keys.example.com"', "page_url"),
        ("retention_days = 3", "retention_days"),
        ("gateways = 2", "gateways"),
        ('traces = { endpoint = "http://127.0.0.1:4318" }', "traces"),
    ],
)
async def test_whatever_the_server_reads_at_its_start_only_is_named(gateway: Gateway, line: str, name: str) -> None:
    reloader = gateway.start()
    gateway.write(TEXT.replace("8080", f"8080\n{line}"))
    await reloader.check()
    assert reloader.restart_needed == (name,)


async def test_what_the_command_line_said_holds_after_a_reload(gateway: Gateway) -> None:
    reloader = gateway.start(port=7000)
    gateway.write(TEXT.replace("8080", "9090"))
    await reloader.check()
    assert reloader.snapshot.listen.port == 7000
    assert reloader.restart_needed == ()


async def test_settings_json_that_appears_later_is_read(gateway: Gateway) -> None:
    reloader = gateway.start('[headrace]\nbase_url = "http://h"\n')
    await reloader.check()
    gateway.write('{"temperature": 0.5}', "settings.json")
    assert await reloader.check()
    assert reloader.snapshot.presets == {"temperature": 0.5}


async def test_it_looks_by_itself(gateway: Gateway) -> None:
    reloader = gateway.start()
    watching = asyncio.create_task(reloader.run(poll_s=0.01))
    await asyncio.sleep(0.05)
    gateway.write(TEXT.replace("one", "two"))
    async with asyncio.timeout(10):
        while not gateway.taken:
            await asyncio.sleep(0.01)
    watching.cancel()
    assert gateway.taken[0].upstreams["u"].base_url == "http://two/v1"
