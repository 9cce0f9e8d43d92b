"""Secrets taken out of text that leaves the gateway: log lines, error messages that quote an upstream, config dumps.

    Redactor(["upstream-secret-123"]).clean("401 for upstream-secret-123")   -> "401 for [secret]"
    clean("Authorization: Bearer sk-Zk3vN9qL0aTt2Xw8")                       -> "Authorization: Bearer sk-Zk3v[secret]"

Two nets: the values the gateway itself knows (its upstreams' keys and header values), and whatever looks like a key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MASK = "[secret]"

SHORTEST_SECRET_CHARS = 6
"""Known values shorter than this, and words such as EMPTY, are no secrets: masking them would eat ordinary text."""
NO_SECRETS = frozenset({"EMPTY", "NONE", "DUMMY", "UNUSED"})

# Lines are many and keys are few: the first expression begins with literals, so that the search skips from one to the
# next, and the second is tried only where one of its words is.
_KEY = re.compile(r"(?:sk[-_]|pk[-_]|rk[-_]|gsk_|hr-|hf_|xai-|ghp_|AIza|AKIA)[A-Za-z0-9_\-]{14,}")
_KEY_SHOWN = re.compile(r"[A-Za-z]{2,4}[-_]?(?:[a-z]{2,6}\d{0,2}[-_]){0,2}[A-Za-z0-9]{4}")
_NAMED = re.compile(
    r"""(\b(?:bearer|basic)[ ]+|\b(?:x-)?(?:goog-)?api[-_]?key["']?[ ]*[:=][ ]*["']?)"""
    r"(?!sk[-_])[A-Za-z0-9._~+/=\-]{8,}",
    re.IGNORECASE,
)
_NAMED_WORDS = (
    "earer ",
    "EARER ",
    "asic ",
    "ASIC ",
    "api-key",
    "api_key",
    "apikey",
    "apiKey",
    "ApiKey",
    "Api-Key",
    "API",
)


def clean(text: str) -> str:
    """Without what looks like a key; a key's first characters stay, so that it can be told from others."""
    text = _KEY.sub(_without_its_end, text)
    if any(word in text for word in _NAMED_WORDS):
        text = _NAMED.sub(rf"\g<1>{MASK}", text)
    return text


def _without_its_end(match: re.Match[str]) -> str:
    key, start = match[0], match.start()
    if start and match.string[start - 1].isalnum():  # the `sk-` of task-force
        return key
    shown = _KEY_SHOWN.match(key)
    return (shown[0] if shown is not None else key[:3]) + MASK


class Redactor:
    """`clean` for one set of known secrets; made anew when the configuration changes."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known = {secret.strip() for secret in secrets}
        known = {s for s in known if len(s) >= SHORTEST_SECRET_CHARS and s.upper() not in NO_SECRETS}
        longest_first = sorted(known, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if known else None

    def clean(self, text: str) -> str:
        return clean(self._known.sub(MASK, text) if self._known is not None else text)

    def __repr__(self) -> str:
        return "Redactor()"
