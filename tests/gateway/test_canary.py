"""Secrets and prompts stay where they belong: looked for in everything the gateway writes or answers.

One real process, every way a request can go wrong, log level debug; then its log, its data directory (database,
write-ahead log, journals), all answers and /metrics are searched byte by byte.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.gateway import replies
from tests.gateway.fake_upstream import FakeUpstream, Request
from tests.gateway.gateways import Gateway, provider, providers, running_gateway

UPSTREAM_SECRET = "canary-upstream-4f9d2b7c61e8"
HEADER_SECRET = "canary-header-0a1b2c3d4e5f"
PROMPT = "canary-prompt-the-heron-stands-in-the-race"
ANSWER = "canary-answer-the-sluice-is-open"
STRANGER = "sk-hr-" + "Q7" * 21 + "x"


def echo(request: Request) -> replies.Reply:
    """An upstream that quotes the key and the prompt it was sent in its error."""
    return replies.error(400, f"Bad key {request.bearer} for the prompt {request.body.decode()}")


def ask_in_every_way(gateway: Gateway, upstream: FakeUpstream) -> list[bytes]:
    """Heads and bodies of all answers."""
    seen: list[bytes] = []
    chat = {"model": "fake", "messages": [{"role": "user", "content": PROMPT}]}
    streamed = {**chat, "stream": True}

    def ask(path: str, body: object, key: str = gateway.key, **headers: str) -> None:
        sent = {"authorization": f"Bearer {key}", **headers}
        with httpx.Client(base_url=gateway.url, timeout=10) as client:
            answer = client.post(path, json=body, headers=sent)
        seen.append(repr(answer.headers.raw).encode() + answer.content.replace(ANSWER.encode(), b""))

    upstream.script(
        replies.chat(ANSWER),
        replies.chat_stream(ANSWER),
        replies.chat_stream(ANSWER, "more").cut(1),
        replies.unauthorized(),
        replies.error(500, f"Incorrect API key provided: {UPSTREAM_SECRET}"),
        replies.error_in_200(f"the key {UPSTREAM_SECRET} is out of credit"),
        replies.html(),
    )
    ask("/v1/chat/completions", chat)
    for _ in range(2):
        ask("/v1/chat/completions", streamed)
    for _ in range(4):
        ask("/v1/chat/completions", chat)
    upstream.answer = replies.messages(ANSWER)
    ask("/v1/messages", {**chat, "max_tokens": 5})
    ask("/v1/responses", {"model": "fake", "input": PROMPT})
    ask("/v1/chat/completions", {**chat, "model": "unknown"})
    ask("/v1/chat/completions", chat, key=STRANGER)
    ask("/v1/chat/completions", {**chat, "stream": PROMPT})
    ask("/v1/nothing", chat)
    ask("/v1/chat/completions", chat, **{"x-api-key": STRANGER})
    with httpx.Client(base_url=gateway.url, headers=gateway.auth) as client:
        seen.append(client.get("/metrics").content)
        seen.append(client.get("/health").content)
        seen.append(client.get("/v1/models").content)
    return seen


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Everything that was written or answered, by where it was found."""
    folder = tmp_path_factory.mktemp("canary")
    with FakeUpstream() as upstream:
        main = {
            **provider(upstream.url, max_retries=0),
            "api_key": UPSTREAM_SECRET,
            "headers": {"x-extra": HEADER_SECRET},
        }
        with running_gateway(folder, providers(main=main), flags=("--log-level", "debug")) as gateway:
            answers = ask_in_every_way(gateway, upstream)
            key = gateway.key
        assert upstream.requests[0].bearer == UPSTREAM_SECRET
        assert upstream.requests[0].headers["x-extra"] == HEADER_SECRET
    found = {f"answer {number}": answer for number, answer in enumerate(answers)}
    found["log"] = gateway.log_path.read_bytes()
    for path in sorted(Path(gateway.data_dir).rglob("*")):
        if path.is_file():
            found[path.name] = path.read_bytes()
    assert "gateway.db" in found and b'"request_id"' in found["log"]
    return {**found, "": key.encode()}


@pytest.mark.parametrize("secret", [UPSTREAM_SECRET, HEADER_SECRET, STRANGER, "the gateway's key"])
def test_no_secret_is_written_or_answered(traces: dict[str, bytes], secret: str) -> None:
    wanted = traces[""] if secret == "the gateway's key" else secret.encode()
    assert [place for place, text in traces.items() if place and wanted in text] == []


@pytest.mark.parametrize("text", [PROMPT, ANSWER])
def test_no_prompt_and_no_answer_is_kept(traces: dict[str, bytes], text: str) -> None:
    kept = [place for place, found in traces.items() if place and text.encode() in found]
    assert [place for place in kept if not place.startswith("answer")] == []


def test_an_upstreams_error_that_quotes_the_prompt_is_not_logged(tmp_path: Path) -> None:
    with FakeUpstream(echo) as upstream:
        main = {**provider(upstream.url, max_retries=0), "api_key": UPSTREAM_SECRET}
        with running_gateway(tmp_path, providers(main=main)) as gateway:
            body = {"model": "fake", "messages": [{"role": "user", "content": PROMPT}]}
            answer = httpx.post(gateway.url + "/v1/chat/completions", json=body, headers=gateway.auth)
        assert answer.status_code == 400
        assert UPSTREAM_SECRET not in answer.text
        assert PROMPT not in gateway.log() and UPSTREAM_SECRET not in gateway.log()
