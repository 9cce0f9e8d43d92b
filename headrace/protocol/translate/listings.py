"""Small answers in each dialect's shape: the list of models, one model, a count of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from headrace.protocol.translate import wire
from headrace.protocol.translate.conversation import (
    Conversation,
    Document,
    Image,
    Part,
    Redacted,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)
from headrace.protocol.translate.events import Dialect, estimated_tokens
from headrace.protocol.translate.wire import Json

TOKENS_PER_TURN = 4
"""What a chat template writes around a message."""
TOKENS_PER_IMAGE = 1000
TOKENS_PER_DOCUMENT = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A model as clients see it. `created_s` in Unix seconds."""

    id: str
    display_name: str | None = None
    created_s: int = 0
    context_window: int | None = None
    owned_by: str = "headrace"


def openai_model(card: ModelCard) -> Json:
    """`max_model_len` is vLLM's word for the context window, and several clients read it."""
    model: Json = {"id": card.id, "object": "model", "created": card.created_s, "owned_by": card.owned_by}
    if card.display_name:
        model["display_name"] = card.display_name
    if card.context_window is not None:
        model["context_window"] = model["max_model_len"] = card.context_window
    return model


def openai_models(cards: Sequence[ModelCard]) -> Json:
    """`data` for OpenAI's clients, and `models` for Codex, which reads nothing else and falls back to its own
    list when an entry lacks a field that its release wants: an empty list tells it nothing and breaks nothing."""
    return {"object": "list", "data": [openai_model(card) for card in cards], "models": []}


def anthropic_model(card: ModelCard) -> Json:
    model: Json = {
        "type": "model",
        "id": card.id,
        "display_name": card.display_name or card.id,
        "created_at": datetime.fromtimestamp(card.created_s, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
    }
    if card.context_window is not None:
        model["max_input_tokens"] = card.context_window
    return model


def anthropic_models(
    cards: Sequence[ModelCard], *, limit: int = 20, after_id: str | None = None, before_id: str | None = None
) -> Json:
    """One page, as the query's `limit`, `after_id` and `before_id` ask. An unknown id begins at the start."""
    ids = [card.id for card in cards]
    start, stop = 0, len(cards)
    if after_id in ids:
        start = ids.index(after_id) + 1
    if before_id in ids:
        stop = ids.index(before_id)
        start = max(start, stop - limit)
    page = cards[start : min(stop, start + limit)]
    more = start > 0 if before_id in ids else start + len(page) < stop
    return {
        "data": [anthropic_model(card) for card in page],
        "has_more": more,
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
    }


def token_count(dialect: Dialect, input_tokens: int) -> Json:
    """The answer to /messages/count_tokens and to /responses/input_tokens."""
    return {**({"object": "response.input_tokens"} if dialect == "responses" else {}), "input_tokens": input_tokens}


def estimated_prompt_tokens(conversation: Conversation) -> int:
    """About how many tokens a request's prompt has, for servers that have no tokenizer of the model."""
    num_bytes, flat = 0, 0
    for turn in conversation.turns:
        flat += TOKENS_PER_TURN
        for part in turn.parts:
            part_bytes, part_flat = _size(part)
            num_bytes += part_bytes
            flat += part_flat
    for tool in conversation.tools:
        num_bytes += len(wire.encode_text([tool.name, tool.description, tool.schema]).encode())
    return flat + estimated_tokens(num_bytes)


def _size(part: Part) -> tuple[int, int]:
    """Bytes of text, and tokens that do not follow from text."""
    match part:
        case Text() | Thinking():
            return len(part.text.encode()), 0
        case ToolCall():
            return len(part.name.encode()) + len(part.arguments.encode()), TOKENS_PER_TURN
        case ToolResult():
            sizes = [_size(inner) for inner in part.parts]
            return sum(size[0] for size in sizes), sum(size[1] for size in sizes)
        case Image():
            return 0, TOKENS_PER_IMAGE
        case Document():
            return (len(part.text.encode()), 0) if part.text is not None else (0, TOKENS_PER_DOCUMENT)
        case Redacted():
            return len(part.data), 0
    return 0, TOKENS_PER_DOCUMENT
