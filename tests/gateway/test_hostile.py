"""What a hostile client or a broken upstream may send: no fault of ours comes of it, and nothing is free or lost."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from headrace.gateway.config_load import InvalidConfig, load_config
from headrace.gateway.keys import KeyRequest
from headrace.gateway.upstream_errors import described, names_thing
from tests.gateway import replies
from tests.gateway.dialects import WAYS, Way, ask
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.gateways import ThreadedGateway, provider, threaded_gateway
from tests.gateway.replies import Reply

CHAT = "/v1/chat/completions"
SHORT = {"connect": 1, "first_token": 1, "idle": 1, "total": 2}
PRICE = {"input": 1, "output": 1_000_000}
"""An output token costs one unit of the currency."""


@dataclasses.dataclass(frozen=True)
class Set:
    gateway: ThreadedGateway
    openai: FakeUpstream
    anthropic: FakeUpstream

    def upstream(self, way: Way) -> FakeUpstream:
        return self.openai if way.upstream == "openai" else self.anthropic


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Set]:
    with FakeUpstream(without=("/responses",)) as openai, FakeUpstream() as anthropic:
        config = {
            "providers": {
                "main": provider(openai.url, "main", timeouts=SHORT, max_retries=0),
                "claude": provider(
                    anthropic.url, dialect="anthropic", models=["claude-model"], timeouts=SHORT, max_retries=0
                ),
            },
            "models": {"dear": {"upstream": "main", "upstream_model": "fake", "price": PRICE}},
            "routing": {"default": "main"},
        }
        with threaded_gateway(tmp_path_factory.mktemp("hostile"), json.dumps(config)) as gateway:
            yield Set(gateway, openai, anthropic)


@pytest.fixture(autouse=True)
def _fresh(parts: Set) -> None:
    parts.gateway.forget()
    parts.openai.forget()
    parts.anthropic.forget()


# Upstreams

ODD = (
    None,
    True,
    False,
    0,
    -1,
    1.5,
    10**18,
    2**63,
    10**25,
    "",
    "x",
    "\ud7ff",
    [],
    [None],
    ["x"],
    [[]],
    {},
    {"a": 1},
    [{}],
)


def damaged(value: Any, draw: random.Random) -> Any:
    """The value with one of its parts, at any depth, replaced by something odd."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        name = draw.choice(list(value))
        return {**value, name: damaged(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.85:
        place = draw.randrange(len(value))
        return [*value[:place], damaged(value[place], draw), *value[place + 1 :]]
    return draw.choice(ODD)


def with_damage(reply: Reply, draw: random.Random) -> Reply:
    """The reply with one of its events, or its body, damaged."""
    places = [place for place, part in enumerate(reply.parts) if b"{" in part]
    place = draw.choice(places)
    before, _, text = reply.parts[place].rpartition(b"data: ")
    value = json.dumps(damaged(json.loads(text), draw)).encode()
    part = before + b"data: " + value + b"\n\n" if reply.is_stream else value
    return dataclasses.replace(reply, parts=(*reply.parts[:place], part, *reply.parts[place + 1 :]))


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_whatever_stands_in_an_answer_is_no_fault_of_ours(
    parts: Set, way: Way, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    draw = random.Random(7)
    gateway = parts.gateway
    for number in range(60):
        tool = "get_weather" if number % 3 == 0 and way.client != "completions" else None
        reply = way.reply(stream, tool=tool) if tool else way.reply(stream, "Falling ", "water ", "does.")
        gateway.forget()
        parts.upstream(way).script(with_damage(reply, draw))
        answer = gateway.client.post(way.path, json=way.body(stream=stream, tool=tool), timeout=10)
        assert answer.status_code in (200, 400, 404, 429, 502, 503, 504), answer.text
        assert "internal_error" not in answer.text
    assert [record.getMessage() for record in caplog.records if record.name.startswith("headrace")] == []
    assert gateway.wait_until_idle()
    stored = gateway.stored_events()
    assert len(stored) >= 60 and gateway.ledger.usage.write_error is None


NOW = datetime.now(UTC)
RETRY_AFTER = {
    "7": "7",
    "0.2": "1",
    "-5": "1",
    format_datetime(NOW + timedelta(days=30), usegmt=True): "604800",
    format_datetime(NOW - timedelta(minutes=10), usegmt=True): "1",
    "1e300": "604800",
    "inf": None,
    "1e999": None,
    "nan": None,
    "soon": None,
    "": None,
    "Wed, 99 Foo 2026 99:99:99 GMT": None,
}


@pytest.mark.parametrize("told", RETRY_AFTER)
@pytest.mark.parametrize("status", [429, 503])
def test_however_an_upstream_says_when_to_ask_again(parts: Set, told: str, status: int) -> None:
    parts.openai.script(replies.error(status, "Too much.").with_headers(retry_after=told))
    answer = ask(parts.gateway.client, Way("chat", "openai"), stream=False)
    assert answer.status == status
    expected = RETRY_AFTER[told] or ("2" if status == 503 else None)
    assert answer.headers.get("retry-after") == expected


RAW = {
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", 502),
    "not modified": (b"HTTP/1.1 304 Not Modified\r\n\r\n", 502),
    "another protocol": (b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n", 502),
    "continue for ever": (b"HTTP/1.1 100 Continue\r\n\r\n" * 3, 502),
    "a status of 999": (b"HTTP/1.1 999 What\r\ncontent-length: 2\r\n\r\n{}", 502),
    "length and chunks": (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 502),
    "a folded header": (b"HTTP/1.1 200 OK\r\nx-a: b\r\n c\r\ncontent-length: 2\r\n\r\n{}", 502),
    "a choice that is none": (b'HTTP/1.1 200 OK\r\ncontent-length: 18\r\n\r\n{"choices":[null]}', 502),
    "a list of errors": (b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n[{"error":"no"}]', 502),
}


@pytest.mark.parametrize("what", RAW)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_that_is_none_is_a_proper_error(parts: Set, what: str, stream: bool) -> None:
    sent, status = RAW[what]
    parts.openai.script(Reply(raw=sent))
    answer = ask(parts.gateway.client, Way("chat", "openai"), stream=stream)
    assert (answer.status, answer.is_complete) == (status, False)
    assert answer.code is not None and answer.code.startswith("upstream_")
    assert parts.gateway.event(answer).output_tokens == 0


# Clients

LARGE = {
    "a negative limit": {"max_tokens": -1},
    "a negative limit that takes away the prompt's tokens": {"max_tokens": -(10**12)},
    "two limits, the smaller one first": {"max_tokens": 1, "max_completion_tokens": 50},
    "two limits, the larger one first": {"max_completion_tokens": 50, "max_tokens": 1},
    "many answers": {"max_tokens": 1, "n": 50},
    "the best of many answers": {"max_tokens": 1, "best_of": 50},
}


@pytest.mark.parametrize("what", LARGE)
def test_no_way_to_write_a_request_gets_round_a_budget(parts: Set, what: str) -> None:
    """The budget is what 20 tokens cost."""
    key = parts.gateway.new_key(what, budget_micros=20_000_000)
    body = {"model": "dear", "messages": [{"role": "user", "content": "Hi"}]}
    with parts.gateway.client_with(key) as client:
        refused = client.post(CHAT, json={**body, **LARGE[what]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
        assert parts.openai.requests == []
        assert client.post(CHAT, json={**body, "max_tokens": 10}).status_code == 200


def test_a_proxy_that_is_no_address_is_refused_at_the_start(tmp_path: Path) -> None:
    """Not at the first request, and not at each."""
    path = tmp_path / "gateway.json"
    for proxies, is_right in ((["proxy.local"], False), (["10.0.0.0/33"], False), (["10.0.0.1", "fd00::/8"], True)):
        server = {"admin": {"trusted_proxies": proxies}}
        path.write_text(json.dumps({"providers": {"a": {"base_url": "http://a"}}, "server": server}))
        if is_right:
            assert load_config(path, {}).listen.admin.trusted_proxies == tuple(proxies)
        else:
            with pytest.raises(InvalidConfig, match="which is no address"):
                load_config(path, {})


FORWARDED = {
    "192.0.2.7": True,
    "evil, 192.0.2.7": True,
    "192.0.2.7, 203.0.113.9": False,
    "192.0.2.7, 127.0.0.1": True,
    "192.0.2.7, ::ffff:127.0.0.1": True,
    "203.0.113.9, 192.0.2.7": True,
    "": False,
    "unknown": False,
    "192.0.2.7:4711": False,
}
"""What a proxy at 127.0.0.1 says of where a request came from, and whether a key for 192.0.2.7 may be used."""


@pytest.mark.parametrize("sent", FORWARDED)
def test_only_what_a_believed_proxy_added_is_believed(parts: Set, sent: str) -> None:
    gateway = parts.gateway
    secret = gateway.ledger.store.create(KeyRequest(name=f"at {sent}", allowed_ips=("192.0.2.7",)))[1]
    gateway.ledger.keys.reload()
    before = gateway.state.snapshot
    admin = dataclasses.replace(before.listen.admin, trusted_proxies=("127.0.0.1/32",))
    try:
        with gateway.client_with(secret) as client:
            body = {"model": "fake", "messages": []}
            headers = {"x-forwarded-for": sent}
            assert client.post(CHAT, json=body, headers=headers).status_code == 403  # nobody is believed yet
            gateway.state.snapshot = dataclasses.replace(before, listen=dataclasses.replace(before.listen, admin=admin))
            answer = client.post(CHAT, json=body, headers=headers)
            assert answer.status_code == (200 if FORWARDED[sent] else 403), answer.text
    finally:
        gateway.state.snapshot = before


def test_a_key_in_the_address_is_none_and_goes_no_further(parts: Set) -> None:
    key = parts.gateway.key
    body = {"model": "fake", "messages": []}
    for path in (CHAT, "/v1/files", "/v1/audio/speech"):
        query = f"?key={key}&api-version=1&x=sk%2Dhr%2Da&token={key}"
        answer = parts.gateway.client.post(path + query, json=body)
        assert answer.status_code in (200, 400, 502), answer.text
        target = parts.openai.last.target
        assert "api-version=1" in target and "sk-hr-" not in unquote(target)
    assert httpx.post(parts.gateway.url + CHAT + f"?key={key}", json=body).status_code == 401


@pytest.mark.timeout(30)
def test_no_error_of_an_upstream_takes_long_to_be_understood() -> None:
    assert described(b"<title" * 40_000, {}).startswith("a body of 240000 bytes")
    assert described(b"<html><title lang=en>Bad gateway</title>", {}) == "an HTML page titled 'Bad gateway'"
    assert not names_thing({"message": "file no such model " * 40_000})
