"""Request defaults: sampling fields that a request leaves out are filled in, nothing else is touched.

Order: the request itself, its key's plan, the model's presets, settings.json; what none of them names is left to the
engine. `stream` is never filled: whether an answer is streamed decides how the client must read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

FIELDS: dict[str, type | tuple[type, ...]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "typical_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "max_tokens": int,
    "min_tokens": int,
    "seed": int,
    "stop": (str, list),
    "reasoning_effort": str,
    "verbosity": str,
    "chat_template_kwargs": dict,
}
"""Fields that presets may hold, by the names of chat completions, and the type of each."""

SAME_FIELD: dict[str, str] = {
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "maxTokens": "max_tokens",
    "topP": "top_p",
    "stop_sequences": "stop",
}
"""Other names of these fields in requests and settings files."""

_OPENAI = frozenset(
    "temperature top_p presence_penalty frequency_penalty max_tokens seed stop reasoning_effort verbosity".split()
)
_SPELLINGS: dict[str, tuple[str, ...]] = {
    name: (name, *(other for other, same in SAME_FIELD.items() if same == name)) for name in FIELDS
}
_ALL = frozenset(FIELDS)

# The name of each field at an endpoint; a field that is not listed does not exist there.
_NAMES: dict[str, dict[str, str]] = {
    "chat": {name: name for name in _ALL},
    "completions": {name: name for name in _ALL - {"reasoning_effort", "verbosity", "chat_template_kwargs"}},
    "messages": {
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "max_tokens": "max_tokens",
        "stop": "stop_sequences",
    },
    "responses": {"temperature": "temperature", "top_p": "top_p", "max_tokens": "max_output_tokens"},
}
_NULL = b"null"


def apply_presets(
    fields: Mapping[str, msgspec.Raw],
    *layers: Mapping[str, Any],
    endpoint: str,
    extended: bool = True,
    one_of_temperature_and_top_p: bool = False,
    room_tokens: int | None = None,
) -> dict[str, msgspec.Raw]:
    """The top level of a request with absent sampling fields filled from `layers` (first one wins).

    `fields` is `msgspec.json.decode(body, type=dict[str, msgspec.Raw])`; a field that is null counts as absent.
    `extended` False: the upstream refuses what OpenAI does not have (Upstream.extended_sampling).
    `one_of_temperature_and_top_p`: Anthropic's newer models refuse both together; temperature stays.
    `room_tokens`: what the model's context has left; a preset max_tokens that may not fit is left out.
    Returns the same object when there is nothing to fill, so that the body can go on byte for byte.
    """
    names = _NAMES.get(endpoint)
    if names is None or not any(layers):
        return fields if isinstance(fields, dict) else dict(fields)
    added: dict[str, msgspec.Raw] = {}
    for name, value in _merged(layers).items():
        if name not in names or _is_given(fields, name):
            continue
        if not extended and name not in _OPENAI and endpoint in ("chat", "completions"):
            continue
        if name == "max_tokens" and room_tokens is not None and value > room_tokens:
            continue
        wire = [value] if name == "stop" and endpoint == "messages" and isinstance(value, str) else value
        added[names[name]] = msgspec.Raw(msgspec.json.encode(wire))
    if (
        one_of_temperature_and_top_p
        and "top_p" in added
        and ("temperature" in added or _is_given(fields, "temperature"))
    ):
        del added["top_p"]
    if not added:
        return fields if isinstance(fields, dict) else dict(fields)
    return {**fields, **added}


def _is_given(fields: Mapping[str, msgspec.Raw], name: str) -> bool:
    """Whether the request has the field under any of its names, and not as null."""
    for spelled in _SPELLINGS[name]:
        raw = fields.get(spelled)
        if raw is not None and bytes(raw) != _NULL:
            return True
    return False


def _merged(layers: tuple[Mapping[str, Any], ...]) -> dict[str, Any]:
    """One value a field, of the first layer that has it."""
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        merged.update(layer)
    return merged
