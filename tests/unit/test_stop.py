"""Stop strings are found wherever a stream is cut, and nothing is held back that could not become one."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.stop import StopChecker


def run(pieces: list[str], stop: list[str], include: bool = False) -> tuple[str, str | None]:
    checker = StopChecker(stop, include)
    out = ""
    for piece in pieces:
        emitted, hit = checker.add(piece)
        out += emitted
        if hit is not None:
            return out, hit
    return out + checker.flush(), None


def first_match(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    """The rule itself, written naively: grow the text by a character until it ends with a stop string."""
    for end in range(1, len(text) + 1):
        for wanted in stop:
            if text[:end].endswith(wanted):
                return text[: end if include else end - len(wanted)], wanted
    return text, None


letters = st.text("ab", max_size=30)
stops = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4)


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    text = draw(letters)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@settings(deadline=None)
@given(cut_texts(), stops, st.booleans())
def test_any_cut_of_the_text_gives_the_same(pieces: list[str], stop: list[str], include: bool) -> None:
    assert run(pieces, stop, include) == first_match("".join(pieces), stop, include)


@settings(deadline=None)
@given(cut_texts(), stops)
def test_exactly_the_longest_beginning_of_a_stop_string_is_held(pieces: list[str], stop: list[str]) -> None:
    checker = StopChecker(stop)
    out = seen = ""
    for piece in pieces:
        emitted, hit = checker.add(piece)
        if hit is not None:
            return
        out += emitted
        seen += piece
        held = max((n for s in stop for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert out == seen[: len(seen) - held]


def test_a_stop_string_over_three_pieces_is_cut_out() -> None:
    assert run(["Hello <", "|en", "d|> more"], ["<|end|>"]) == ("Hello ", "<|end|>")


def test_text_goes_out_as_soon_as_it_cannot_be_a_stop_string() -> None:
    checker = StopChecker(["END"])
    assert checker.add("the E") == ("the ", None)
    assert checker.add("ight") == ("Eight", None)
    assert checker.flush() == ""


def test_the_stop_string_can_be_kept() -> None:
    assert run(["one. t", "wo"], [". "], include=True) == ("one. ", ". ")


def test_of_two_that_end_together_the_first_listed_wins() -> None:
    assert run(["xab"], ["b", "ab"]) == ("xa", "b")
    assert run(["xab"], ["ab", "b"]) == ("x", "ab")


def test_the_match_that_is_complete_first_wins_whatever_the_order() -> None:
    assert run(["a long text"], ["text", "long"]) == ("a ", "long")


def test_after_a_hit_nothing_more_comes_out() -> None:
    checker = StopChecker(["."])
    assert checker.add("a.b") == ("a", ".")
    assert checker.add("c") == ("", ".")
    assert checker.flush() == ""
    assert checker.hit == "."


def test_unchecked_text_passes_and_is_no_part_of_a_match() -> None:
    checker = StopChecker(["ab"])
    assert checker.add("ab a", check=False) == ("ab a", None)
    assert checker.add("b") == ("b", None)
    assert checker.add("ab") == ("", "ab")


def test_no_stop_strings_let_everything_pass() -> None:
    checker = StopChecker([])
    assert checker.add("text") == ("text", None)
    assert checker.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopChecker(["a", ""])
