"""The smaller parts of a configuration: presets, limits, prices, plans and the `[server]` section."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any, cast

from headrace.gateway.config_section import Section, shown
from headrace.gateway.config_upstreams import read_address, read_headers
from headrace.gateway.presets import FIELDS, SAME_FIELD
from headrace.gateway.snapshot import EMPTY, Admin, Limits, Listen, Period, Plan, Price, Tracing
from headrace.protocol.errors import nearest

BUILT_IN_PLANS: Mapping[str, Plan] = {
    "default": Plan(name="default", display_name="Default"),
    "coding": Plan(
        name="coding",
        display_name="Coding Plan",
        presets={"temperature": 0.2, "top_p": 0.95},
        limits=Limits(rpm=240, concurrency=16),
        session_affinity=True,
    ),
}
PERIODS = ("day", "week", "month", "total")
DATABASES = ("sqlite", "postgresql", "postgres")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 2**31),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "repetition_penalty": (0.01, 10),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "max_tokens": (1, 2**31),
    "min_tokens": (0, 2**31),
    "seed": (-(2**63), 2**63 - 1),
}


def read_presets(section: Section) -> Mapping[str, Any]:
    """Every key of the table as a request default. `stream` is accepted and stays with each request."""
    presets: dict[str, Any] = {}
    for written, raw in section.table.items():
        name = SAME_FIELD.get(written, written)
        if name == "stream":
            if not isinstance(raw, bool):
                section.complain(written, f"must be true or false, but it is {shown(raw)}.")
            elif raw:
                section.warn(written, "is left to each request: a default would break clients that do not stream.")
            continue
        if name not in FIELDS:
            near = nearest(written, [*FIELDS, "stream"])
            hint = f"Did you mean {near}?" if near else f"Request defaults are {', '.join(FIELDS)}."
            section.problems.unknown(section.place(written), f"{written} is no request default. {hint}")
            continue
        wrong = _preset_mistake(name, raw)
        if wrong is not None:
            section.complain(written, f"must be {wrong}, but it is {shown(raw)}.")
        else:
            presets[name] = plain(raw)
    return presets or EMPTY


def plain(value: Any) -> Any:
    """A value of the file as JSON knows it: Decimal becomes float."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def _preset_mistake(name: str, raw: object) -> str | None:
    """What the value of a preset must be, if it is not."""
    kind = FIELDS[name]
    if kind in (int, float):
        low, high = _RANGES[name]
        is_number = isinstance(raw, int | Decimal) and not isinstance(raw, bool)
        if kind is int and not (isinstance(raw, int) and is_number):
            return "a whole number"
        if not is_number or not low <= cast(Decimal, raw) <= high:
            return f"a number from {low:g} to {high:g}"
        return None
    if name == "stop":
        items = raw if isinstance(raw, list) else [raw]
        return None if items and all(isinstance(item, str) and item for item in items) else "text or a list of texts"
    if isinstance(raw, kind):
        return None
    return "a table" if kind is dict else "text"


def read_limits(section: Section) -> Limits:
    """rpm, tpm, concurrency, budget and budget_period of a plan."""
    budget = section.money("budget")
    period = section.choice("budget_period", PERIODS)
    if period is not None and budget is None and "budget" not in section:
        section.complain("budget_period", "stands without a budget.")
    return Limits(
        rpm=section.integer("rpm"),
        tpm=section.integer("tpm"),
        concurrency=section.integer("concurrency"),
        budget_micros=budget,
        budget_period=cast(Period, period or "month") if budget is not None else None,
    )


def read_price(section: Section | None) -> Price:
    """`price = { input = 0.15, output = 0.60, cached_input = 0.075 }`: currency for a million tokens."""
    if section is None:
        return Price()
    price = Price(
        input_micros_per_mtok=section.money("input") or 0,
        output_micros_per_mtok=section.money("output") or 0,
        cached_input_micros_per_mtok=section.money("cached_input"),
    )
    section.finish()
    return price


def read_plans(root: Section) -> dict[str, Plan]:
    """The built-in plans, changed and added to by `[plans.NAME]`: what a section names replaces that value."""
    plans = dict(BUILT_IN_PLANS)
    for name, section in root.sections("plans"):
        base = plans.get(name, Plan(name=name))
        presets = section.section("presets")
        limits = read_limits(section)
        given = {field: getattr(limits, field) for key, field in _LIMIT_FIELDS if key in section}
        affinity = section.flag("session_affinity")
        plans[name] = Plan(
            name=name,
            display_name=section.text("display_name") or base.display_name,
            presets=read_presets(presets) if presets is not None else base.presets,
            models=section.names("models") or base.models,
            limits=replace(base.limits, **given),
            session_affinity=base.session_affinity if affinity is None else affinity,
        )
        section.finish()
    return plans


_LIMIT_FIELDS = (
    ("rpm", "rpm"),
    ("tpm", "tpm"),
    ("concurrency", "concurrency"),
    ("budget", "budget_micros"),
    ("budget", "budget_period"),
)


def _read_tracing(section: Section | None) -> Tracing | None:
    """`[server.traces]`; None where it is missing or wrong."""
    if section is None:
        return None
    base = Tracing(endpoint="")
    text = section.text("endpoint")
    if text is None and "endpoint" not in section:
        section.complain(None, 'has no endpoint; name a collector such as endpoint = "http://127.0.0.1:4318".')
    endpoint = None if text is None else read_address(section, "endpoint", text.removesuffix("/v1/traces"))
    sample = section.number("sample", 0, 1)
    name = section.text("service_name") or base.service_name
    headers = read_headers(section)
    section.finish()
    if endpoint is None:
        return None
    return Tracing(
        endpoint=endpoint, sample=base.sample if sample is None else sample, service_name=name, headers=headers
    )


def read_listen(section: Section | None) -> Listen:
    """The `[server]` section."""
    base = Listen()
    if section is None:
        return base
    port = section.integer("port", 0, 65535)
    admin = section.section("admin")
    enabled = admin.flag("enabled") if admin else None
    proxies = admin.names("trusted_proxies") if admin else None
    for proxy in proxies or ():
        try:
            ipaddress.ip_network(proxy, strict=False)
        except ValueError:
            assert admin is not None
            admin.complain("trusted_proxies", f'names "{proxy}", which is no address such as 10.0.0.1 or 10.0.0.0/8.')
    if admin is not None:
        admin.finish()
    traces = _read_tracing(section.section("traces"))
    database = section.text("database", secret=True)
    if database is not None and database.partition(":")[0].partition("+")[0] not in DATABASES:
        section.complain("database", "must begin with sqlite:/// or postgresql://; other databases are not supported.")
    hold_back = section.seconds("hold_back_s", 0)
    drain = section.seconds("drain_s", 0)
    listen = Listen(
        host=section.text("host") or base.host,
        port=base.port if port is None else port,
        max_body_bytes=section.integer("max_body_bytes", 1024, 2**40) or base.max_body_bytes,
        hold_back_s=base.hold_back_s if hold_back is None else hold_back,
        database_url=database,
        data_dir=section.text("data_dir"),
        log_level=section.choice("log_level", LOG_LEVELS) or base.log_level,
        page_url=section.text("page_url"),
        allowed_origins=section.names("allowed_origins") or (),
        drain_s=base.drain_s if drain is None else drain,
        retention_days=section.integer("retention_days"),
        gateways=section.integer("gateways", 1, 1000) or base.gateways,
        traces=traces,
        admin=Admin(enabled=True if enabled is None else enabled, trusted_proxies=proxies or ()),
    )
    section.finish()
    return listen
