"""Who may call: API keys, and which browser pages may (CORS).

With keys set, every path is closed but the four that monitoring needs. Comparison takes the same time for
every wrong key, and no message or log line repeats what was sent.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence

from headrace.config.settings import ServerSettings
from headrace.protocol import errors
from headrace.protocol.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready", "/readyz", "/ping", "/version"})
READING = frozenset({"GET", "HEAD", "OPTIONS"})


class KeyCheck:
    """Checks the key of a request against the server's keys; with none set, everything passes."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def refusal(self, headers: Mapping[str, str], path: str) -> ApiError | None:
        """None when the request may go on. `path` is canonical."""
        if not self._keys or path in OPEN_PATHS:
            return None
        try:
            key = sent_key(headers)
        except ApiError as error:
            return error
        matches = [hmac.compare_digest(key.encode("utf-8", "replace"), known) for known in self._keys]
        return None if any(matches) else errors.invalid_api_key()


def sent_key(headers: Mapping[str, str]) -> str:
    """The key in Authorization, x-api-key or api-key, the first of them that is there. Raises ApiError (401).

    Forgiven, because copied from a file or a shell: blanks and line ends, quotes, `Bearer` written twice.
    """
    authorization = _stripped(headers.get("authorization", ""))
    if authorization:
        return _bearer(authorization)
    for name in ("x-api-key", "api-key"):
        key = _stripped(headers.get(name, ""))
        if key:
            return key
    raise errors.missing_api_key()


def _bearer(authorization: str) -> str:
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() != "bearer":
        if scheme.lower().startswith("bearer"):
            if scheme.lower() in ("bearer:", "bearer="):
                raise errors.malformed_authorization("a blank, and nothing else, follows `Bearer`.")
            raise errors.malformed_authorization("the space after `Bearer` is missing.")
        if rest:
            raise errors.malformed_authorization("its scheme is not `Bearer`.")
        raise errors.malformed_authorization("it lacks the word `Bearer` before the key.")
    rest = _stripped(rest)
    while rest.lower().startswith("bearer "):
        rest = _stripped(rest[len("bearer ") :])
    if not rest or rest.lower() == "bearer":
        raise errors.malformed_authorization(
            "no key follows `Bearer`. Is the environment variable that should hold the key exported?"
        )
    return rest


def _stripped(value: str) -> str:
    return value.strip(" \t\r\n\"'")


class Cors:
    """Headers for browser pages from other origins; nothing unless origins are allowed."""

    def __init__(self, settings: ServerSettings) -> None:
        self._origins = frozenset(settings.allowed_origins)
        self._methods = settings.allowed_methods
        self._headers = settings.allowed_headers
        self._is_open = not settings.api_keys

    def headers(self, origin: str | None) -> dict[str, str]:
        if origin is None or not self._allows(origin):
            return {"vary": "Origin"} if self._origins and "*" not in self._origins else {}
        exposed = "x-request-id, x-headrace-ignored, retry-after"
        if "*" in self._origins:
            return {"access-control-allow-origin": "*", "access-control-expose-headers": exposed}
        return {"access-control-allow-origin": origin, "access-control-expose-headers": exposed, "vary": "Origin"}

    def preflight(self, origin: str, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers that answer a preflight request. Raises ApiError (403) when the origin may not call."""
        if not self._allows(origin):
            raise errors.origin_not_allowed(origin)
        wanted_method = headers["access-control-request-method"]
        wanted_headers = headers.get("access-control-request-headers", "")
        methods = wanted_method if "*" in self._methods else ", ".join(self._methods)
        allowed = wanted_headers if "*" in self._headers else ", ".join(self._headers)
        answer = {"access-control-allow-methods": methods, "access-control-max-age": "600"}
        return {**answer, "access-control-allow-headers": allowed} if allowed else answer

    def check(self, method: str, origin: str | None) -> None:
        """A form of a page elsewhere needs no preflight, and must not make a server without a key work.

        Raises ApiError (403)."""
        if self._is_open and origin is not None and method not in READING and not self._allows(origin):
            raise errors.origin_not_allowed(origin)

    def _allows(self, origin: str) -> bool:
        return "*" in self._origins or origin in self._origins
