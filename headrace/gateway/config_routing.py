"""The `routing` section: default, fallback and rules, each checked against the upstreams and models there are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headrace.gateway.config_models import Catalogue
from headrace.gateway.config_section import Section, dotted, shown
from headrace.gateway.route import attempts_for
from headrace.gateway.rules import flattened, parse_condition
from headrace.gateway.snapshot import Condition, Rule, Snapshot
from headrace.protocol.errors import nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    default_model: str | None
    fallback: tuple[str, ...]
    fallback_models: dict[str, str]
    rules: tuple[Rule, ...]
    continues_streams: bool


def read_routing(
    root: Section, routing: Section | None, catalogue: Catalogue, fallback_models: dict[str, str]
) -> Routing:
    """`fallback_models` are those that upstreams name themselves (`fallback_model`)."""
    default_model = stream_failure = None
    fallback: list[str] = []
    mapped = dict(fallback_models)
    if routing is not None:
        default = routing.text("default")
        if default is not None and default not in catalogue.upstreams:
            default_model = _model(routing, "default", default, catalogue)
        for name in routing.names("fallback") or ():
            if name in catalogue.upstreams:
                fallback.append(name)
            elif (model := _model(routing, "fallback", name, catalogue)) is not None:
                for target in catalogue.models[model].targets[:1]:
                    fallback.append(target.upstream)
                    mapped.setdefault(target.upstream, target.model)
    rules = [*_rules(root, catalogue, mapped), *(_rules(routing, catalogue, mapped) if routing else ())]
    if routing is not None:
        stream_failure = routing.choice("stream_failure", ("error", "continue"))
        routing.finish()
    return Routing(
        default_model=default_model,
        fallback=tuple(dict.fromkeys(fallback)),
        fallback_models=mapped,
        rules=tuple(rules),
        continues_streams=stream_failure == "continue",
    )


def check_model(section: Section, key: str, name: str | None, catalogue: Catalogue) -> str | None:
    """`default_model`: a model, an alias, or any name where the default upstream takes any."""
    if name is None:
        return None
    default = catalogue.upstreams.get(catalogue.default_upstream or "")
    if name not in catalogue.models and name not in catalogue.aliases and default is not None and not default.models:
        return name
    return _model(section, key, name, catalogue)


def _model(section: Section, key: str, name: str, catalogue: Catalogue) -> str | None:
    model = catalogue.aliases.get(name, name)
    if model in catalogue.models:
        return model
    known = [*catalogue.upstreams, *catalogue.models] if key != "default_model" else [*catalogue.models]
    what = "no model" if key == "default_model" else "no upstream and no model"
    section.complain(key, f"is {shown(name)}, which is {what}.{_hint(name, known)}")
    return None


def _hint(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = nearest(name, names)
    return f" Did you mean {near}?" if near else f" Known are {', '.join(names) or 'none'}."


def _rules(section: Section, catalogue: Catalogue, mapped: dict[str, str]) -> Iterable[Rule]:
    for item in section.items("rules"):
        rule = _rule(item, catalogue, mapped)
        if rule is not None:
            yield rule


def _rule(section: Section, catalogue: Catalogue, mapped: dict[str, str]) -> Rule | None:
    match = section.section("match")
    conditions: list[Condition] = []
    for subject, value in flattened(match.table) if match else ():
        try:
            conditions.append(parse_condition(subject, value))
        except ValueError as error:
            place = section.document.place((*section.key, "match", *_written(match, subject)))
            section.problems.error(place, f"{dotted((*section.key, 'match', subject))}: {error}")
    if "match" not in section:
        section.complain(None, "has no match; a rule without conditions is written `match = {}`.")
    target = section.text("target")
    model = section.text("model")
    fallback = section.names("fallback") or ()
    section.raw("name")
    section.finish()
    if "target" not in section:
        section.complain(None, "has no target: name an upstream or a model.")
    for key, name in [("target", target), *(("fallback", name) for name in fallback)]:
        if name is not None and name not in catalogue.upstreams and _model(section, key, name, catalogue) is None:
            return None
    if target is None:
        return None
    rule = Rule(match=tuple(conditions), target=target, model=model, fallback=fallback, place=dotted(section.key))
    _check_serves(section, rule, catalogue, mapped)
    return rule


def _written(match: Section | None, subject: str) -> tuple[str, ...]:
    """The key of a condition as the file has it: "key.tag" in one piece, or ("key", "tag")."""
    if match is None or subject in match.table:
        return (subject,)
    first, _, rest = subject.partition(".")
    return (first, rest)


def _check_serves(section: Section, rule: Rule, catalogue: Catalogue, mapped: dict[str, str]) -> None:
    """A rule whose target cannot serve the model, with no mapping, is a mistake now and not at the first request."""
    upstream = catalogue.upstreams.get(rule.target)
    if upstream is None:
        if rule.model is not None:
            section.complain("model", f"stands beside the model {rule.target} as target; a model knows its own name.")
        return
    served = ", ".join(upstream.models)
    if rule.model is not None:
        if not upstream.serves(rule.model):
            section.complain("model", f"is {shown(rule.model)}, but {upstream.name} serves {served}.")
        return
    if upstream.name in mapped:
        return
    for condition in rule.match:
        for test in condition.tests if condition.subject == "model" else ():
            name = catalogue.aliases.get(str(test.value), str(test.value))
            known = catalogue.models.get(name)
            has_target = known is not None and any(t.upstream == upstream.name for t in known.targets)
            if test.operator == "=" and not upstream.serves(name) and not has_target:
                section.complain(
                    "target",
                    f"is {upstream.name}, which serves {served} and not {test.value}; give the rule a `model`, or "
                    f"upstreams.{upstream.name} a `fallback_model`.",
                )


def unpriced(snapshot: Snapshot) -> Iterator[str]:
    """Warnings: a model has a price, and what may stand in for it has none, so that it would be booked as free."""
    for name in snapshot.models:
        attempts = attempts_for(snapshot, name)
        for attempt in attempts[1:]:
            if attempts[0].price.is_any and not attempt.price.is_any:
                yield (
                    f"models.{name}: the upstream {attempt.upstream.name} may answer for it with {attempt.model}, "
                    "which has no price: such requests count as free, also against budgets."
                )
