"""Messages between two processes: whole, in order, of any size, however the bytes arrive and whoever waits."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.protocol.message_socket import MessageSocket, PeerGone


@contextlib.contextmanager
def connected() -> Iterator[tuple[MessageSocket, MessageSocket]]:
    a, b = map(MessageSocket, socket.socketpair())
    try:
        yield a, b
    finally:
        a.close()
        b.close()


def received(end: MessageSocket) -> list[bytes]:
    messages = []
    while (message := end.receive()) is not None:
        messages.append(message)
    return messages


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=40) | st.integers(0, 200_000).map(bytes), max_size=12), st.randoms())
def test_messages_arrive_whole_and_in_order_whatever_the_pieces(messages: list[bytes], chance: random.Random) -> None:
    raw, other = socket.socketpair()
    with raw, contextlib.closing(MessageSocket(other)) as end:
        stream = b"".join(struct.pack("<I", len(message)) + message for message in messages)
        got: list[bytes] = []
        at = 0
        while at < len(stream):
            size = chance.choice((1, 3, 4, 5, 1000, 70_000))
            at += raw.send(stream[at : at + size])
            got += received(end)
        assert got == messages


def test_what_the_system_does_not_take_goes_later() -> None:
    with connected() as (a, b):
        messages = [bytes([i]) * (30_000 * i) for i in range(40)]
        done = [a.send(message) for message in messages]
        assert done[0] and not done[-1]
        got: list[bytes] = []
        while not a.flush():
            got += received(b)
            a.wait(None, to_send=True)
        assert got + received(b) == messages
        assert a.send(b"next")
        assert received(b) == [b"next"]


def test_the_end_comes_behind_the_last_message() -> None:
    with connected() as (a, b):
        b.send(b"unread by a")
        a.send(b"one")
        a.send(b"two")
        a.close()
        assert [b.receive(), b.receive()] == [b"one", b"two"]
        for _ in range(2):
            with pytest.raises(PeerGone):
                b.receive()
        with pytest.raises(PeerGone):
            b.send(b"to nobody")


def test_a_message_cut_short_by_the_end_is_not_delivered() -> None:
    raw, other = socket.socketpair()
    with contextlib.closing(MessageSocket(other)) as end:
        raw.send(struct.pack("<I", 10) + b"half")
        assert end.receive() is None
        raw.close()
        with pytest.raises(PeerGone):
            end.receive()


def test_the_end_is_noticed_by_who_still_has_something_to_send() -> None:
    with connected() as (a, b):
        assert not a.send(bytes(10_000_000))
        b.close()
        with pytest.raises(PeerGone):
            a.flush()


def test_waiting_ends_when_something_comes_and_in_time_when_nothing_does() -> None:
    with connected() as (a, b):
        b.wait(0.01)
        assert b.receive() is None
        a.send(b"")
        b.wait(None)
        assert b.receive() == b""
        a.close()
        b.wait(None)
