"""docs/gateway-config.md: its files start a gateway, and its tables name exactly the keys there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.gateway.config_load import InvalidConfig, load_config
from headrace.gateway.config_upstreams import UPSTREAM_KEYS
from headrace.gateway.metrics import PREFIX, GatewayMetrics
from headrace.gateway.rules import SUBJECTS
from headrace.gateway.snapshot import Timeouts
from tests.documents import Block, blocks

PAGE = "docs/gateway-config.md"
FILES = [block for block in blocks() if block.page == PAGE and block.language in ("toml", "json")]
TEXT = (Path(__file__).parents[2] / PAGE).read_text()


@pytest.mark.parametrize("block", FILES, ids=lambda block: block.place)
def test_a_file_of_the_page_passes_the_check(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cloud.key").write_text("sk-1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TAOTOKEN_API_KEY", "sk-2")
    (tmp_path / f"headrace.{block.language}").write_text(block.text)
    assert main(["gateway", "check", "--no-probe", "--config", f"headrace.{block.language}"]) == 0
    assert "Note:" not in capsys.readouterr().out


def section(title: str) -> str:
    return TEXT[TEXT.index(f"## {title}") :].split("\n## ")[0]


def keys_of(title: str) -> set[str]:
    cells = re.findall(r"^\| (`[^|]*) \|", section(title), re.M)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def known_keys(tmp_path: Path, text: str) -> set[str]:
    """The keys that the complaint about an unknown one lists."""
    (tmp_path / "g.toml").write_text(text)
    with pytest.raises(InvalidConfig) as caught:
        load_config(tmp_path / "g.toml", {})
    listed = re.search(r"Known here: (.*)\.", str(caught.value))
    assert listed is not None
    return set(listed[1].split(", "))


def test_the_table_of_upstreams_is_complete(tmp_path: Path) -> None:
    known = known_keys(tmp_path, '[upstreams.u]\nbase_url = "http://h"\nqqqqqqqq = 1\n')
    assert keys_of("`[upstreams.NAME]`") == known == {*UPSTREAM_KEYS, "models", "fallback_model"}


def test_the_table_of_models_is_complete(tmp_path: Path) -> None:
    known = known_keys(tmp_path, '[models.m]\nupstream = "http://h"\nqqqqqqqq = 1\n')
    assert keys_of("`[models.NAME]`") == known


def test_the_list_of_server_keys_is_complete(tmp_path: Path) -> None:
    known = known_keys(tmp_path, '[upstreams.u]\nbase_url = "http://h"\n[server]\nqqqqqqqq = 1\n')
    named = {word.split(" ")[0] for word in re.findall(r"`([a-z_]+[^`]*)`", section("`[server]`"))}
    assert known <= named


def test_the_table_of_rules_is_complete() -> None:
    assert keys_of("`[routing]` and rules") == set(SUBJECTS)


def test_the_defaults_of_the_page_are_the_defaults() -> None:
    t = Timeouts()
    written = (
        f"connect = {t.connect_s:g}, first_token = {t.first_token_s:g}, idle = {t.idle_s:g}, total = {t.total_s:g}"
    )
    assert f"{{ {written} }}" in TEXT


def test_the_table_of_metrics_is_complete() -> None:
    collected = GatewayMetrics().collect()
    names = {family.name + ("_total" if family.type == "counter" else "") for family in collected}
    others = {name for name in names if name.startswith("gen_ai_")}
    assert {PREFIX + name for name in keys_of("Watching it")} == names - others
    assert all(f"`{name}`" in TEXT for name in others)
