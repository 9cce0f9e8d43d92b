"""Where a request goes: from the model's name and the rules to an ordered list of attempts.

An alias becomes its model, the first matching rule decides, else the model's own targets are tried and after them the
fallback upstreams, each with the name it has for the model. What the request certainly does not fit into is left out
before anything is sent. Pure: the same snapshot and facts give the same route.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import msgspec

from headrace.gateway.body import Fields
from headrace.gateway.estimate import estimate_tokens
from headrace.gateway.model_router import Router
from headrace.gateway.rules import RequestFacts, matching_rule
from headrace.gateway.snapshot import Model, Price, Rule, Snapshot, Target, Upstream
from headrace.protocol.errors import ApiError, model_not_found

__all__ = [
    "Attempt",
    "RequestFacts",
    "Route",
    "decide",
    "estimate_tokens",
    "mapped_model",
    "model_names",
    "requested_model",
    "resolve_alias",
]

GENERATING = frozenset({"chat", "completions", "messages", "responses"})
"""Endpoints at which one chat model may stand in for another; an embedding of another model would be worthless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One upstream to ask, with the model's name there and the reason, as `x-gateway-*` headers and logs say it."""

    upstream: Upstream
    model: str
    why: str
    context_window: int | None = None
    price: Price = field(default_factory=Price)


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """`model` is what the client asked for; `attempts` has at least one."""

    model: Model
    attempts: tuple[Attempt, ...]
    rule: str | None = None
    """The place of the rule that decided."""
    too_small: tuple[str, ...] = ()
    """Upstreams left out because the request does not fit into their context."""


def decide(snapshot: Snapshot, facts: RequestFacts, fields: Fields | None = None) -> Route:
    """`fields`: the request's, for a model with a router; without them its targets stay in their order.

    Raises ApiError: 400 missing_model, 404 model_not_found with the nearest name."""
    name = requested_model(snapshot, facts)
    rule = matching_rule(snapshot.rules, facts, name) if snapshot.rules else None
    attempts = _attempts(snapshot, rule, name, facts.endpoint)
    if not attempts:
        raise model_not_found(facts.model or name, model_names(snapshot, facts.visible_models))
    model = snapshot.models.get(name) or Model(name=name)
    if model.router is not None and rule is None and fields is not None:
        attempts = _routed(model, model.router, attempts, facts, fields)
    fitting, too_small = _fitting(attempts, facts)
    return Route(model=model, attempts=fitting, rule=rule.place if rule else None, too_small=too_small)


def requested_model(snapshot: Snapshot, facts: RequestFacts) -> str:
    """The model's own name: of the request, after aliases, or the default. Raises ApiError 400 when there is none."""
    name = facts.model or default_model(snapshot)
    if name is None:
        names = ", ".join(model_names(snapshot, facts.visible_models))
        message = "`model` is missing, and no default_model is configured. " + (
            f"Send one of: {names}." if names else ""
        )
        raise ApiError(400, message.rstrip(), code="missing_model", param="model")
    return resolve_alias(snapshot, name)


def default_model(snapshot: Snapshot) -> str | None:
    """What a request without `model` gets: the configured one, else the default upstream's first, else the only one."""
    if snapshot.default_model is not None:
        return snapshot.default_model
    upstream = snapshot.upstreams.get(snapshot.default_upstream or "")
    if upstream is not None and upstream.models:
        return upstream.models[0]
    return next(iter(snapshot.models)) if len(snapshot.models) == 1 else None


def resolve_alias(snapshot: Snapshot, name: str) -> str:
    return snapshot.aliases.get(name, name)


def model_names(snapshot: Snapshot, visible: tuple[str, ...] = ()) -> list[str]:
    """Every name a client may send, models first, then aliases; those that one of the globs `visible` lets through."""
    names = [*snapshot.models, *(alias for alias in snapshot.aliases if alias not in snapshot.models)]
    if not visible:
        return names
    return [name for name in names if any(fnmatchcase(name, glob) for glob in visible)]


def attempts_for(snapshot: Snapshot, name: str) -> tuple[Attempt, ...]:
    """Where a chat request for the model `name` may go when no rule decides."""
    return _attempts(snapshot, None, name, "chat")


def mapped_model(snapshot: Snapshot, upstream: Upstream, name: str, endpoint: str) -> str | None:
    """What model `name` is called at a fallback upstream; None when it has nothing for it.

    Its own target there, else the same name where it is served, else (generating endpoints only) the upstream's
    `fallback_model`, else its first model.
    """
    model = snapshot.models.get(name)
    for target in model.targets if model else ():
        if target.upstream == upstream.name:
            return target.model
    if upstream.serves(name):
        return snapshot.fallback_models.get(upstream.name, name) if not upstream.models else name
    if endpoint not in GENERATING:
        return None
    return snapshot.fallback_models.get(upstream.name, upstream.models[0])


def _attempts(snapshot: Snapshot, rule: Rule | None, name: str, endpoint: str) -> tuple[Attempt, ...]:
    """All places to ask, without regard to size: for a known name they depend on rule, name and kind of endpoint."""
    key = (rule, name, endpoint if endpoint in GENERATING else "other")
    known: tuple[Attempt, ...] | None = snapshot.memo.get(key)
    if known is not None:
        return known
    found = _by_name(snapshot, name, endpoint) if rule is None else _by_rule(snapshot, rule, name, endpoint)
    attempts = _distinct(found)
    if name in snapshot.models:
        snapshot.memo[key] = attempts
    return attempts


def _by_rule(snapshot: Snapshot, rule: Rule, name: str, endpoint: str) -> Iterator[Attempt]:
    """The rule's target and its own fallbacks. A rule that does not look at the model is no excuse for a wrong name."""
    if name not in snapshot.models and not any(condition.subject == "model" for condition in rule.match):
        takers = (snapshot.upstreams.get(target) for target in (rule.target, *rule.fallback))
        if not any(taker is not None and taker.serves(name) for taker in takers):
            return
    yield from _towards(snapshot, rule.target, rule.model, name, endpoint, rule.place)
    for other in rule.fallback:
        yield from _towards(snapshot, other, None, name, endpoint, f"fallback of {rule.place}")


def _towards(
    snapshot: Snapshot, target: str, model: str | None, name: str, endpoint: str, why: str
) -> Iterator[Attempt]:
    """Attempts at what a rule names: an upstream, or a model with its targets."""
    upstream = snapshot.upstreams.get(target)
    if upstream is not None:
        mapped = model if model is not None else mapped_model(snapshot, upstream, name, endpoint)
        if mapped is not None:
            yield _attempt(snapshot, Target(upstream=target, model=mapped), why)
        return
    named = snapshot.models.get(resolve_alias(snapshot, target))
    for place in named.targets if named else ():
        yield _attempt(snapshot, place, why)


def _by_name(snapshot: Snapshot, name: str, endpoint: str) -> Iterator[Attempt]:
    """The model's targets, then the fallback upstreams; an unknown name goes only to upstreams that take any."""
    model = snapshot.models.get(name)
    if model is None:
        for upstream_name in (snapshot.default_upstream, *snapshot.fallback):
            upstream = snapshot.upstreams.get(upstream_name or "")
            if upstream is not None and not upstream.models:
                why = "default upstream" if upstream_name == snapshot.default_upstream else "fallback"
                yield _attempt(snapshot, Target(upstream=upstream.name, model=name), why)
        return
    for place, target in enumerate(model.targets):
        yield _attempt(snapshot, target, "model" if place == 0 else "fallback")
    for upstream_name in snapshot.fallback:
        upstream = snapshot.upstreams[upstream_name]
        mapped = mapped_model(snapshot, upstream, name, endpoint)
        if mapped is not None:
            yield _attempt(snapshot, Target(upstream=upstream_name, model=mapped), "fallback")


def _attempt(snapshot: Snapshot, target: Target, why: str) -> Attempt:
    """Context and price are the target's own, else those of the model that goes by this name at this upstream."""
    known = target if target.context_window is not None else _described(snapshot, target)
    return Attempt(
        upstream=snapshot.upstreams[target.upstream],
        model=target.model,
        why=why,
        context_window=known.context_window,
        price=target.price if target.price != Price() else known.price,
    )


def _described(snapshot: Snapshot, target: Target) -> Target:
    model = snapshot.models.get(target.model)
    for candidate in model.targets if model else ():
        if (candidate.upstream, candidate.model) == (target.upstream, target.model):
            return candidate
    return target


def _routed(
    model: Model, router: Router, attempts: tuple[Attempt, ...], facts: RequestFacts, fields: Fields
) -> tuple[Attempt, ...]:
    candidates = tuple(dict.fromkeys(target.model for target in model.targets))
    chosen = router.first(candidates, {name: fields.value(name) for name in fields.raws}, facts)
    return attempts if chosen is None else tuple(sorted(attempts, key=lambda attempt: attempt.model != chosen))


def _distinct(attempts: Iterable[Attempt]) -> tuple[Attempt, ...]:
    """The first attempt of each (upstream, model)."""
    found: dict[tuple[str, str], Attempt] = {}
    for attempt in attempts:
        found.setdefault((attempt.upstream.name, attempt.model), attempt)
    return tuple(found.values())


def _fitting(attempts: tuple[Attempt, ...], facts: RequestFacts) -> tuple[tuple[Attempt, ...], tuple[str, ...]]:
    """Attempts whose context holds the request. If none does, all stay: only the upstream knows exactly."""
    if facts.endpoint not in GENERATING:
        return attempts, ()
    needed = facts.prompt_tokens + (facts.max_tokens or 0)
    for attempt in attempts:
        if attempt.context_window is not None and needed > attempt.context_window:
            break
    else:
        return attempts, ()
    fits = [attempt.context_window is None or needed <= attempt.context_window for attempt in attempts]
    if not any(fits):
        return attempts, ()
    too_small = tuple(attempt.upstream.name for attempt, fit in zip(attempts, fits, strict=True) if not fit)
    return tuple(attempt for attempt, fit in zip(attempts, fits, strict=True) if fit), too_small
