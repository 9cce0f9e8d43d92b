"""Prompts and answers are kept for the keys that ask for it, in the database alone, and only as long as they say."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy.exc import OperationalError

from headrace.cli.main import main
from headrace.gateway import prompt_log
from headrace.gateway.keys import KeyMistake, KeyRequest
from headrace.gateway.ledger import open_store
from headrace.gateway.prompt_log import KeptPrompt, PromptLog
from tests.gateway import replies
from tests.gateway.dialects import WAYS, Way
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.gateways import ThreadedGateway, provider, providers, running_gateway, threaded_gateway

DAY_S = 86_400.0
PROMPT = "canary-prompt-the-heron-stands-in-the-race"
ANSWER = "canary-answer-the-sluice-is-open"
BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": PROMPT}]}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def upstream() -> Iterator[FakeUpstream]:
    with FakeUpstream(without=("/responses",)) as fake:
        yield fake


@pytest.fixture(scope="module")
def gateway(upstream: FakeUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedGateway]:
    config = providers(
        main=provider(upstream.url, max_retries=0),
        claude=provider(upstream.url, dialect="anthropic", models=["claude-model"], max_retries=0),
    )
    with threaded_gateway(tmp_path_factory.mktemp("kept"), config) as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh(gateway: ThreadedGateway, upstream: FakeUpstream) -> None:
    gateway.forget()
    upstream.forget()


def key_of(gateway: ThreadedGateway, name: str, kept_s: float | None) -> tuple[str, str]:
    """The id and the secret of a key that keeps its prompts."""
    record, secret = gateway.ledger.store.create(KeyRequest(name=name, prompts_kept_s=kept_s))
    gateway.ledger.keys.reload()
    return record.id, secret


def kept_of(gateway: ThreadedGateway, key_id: str, number: int) -> list[KeptPrompt]:
    deadline = time.monotonic() + 5
    while len(found := gateway.ledger.prompts.latest(key_id, 100)) < number:
        assert time.monotonic() < deadline, f"{len(found)} are kept, {number} were expected"
        time.sleep(0.02)
    return list(found)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_was_sent_and_answered_is_kept_as_it_was(
    gateway: ThreadedGateway, upstream: FakeUpstream, way: Way
) -> None:
    key_id, secret = key_of(gateway, f"keeps {way}", 7 * DAY_S)
    received = []
    with gateway.client_with(secret) as client:
        for stream in (False, True):
            upstream.script(way.reply(stream, "Water ", "does."))
            received.append(client.post(way.path, json=way.body(stream=stream)))
    found = kept_of(gateway, key_id, 2)
    assert [each.answer for each in found] == [answer.text for answer in received]
    assert [json.loads(each.request) for each in found] == [way.body(stream=False), way.body(stream=True)]
    assert [each.request_id for each in found] == [answer.headers["x-request-id"] for answer in received]
    assert {(each.status, each.outcome, each.model) for each in found} == {(200, "ok", way.model)}
    assert all(each.ends_at - each.time_s == 7 * DAY_S for each in found)


def test_errors_and_broken_streams_are_kept_as_the_client_saw_them(
    gateway: ThreadedGateway, upstream: FakeUpstream
) -> None:
    key_id, secret = key_of(gateway, "errors", DAY_S)
    upstream.script(replies.error(500, "It broke."), replies.chat_stream("Wa", "ter").cut(1))
    with gateway.client_with(secret) as client:
        received = [client.post(CHAT, json=BODY).text, client.post(CHAT, json={**BODY, "stream": True}).text]
    found = kept_of(gateway, key_id, 2)
    assert [each.answer for each in found] == received
    assert [(each.status, each.outcome) for each in found] == [(502, "error"), (200, "truncated")]


def test_no_other_keys_prompts_are_kept(gateway: ThreadedGateway) -> None:
    keeping, secret = key_of(gateway, "one that keeps", DAY_S)
    other, plain = key_of(gateway, "one that does not", None)
    for each in (plain, secret, plain):
        with gateway.client_with(each) as client:
            assert client.post(CHAT, json=BODY).status_code == 200
    assert len(kept_of(gateway, keeping, 1)) == 1
    assert gateway.ledger.prompts.latest(other, 100) == []


def test_a_long_text_is_cut_and_says_so_and_what_is_no_text_is_told_by_its_size(
    gateway: ThreadedGateway, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_log, "MAX_KEPT_BYTES", 100)
    key_id, secret = key_of(gateway, "long", DAY_S)
    sound = replies.Reply(content_type="audio/mpeg", parts=(b"\xff\xfb\x00" * 20,))
    upstream.script(replies.chat("é" * 500), sound)
    with gateway.client_with(secret) as client:
        client.post(CHAT, json=BODY)
        client.post("/v1/audio/speech", json={"model": "fake", "input": "Hi"})
    chat, speech = kept_of(gateway, key_id, 2)
    assert len(chat.answer.encode()) < 150 and chat.answer.endswith(" bytes)") and "... (" in chat.answer
    assert speech.answer == "(60 bytes that are no text)"


def test_what_has_had_its_time_is_gone_from_the_file(tmp_path: Path) -> None:
    now_s = 1000.0
    store = open_store(None, tmp_path)
    log = PromptLog(store.database, now_s=lambda: now_s)
    common = {"endpoint": "chat", "model": "m", "upstream": "u", "status": 200, "outcome": "ok", "answer": ANSWER}
    for key_id, kept_s in (("short", 10.0), ("long", 1000.0)):
        kept = KeptPrompt(
            key_id=key_id, time_s=now_s, ends_at=now_s + kept_s, request_id="r", request=f"{PROMPT}-{key_id}", **common
        )  # type: ignore[arg-type]
        log.append(kept)
    log.work()
    assert [len(log.latest(key_id, 5)) for key_id in ("short", "long")] == [1, 1]
    now_s = 1011.0
    assert [len(log.latest(key_id, 5)) for key_id in ("short", "long")] == [0, 1]
    log.prune()
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert f"{PROMPT}-short".encode() not in written and f"{PROMPT}-long".encode() in written
    log.forget("long")
    assert PROMPT.encode() not in b"".join(path.read_bytes() for path in tmp_path.iterdir())
    store.database.close()


def test_a_database_that_fails_costs_the_prompts_and_their_text_is_not_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(None, tmp_path)
    log = PromptLog(store.database)

    def fails(*_: object, **__: object) -> None:
        raise OperationalError(f"INSERT {PROMPT}", None, Exception(PROMPT))

    monkeypatch.setattr(store.database, "write", fails)
    log.append(KeptPrompt(key_id="k", time_s=0, ends_at=9e9, request_id="r", endpoint="chat", model="m", upstream="u",
                          status=200, outcome="ok", request=PROMPT, answer=ANSWER))  # fmt: skip
    with caplog.at_level(logging.DEBUG):
        log.work()
    assert log.num_dropped == 1 and "could not be written" in caplog.text and PROMPT not in caplog.text
    store.database.close()


def test_the_queue_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_log, "MAX_WAITING_BYTES", 100)
    store = open_store(None, tmp_path)
    log = PromptLog(store.database)
    for _ in range(5):
        log.append(KeptPrompt(key_id="k", time_s=0, ends_at=9e9, request_id="r", endpoint="chat", model="m",
                              upstream="u", status=200, outcome="ok", request="x" * 40, answer=""))  # fmt: skip
    log.work()
    assert (len(log.latest("k", 9)), log.num_dropped) == (2, 3)
    store.database.close()


def test_by_hand_from_begin_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One process: a key begins to keep, shows what was asked, ends, and nothing is left in any file or log."""
    with FakeUpstream(replies.chat(ANSWER)) as upstream:
        with running_gateway(tmp_path, providers(main=provider(upstream.url))) as gateway:
            where = ["--data-dir", str(gateway.data_dir)]
            assert main(["key", "prompts", "test", *where]) == 0
            assert "keeps no prompts" in capsys.readouterr().out
            assert main(["key", "prompts", "test", "--keep", "7d", *where]) == 0
            assert main(["key", "show", "test", *where]) == 0
            assert "kept for 7 days" in capsys.readouterr().out
            time.sleep(1.0)  # a change of a key is seen by then

            assert httpx.post(gateway.url + CHAT, json=BODY, headers=gateway.auth).status_code == 200
            time.sleep(0.8)
            assert main(["key", "prompts", "test", "--json", *where]) == 0
            (shown,) = json.loads(capsys.readouterr().out)
            assert PROMPT in shown["request"] and ANSWER in shown["answer"] and shown["status"] == 200
            assert main(["key", "prompts", "test", "--keep", "off", *where]) == 0
            time.sleep(1.0)
            assert httpx.post(gateway.url + CHAT, json=BODY, headers=gateway.auth).status_code == 200
        files = {path.name: path.read_bytes() for path in gateway.data_dir.rglob("*") if path.is_file()}
        files["log"] = gateway.log_path.read_bytes()
        assert [name for name, text in files.items() if PROMPT.encode() in text or ANSWER.encode() in text] == []


@pytest.mark.parametrize("kept_s", [0.0, -1.0, 1e12])
def test_a_time_that_is_none_is_refused(tmp_path: Path, kept_s: float) -> None:
    store = open_store(None, tmp_path)
    with pytest.raises(KeyMistake, match="ten years"):
        store.create(KeyRequest(name="a", prompts_kept_s=kept_s))
    store.database.close()
