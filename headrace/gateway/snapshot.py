"""The nouns of the gateway's configuration: what one valid file says, frozen.

A Snapshot is built by `gateway.config_load`, held behind one pointer and replaced as a whole on a reload; a request
that began under one snapshot ends under it. Nothing here reads files, the environment or the network.

Money is integer micro-units (1e-6 of the currency), time is float seconds, tokens are integers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit, urlunsplit

from headrace.config import gateway_defaults

if TYPE_CHECKING:
    from headrace.gateway.model_router import Router

Dialect = Literal["openai", "anthropic"]
Period = Literal["day", "week", "month", "total"]

EMPTY: Mapping[str, Any] = MappingProxyType({})


def _empty() -> Mapping[str, Any]:
    return EMPTY


VERSIONED_PATH = re.compile(r"(/v\d[^/]*|/openai)$")
"""A base URL whose path ends like this is complete: paths are appended without another /v1."""
UNVERSIONED = frozenset({"/tokenize", "/detokenize", "/pooling", "/classify"})
"""Endpoints that vLLM and llama.cpp have beside /v1, not below it; Headrace has them at both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long an upstream may take, in seconds; each is named in the 504 that it causes."""

    connect_s: float = 5.0
    first_token_s: float = 120.0
    idle_s: float = 60.0
    """Between two pieces of a stream."""
    total_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Micro-units of the currency for a million tokens."""

    input_micros_per_mtok: int = 0
    output_micros_per_mtok: int = 0
    cached_input_micros_per_mtok: int | None = None
    """None = cached prompt tokens cost what the others cost."""

    @property
    def is_any(self) -> bool:
        """Whether anything costs anything."""
        return bool(self.input_micros_per_mtok or self.output_micros_per_mtok or self.cached_input_micros_per_mtok)


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """A server that answers requests: an engine, a cloud API, another gateway. May have several replicas."""

    name: str
    base_url: str
    dialect: Dialect = "openai"
    api_key: str | None = field(default=None, repr=False)
    """None = no key is sent; the literal EMPTY is sent as it is (vLLM without --api-key ignores it)."""
    models: tuple[str, ...] = ()
    """Names it serves, its own spelling; () = any."""
    timeouts: Timeouts = Timeouts()
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Extra headers sent with every request."""
    path_prefix: str | None = None
    """Put between the host and /chat/completions instead of what the join rule finds, such as /v1beta/openai."""
    chat_path: str | None = None
    """The whole path of the chat endpoint, where it follows no rule."""
    replicas: tuple[str, ...] = ()
    """Base URLs of equal servers, the first is `base_url`; () = `base_url` alone."""
    health_path: str | None = None
    """Asked by health checks, from the host's root; None = the models endpoint."""
    trusted: bool = True
    """Named in the file: may be a private address. Those registered in the console are not trusted."""
    max_retries: int = 2
    """Further attempts at this upstream after a failure that may pass (connection, 429, 5xx), before falling back."""
    extended_sampling: bool = True
    """Takes fields beyond OpenAI's (top_k, min_p, repetition_penalty ...); if not, presets leave them out."""

    @property
    def base_urls(self) -> tuple[str, ...]:
        return self.replicas or (self.base_url,)

    def serves(self, model: str) -> bool:
        """Whether it takes this model name as it stands."""
        return not self.models or model in self.models

    def url(self, path: str, replica: int = 0) -> str:
        """The address of endpoint `path` ("/chat/completions", "/models", "/messages"; without /v1) at a replica.

        http://host:8000/v1      + /chat/completions = http://host:8000/v1/chat/completions
        http://host:8000         + /chat/completions = http://host:8000/v1/chat/completions
        https://host/api         + /models           = https://host/api/v1/models
        https://host/v1beta/openai + /models         = https://host/v1beta/openai/models
        http://host:8000/v1      + /tokenize         = http://host:8000/tokenize
        `path_prefix` replaces the base URL's own path; `chat_path` is the whole path of /chat/completions.
        """
        parts = urlsplit(self.base_urls[replica])
        if path == "/chat/completions" and self.chat_path is not None:
            whole = _slashed(self.chat_path)
        elif self.path_prefix is not None:
            whole = _slashed(self.path_prefix) + path
        else:
            base = parts.path.rstrip("/")
            whole = base + path if VERSIONED_PATH.search(base) else base + "/v1" + path
            if path in UNVERSIONED:
                whole = base.removesuffix("/v1") + path
        return urlunsplit((parts.scheme, parts.netloc, whole, parts.query, ""))

    def root_url(self, path: str, replica: int = 0) -> str:
        """An address from the host's root, for health checks: /health."""
        parts = urlsplit(self.base_urls[replica])
        return urlunsplit((parts.scheme, parts.netloc, _slashed(path), "", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One place that can answer for a model."""

    upstream: str
    model: str
    """The model's name at the upstream."""
    context_window: int | None = None
    """Tokens of prompt and answer there; None = unknown, nothing is compared with it."""
    price: Price = Price()


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A name that clients send."""

    name: str
    display_name: str | None = None
    targets: tuple[Target, ...] = ()
    """First choice first."""
    context_window: int | None = None
    """That of the first target."""
    price: Price = Price()
    """That of the first target; what a request costs is its target's price."""
    presets: Mapping[str, Any] = field(default_factory=_empty)
    """Request fields filled in where the request leaves them out."""
    aliases: tuple[str, ...] = ()
    router: Router | None = None
    """Chooses which target is asked first."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One comparison of a condition."""

    operator: Literal["=", "!=", ">", ">=", "<", "<=", "glob"]
    value: str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One line of a rule's `match`: it holds when one of its tests does.

    {"max_tokens": ">4096"} is Condition(subject="max_tokens", tests=(Comparison(">", 4096),));
    A list has a test for each of its values: ["gpt-*", "o3"] is (Comparison("glob", "gpt-*"), Comparison("=", "o3")).
    """

    subject: str
    """model, max_tokens, prompt_tokens, total_tokens, stream, tools, endpoint, key.tag, key.name or header.NAME."""
    tests: tuple[Comparison, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The first rule whose conditions all hold decides where the request goes."""

    match: tuple[Condition, ...]
    target: str
    """An upstream's or a model's name."""
    model: str | None = None
    """The model's name at the target upstream; None = as the request says, or what the upstream maps it to."""
    fallback: tuple[str, ...] = ()
    """Upstreams or models tried when the target fails. () = none: a rule may be there to keep requests in the house."""
    place: str = ""
    """Where it stands, for messages: `routing.rules[0]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """None = no limit."""

    rpm: int | None = None
    tpm: int | None = None
    concurrency: int | None = None
    budget_micros: int | None = None
    budget_period: Period | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A named bundle that keys are given: presets, models and quota."""

    name: str
    display_name: str | None = None
    presets: Mapping[str, Any] = field(default_factory=_empty)
    models: tuple[str, ...] = ()
    """Globs of the models it opens; () = all."""
    limits: Limits = Limits()
    session_affinity: bool = False
    """Requests of one session (x-session-id, Claude Code's, prompt_cache_key, user) stay with one replica, busy or
    not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admin:
    """The console and its API."""

    enabled: bool = True
    trusted_proxies: tuple[str, ...] = ()
    """Addresses (CIDR) whose X-Forwarded-For is believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracing:
    """`[server.traces]`: where spans of requests go."""

    endpoint: str
    """Of an OpenTelemetry collector that takes OTLP over HTTP, without /v1/traces."""
    sample: float = 1.0
    """Share of the requests that come without a `traceparent`."""
    service_name: str = "headrace-gateway"
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """The `[server]` section: not hot, a change of it needs a restart."""

    host: str = gateway_defaults.HOST
    port: int = gateway_defaults.PORT
    max_body_bytes: int = 32 * 1024 * 1024
    hold_back_s: float = 10.0
    """How long a stream's first content is waited for with nothing sent to the client, so that a fallback is unseen."""
    database_url: str | None = field(default=None, repr=False)
    """None = SQLite in the data directory."""
    data_dir: str | None = None
    log_level: str = "info"
    page_url: str | None = None
    """Where people renew their keys; None = this gateway's own page, or `headrace key` where it has none."""
    allowed_origins: tuple[str, ...] = ()
    drain_s: float = 30.0
    """How long running requests are waited for at the end."""
    retention_days: int | None = None
    """Older rows of single requests are removed, their daily sums stay; None = all are kept."""
    gateways: int = 1
    """How many gateways share the keys: each lets its part of rates and concurrency through."""
    traces: Tracing | None = None
    admin: Admin = Admin()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One `[engine.NAME]` of headrace.toml: `headrace up` starts `headrace serve` with these words."""

    name: str
    flags: tuple[str, ...] = field(repr=False)
    upstream: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything a valid configuration says. Values compare and print; secrets are left out of `repr`."""

    generation: int = 1
    path: str | None = None
    upstreams: Mapping[str, Upstream] = field(default_factory=_empty)
    models: Mapping[str, Model] = field(default_factory=_empty)
    aliases: Mapping[str, str] = field(default_factory=_empty)
    """alias -> model name."""
    default_model: str | None = None
    """Taken when a request names no model."""
    default_upstream: str | None = None
    """Takes names that no model has, where it serves them."""
    fallback: tuple[str, ...] = ()
    """Upstreams tried when a model's own targets fail, in this order."""
    fallback_models: Mapping[str, str] = field(default_factory=_empty)
    """upstream -> its model for a fallback that does not have the requested one; absent = its first model."""
    rules: tuple[Rule, ...] = ()
    continues_streams: bool = False
    """A stream of plain text that breaks is gone on with by another upstream."""
    presets: Mapping[str, Any] = field(default_factory=_empty)
    """settings.json: defaults of every request."""
    plans: Mapping[str, Plan] = field(default_factory=_empty)
    listen: Listen = Listen()
    engines: tuple[EngineSpec, ...] = ()
    warnings: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    """Every file it was read from, ${file:} secrets included; what a reload watches."""
    memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Attempts already worked out, by what they depend on; filled by `route`, bounded by the names there are."""


def _slashed(path: str) -> str:
    """The path with one slash before it and none after it; the empty path stays empty."""
    stripped = path.strip("/")
    return "/" + stripped if stripped else ""
