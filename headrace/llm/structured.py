"""What an answer must match, as people write it in Python: vLLM's two classes, of now and before.

They become the request field `structured_outputs`, so they mean the same as over HTTP.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """One of the first six says what; the rest how JSON is written."""

    json: object = None
    """A JSON Schema, its text, or a pydantic model."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """GBNF, EBNF or Lark."""
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    disable_fallback: bool = False

    def field(self) -> dict[str, Any]:
        """As the field of a request."""
        return _field(self)


@dataclass(frozen=True, kw_only=True)
class GuidedDecodingParams:
    """The same under vLLM's older name. `backend` has no effect: there is one."""

    json: object = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    backend: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    disable_fallback: bool = False

    def field(self) -> dict[str, Any]:
        """As the field of a request."""
        field = _field(self)
        field.pop("backend", None)
        return field


def _field(params: StructuredOutputsParams | GuidedDecodingParams) -> dict[str, Any]:
    given = {item.name: getattr(params, item.name) for item in dataclasses.fields(params)}
    own = {name: value for name, value in given.items() if value is not None and value is not False}
    of_model = getattr(params.json, "model_json_schema", None)
    if params.json is not None:
        own["json"] = of_model() if callable(of_model) else params.json
    return own
