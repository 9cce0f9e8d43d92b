"""The gateway's log lines and what is taken out of them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from headrace.gateway import logs
from headrace.gateway.logs import GatewayLog, RequestLine, log_request
from headrace.gateway.redact import Redactor, clean

KEY = "sk-hr-Zk3vN9qL0aTt2Xw8RmB5yC7dF1gH4jK6"
UPSTREAM_SECRET = "upstream secret/42"


class Log:
    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.log = GatewayLog(self.stream, redactor=Redactor([UPSTREAM_SECRET]))

    def close(self) -> None:
        self.log.close()

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    @property
    def lines(self) -> list[dict]:
        return [json.loads(line) for line in self.text.splitlines()]


@pytest.fixture
def log() -> Iterator[Log]:
    root, headrace = logging.getLogger(), logging.getLogger("headrace")
    before = root.handlers[:], root.level, headrace.level
    made = Log()
    made.log.start("info")
    yield made
    made.close()
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    headrace.setLevel(before[2])


def test_a_request_is_one_json_line_without_empty_fields(log: Log) -> None:
    log_request(
        RequestLine(
            request_id="r1",
            key="sk-hr-Zk3v",
            method="POST",
            path="/v1/chat/completions",
            status=200,
            total_ms=8.5,
        )
    )
    log.close()
    (line,) = log.lines
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "event": "request",
        "request_id": "r1",
        "key": "sk-hr-Zk3v",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "total_ms": 8.5,
    }


def test_a_traceback_is_part_of_the_line_and_has_no_secrets(log: Log) -> None:
    try:
        raise ValueError(f"upstream said {UPSTREAM_SECRET}, we sent {KEY}")
    except ValueError:
        logs.logger.exception("a request failed with key %s", KEY)
    log.close()
    (line,) = log.lines
    assert "ValueError: upstream said [secret], we sent sk-hr-Zk3v[secret]" in line["traceback"]
    assert line["message"] == "a request failed with key sk-hr-Zk3v[secret]"
    assert KEY not in log.text and UPSTREAM_SECRET not in log.text


def test_lines_are_written_in_order_and_none_is_lost_at_the_end(log: Log) -> None:
    for number in range(3000):
        log_request(RequestLine(request_id="r", method="POST", path="/", status=number))
    log.close()
    assert [line["status"] for line in log.lines] == list(range(3000))


def test_no_secret_of_any_line_is_written(log: Log) -> None:
    for number in range(50):
        log_request(RequestLine(request_id=f"r{number}", method="GET", path=f"/v1/{KEY}", status=404))
        log_request(RequestLine(request_id=f"x-api-key: {UPSTREAM_SECRET}", method="GET", path="/api", status=404))
    log.close()
    assert {line["path"] for line in log.lines} == {"/v1/sk-hr-Zk3v[secret]", "/api"}
    assert {line["request_id"] for line in log.lines[1::2]} == {"x-api-key: [secret]"}
    assert len(log.lines) == 100


def test_lines_that_come_too_fast_are_dropped_and_counted(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_WAITING_LINES", 0)
    log_request(RequestLine(request_id="r", method="POST", path="/", status=200))
    assert log.log.num_dropped == 1


def test_a_record_that_cannot_be_formatted_does_not_end_the_log(log: Log) -> None:
    log.log.accept(logging.makeLogRecord({"name": "x", "levelno": 20, "msg": "%d of %d", "args": ("not a number",)}))
    logs.logger.info("after it")
    log.close()
    assert "unreadable" in log.lines[0]["message"]
    assert log.lines[1]["message"] == "after it"


def test_levels_below_the_configured_one_are_not_written(log: Log) -> None:
    logs.logger.debug("detail")
    log.close()
    assert log.text == ""


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        (f"Authorization: Bearer {KEY}", "Authorization: Bearer sk-hr-Zk3v[secret]"),
        (
            "Incorrect API key provided: sk-proj-abcdEFGH1234ijklMNOP.",
            "Incorrect API key provided: sk-proj-abcd[secret].",
        ),
        ("x-api-key: 0123456789abcdef", "x-api-key: [secret]"),
        ('{"api_key": "0123456789abcdef"}', '{"api_key": "[secret]"}'),
        ("Authorization: Bearer abc.def.ghi-jkl", "Authorization: Bearer [secret]"),
        ("sk-ant-api03-AbCd1234EfGh5678IjKl", "sk-ant-api03-AbCd[secret]"),
    ],
)
def test_what_looks_like_a_key_is_masked(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


@pytest.mark.parametrize(
    "text",
    [
        "key sk-hr-Zk3v was refused",
        "The bearer of good news, the skeleton-key-to-everything-in-the-house",
        "model qwen2-7b-local at http://127.0.0.1:8000/v1",
        "request 6f1e2d3c4b5a69788796a5b4c3d2e1f0 failed",
    ],
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert clean(text) == text


def test_the_word_empty_is_not_a_secret() -> None:
    assert Redactor(["EMPTY", "", "abc"]).clean("EMPTY abc") == "EMPTY abc"


def test_the_longest_known_secret_wins() -> None:
    assert Redactor(["secret-one", "secret-one-two"]).clean("a secret-one-two b") == "a [secret] b"
