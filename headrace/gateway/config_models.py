"""From upstreams and `[models.NAME]` sections to the catalogue: every name a client may send, with its targets.

A name comes from a section, from an upstream's `models` list or from both. The seeds' form, a model whose `upstream`
is an address with its own `upstream_key`, makes an upstream for that address.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from headrace.gateway.config_section import Section, shown
from headrace.gateway.config_upstreams import MANAGED, MANAGED_WORDS, read_address, read_secret
from headrace.gateway.config_values import read_presets, read_price
from headrace.gateway.model_router import Router, load_router
from headrace.gateway.snapshot import EMPTY, Model, Price, Target, Timeouts, Upstream
from headrace.protocol.errors import nearest

MANAGED_MISSING = (
    'is "{}", and there is no address for it: give [headrace] a base_url (and an api_key), or set '
    "TAOTOKEN_BASE_URL and TAOTOKEN_API_KEY."
)


@dataclass(slots=True)
class Catalogue:
    """What the reading of a file has found so far. `unlisted` are upstreams made for one model's address."""

    upstreams: dict[str, Upstream]
    default_upstream: str | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    max_retries: int = 2
    models: dict[str, Model] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)
    later: list[tuple[str, Section]] = field(default_factory=list)
    """Models whose `fallbacks` wait until every model is known."""

    def upstreams_by_preference(self) -> list[Upstream]:
        """The default upstream first, then as in the file."""
        return sorted(self.upstreams.values(), key=lambda upstream: upstream.name != self.default_upstream)

    def listing(self, name: str) -> tuple[Target, ...]:
        """A target at each upstream whose `models` has the name."""
        return tuple(Target(upstream=u.name, model=name) for u in self.upstreams_by_preference() if name in u.models)

    def read_model(self, name: str, section: Section) -> None:
        """One `[models.NAME]`."""
        if name in self.models:
            section.complain(None, "is described twice; keep one.")
            return
        window = section.integer("context_window")
        price = read_price(section.section("price"))
        presets = section.section("presets")
        at = section.text("upstream_model")
        targets = self._targets(name, section, at, window, price)
        router = _router(section)
        aliases = section.names("aliases") or ()
        for alias in aliases:
            self.add_alias(section, "aliases", alias, name)
        self.models[name] = Model(
            name=name,
            display_name=section.text("display_name"),
            targets=targets,
            context_window=window,
            price=price,
            presets=read_presets(presets) if presets else EMPTY,
            aliases=aliases,
            router=router,
        )
        self.later.append((name, section))
        section.raw("fallbacks")
        section.finish()

    def add_listed_models(self) -> None:
        """Models that only an upstream's list names."""
        for upstream in self.upstreams_by_preference():
            if upstream.name in self.made:
                continue
            for name in upstream.models:
                if name not in self.models:
                    self.models[name] = Model(name=name, targets=self.listing(name))

    def add_fallbacks(self) -> None:
        """`fallbacks` of each model: further targets, by upstream, by model, or written out."""
        for name, section in self.later:
            model = self.models[name]
            more: list[Target] = []
            for item in _as_list(section.table.get("fallbacks")):
                found = self._fallback(name, section, item)
                asked = {(target.upstream, target.model) for target in (*model.targets, *more)}
                if found and all((target.upstream, target.model) in asked for target in found):
                    section.warn("fallbacks", f"names {shown(item)}, which is asked already.")
                more += found
            if more:
                self.models[name] = replace(model, targets=tuple(dict.fromkeys((*model.targets, *more))))

    def add_alias(self, section: Section, key: str, alias: str, name: str) -> None:
        before = self.aliases.setdefault(alias, name)
        if before != name:
            section.complain(key, f"gives {alias!r} to {name}, but it is an alias of {before} already.")

    def name_made_upstreams(self) -> None:
        """An upstream made for an address serves the models that point to it, and only these."""
        for upstream in self.made:
            served = [t.model for m in self.models.values() for t in m.targets if t.upstream == upstream]
            self.upstreams[upstream] = replace(self.upstreams[upstream], models=tuple(dict.fromkeys(served)))

    def _targets(
        self, name: str, section: Section, at: str | None, window: int | None, price: Price
    ) -> tuple[Target, ...]:
        key = read_secret(section, "upstream_key")
        written = section.text("upstream")
        listed = section.raw("targets")
        if written is not None and listed is not None:
            section.complain("targets", "and upstream are both given; keep one.")
        if written is not None:
            upstream = self._upstream(section, "upstream", written, key)
            if upstream is None or not self._serves(section, upstream, name, at):
                return ()
            return (Target(upstream=upstream, model=at or name, context_window=window, price=price),)
        if key is not None:
            section.complain("upstream_key", "stands without an upstream.")
        if listed is not None:
            targets = [self._target(name, section, "targets", item) for item in _as_list(listed)]
            if not targets:
                section.complain("targets", "is empty.")
            return tuple(
                replace(t, context_window=t.context_window or window, price=price if t.price == Price() else t.price)
                for t in targets
                if t is not None
            )
        if "upstream" in section:
            return ()
        found = self.listing(at or name)
        default = self.upstreams.get(self.default_upstream or "")
        if not found and default is not None and not default.models:
            found = (Target(upstream=default.name, model=at or name),)
        if not found:
            section.complain(None, "has no upstream, and no upstream lists this name in its models.")
        return tuple(replace(target, context_window=window, price=price) for target in found)

    def _upstream(self, section: Section, key: str, written: str, upstream_key: str | None) -> str | None:
        """The name of the upstream that a model points to: by name, by address, or the managed one."""
        if written in MANAGED_WORDS:
            if MANAGED not in self.upstreams:
                section.complain(key, MANAGED_MISSING.format(written))
                return None
            return MANAGED
        if written in self.upstreams and written not in self.made:
            if upstream_key is not None:
                section.complain("upstream_key", f"belongs into upstreams.{written}.api_key.")
            return written
        if "://" not in written:
            near = nearest(written, [*self.upstreams, *MANAGED_WORDS])
            hint = f" Did you mean {near}?" if near else f" Known are {', '.join(self.upstreams) or 'none'}."
            section.complain(key, f"is {shown(written)}, which is no upstream and no URL.{hint}")
            return None
        url = read_address(section, key, written)
        return None if url is None else self._made(url, upstream_key)

    def _made(self, url: str, key: str | None) -> str:
        for upstream in self.upstreams.values():
            if upstream.base_url == url and upstream.name != MANAGED and (key is None or upstream.api_key == key):
                return upstream.name
        host = urlsplit(url).netloc
        name = next(n for n in (host, *(f"{host}-{i}" for i in range(2, 10_000))) if n not in self.upstreams)
        self.upstreams[name] = Upstream(
            name=name, base_url=url, api_key=key, timeouts=self.timeouts, max_retries=self.max_retries
        )
        self.made.add(name)
        return name

    def _serves(self, section: Section, upstream: str, name: str, at: str | None) -> bool:
        served = self.upstreams[upstream]
        if upstream in self.made or served.serves(at or name):
            return True
        names = ", ".join(served.models)
        where = "upstream_model" if at else None
        section.complain(where, f"points to {upstream}, which serves {names} and not {at or name}; set upstream_model.")
        return False

    def _target(self, name: str, section: Section, key: str, item: object) -> Target | None:
        """`"local"` or `{ upstream = "local", model = "qwen2-7b", context_window = 8192, price = {...} }`."""
        if isinstance(item, str):
            upstream = self._upstream(section, key, item, None)
            if upstream is None or not self._serves(section, upstream, name, None):
                return None
            return Target(upstream=upstream, model=name)
        if not isinstance(item, Mapping):
            section.complain(key, f"must hold names of upstreams or tables, but one is {shown(item)}.")
            return None
        place = Section(section.document, (*section.key, key), item, section.problems, section.placeholders)
        written = place.text("upstream")
        model = place.text("model") or name
        target_window = place.integer("context_window")
        price = read_price(place.section("price"))
        place.finish()
        if written is None:
            place.complain(None, "has a table without upstream.")
            return None
        upstream = self._upstream(place, "upstream", written, None)
        if upstream is None or not self._serves(place, upstream, model, None):
            return None
        return Target(upstream=upstream, model=model, context_window=target_window, price=price)

    def _fallback(self, name: str, section: Section, item: object) -> list[Target]:
        if isinstance(item, str) and item not in self.upstreams:
            other = self.models.get(self.aliases.get(item, item))
            if other is not None:
                return [replace(t, context_window=t.context_window or other.context_window) for t in other.targets]
            if item not in MANAGED_WORDS and "://" not in item:
                near = nearest(item, [*self.upstreams, *self.models])
                hint = f" Did you mean {near}?" if near else ""
                section.complain("fallbacks", f"names {shown(item)}, which is no upstream and no model.{hint}")
                return []
        if isinstance(item, str) and item in self.upstreams:
            upstream = self.upstreams[item]
            return [Target(upstream=item, model=name if upstream.serves(name) else upstream.models[0])]
        target = self._target(name, section, "fallbacks", item)
        return [] if target is None else [target]


def _router(section: Section) -> Router | None:
    written = section.text("router")
    if written is None:
        return None
    try:
        router, path = load_router(written, section.placeholders.folder)
    except ValueError as error:
        section.complain("router", f"is {shown(written)}: it {error}.")
        return None
    if path is not None:
        section.placeholders.files.append(path)
    return router


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]
