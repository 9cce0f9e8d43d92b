"""`headrace key`: make, list, revoke and rotate keys, and see what they used. A running gateway follows in a second.

It works on the database, not through a gateway, so it works as well when none is running.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from headrace.cli.options import Option, parse_options

if TYPE_CHECKING:
    from headrace.gateway.keys import KeyRecord, KeyStore
    from headrace.gateway.snapshot import Limits

USAGE = """\
headrace key create NAME [options]   make a key; it is shown this once
headrace key list                    every key, without its secret
headrace key show NAME               one key and what it used
headrace key revoke NAME             end a key; every gateway refuses it within a second
headrace key rotate NAME [--grace]   a new secret; the old one works for another day
headrace key usage [NAME] [options]  requests, tokens and cost
headrace key prompts NAME [options]  what a key's clients asked and were answered, where the key keeps it

NAME is a key's name, its id, or its beginning as `list` shows it.

create:
  --tag A,B           environments or teams, for rules and metrics
  --plan NAME         a plan of the configuration: presets, models and quota together
  --models A,B        the models it may call; * and ? match (all)
  --expires WHEN      30d, 12h, 2026-12-31 or never (never)
  --rpm N             requests a minute
  --tpm N             tokens a minute
  --concurrency N     requests at a time
  --budget AMOUNT     5/month, 0.50/day, 20/week, 100/total
  --allow-ip A,B      addresses or networks it may be used from (all)
  --keep-prompts TIME keep prompts and answers so long: 7d, 12h (they are not kept)

rotate:
  --grace TIME        how long the old secret still works (24h); 0 = it ends at once

usage:
  --days N            today and the days before it (30)
  --by A,B            key, model, upstream, day (key)

prompts:
  --last N            so many, the newest last (10)
  --keep TIME         keep them so long from now on; off = no longer, and remove what is kept

everywhere:
  --config FILE       take database and data directory from this configuration; else ./headrace.toml if it is there
  --database URL      sqlite:///FILE or postgresql://USER@HOST/NAME; else SQLite in the data directory
  --data-dir DIR      where keys and usage are kept (~/.headrace)
  --json              the result as JSON

Days are UTC. Exit status: 0, or 2 when something was wrong.
"""

LARGEST = 10**12
WHERE = (Option("config", "FILE"), Option("database", "URL"), Option("data-dir", "DIR"), Option("json"))
CREATING = (
    Option("tag", "A,B", many=True),
    Option("plan", "NAME"),
    Option("models", "A,B", many=True),
    Option("expires", "WHEN"),
    Option("rpm", "N", number=(1, LARGEST)),
    Option("tpm", "N", number=(1, LARGEST)),
    Option("concurrency", "N", number=(1, LARGEST)),
    Option("budget", "AMOUNT"),
    Option("allow-ip", "A,B", many=True),
    Option("keep-prompts", "TIME"),
)
ROTATING = (Option("grace", "TIME"),)
ASKING = (Option("days", "N", number=(1, 36_500)), Option("by", "A,B", many=True))

KEEPING = (Option("last", "N", number=(1, 100_000)), Option("keep", "TIME"))

Options = dict[str, str]


def key_command(words: Sequence[str]) -> int:
    """Run `headrace key` with `words`; returns the exit status."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if words else 2
    name, *rest = words
    if name not in ACTIONS:
        from headrace.config.flags import closest

        near = closest(name, ACTIONS)
        hint = f"Did you mean headrace key {near}?" if near else "`headrace key --help` shows what there is."
        print(f"headrace key: there is no {name}. {hint}", file=sys.stderr)
        return 2
    act, more, needs_name = ACTIONS[name]
    command = f"headrace key {name}"
    options = parse_options(command, rest, (*WHERE, *more), USAGE, positionals=0 if act is _list else 1)
    if isinstance(options, int):
        return options
    if needs_name and "0" not in options:
        print(f"{command} needs the name of a key: {command} NAME.", file=sys.stderr)
        return 2
    return _act(command, act, options)


def _act(command: str, act: Callable[[KeyStore, Options], None], options: Options) -> int:
    from headrace.config.errors import ConfigError
    from headrace.gateway.config_load import InvalidConfig
    from headrace.gateway.keys import KeyMistake
    from headrace.gateway.ledger import open_store

    try:
        database_url, data_dir = _place(options)
        store = open_store(database_url, data_dir)
        try:
            act(store, options)
        finally:
            store.database.close()
    except InvalidConfig as error:
        for line in error.problems:
            print(f"{command}: {line}", file=sys.stderr)
        return 2
    except (ConfigError, KeyMistake) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2
    return 0


def _place(options: Options) -> tuple[str | None, str]:
    """Database URL and data directory: the options', else the configuration's, else the usual ones."""
    from headrace.config.gateway_defaults import DATA_DIR
    from headrace.gateway.config_load import load_config
    from headrace.gateway.keys import KeyMistake

    url, data_dir = options.get("database"), options.get("data-dir")
    if "config" in options or (url is None and data_dir is None):
        snapshot = load_config(options.get("config"), os.environ)
        url = url or snapshot.listen.database_url
        data_dir = data_dir or snapshot.listen.data_dir
        plan = options.get("plan")
        if plan is not None and plan not in snapshot.plans:
            raise KeyMistake(f"--plan {plan}: the configuration has the plans {', '.join(snapshot.plans) or 'none'}.")
    return url, data_dir or DATA_DIR


def _create(store: KeyStore, options: Options) -> None:
    from headrace.cli import key_values
    from headrace.gateway.keys import KeyRequest
    from headrace.gateway.snapshot import Limits

    budget_micros, budget_period = key_values.budget(options.get("budget"))
    request = KeyRequest(
        name=options["0"],
        tags=key_values.words(options.get("tag")),
        plan=options.get("plan"),
        models=key_values.words(options.get("models")),
        limits=Limits(
            rpm=_number(options, "rpm"),
            tpm=_number(options, "tpm"),
            concurrency=_number(options, "concurrency"),
            budget_micros=budget_micros,
            budget_period=budget_period,
        ),
        allowed_ips=key_values.words(options.get("allow-ip")),
        expires_at=key_values.expiry(options.get("expires"), store.now_s()),
        prompts_kept_s=key_values.seconds(options["keep-prompts"]) if "keep-prompts" in options else None,
    )
    record, secret = store.create(request)
    _show_secret(record, secret, f"Made the key {record.name}", options, store.now_s())


def _rotate(store: KeyStore, options: Options) -> None:
    from headrace.cli import key_values
    from headrace.gateway.keys import DEFAULT_GRACE_S
    from headrace.protocol.access_errors import shown_date

    grace_s = DEFAULT_GRACE_S if "grace" not in options else key_values.seconds(options["grace"])
    record, secret = store.rotate(options["0"], grace_s)
    until = f"the old secret works until {shown_date(store.now_s() + grace_s)}" if grace_s else "the old secret ended"
    _show_secret(record, secret, f"Rotated the key {record.name}; {until}", options, store.now_s())


def _list(store: KeyStore, options: Options) -> None:
    from headrace.cli.gateway import print_table

    records, now_s = store.records(), store.now_s()
    if "json" in options:
        _print_json([_as_json(record, now_s) for record in records])
    elif not records:
        print("There are no keys yet. Make one: headrace key create NAME")
    else:
        heading = ("name", "key", "state", "tags", "plan", "models", "limits", "expires")
        print_table([heading, *(_row(record, now_s) for record in records)])


def _show(store: KeyStore, options: Options) -> None:
    from headrace.gateway.limits import money
    from headrace.gateway.usage_queries import usage_sums
    from headrace.protocol.access_errors import shown_date

    record, now_s = store.find(options["0"]), store.now_s()
    sums = usage_sums(store.database, first="0", by=(), key_id=record.id)
    if "json" in options:
        used = asdict(sums[0]) if sums else {}
        usage = {name: used.get(name, 0) for name in ("requests", "input_tokens", "output_tokens", "cost_micros")}
        _print_json({**_as_json(record, now_s), "usage": usage})
        return
    name, shown, state, tags, plan, models, limits, expires = _row(record, now_s)
    lines = [("name", name), ("id", record.id), ("key", shown), ("state", state)]
    lines += [("tags", tags), ("plan", plan), ("models", models), ("limits", limits)]
    lines += [("addresses", ", ".join(record.allowed_ips) or "all"), ("made", shown_date(record.created_at))]
    lines += [("expires", expires)]
    if record.prompts_kept_s is not None:
        lines.append(("prompts", f"kept for {record.prompts_kept_s / 86_400:g} days"))
    if record.revoked_at is not None:
        lines.append(("revoked", shown_date(record.revoked_at)))
    used_text = "nothing"
    if sums:
        total = sums[0]
        tokens = f"{total.input_tokens:,} tokens in, {total.output_tokens:,} out"
        used_text = f"{total.requests:,} requests, {tokens}, cost {money(total.cost_micros)}"
    for label, text in [*lines, ("used", used_text)]:
        print(f"{label:<10} {text}".rstrip())


def _revoke(store: KeyStore, options: Options) -> None:
    record = store.revoke(options["0"])
    if "json" in options:
        _print_json(_as_json(record, store.now_s()))
    else:
        print(f"Revoked the key {record.name} ({record.shown}). Running gateways refuse it within a second.")


def _usage(store: KeyStore, options: Options) -> None:
    from headrace.cli import key_values
    from headrace.cli.gateway import print_table
    from headrace.gateway.budget import day_number, day_text
    from headrace.gateway.keys import KeyMistake
    from headrace.gateway.limits import money
    from headrace.gateway.usage_queries import GROUPINGS, usage_sums

    wanted = key_values.words(options.get("by", "key"))
    unknown = [name for name in wanted if name not in GROUPINGS]
    if unknown:
        raise KeyMistake(f"--by {','.join(wanted)}: {unknown[0]} is none of {', '.join(GROUPINGS)}.")
    by = [name for name in GROUPINGS if name in wanted]
    num_days = int(options.get("days", "30"))
    first = day_text(day_number(store.now_s()) - num_days + 1)
    key_id = store.find(options["0"]).id if "0" in options else None
    sums = usage_sums(store.database, first=first, by=by, key_id=key_id)
    if "json" in options:
        _print_json([{name: value for name, value in asdict(row).items() if value is not None} for row in sums])
        return
    if not sums:
        print(f"Nothing was used since {first}.")
        return
    heading = (*by, "requests", "failed", "tokens in", "cached", "tokens out", "cost")
    rows = [heading]
    for row in sums:
        groups = tuple(str(row.key_name if name == "key" else getattr(row, name)) for name in by)
        numbers = (row.requests, row.failed, row.input_tokens, row.cached_tokens, row.output_tokens)
        rows.append((*groups, *(f"{number:,}" for number in numbers), money(row.cost_micros)))
    print_table(rows)
    estimated = sum(row.estimated for row in sums)
    if estimated:
        print(f"\nThe tokens of {estimated:,} requests are estimated: their upstream gave none.")


def _prompts(store: KeyStore, options: Options) -> None:
    from msgspec import structs

    from headrace.cli import key_values
    from headrace.gateway.prompt_log import PromptLog
    from headrace.protocol.access_errors import shown_date

    log = PromptLog(store.database, now_s=store.now_s)
    if "keep" in options:
        is_off = options["keep"] == "off"
        kept_s = None if is_off else key_values.seconds(options["keep"])
        record = store.change(options["0"], prompts_kept_s=kept_s)
        if is_off:
            log.forget(record.id)
        kept = "no longer kept, and removed" if is_off else f"kept for {options['keep']} from now on"
        print(f"Prompts and answers of the key {record.name} are {kept}.")
        return
    record = store.find(options["0"])
    found = log.latest(record.id, int(options.get("last", "10")))
    if "json" in options:
        _print_json([{**structs.asdict(each), "time": _time(each.time_s)} for each in found])
        return
    if not found and record.prompts_kept_s is None:
        print(f"The key {record.name} keeps no prompts. headrace key prompts {record.name} --keep 7d begins to.")
    for each in found:
        print(f"{shown_date(each.time_s)}  {each.endpoint}  {each.model}  {each.status} {each.outcome}")
        print(f"{each.request}\n\n{each.answer}\n")


def _show_secret(record: KeyRecord, secret: str, done: str, options: Options, now_s: float) -> None:
    if "json" in options:
        _print_json({**_as_json(record, now_s), "key": secret})
        return
    print(f"{done}. The secret is shown this once:\n\n  {secret}\n")
    print("Clients send it as `Authorization: Bearer ...`; `headrace connect TOOL` writes a tool's settings.")


def _row(record: KeyRecord, now_s: float) -> tuple[str, ...]:
    from headrace.protocol.access_errors import shown_date

    return (
        record.name,
        record.shown,
        record.state(now_s),
        ", ".join(record.tags),
        record.plan or "",
        ", ".join(record.models) or "all",
        _limits(record.limits),
        "never" if record.expires_at is None else shown_date(record.expires_at),
    )


def _limits(limits: Limits) -> str:
    from headrace.gateway.limits import money

    parts = [
        f"{value:,} {unit}"
        for value, unit in ((limits.rpm, "rpm"), (limits.tpm, "tpm"), (limits.concurrency, "at a time"))
        if value is not None
    ]
    if limits.budget_micros is not None:
        parts.append(f"{money(limits.budget_micros)}/{limits.budget_period}")
    return ", ".join(parts) or "none"


def _as_json(record: KeyRecord, now_s: float) -> dict[str, object]:
    limits = record.limits
    return {
        "id": record.id,
        "name": record.name,
        "prefix": record.prefix,
        "last4": record.last4,
        "state": record.state(now_s),
        "tags": list(record.tags),
        "plan": record.plan,
        "models": list(record.models),
        "limits": {name: value for name, value in asdict(limits).items() if value is not None},
        "allowed_ips": list(record.allowed_ips),
        "created_at": _time(record.created_at),
        "expires_at": _time(record.expires_at),
        "prompts_kept_s": record.prompts_kept_s,
        "revoked_at": _time(record.revoked_at),
    }


def _time(time_s: float | None) -> str | None:
    return None if time_s is None else datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")


def _number(options: Options, name: str) -> int | None:
    return int(options[name]) if name in options else None


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


ACTIONS: dict[str, tuple[Callable[[KeyStore, Options], None], tuple[Option, ...], bool]] = {
    "create": (_create, CREATING, True),
    "list": (_list, (), False),
    "show": (_show, (), True),
    "revoke": (_revoke, (), True),
    "rotate": (_rotate, ROTATING, True),
    "usage": (_usage, ASKING, False),
    "prompts": (_prompts, KEEPING, True),
}
"""Each with its own options and whether it needs a key's name."""
