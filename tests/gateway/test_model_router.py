"""A model whose targets a function chooses from."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.gateway.config_load import InvalidConfig, load_config
from tests.gateway import replies
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.gateways import ThreadedGateway, provider, running_gateway, threaded_gateway

CHAT = "/v1/chat/completions"
SECRET = "canary-prompt-the-heron"
CHOOSE = """
def choose(question):
    text = question.body["messages"][-1]["content"]
    if text == "fail":
        raise ValueError(text)
    if text == "candidates":
        return question.candidates[-1]
    return {"hard": "large", "none": None, "strange": "unknown", "list": ["large"]}.get(text, "small")
"""


def config(upstream: FakeUpstream, router: str = "python:choosing:choose") -> dict[str, Any]:
    targets = [{"upstream": "main", "model": model} for model in ("small", "large")]
    return {
        "providers": {"main": provider(upstream.url, models=["small", "large"], max_retries=0)},
        "models": {"auto": {"targets": targets, "router": router}},
        "rules": [{"match": {"header.x-rule": "yes"}, "target": "large"}],
    }


@pytest.fixture(scope="module")
def upstream() -> Iterator[FakeUpstream]:
    with FakeUpstream() as fake:
        yield fake


@pytest.fixture(scope="module")
def gateway(upstream: FakeUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedGateway]:
    folder = tmp_path_factory.mktemp("routed")
    (folder / "choosing.py").write_text(CHOOSE)
    with threaded_gateway(folder, json.dumps(config(upstream))) as running:
        yield running


def body(text: str) -> dict[str, Any]:
    return {"model": "auto", "messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize(
    ("text", "model"),
    [("easy", "small"), ("hard", "large"), ("candidates", "large"), ("none", "small"), ("strange", "small"),
     ("fail", "small")],
)  # fmt: skip
def test_the_function_names_the_target_that_is_asked(
    gateway: ThreadedGateway, upstream: FakeUpstream, text: str, model: str
) -> None:
    answer = gateway.client.post(CHAT, json=body(text))
    assert answer.status_code == 200 and answer.json()["model"] == "auto"
    assert answer.headers["x-gateway-model"] == model == upstream.last.json["model"]


def test_the_other_targets_stay_behind_it(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    gateway.forget()
    upstream.script(replies.error(500, "It broke."))
    answer = gateway.client.post(CHAT, json=body("hard"))
    assert (answer.headers["x-gateway-model"], answer.headers["x-gateway-attempts"]) == ("small", "2")


def test_a_rule_goes_before_it_and_other_models_know_nothing_of_it(
    gateway: ThreadedGateway, upstream: FakeUpstream
) -> None:
    answer = gateway.client.post(CHAT, json=body("easy"), headers={"x-rule": "yes"})
    assert answer.headers["x-gateway-model"] == "large"
    assert gateway.client.post(CHAT, json={**body("hard"), "model": "small"}).headers["x-gateway-model"] == "small"


def test_a_function_that_fails_is_named_in_the_log_without_the_prompt(
    gateway: ThreadedGateway, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = {**body("fail"), "messages": [{"role": "user", "content": [SECRET]}]}
    assert gateway.client.post(CHAT, json=wrong).status_code == 200
    assert "python:choosing:choose failed with TypeError" in caplog.text and SECRET not in caplog.text


def test_a_change_of_the_function_is_seen_without_a_restart(tmp_path: Path, upstream: FakeUpstream) -> None:
    (tmp_path / "choosing.py").write_text("def choose(question):\n    return 'small'\n")
    with running_gateway(tmp_path, json.dumps(config(upstream))) as gateway:

        def asked() -> str:
            answer = httpx.post(gateway.url + CHAT, json=body("x"), headers=gateway.auth)
            return answer.headers["x-gateway-model"]

        assert asked() == "small"
        (tmp_path / "choosing.py").write_text("def choose(question):\n    return 'large'  # now\n")
        deadline = time.monotonic() + 5
        while asked() != "large":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        (tmp_path / "choosing.py").write_text("def choose(question:\n")
        time.sleep(1.5)
        assert asked() == "large"
        assert "cannot be loaded: SyntaxError" in httpx.get(gateway.url + "/health").json()["config_error"]


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("choosing:choose", "is not of the form"),
        ("python:choosing", "is not of the form"),
        ("python:no_such_module_here:choose", "cannot be loaded: ModuleNotFoundError"),
        ("python:choosing:chose", "no function of choosing"),
        ("python:broken:choose", "cannot be loaded: ZeroDivisionError"),
    ],
)
def test_a_router_that_cannot_be_is_refused_at_the_start(
    tmp_path: Path, upstream: FakeUpstream, written: str, words: str
) -> None:
    (tmp_path / "choosing.py").write_text(CHOOSE)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    path = tmp_path / "gateway.json"
    path.write_text(json.dumps(config(upstream, written)))
    with pytest.raises(InvalidConfig, match=words):
        load_config(path, {})
