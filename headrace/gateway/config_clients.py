"""Settings files of clients, read as ours: what a tool was given (address, key, model) describes an upstream.

Known forms: Cline and Continue's {provider, baseUrl, apiKey, modelId, ...}, the guides' Codex auth.json
{openai: {baseURL, apiKey}}, Codex's own {OPENAI_API_KEY}, and {base_url, api_key, model, timeout, max_retries}.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["cline", "codex", "client"]
UPSTREAM = "imported"
OPENAI_URL = "https://api.openai.com/v1"

TITLES: Mapping[Kind, str] = {
    "cline": "settings of Cline or Continue",
    "codex": "auth.json of Codex",
    "client": "client settings {base_url, api_key, model}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """The three pieces and what else the file says; `unread` are keys that mean nothing to a gateway."""

    kind: Kind
    base_url: str
    api_key: str | None = field(repr=False)
    model: str | None = None
    timeout_s: Any = None
    max_retries: Any = None
    presets: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    def table(self) -> dict[str, Any]:
        """The same as a configuration of ours."""
        upstream: dict[str, Any] = {"base_url": self.base_url}
        if self.api_key is not None:
            upstream["api_key"] = self.api_key
        if self.model is not None:
            upstream["models"] = [self.model]
        if self.timeout_s is not None:
            upstream["timeout"] = self.timeout_s
        if self.max_retries is not None:
            upstream["max_retries"] = self.max_retries
        table: dict[str, Any] = {"upstreams": {UPSTREAM: upstream}, "routing": {"default": UPSTREAM}}
        if self.model is not None:
            table["default_model"] = self.model
        if self.presets:
            table["presets"] = dict(self.presets)
        return table


def client_kind(table: Mapping[str, Any]) -> Kind | None:
    """Which client's file this is, by keys that no other has."""
    nested = table.get("openai")
    if isinstance(nested, Mapping) and ("baseURL" in nested or "apiKey" in nested):
        return "codex"
    if "OPENAI_API_KEY" in table:
        return "codex"
    if "baseUrl" in table or "apiBase" in table:
        return "cline"
    if "base_url" in table and "upstreams" not in table and "providers" not in table:
        return "client"
    return None


def client_settings(table: Mapping[str, Any], kind: Kind) -> ClientSettings:
    """The three pieces of a client's file. ValueError says which one is missing or no text."""
    if kind == "codex":
        nested = table.get("openai")
        inner = nested if isinstance(nested, Mapping) else {}
        return ClientSettings(
            kind=kind,
            base_url=_text(inner, "baseURL", "baseUrl") or OPENAI_URL,
            api_key=_text(inner, "apiKey") or _text(table, "OPENAI_API_KEY"),
            unread=tuple(name for name in table if name not in ("openai", "OPENAI_API_KEY")),
        )
    names = ("baseUrl", "apiBase") if kind == "cline" else ("base_url",)
    base_url = _text(table, *names)
    if base_url is None:
        raise ValueError(f"{names[0]} is missing")
    presets = {ours: table[theirs] for theirs, ours in _PRESETS.items() if theirs in table}
    known = {*names, "apiKey", "api_key", "modelId", "model", "timeout", "max_retries", "provider", *_PRESETS}
    return ClientSettings(
        kind=kind,
        base_url=base_url,
        api_key=_text(table, "apiKey", "api_key"),
        model=_text(table, "modelId", "model"),
        timeout_s=table.get("timeout"),
        max_retries=table.get("max_retries"),
        presets=presets,
        unread=tuple(name for name in table if name not in known),
    )


_PRESETS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "topP": "top_p",
    "maxTokens": "max_tokens",
    "max_tokens": "max_tokens",
}


def _text(table: Mapping[str, Any], *names: str) -> str | None:
    for name in names:
        value = table.get(name)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name} must be text")
        if value and value.strip():
            return str(value).strip()
    return None
