"""Every configuration file of the guides starts a gateway, and hot reload works in a running one."""

from __future__ import annotations

import os
import time
from pathlib import Path

import httpx
import pytest

from tests.gateway.gateways import running_gateway, threaded_gateway

SEEDS = Path(__file__).parents[1] / "data/seeds"
ENVIRONMENT = {"TAOTOKEN_API_KEY": "sk-from-the-environment"}


def first_models(url: str, auth: dict[str, str]) -> list[str]:
    return [model["id"] for model in httpx.get(f"{url}/api/v1/models", headers=auth).json()["data"]][:1]


@pytest.mark.parametrize(("name", "first"), [("config.toml", "qwen2-7b-local"), ("providers.json", "qwen2.5-7b-awq")])
def test_the_command_starts_with_the_gateway_files(name: str, first: str, tmp_path: Path) -> None:
    text = (SEEDS / name).read_text()
    with running_gateway(tmp_path, text, suffix=Path(name).suffix, environment=ENVIRONMENT) as gateway:
        assert first_models(gateway.url, gateway.auth) == [first]


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("settings.json", []),
        ("cline.json", ["qwen2.5-7b"]),
        ("codex-auth.json", []),
        ("client.json", ["Qwen2.5-72B-Instruct"]),
    ],
)
def test_a_gateway_starts_with_the_other_files(name: str, first: list[str], tmp_path: Path) -> None:
    with threaded_gateway(tmp_path, (SEEDS / name).read_text()) as gateway:
        assert first_models(gateway.url, {"authorization": f"Bearer {gateway.key}"}) == first


def test_a_changed_file_is_in_force_within_seconds_and_a_bad_one_is_told_by_health(tmp_path: Path) -> None:
    def until(path: str, what: str) -> None:
        deadline = time.monotonic() + 10
        while what not in (found := httpx.get(gateway.url + path, headers=gateway.auth).text):
            assert time.monotonic() < deadline, found
            time.sleep(0.05)

    def write(text: str) -> None:
        fresh = gateway.config.with_name("fresh")
        fresh.write_text(text)
        os.replace(fresh, gateway.config)

    text = '[upstreams.u]\nbase_url = "http://127.0.0.1:9/v1"\nmodels = ["before"]\n'
    with running_gateway(tmp_path, text, suffix=".toml") as gateway:
        until("/v1/models", '"before"')
        write(text.replace("before", "after"))
        until("/v1/models", '"after"')
        write(text + "[serverr]\n")
        until("/health", "unknown key serverr")
        until("/v1/models", '"after"')
