"""Responses that clients may ask for again or go on from: in memory, the newest that fit two limits.

Each holds its whole input, earlier turns included, so going on from one needs no other.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.protocol import errors

Json = dict[str, Any]

MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20
"""Of responses and inputs as JSON."""

_ID_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs", "custom_tool_call": "ctc"}

_encode = msgspec.json.Encoder().encode


@dataclass
class StoredResponse:
    """`response` as it stands now; `items` are its input; `task` generates it, None once it is done."""

    response: Json
    items: list[Json]
    task: asyncio.Task[None] | None = None
    num_bytes: int = field(default=0)


class ResponseStore:
    """The newest responses. Looking one up keeps it."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def get(self, response_id: str, param: str = "response_id") -> StoredResponse:
        """Raises ApiError (404) naming `param`, where the id stood."""
        stored = self._stored.get(response_id)
        if stored is None:
            raise errors.response_not_found(response_id, param)
        self._stored.move_to_end(response_id)
        return stored

    def item(self, item_id: str) -> Json | None:
        """An item of a response that is done, of its input or its output."""
        for stored in reversed(self._stored.values()):
            if stored.task is None:
                for item in (*stored.response["output"], *stored.items):
                    if isinstance(item, dict) and item.get("id") == item_id:
                        return item
        return None

    def put(self, response: Json, items: list[Json], task: asyncio.Task[None] | None = None) -> None:
        """Keep a response, in the place of an earlier state of it. One that is too large alone is not kept."""
        response_id = str(response["id"])
        self.remove(response_id)
        stored = StoredResponse(response, items, task, len(_encode(response)) + len(_encode(items)))
        self._stored[response_id] = stored
        self._num_bytes += stored.num_bytes
        while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
            oldest = next((key for key, held in self._stored.items() if held.task is None), None)
            if oldest is None:
                return
            self.remove(oldest)

    def remove(self, response_id: str) -> None:
        stored = self._stored.pop(response_id, None)
        if stored is not None:
            self._num_bytes -= stored.num_bytes


def input_items(given: object) -> list[Json]:
    """A request's `input` as items with ids, messages with parts; what is malformed is left for its reader."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}] if given else []
    if not isinstance(given, list):
        return []
    return [_item(item) if isinstance(item, dict) else item for item in given]


def _item(item: Json) -> Json:
    kind = str(item.get("type") or "message")
    named = {"id": item.get("id") or f"{_ID_PREFIXES.get(kind, 'msg')}_{uuid.uuid4().hex}", **item, "type": kind}
    named["id"] = item.get("id") or named["id"]
    content = item.get("content")
    if kind == "message" and isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        named["content"] = [{"type": part, "text": content}]
    return named


def page(items: Sequence[Json], *, limit: int, newest_first: bool, after: str | None) -> Json:
    """A list of items as the API gives it, from behind the item `after`."""
    ordered = list(reversed(items)) if newest_first else list(items)
    ids = [str(item.get("id")) for item in ordered]
    start = ids.index(after) + 1 if after in ids else 0
    shown = ordered[start : start + limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0].get("id") if shown else None,
        "last_id": shown[-1].get("id") if shown else None,
        "has_more": start + len(shown) < len(ordered),
    }
