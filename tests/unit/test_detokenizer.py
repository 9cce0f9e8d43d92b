"""A stream never shows part of a character, and its pieces join to what decoding the whole would give."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.model_files import open_model
from headrace.text.detokenizer import Detokenizer
from headrace.text.tokenizer import Tokenizer
from tests.small_models import bundled_gguf

BUNDLED = Tokenizer.load(open_model(bundled_gguf()))
SINGLE_BYTE = {BUNDLED.token_bytes(i): i for i in range(400) if len(BUNDLED.token_bytes(i)) == 1}


def pieces(token_ids: list[int], size: int = 1) -> list[str]:
    detokenizer = Detokenizer(BUNDLED)
    out = [detokenizer.add(token_ids[i : i + size]) for i in range(0, len(token_ids), size)]
    return [*out, detokenizer.flush()]


def by_bytes(raw: bytes) -> list[int]:
    return [SINGLE_BYTE[bytes([b])] for b in raw]


# Any ids at all, but many that are single bytes, so that characters are broken in every way.
token_lists = st.lists(st.one_of(st.integers(0, 49151), st.sampled_from(sorted(SINGLE_BYTE.values()))), max_size=40)


@settings(deadline=None)
@given(token_lists, st.integers(1, 7), st.booleans())
def test_any_split_joins_to_the_whole_text(token_ids: list[int], size: int, skip: bool) -> None:
    detokenizer = Detokenizer(BUNDLED, skip_special_tokens=skip)
    out = [detokenizer.add(token_ids[i : i + size]) for i in range(0, len(token_ids), size)]
    assert "".join([*out, detokenizer.flush()]) == BUNDLED.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", ["naïve Größe", "你好，世界", "👩\u200d👩\u200d👧", "こんにちは", "\t<|x|>\n"])
def test_a_character_comes_out_whole_with_the_token_that_completes_it(text: str) -> None:
    out = pieces(BUNDLED.encode(text, add_special_tokens=False))
    assert "".join(out) == text
    assert all("�" not in piece for piece in out)


def test_an_unfinished_character_waits_for_its_bytes() -> None:
    first, second, third, last = by_bytes("😀".encode())
    detokenizer = Detokenizer(BUNDLED)
    assert detokenizer.add([first, second]) == ""
    assert detokenizer.add([third]) == ""
    assert detokenizer.add([last]) == "😀"
    assert detokenizer.flush() == ""


def test_a_character_left_unfinished_is_replaced_at_the_end_only() -> None:
    assert pieces(by_bytes("a世".encode()[:-1])) == ["a", "", "", "�"]


def test_bytes_that_can_never_be_a_character_are_replaced_at_once() -> None:
    raw = b"a\x93b"
    assert pieces(by_bytes(raw)) == ["a", "�", "b", ""]


def test_text_that_continues_a_prompt_s_broken_character_does_not_show_the_prompt() -> None:
    tail = by_bytes("世".encode())[1:]
    assert "".join(pieces(tail)) == "世".encode()[1:].decode(errors="replace")


def test_special_tokens_are_left_out_unless_wanted() -> None:
    assert Detokenizer(BUNDLED).add([1, 19556, 2]) == "Hello"
    assert Detokenizer(BUNDLED, skip_special_tokens=False).add([1, 19556, 2]) == "<|im_start|>Hello<|im_end|>"
