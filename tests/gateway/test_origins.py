"""Pages of other origins: a browser hands an answer to those that `allowed_origins` names, and to no others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.gateways import ThreadedGateway

APP, OTHER = "https://app.example", "https://other.example"
BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def allow(gateway: ThreadedGateway, upstream: FakeUpstream) -> Iterator[Any]:
    before = gateway.state.snapshot

    def change(*origins: str) -> ThreadedGateway:
        gateway.state.snapshot = replace(before, listen=replace(before.listen, allowed_origins=origins))
        return gateway

    yield change
    gateway.state.snapshot = before


def preflight(gateway: ThreadedGateway, origin: str) -> httpx.Response:
    headers = {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": "x-a,x-b"}
    return httpx.request("OPTIONS", gateway.url + "/v1/chat/completions", headers=headers)


def test_an_allowed_page_may_send_what_it_wants_without_a_key_in_its_first_question(allow: Any) -> None:
    answer = preflight(allow(APP), APP)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (204, APP)
    assert answer.headers["access-control-allow-headers"] == "x-a,x-b"
    assert "POST" in answer.headers["access-control-allow-methods"] and answer.headers["vary"] == "Origin"


def test_another_page_is_refused_with_the_setting_that_would_allow_it(allow: Any) -> None:
    answer = preflight(allow(APP), OTHER)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert "`allowed_origins` in `[server]`" in answer.json()["message"]
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"model": "none"}], ids=["whole", "stream", "error"])
def test_every_answer_is_for_allowed_pages_only(allow: Any, more: dict[str, Any]) -> None:
    gateway = allow(APP)
    for origin, told in ((APP, APP), (OTHER, None)):
        answer = gateway.client.post("/v1/chat/completions", json=BODY | more, headers={"origin": origin})
        assert answer.headers.get("access-control-allow-origin") == told
    assert (
        "x-request-id"
        in gateway.client.get("/v1/models", headers={"origin": APP}).headers["access-control-expose-headers"]
    )


def test_a_star_is_any_page(allow: Any) -> None:
    assert preflight(allow("*"), OTHER).headers["access-control-allow-origin"] == "*"


def test_without_the_setting_no_page_is_told_anything(allow: Any) -> None:
    assert preflight(allow(), APP).status_code == 405
    assert "access-control-allow-origin" not in allow().client.get("/v1/models", headers={"origin": APP}).headers
