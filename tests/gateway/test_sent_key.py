"""What programs and people put where a key belongs: it is read, or the 401 says what it is."""

from __future__ import annotations

import pytest

from headrace.gateway.key_index import KEY_CHARS
from headrace.gateway.key_secrets import PREFIX
from headrace.gateway.sent_key import hint, sent_key

KEY = PREFIX + "k" * (KEY_CHARS - len(PREFIX))


@pytest.mark.parametrize("header", [b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key"])
@pytest.mark.parametrize(
    "form",
    [
        "Bearer {}",
        "bearer Bearer {}",
        'Bearer "{}"',
        '"Bearer {}"',
        "Bearer <{}>",
        "Bearer {}\u200b",
        "\ufeffBearer {}",
    ],
)
def test_a_key_is_read_as_copying_leaves_it_in_every_header(header: bytes, form: str) -> None:
    assert sent_key({header: form.format(KEY).encode()}, None).value == KEY


def test_the_same_key_with_and_without_bearer_is_no_conflict() -> None:
    headers = {b"authorization": f"Bearer {KEY}".encode(), b"x-api-key": f"Bearer {KEY}".encode()}
    assert not sent_key(headers, None).conflicting
    headers[b"api-key"] = b"another"
    assert sent_key(headers, None).conflicting


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ("$TAOTOKEN_API_KEY", "variable was not filled in"),
        ("{{ api_key }}", "variable was not filled in"),
        ("your key", "the key itself belongs in its place"),
        ("YOUR_API_KEY", "the key itself belongs in its place"),
        ("%API_KEY%", "the key itself belongs in its place"),
        ("sk-xxxxxxxx", "the key itself belongs in its place"),
        ("EMPTY", "filler word"),
        ("sk-proj-abcdef", "another service"),
        (KEY[:-1], f"{KEY_CHARS - 1} characters where {KEY_CHARS} are right"),
        (KEY, "a wrong character"),
    ],
)
def test_what_is_no_key_is_told_by_its_looks(sent: str, says: str) -> None:
    assert says in hint(sent, PREFIX, KEY_CHARS)
