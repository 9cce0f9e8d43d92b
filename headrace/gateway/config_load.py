"""From a file to a Snapshot, or to every mistake in it at once.

Any of these starts the gateway: our TOML, the guides' config.toml with its settings.json beside it, a providers and
routing JSON, a settings.json alone, a client's settings. Without a file the gateway serves the engine on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.config.errors import ConfigError
from headrace.gateway.config_clients import client_kind, client_settings
from headrace.gateway.config_document import Document, read_document
from headrace.gateway.config_engines import read_engines
from headrace.gateway.config_models import Catalogue
from headrace.gateway.config_routing import check_model, read_routing, unpriced
from headrace.gateway.config_section import Problems, Section
from headrace.gateway.config_upstreams import MANAGED, MANAGED_WORDS, managed_upstream, read_upstream
from headrace.gateway.config_values import read_listen, read_plans, read_presets
from headrace.gateway.placeholders import Placeholders
from headrace.gateway.presets import FIELDS, SAME_FIELD
from headrace.gateway.snapshot import EMPTY, Snapshot, Upstream

ENGINE_URL = "http://127.0.0.1:8000/v1"
"""Where `headrace serve` listens by default."""
OUR_SECTIONS = ("headrace", "taotoken", "server", "upstreams", "providers", "models", "routing", "plans", "engine")
DEFAULT_FILE = "headrace.toml"


class InvalidConfig(ConfigError):
    """`problems` has one line for every mistake; the message is all of them."""

    def __init__(self, problems: Sequence[str], sources: Sequence[str] = (), warnings: Sequence[str] = ()) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)
        self.sources = tuple(sources)
        self.warnings = tuple(warnings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What the command line says; it wins over the file, at reloads too."""

    host: str | None = None
    port: int | None = None
    database_url: str | None = None
    data_dir: str | None = None
    log_level: str | None = None


NO_OVERRIDES = Overrides()


def load_config(
    path: str | Path | None,
    environment: Mapping[str, str],
    *,
    overrides: Overrides = NO_OVERRIDES,
    generation: int = 1,
) -> Snapshot:
    """Read, fill in, check. Raises InvalidConfig.

    `path` None: headrace.toml here if there is one, else the engine at its default address. `environment` is what
    ${VAR} means (os.environ of the start), and TAOTOKEN_BASE_URL / TAOTOKEN_API_KEY for `managed`.
    """
    chosen = Path(path) if path is not None else Path(DEFAULT_FILE)
    if path is None and not chosen.is_file():
        snapshot = replace(_without_a_file(environment), generation=generation)
        return replace(snapshot, listen=_overridden(snapshot, overrides))
    placeholders = Placeholders(environment, chosen.absolute().parent)
    problems = Problems()
    snapshot = Snapshot()
    try:
        snapshot = _read(read_document(chosen), problems, placeholders)
    except ConfigError as error:
        problems.errors.append(str(error))
    sources = [str(chosen), *snapshot.sources, *(str(file) for file in placeholders.files)]
    sources = list(dict.fromkeys(sources))
    if problems.errors:
        raise InvalidConfig(list(dict.fromkeys(problems.errors)), sources, problems.warnings)
    snapshot = replace(
        snapshot,
        generation=generation,
        path=str(chosen),
        warnings=tuple(dict.fromkeys([*problems.warnings, *unpriced(snapshot)])),
        sources=tuple(sources),
    )
    return replace(snapshot, listen=_overridden(snapshot, overrides))


def engine_snapshot(engine: Upstream, environment: Mapping[str, str], overrides: Overrides = NO_OVERRIDES) -> Snapshot:
    """A gateway without a file before one engine that `headrace up` starts, under the names the engine serves."""
    snapshot = _without_a_file(environment, engine)
    return replace(snapshot, listen=_overridden(snapshot, overrides))


def is_gateway_config(path: Path) -> bool:
    """Whether a file given to `headrace up --config` is a headrace.toml and not a list of serve flags."""
    try:
        table = read_document(path).table
    except ConfigError:
        return False
    return any(isinstance(table.get(name), Mapping) for name in OUR_SECTIONS)


def _without_a_file(environment: Mapping[str, str], engine: Upstream | None = None) -> Snapshot:
    """The engine on this machine, and the managed upstream when the environment names one."""
    engine = engine or Upstream(name="engine", base_url=ENGINE_URL, health_path="/health")
    managed = managed_upstream(None, environment)
    catalogue = Catalogue(upstreams={engine.name: engine} | ({MANAGED: managed} if managed else {}))
    catalogue.default_upstream = engine.name
    catalogue.add_listed_models()
    plans = read_plans(Section(Document(Path(), "", {}, {}, True), (), {}, Problems(), Placeholders({}, Path())))
    return Snapshot(
        upstreams=MappingProxyType(catalogue.upstreams),
        models=MappingProxyType(catalogue.models),
        default_upstream=engine.name,
        fallback=(MANAGED,) if managed else (),
        plans=MappingProxyType(plans),
    )


def _read(document: Document, problems: Problems, placeholders: Placeholders) -> Snapshot:
    table = document.table
    if table and all(name in FIELDS or name in SAME_FIELD or name == "stream" for name in table):
        section = Section(document, (), table, problems, placeholders)
        presets = read_presets(section)
        return replace(_without_a_file(placeholders.environment), presets=presets)
    kind = client_kind(table)
    if kind is not None:
        try:
            settings = client_settings(table, kind)
        except ValueError as error:
            raise ConfigError(f"{document.name}: {error}.") from None
        for name in settings.unread:
            problems.warn(document.place((name,)), f"{name} is a setting of the client; it has no effect here.")
        document = replace(document, table=settings.table(), lines={})
    strict = document.table.get("strict", True)
    problems.strict = strict is not False
    root = Section(document, (), document.table, problems, placeholders)
    root.flag("strict")
    return _read_sections(root)


def _read_sections(root: Section) -> Snapshot:
    environment = root.placeholders.environment
    both = [name for name in ("headrace", "taotoken") if name in root]
    if len(both) == 2:
        root.complain("taotoken", "and headrace are the same section; keep one.")
    ours = root.section(both[0]) if both else None

    catalogue = Catalogue(upstreams={})
    managed = managed_upstream(ours, environment)
    fallback_models = _read_upstreams(root, catalogue, managed)
    engines = read_engines(root)
    for spec, upstream in engines:
        if upstream.name in catalogue.upstreams:
            place = root.place("engine", spec.name)
            root.problems.error(place, f"engine.{spec.name} is an upstream by itself; rename it or the upstream.")
        catalogue.upstreams[upstream.name] = upstream
    used = managed is not None and (
        (ours is not None and ("base_url" in ours or "urls" in ours)) or _names_managed(root)
    )
    if managed is not None and used:
        catalogue.upstreams.setdefault(MANAGED, managed)
        catalogue.timeouts, catalogue.max_retries = managed.timeouts, managed.max_retries

    routing = root.section("routing")
    described = [*root.sections("models"), *(ours.sections("models") if ours is not None else ())]
    catalogue.default_upstream = _default_upstream(routing, catalogue, has_models=bool(described))
    for name, section in described:
        catalogue.read_model(name, section)
    catalogue.add_listed_models()
    catalogue.add_fallbacks()
    catalogue.name_made_upstreams()
    _read_aliases(root, catalogue)
    found = read_routing(root, routing, catalogue, fallback_models)

    default_model = check_model(root, "default_model", root.text("default_model"), catalogue)
    if ours is not None:
        own = check_model(ours, "default_model", ours.text("default_model"), catalogue)
        default_model = default_model or own
        ours.finish()
    plans = read_plans(root)
    listen = read_listen(root.section("server"))
    presets, sources = _read_settings(root)
    root.finish(
        also=(
            "headrace",
            "taotoken",
            "upstreams",
            "models",
            "engine",
            "plans",
            "aliases",
            "presets",
            "settings",
            "rules",
        )
    )
    if not catalogue.upstreams and not root.problems.errors:
        root.complain(None, "names no upstream: add [upstreams.NAME], [engine.NAME] or [headrace] with a base_url.")
    return Snapshot(
        upstreams=MappingProxyType(catalogue.upstreams),
        models=MappingProxyType(catalogue.models),
        aliases=MappingProxyType(catalogue.aliases),
        default_model=default_model or found.default_model,
        default_upstream=catalogue.default_upstream,
        fallback=found.fallback,
        fallback_models=MappingProxyType(found.fallback_models),
        rules=found.rules,
        continues_streams=found.continues_streams,
        presets=presets,
        plans=MappingProxyType(plans),
        listen=listen,
        engines=tuple(spec for spec, _ in engines),
        sources=sources,
    )


def _read_upstreams(root: Section, catalogue: Catalogue, managed: Upstream | None) -> dict[str, str]:
    """`[upstreams.NAME]` and `providers`, one and the same. Returns the `fallback_model` of each that has one."""
    mapped: dict[str, str] = {}
    for name, section in [*root.sections("upstreams"), *root.sections("providers")]:
        models = section.names("models") or ()
        fallback_model = section.text("fallback_model")
        if section.table.get("base_url") in MANAGED_WORDS:
            section.raw("base_url")
            upstream = replace(managed, name=name) if managed is not None else None
            if upstream is None:
                section.complain(
                    "base_url", "is managed, and neither [headrace] nor TAOTOKEN_BASE_URL gives an address."
                )
        else:
            upstream = read_upstream(section, name)
        section.finish()
        if fallback_model is not None and models and fallback_model not in models:
            section.complain("fallback_model", f"is {fallback_model!r}; the upstream's models are {', '.join(models)}.")
        elif fallback_model is not None:
            mapped[name] = fallback_model
        if name in catalogue.upstreams:
            section.complain(None, "is described twice; keep one.")
        elif upstream is not None:
            catalogue.upstreams[name] = replace(upstream, models=models)
    return mapped


def _names_managed(root: Section) -> bool:
    """Whether anything below says `managed`."""

    def says(value: Any) -> bool:
        if isinstance(value, Mapping):
            return any(says(item) for item in value.values())
        return any(says(item) for item in value) if isinstance(value, list) else value in MANAGED_WORDS

    return says({name: value for name, value in root.table.items() if name != "engine"})


def _default_upstream(routing: Section | None, catalogue: Catalogue, *, has_models: bool) -> str | None:
    """`routing.default`, else the only upstream of a file that describes no models."""
    named = routing.table.get("default") if routing is not None else None
    if isinstance(named, str):
        return named if named in catalogue.upstreams else None
    return next(iter(catalogue.upstreams)) if len(catalogue.upstreams) == 1 and not has_models else None


def _read_aliases(root: Section, catalogue: Catalogue) -> None:
    """`[aliases]`: other names of models. An alias is no model's name and leads to a model."""
    section = root.section("aliases")
    for alias in section.table if section is not None else ():
        model = section.text(alias) if section is not None else None
        if model is None or section is None:
            continue
        if check_model(section, alias, model, catalogue) is not None:
            catalogue.add_alias(section, alias, alias, model)
    for alias, model in catalogue.aliases.items():
        if alias in catalogue.models:
            root.problems.error(
                root.place("models", model, "aliases"), f"{alias!r} is an alias of {model} and a model too; rename one."
            )


def _read_settings(root: Section) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """`[presets]`, or the file that `settings` names; and that file.

    The guides' config.toml, which has a `[taotoken]` or `[headrace]` section, takes settings.json beside it by itself.
    """
    inline = root.section("presets")
    named = root.raw("settings")
    folder = root.document.path.parent
    if inline is not None:
        if named not in (None, False):
            root.complain("settings", "and presets are both given; keep one.")
        return read_presets(inline), ()
    if named is False:
        return EMPTY, ()
    if named is not None and not isinstance(named, str):
        root.complain("settings", "must be the path of a JSON file, or false for none.")
        return EMPTY, ()
    if named is None and "headrace" not in root and "taotoken" not in root:
        return EMPTY, ()
    path = folder / Path(named or "settings.json").expanduser()
    if named is None and not path.is_file():
        return EMPTY, (str(path),)
    try:
        document = read_document(path)
    except ConfigError as error:
        root.problems.errors.append(f"{error} (Request defaults; `settings = false` reads none.)")
        return EMPTY, (str(path),)
    section = Section(document, (), document.table, root.problems, root.placeholders)
    return read_presets(section), (str(path),)


def _overridden(snapshot: Snapshot, overrides: Overrides) -> Any:
    names = ("host", "port", "database_url", "data_dir", "log_level")
    given = {name: value for name in names if (value := getattr(overrides, name)) is not None}
    return replace(snapshot.listen, **given)
