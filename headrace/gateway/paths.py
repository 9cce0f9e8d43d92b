"""Which endpoint a path means. This is the one place that decides the dialect of a request and of its errors.

Clients disagree on where a base URL ends, so /api/v1/chat/completions, /v1/chat/completions, /chat/completions,
/openai/v1/v1/chat/completions/ are one endpoint: `canonical` strips what is optional.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass
from typing import Literal

from headrace.protocol import errors

ErrorForm = Literal["openai", "anthropic", "responses"]

Kind = Literal[
    "generate",  # a JSON body with `model`; the answer is checked, counted, and may be a stream of events
    "whole",  # a JSON body with `model`; the answer is JSON
    "opaque",  # a body with `model` (JSON or a form); the answer is passed on as it comes
    "files",  # stays with the upstream that made it
    "batches",
    "response",  # a stored response
    "count_tokens",
    "models",
    "model",
    "health",
    "live",
    "ready",
    "metrics",
    "root",
]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`path` is canonical: without /v1. `name` is what rules call it (`endpoint`)."""

    name: str
    kind: Kind
    path: str
    methods: tuple[str, ...] = ("POST",)
    form: ErrorForm = "openai"


_EXACT = (
    Endpoint("chat", "generate", "/chat/completions"),
    Endpoint("completions", "generate", "/completions"),
    Endpoint("fim", "generate", "/fim/completions"),
    Endpoint("messages", "generate", "/messages", form="anthropic"),
    Endpoint("responses", "generate", "/responses", form="responses"),
    Endpoint("count_tokens", "count_tokens", "/messages/count_tokens", form="anthropic"),
    Endpoint("responses_input_tokens", "whole", "/responses/input_tokens"),
    Endpoint("responses_compact", "whole", "/responses/compact"),
    Endpoint("embeddings", "whole", "/embeddings"),
    Endpoint("rerank", "whole", "/rerank"),
    Endpoint("score", "whole", "/score"),
    Endpoint("pooling", "whole", "/pooling"),
    Endpoint("classify", "whole", "/classify"),
    Endpoint("moderations", "whole", "/moderations"),
    Endpoint("tokenize", "whole", "/tokenize"),
    Endpoint("detokenize", "whole", "/detokenize"),
    Endpoint("audio_speech", "opaque", "/audio/speech"),
    Endpoint("audio_transcriptions", "opaque", "/audio/transcriptions"),
    Endpoint("audio_translations", "opaque", "/audio/translations"),
    Endpoint("images_generations", "opaque", "/images/generations"),
    Endpoint("images_edits", "opaque", "/images/edits"),
    Endpoint("images_variations", "opaque", "/images/variations"),
    Endpoint("files", "files", "/files", ("GET", "POST")),
    Endpoint("batches", "batches", "/batches", ("GET", "POST")),
    Endpoint("models", "models", "/models", ("GET",)),
    Endpoint("health", "health", "/health", ("GET",)),
    Endpoint("live", "live", "/health/live", ("GET",)),
    Endpoint("ready", "ready", "/health/ready", ("GET",)),
    Endpoint("metrics", "metrics", "/metrics", ("GET",)),
    Endpoint("root", "root", "/", ("GET",)),
)

_BELOW = (
    (re.compile(r"/models/(?P<id>.+)"), Endpoint("model", "model", "/models/{id}", ("GET",))),
    (re.compile(r"/files/(?P<id>[^/]+)"), Endpoint("file", "files", "/files/{id}", ("GET", "DELETE"))),
    (re.compile(r"/files/(?P<id>[^/]+)/content"), Endpoint("file_content", "files", "/files/{id}/content", ("GET",))),
    (re.compile(r"/batches/(?P<id>[^/]+)"), Endpoint("batch", "batches", "/batches/{id}", ("GET",))),
    (re.compile(r"/batches/(?P<id>[^/]+)/cancel"), Endpoint("batch_cancel", "batches", "/batches/{id}/cancel")),
    (re.compile(r"/responses/(?P<id>[^/]+)"), Endpoint("response", "response", "/responses/{id}", ("GET", "DELETE"))),
    (re.compile(r"/responses/(?P<id>[^/]+)/cancel"), Endpoint("response_cancel", "response", "/responses/{id}/cancel")),
    (
        re.compile(r"/responses/(?P<id>[^/]+)/input_items"),
        Endpoint("response_input", "response", "/responses/{id}/input_items", ("GET",)),
    ),
)

ALIKE = 0.75
"""How alike an unknown path and an endpoint must be (0 to 1): `completion` is, `usage` and `messages` are not."""

_PREFIX = re.compile(r"^/(?:api|anthropic|openai)(?=/|$)")
_VERSIONS = re.compile(r"^(?:/+v1)+(?=/|$)")

OPEN_KINDS = frozenset({"health", "live", "ready", "metrics", "root"})
"""Answered without a key."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request goes. `id` is the part of the path that the endpoint leaves open, None where it has none."""

    endpoint: Endpoint
    id: str | None = None

    @property
    def upstream_path(self) -> str:
        return self.endpoint.path if self.id is None else self.endpoint.path.replace("{id}", self.id)


_PLACES = {endpoint.path: Place(endpoint) for endpoint in _EXACT}
_PLACES["/v2/rerank"] = _PLACES["/rerank"]  # As Cohere's clients ask for it.


def canonical(path: str) -> str:
    """The path without one optional /api, /anthropic or /openai, any number of /v1, and a trailing slash."""
    if path in _PLACES:
        return path
    return _stripped(path) if len(path) < 100 else _stripped.__wrapped__(path)


@functools.lru_cache(maxsize=1000)
def _stripped(path: str) -> str:
    path = "/" + path.strip("/")
    path = _PREFIX.sub("", path)
    path = _VERSIONS.sub("", path)
    return "/" + path.strip("/")


def is_api(path: str) -> bool:
    """Whether this path, as received, can only be meant for the API: its errors are JSON, never pages."""
    return canonical(path) in _PLACES or bool(_PREFIX.match(path) or _VERSIONS.match(path))


def is_open(path: str) -> bool:
    """Whether a canonical path is answered without a key: by the gateway itself, about itself."""
    place = _PLACES.get(path)
    return place is not None and place.endpoint.kind in OPEN_KINDS


def find(method: str, path: str, received: str = "") -> Place:
    """The endpoint of a canonical path. HEAD is GET. Raises ApiError 404, quoting `received`, or 405."""
    place = _PLACES.get(path)
    if place is None:
        for pattern, endpoint in _BELOW:
            match = pattern.fullmatch(path)
            if match is not None:
                place = Place(endpoint, match["id"])
                break
    if place is None or (path == "/" and method == "POST"):  # the base URL, with nothing behind it
        raise unknown(method, path, received or path)
    if method not in place.endpoint.methods and not (method == "HEAD" and "GET" in place.endpoint.methods):
        raise errors.method_not_allowed(method, _shown(place.endpoint.path), place.endpoint.methods)
    return place


def error_form(path: str) -> ErrorForm:
    """How an error on this canonical path is written, also where the path or the method is wrong."""
    place = _PLACES.get(path)
    if place is not None:
        return place.endpoint.form
    return "anthropic" if path.startswith("/messages") else "openai"


def unknown(method: str, path: str, received: str) -> errors.ApiError:
    guess = _meant(path)
    hint = f" Did you mean {_shown(guess)}?" if guess else " /v1/models lists the models, /v1/chat/completions answers."
    message = f"There is no {method} {received[: errors.MAX_QUOTED_CHARS]} on this gateway.{hint}"
    return errors.ApiError(404, message, code="unknown_endpoint")


def _meant(path: str) -> str | None:
    """The endpoint whose beginning this is (`/embed`), or that is spelled much alike. The slash counts for nothing."""
    word = path.strip("/").lower()
    names = [endpoint.path[1:] for endpoint in _EXACT if endpoint.kind != "root"]
    found = [name for name in names if len(word) > 2 and name.startswith(word)]
    found = found or difflib.get_close_matches(word, names, n=1, cutoff=ALIKE)
    return "/" + found[0] if found else None


def _shown(path: str) -> str:
    return path if path in ("/", "/metrics") or path.startswith("/health") else "/v1" + path
