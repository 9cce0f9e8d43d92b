"""Every path the server answers, as a table; and where a path that is not in it was meant to go.

Clients disagree on where the base URL ends, so `/v1/chat/completions`, `/chat/completions`,
`/api/v1/chat/completions` and `/v1/v1/chat/completions/` are one route: `canonical` strips what is optional.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from headrace.protocol import errors
from headrace.protocol.batches import BatchFields
from headrace.protocol.openai_chat import ChatFields
from headrace.protocol.openai_completions import CompletionFields
from headrace.protocol.pooling import EmbeddingFields, PoolFields, RerankFields, ScoreFields
from headrace.protocol.sampling import SamplingFields
from headrace.protocol.tokenization import DetokenizeFields, TokenizeFields
from headrace.protocol.translate.events import Dialect
from headrace.server import admin, batches, files, status, stored_responses
from headrace.server.admin import AbortFields
from headrace.server.chat import chat_completions
from headrace.server.completions import completions
from headrace.server.embeddings import embeddings, pooling
from headrace.server.http import Exchange
from headrace.server.invocations import invocations
from headrace.server.messages import count_tokens, messages
from headrace.server.models import list_models, retrieve_model
from headrace.server.pages import docs_page, openapi_document
from headrace.server.rerank import rerank, score
from headrace.server.responses import input_tokens, responses
from headrace.server.serving import Serving
from headrace.server.tokenization import detokenize, tokenize

Handler = Callable[[Serving, Exchange], Awaitable[None]]


@dataclass(frozen=True)
class Route:
    """`path` as people write it. `body` are the types whose fields the request's JSON object may have."""

    path: str
    method: str
    answer: Handler
    summary: str
    body: tuple[type[msgspec.Struct], ...] = ()
    admin: bool = False
    """For whoever runs the server; see admin.py."""
    gives: Literal["text", "vectors", "scores"] | None = None
    """What the model must be served for."""


def _check_open(serving: Serving, exchange: Exchange) -> None:
    """Raises ApiError (404) where --disable-fastapi-docs closes the page."""
    if not serving.settings.serve_docs:
        raise errors.unknown_endpoint(exchange.method, exchange.path, known_paths())


async def _openapi(serving: Serving, exchange: Exchange) -> None:
    _check_open(serving, exchange)
    await exchange.answer_json(openapi_document(ROUTES, serving.settings.root_path))


async def _docs(serving: Serving, exchange: Exchange) -> None:
    _check_open(serving, exchange)
    page = docs_page(ROUTES, serving.names.primary, serving.settings.root_path)
    await exchange.answer(200, page.encode(), "text/html; charset=utf-8")


async def _model(serving: Serving, exchange: Exchange) -> None:
    path = canonical(exchange.path, serving.settings.root_path)
    await retrieve_model(serving, exchange, path.removeprefix("/models/"))


MODEL_PATH = "/v1/models/{model}"

ROUTES: tuple[Route, ...] = (
    Route(
        "/v1/chat/completions",
        "POST",
        chat_completions,
        "Answer a conversation",
        (ChatFields, SamplingFields),
        gives="text",
    ),
    Route(
        "/v1/completions",
        "POST",
        completions,
        "Continue a text",
        (CompletionFields, SamplingFields),
        gives="text",
    ),
    Route("/v1/messages", "POST", messages, "Answer a conversation, in Anthropic's dialect", gives="text"),
    Route("/v1/messages/count_tokens", "POST", count_tokens, "How many tokens a conversation has", gives="text"),
    Route("/v1/responses", "POST", responses, "Answer a conversation, in OpenAI's newer dialect", gives="text"),
    Route(
        "/v1/responses/input_tokens",
        "POST",
        input_tokens,
        "How many tokens a response's prompt would have",
        gives="text",
    ),
    Route("/v1/embeddings", "POST", embeddings, "A vector for each text", (EmbeddingFields,), gives="vectors"),
    Route("/pooling", "POST", pooling, "Vectors, rows or scores of texts", (PoolFields,), gives="scores"),
    Route("/v1/score", "POST", score, "A score for each pair of texts", (ScoreFields,), gives="scores"),
    Route("/v1/rerank", "POST", rerank, "Documents by their score for a query", (RerankFields,), gives="scores"),
    Route("/v2/rerank", "POST", rerank, "The same as /v1/rerank", (RerankFields,), gives="scores"),
    Route("/v1/responses/{response}", "GET", stored_responses.retrieve, "A stored response, as it stands"),
    Route("/v1/responses/{response}", "DELETE", stored_responses.delete, "Forget a stored response"),
    Route("/v1/responses/{response}/cancel", "POST", stored_responses.cancel, "Stop one that runs in the background"),
    Route("/v1/responses/{response}/input_items", "GET", stored_responses.list_input_items, "What it was asked"),
    Route("/v1/files", "POST", files.upload, "Keep a file of requests: a form with `file` and `purpose` batch"),
    Route("/v1/files", "GET", files.list_files, "The files that are kept"),
    Route("/v1/files/{file}", "GET", files.retrieve, "What is known of a file"),
    Route("/v1/files/{file}", "DELETE", files.delete, "Forget a file"),
    Route("/v1/files/{file}/content", "GET", files.content, "A file as it was sent, or written by a batch"),
    Route("/v1/batches", "POST", batches.create, "Answer the requests of a file in the background", (BatchFields,)),
    Route("/v1/batches", "GET", batches.list_batches, "All batches, the newest first"),
    Route("/v1/batches/{batch}", "GET", batches.retrieve, "How far a batch is"),
    Route("/v1/batches/{batch}/cancel", "POST", batches.cancel, "Stop a batch; what it has answered stays"),
    Route("/v1/models", "GET", list_models, "The served models, their limits and sampling defaults"),
    Route(MODEL_PATH, "GET", _model, "One served model; its name may contain slashes"),
    Route("/tokenize", "POST", tokenize, "Token ids of a text or a conversation", (TokenizeFields,)),
    Route("/detokenize", "POST", detokenize, "The text of token ids", (DetokenizeFields,)),
    Route("/health", "GET", status.health, "200 while the engine makes progress"),
    Route("/ready", "GET", status.ready, "200 while new requests are taken"),
    Route("/readyz", "GET", status.ready, "The same as /ready"),
    Route("/ping", "GET", status.ping, "The same as /health"),
    Route("/ping", "POST", status.ping, "The same as /health"),
    Route("/version", "GET", status.version, "The server's version"),
    Route("/load", "GET", status.load, "How many requests are being answered"),
    Route("/metrics", "GET", status.metrics, "Metrics for Prometheus"),
    Route("/invocations", "POST", invocations, "SageMaker's entry: a chat or a completion, as the body says"),
    Route("/server_info", "GET", admin.server_info, "Settings, what the engine found, its last step", admin=True),
    Route(
        "/reset_prefix_cache", "POST", admin.reset_prefix_cache, "Forget cached prefixes that nobody uses", admin=True
    ),
    Route("/sleep", "POST", admin.sleep, "Give memory back: ?level=1 the KV cache, 2 all of it", admin=True),
    Route("/wake_up", "POST", admin.wake_up, "Undo /sleep", admin=True),
    Route("/is_sleeping", "GET", admin.is_sleeping, "Whether the engine sleeps", admin=True),
    Route("/abort_requests", "POST", admin.abort_requests, "End requests by id, or all", (AbortFields,), admin=True),
    Route("/start_profile", "POST", admin.start_profile, "Profile the engine (--profiler-dir)", admin=True),
    Route("/stop_profile", "POST", admin.stop_profile, "End the profile; answers with its file", admin=True),
    Route("/openapi.json", "GET", _openapi, "This table as an OpenAPI document"),
    Route("/docs", "GET", _docs, "This table as a page"),
    Route("/", "GET", status.root, "Name, version and model"),
)

NOT_BUILT = {
    "/classify": "classification",
    "/v2/embed": "Cohere's form of embeddings",
    "/chat/completions/batch": "batched chat",
    "/audio": "audio",
    "/images": "image generation",
    "/videos": "video generation",
    "/moderations": "moderation",
    "/fine_tuning": "fine-tuning",
    "/assistants": "the Assistants API",
    "/threads": "the Assistants API",
    "/vector_stores": "vector stores",
    "/realtime": "the Realtime API",
    "/load_lora_adapter": "loading LoRA adapters",
    "/unload_lora_adapter": "unloading LoRA adapters",
    "/tokenizer_info": "tokenizer information",
}
"""Canonical paths of features that other servers have, by what they are; paths below them are meant too."""


def canonical(path: str, root_path: str = "") -> str:
    """The path without `root_path`, an optional `/api`, `/openai` or `/anthropic`, any `/v1`s, and a trailing slash."""
    root = root_path.rstrip("/")
    if root and (path == root or path.startswith(root + "/")):
        path = path[len(root) :]
    path = "/" + path.strip("/")
    path = re.sub(r"^/(?:api|openai|anthropic)(?=/|$)", "", path)
    path = re.sub(r"^(?:/+v1)+(?=/|$)", "", path)
    return "/" + path.lstrip("/")


def dialect_of(path: str, headers: Mapping[str, str]) -> Dialect:
    """In whose words a client of this canonical path reads errors."""
    is_messages = path == "/messages" or path.startswith("/messages/") or "anthropic-version" in headers
    return "messages" if is_messages else "chat"


_BY_PATH: dict[str, dict[str, Route]] = {}
for _route in ROUTES:
    _BY_PATH.setdefault(canonical(_route.path), {})[_route.method] = _route
_PATTERNS = {
    re.compile(re.sub(r"{\w+}", "[^/]+", path.replace("{model}", ".+"))): by_method
    for path, by_method in _BY_PATH.items()
    if "{" in path
}


def find(method: str, path: str, sent: str | None = None) -> Route:
    """The route of a canonical path. HEAD is GET. Raises ApiError 404, 405 or 501 naming the path as it was sent."""
    sent = sent or path
    matching = (by_method for pattern, by_method in _PATTERNS.items() if pattern.fullmatch(path))
    by_method = _BY_PATH.get(path) or next(matching, None)
    if by_method is None:
        for known, feature in NOT_BUILT.items():
            if path == known or path.startswith(known + "/"):
                raise errors.not_implemented(sent, feature)
        raise errors.unknown_endpoint(method, sent, known_paths(), canonical=path)
    route = by_method.get("GET" if method == "HEAD" else method)
    if route is None:
        raise errors.method_not_allowed(method, next(iter(by_method.values())).path, by_method)
    return route


def batch_endpoints() -> list[str]:
    """What a batch's lines may ask: whatever takes a JSON object and answers with one."""
    closed = ("/ping", "/invocations", "/v1/files", "/v1/batches")
    paths = (route.path for route in ROUTES if route.method == "POST" and not route.admin and "{" not in route.path)
    return [path for path in paths if path not in closed]


BATCH_PATHS = frozenset(canonical(path) for path in batch_endpoints())


def known_paths() -> list[str]:
    return list(dict.fromkeys(route.path for route in ROUTES if len(route.path) > 1))
