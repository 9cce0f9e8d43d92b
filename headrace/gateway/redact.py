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

KEY_SHAPES = re.compile(
    r"""
    (?P<shown>\b(?:(?:sk|pk|rk|gsk|hr|hf|xai|ghp)[-_](?-i:[a-z]{2,6}\d{0,2}[-_]){0,2}|AIza|AKIA)[A-Za-z0-9]{4})
    [A-Za-z0-9_\-]{12,}                                  # sk-Zk3v and at least twelve more
    | (?P<scheme>\b(?:bearer|basic)\s+)(?!sk[-_])[A-Za-z0-9._~+/=\-]{8,}
    | (?P<named>\b(?:x-)?(?:goog-)?api[-_]key["']?\s*[:=]\s*["']?)(?!sk[-_])[A-Za-z0-9._~+/=\-]{8,}
    """,
    re.VERBOSE | re.IGNORECASE,
)


def clean(text: str) -> str:
    """Without what looks like a key; a key's first characters stay, so that it can be told from others."""
    return KEY_SHAPES.sub(_masked, text)


def _masked(match: re.Match[str]) -> str:
    kept: str = match["shown"] or match["scheme"] or match["named"] or ""
    return kept + MASK


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
