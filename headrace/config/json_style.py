"""--structured-outputs-config: of vLLM's object the keys that have a meaning here, the others told."""

from __future__ import annotations

import difflib

from headrace.config.errors import ConfigError

JSON_STYLE_FLAGS = ("disable-any-whitespace", "disable-additional-properties")
_KNOWN = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback", "backend")
_FLAG = "--structured-outputs-config"


def json_style(config: dict[str, object]) -> tuple[bool, bool]:
    """(disable_any_whitespace, disable_additional_properties). Raises ConfigError for a key without effect."""
    for name, value in config.items():
        if name in ("reasoning_parser", "enable_in_reasoning"):
            raise ConfigError(f"{_FLAG}: {name} has no effect here; see --reasoning-parser.")
        if name not in _KNOWN:
            close = difflib.get_close_matches(name, _KNOWN, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{_FLAG}: {name} is not known; known are {', '.join(_KNOWN)}.{hint}")
        if name != "backend" and not isinstance(value, bool):
            raise ConfigError(f"{_FLAG}: {name} must be true or false.")
    return bool(config.get(_KNOWN[0])), bool(config.get(_KNOWN[1]))
