"""The reader of server-sent events: any cut of the bytes gives the same events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.protocol.sse_reader import EventTooLong, ServerEvent, SseReader
from tests.gateway.answers import cut


def events(*pieces: bytes) -> list[ServerEvent]:
    reader = SseReader()
    found = [event for piece in pieces for event in reader.feed(piece)]
    return found + reader.finish()


def test_an_event_has_a_name_and_data():
    assert events(b"event: ping\ndata: {}\n\ndata: [DONE]\n\n") == [
        ServerEvent("ping", "{}"),
        ServerEvent(None, "[DONE]"),
    ]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_lines_end_in_lf_crlf_or_cr(newline: bytes):
    stream = newline.join([b"data: a", b"data: b", b"", b"data:c", b"", b""])
    assert events(stream) == [ServerEvent(None, "a\nb"), ServerEvent(None, "c")]


def test_comments_ids_retries_and_a_byte_order_mark_are_no_data():
    assert events(b"\xef\xbb\xbf: hello\nid: 7\nretry: 10\n\n: keep-alive\n\ndata: x\n\n") == [ServerEvent(None, "x")]


def test_one_blank_after_the_colon_is_not_data_and_a_second_is():
    assert events(b"data:  x \n\n") == [ServerEvent(None, " x ")]


def test_the_last_event_counts_without_its_blank_line():
    assert events(b"data: x\n") == events(b"data: x") == [ServerEvent(None, "x")]


def test_a_character_cut_in_two_is_whole_again():
    data = "data: Grüße 水\n\n".encode()
    assert events(*[data[place : place + 1] for place in range(len(data))]) == [ServerEvent(None, "Grüße 水")]


def test_an_event_without_end_is_refused_and_not_kept():
    for piece in (b"x" * 1200, b"data: " + b"x" * 1200 + b"\n", b"data: 0123456789\n" * 100):
        reader = SseReader(limit_bytes=1000)
        with pytest.raises(EventTooLong):
            reader.feed(piece)


def test_many_small_events_are_no_long_one():
    reader = SseReader(limit_bytes=100)
    assert sum(len(reader.feed(b"data: 0123456789\n\n")) for _ in range(100)) == 100
    assert reader.is_between_events


lines = st.lists(
    st.sampled_from([b"data: a", b"data:b ", b"event: e", b": c", b"", b"data", b"id: 1", b"x"]), max_size=20
)


@settings(max_examples=200, deadline=None)
@given(lines, st.sampled_from([b"\n", b"\r\n", b"\r"]), st.lists(st.integers(0, 300), max_size=10))
def test_any_cut_gives_the_same_events(rows: list[bytes], newline: bytes, places: list[int]):
    stream = newline.join(rows)
    assert events(*cut(stream, places)) == events(stream)
