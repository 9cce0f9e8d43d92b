"""Putting the blocks of an answer one after the other, whatever order their pieces come in.

Upstreams may write several tool calls at once: a piece of the first, a piece of the second, a piece of the first.
Other dialects have one open block at a time. The block at the head streams; pieces of later ones wait until the
head is known to be over: it was closed, or it is text, or its arguments are complete JSON.

    text "Hi" | call 0 '{"a"' | call 1 '{}' | call 0 ': 1}'
    -> Open text, "Hi", Close, Open call 0, '{"a"', ': 1}', Close, Open call 1, '{}'
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import msgspec

from headrace.protocol.translate.events import BlockKind, Close, Event, Open, Piece
from headrace.protocol.translate.failures import invalid_answer


class _Block:
    __slots__ = ("data", "id", "is_closed", "is_open", "kind", "name", "pieces", "sent", "signature", "was_told")

    def __init__(self, kind: BlockKind, id: str, name: str, data: str) -> None:
        self.kind: BlockKind = kind
        self.id = id
        self.name = name
        self.data = data
        self.signature: str | None = None
        self.pieces: list[str] = []
        """Waiting to be told, or of a call all there are."""
        self.sent = 0
        self.was_told = False
        self.is_open = False
        self.is_closed = False

    def is_over(self) -> bool:
        if self.is_closed or self.kind != "call":
            return True
        if not self.pieces or not self.pieces[-1].rstrip().endswith("}"):
            return False
        return _is_json("".join(self.pieces))


class Blocks:
    """`open`, `add` and `close` give the events that can be told now; `close_all` the rest. Blocks have keys of
    the reader's choice. Raises ApiError (502) when a piece comes too late or a tool call never got a name."""

    def __init__(self) -> None:
        self._queue: list[_Block] = []
        self._known: dict[Hashable, _Block] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._known

    def open(self, key: Hashable, kind: BlockKind, id: str = "", name: str = "", data: str = "") -> list[Event]:
        block = _Block(kind, id, name, data)
        self._known[key] = block
        self._queue.append(block)
        return list(self._advance())

    def name(self, key: Hashable, id: str, name: str) -> list[Event]:
        """Fill in what the first piece of a call lacked."""
        block = self._known[key]
        block.id = block.id or id
        block.name = block.name or name
        return list(self._advance())

    def id_of(self, key: Hashable) -> str:
        return self._known[key].id

    def has_pieces(self, key: Hashable) -> bool:
        return self._known[key].was_told

    def add(self, key: Hashable, text: str) -> list[Event]:
        block = self._known[key]
        if block not in self._queue:
            if text.strip():
                raise invalid_answer("a part of it came after what it belongs to was complete.")
            return []
        if text:
            block.pieces.append(text)
            block.was_told = True
        return list(self._advance())

    def sign(self, key: Hashable, signature: str) -> None:
        block = self._known[key]
        block.signature = (block.signature or "") + signature

    def close(self, key: Hashable) -> list[Event]:
        self._known[key].is_closed = True
        return list(self._advance())

    def close_all(self) -> list[Event]:
        for block in self._queue:
            block.is_closed = True
        return list(self._advance())

    def _advance(self) -> Iterable[Event]:
        while self._queue:
            head = self._queue[0]
            if not head.is_open:
                if head.kind == "call" and not head.name:
                    if head.is_closed:
                        raise invalid_answer("a tool call has no name.")
                    return
                head.is_open = True
                yield Open(head.kind, head.id, head.name, head.data)
            for piece in head.pieces[head.sent :]:
                yield Piece(piece)
            head.sent = len(head.pieces)
            if head.kind != "call":  # Only arguments are looked at again.
                head.pieces, head.sent = [], 0
            if not (head.is_closed or (len(self._queue) > 1 and head.is_over())):
                return
            if head.kind == "call" and not "".join(head.pieces).strip():
                yield Piece("{}")
            yield Close(head.signature)
            del self._queue[0]
            head.pieces.clear()


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
