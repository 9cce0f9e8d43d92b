"""Keys as records, and the store that makes, lists, revokes and rotates them. Nothing here runs for a request.

A key is a row with a name and rights; it has one secret, or two for a while after a rotation. A change bumps the
version "keys" in the same transaction, by which every process sees it within a second (`key_index`).
"""

from __future__ import annotations

import fnmatch
import ipaddress
import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict, Unpack

from sqlalchemy import Connection, Row, select, update
from sqlalchemy.exc import IntegrityError

from headrace.gateway import key_secrets
from headrace.gateway.snapshot import Limits
from headrace.gateway.storage import tables
from headrace.gateway.storage.database import Database
from headrace.protocol.errors import nearest

VERSION = "keys"
DEFAULT_GRACE_S = 24 * 3600.0
WARNING_S = 7 * 24 * 3600.0
MAX_NAME_CHARS = 100
MAX_KEPT_S = 10 * 366 * 24 * 3600.0
FIRST_KEY_NAME = "first"
NO_LIMITS = Limits()

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class KeyMistake(ValueError):
    """What was asked of the store cannot be done; the message is for the person who asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """A key without its secret. Times are seconds since 1970."""

    id: str
    name: str
    prefix: str
    last4: str
    tags: tuple[str, ...] = ()
    plan: str | None = None
    models: tuple[str, ...] = ()
    """Globs of the models it may call; () = all."""
    limits: Limits = NO_LIMITS
    allowed_ips: tuple[str, ...] = ()
    """Addresses and networks it may be used from; () = everywhere."""
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None
    prompts_kept_s: float | None = None
    """How long its prompts and answers are kept; None = they are not."""
    secret_valid_until: float | None = None
    """Set for a secret that a rotation has replaced: it works until then."""
    networks: tuple[Network, ...] = field(default=(), repr=False, compare=False)

    @property
    def shown(self) -> str:
        """What may be printed of the secret: sk-hr-4fQ0...x9Zk."""
        return f"{self.prefix}...{self.last4}"

    @property
    def ends_at(self) -> float | None:
        """When this secret stops working, by expiry or by rotation."""
        ends = [end for end in (self.expires_at, self.secret_valid_until) if end is not None]
        return min(ends, default=None)

    def state(self, now_s: float) -> str:
        """active, expired or revoked."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now_s else "active"

    def allows_model(self, name: str) -> bool:
        return matches_any(name, self.models)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRequest:
    """What a new key shall be. `checked` says what is wrong with it."""

    name: str
    tags: tuple[str, ...] = ()
    plan: str | None = None
    models: tuple[str, ...] = ()
    limits: Limits = NO_LIMITS
    allowed_ips: tuple[str, ...] = ()
    expires_at: float | None = None
    prompts_kept_s: float | None = None

    def checked(self, now_s: float) -> KeyRequest:
        """The request with addresses in their usual form. Raises KeyMistake."""
        name = self.name.strip()
        if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
            raise KeyMistake(f"A key's name has 1 to {MAX_NAME_CHARS} printable characters; name it by its purpose.")
        if self.expires_at is not None and self.expires_at <= now_s:
            raise KeyMistake("The expiry lies in the past.")
        if self.prompts_kept_s is not None and not 0 < self.prompts_kept_s <= MAX_KEPT_S:
            raise KeyMistake("Prompts are kept for more than no time and at most ten years.")
        limits = self.limits
        for label, value in (("rpm", limits.rpm), ("tpm", limits.tpm), ("concurrency", limits.concurrency)):
            if value is not None and value < 1:
                raise KeyMistake(f"The limit {label} must be 1 or more, but it is {value}. Leave it out for no limit.")
        if limits.budget_micros is not None:
            if limits.budget_micros < 1:
                raise KeyMistake("A budget must be more than 0. Leave it out for no limit.")
            limits = replace(limits, budget_period=limits.budget_period or "total")
        addresses = tuple(str(network(address)) for address in self.allowed_ips)
        return replace(self, name=name, limits=limits, allowed_ips=addresses)


class KeyChanges(TypedDict, total=False):
    """What of a key changes: fields of its KeyRequest."""

    name: str
    tags: tuple[str, ...]
    plan: str | None
    models: tuple[str, ...]
    limits: Limits
    allowed_ips: tuple[str, ...]
    expires_at: float | None
    prompts_kept_s: float | None


def matches_any(name: str, globs: Sequence[str]) -> bool:
    """Whether one of the globs matches; no globs = everything."""
    return not globs or any(glob == name or fnmatch.fnmatchcase(name, glob) for glob in globs)


def network(text: str) -> Network:
    """An address or a network such as 10.0.0.0/8. Raises KeyMistake."""
    try:
        return ipaddress.ip_network(text.strip(), strict=False)
    except ValueError:
        raise KeyMistake(f"{text} is not an address such as 192.0.2.7 or a network such as 10.0.0.0/8.") from None


class KeyStore:
    """The keys in the database. Its methods block: call them in a thread, never on the event loop."""

    def __init__(self, database: Database, pepper: bytes, *, now_s: Callable[[], float] = time.time) -> None:
        self.database = database
        self.pepper = pepper
        self.now_s = now_s

    def create(self, request: KeyRequest) -> tuple[KeyRecord, str]:
        """Make a key. Returns its record and its secret, which cannot be had again. Raises KeyMistake."""
        checked = request.checked(self.now_s())
        with self.database.write() as connection:
            return self._create(connection, checked)

    def first(self) -> tuple[KeyRecord, str | None]:
        """At the first start a new key with its secret; later the oldest usable key (else the oldest), and None."""
        with self.database.write() as connection:
            self._lock(connection)
            records = self._list(connection)
            if not records:
                return self._create(connection, KeyRequest(name=FIRST_KEY_NAME))
            now_s = self.now_s()
            return min(records, key=lambda record: (record.state(now_s) != "active", record.created_at)), None

    def records(self) -> list[KeyRecord]:
        """Every key, the oldest first; of a key with two secrets the newer is shown."""
        with self.database.read() as connection:
            return self._list(connection)

    def find(self, name: str) -> KeyRecord:
        """The key with this name, id, prefix, or shown form. Raises KeyMistake when none or several have it."""
        with self.database.read() as connection:
            return _one(self._list(connection), name)

    def revoke(self, name: str) -> KeyRecord:
        """End a key for good; every process refuses it within a second. Revoking twice changes nothing."""
        keys = tables.keys
        with self.database.write() as connection:
            record = _one(self._list(connection), name)
            if record.revoked_at is None:
                record = replace(record, revoked_at=self.now_s())
                connection.execute(update(keys).where(keys.c.id == record.id).values(revoked_at=record.revoked_at))
                self.database.bump(connection, VERSION)
        return record

    def rotate(self, name: str, grace_s: float = DEFAULT_GRACE_S) -> tuple[KeyRecord, str]:
        """A new secret for the key; the old one works for `grace_s` more. Raises KeyMistake for a revoked key."""
        stored = tables.key_secrets
        now_s = self.now_s()
        until = now_s + max(0.0, grace_s)
        with self.database.write() as connection:
            record = _one(self._list(connection), name)
            if record.state(now_s) != "active":
                raise KeyMistake(f"The key {record.name} is {record.state(now_s)}: create a new one.")
            later = (stored.c.valid_until.is_(None)) | (stored.c.valid_until > until)
            connection.execute(update(stored).where(stored.c.key_id == record.id, later).values(valid_until=until))
            secret = key_secrets.new_secret()
            self._add_secret(connection, record.id, secret, now_s)
            self.database.bump(connection, VERSION)
        prefix, last4 = key_secrets.shown_prefix(secret), key_secrets.last_four(secret)
        return replace(record, secret_valid_until=None, prefix=prefix, last4=last4), secret

    def change(self, key: str, /, **changed: Unpack[KeyChanges]) -> KeyRecord:
        """Give the key other rights; those that are not named stay, and so does its secret. Raises KeyMistake."""
        keys = tables.keys
        with self.database.write() as connection:
            record = _one(self._list(connection), key)
            request = replace(_rights(record), **changed)
            # An expiry that has passed may stay as it is; only a new one must lie ahead.
            keeps_expiry = request.expires_at == record.expires_at
            checked = replace(request, expires_at=None if keeps_expiry else request.expires_at).checked(self.now_s())
            checked = replace(checked, expires_at=request.expires_at)
            values = _columns(checked)
            try:
                connection.execute(update(keys).where(keys.c.id == record.id).values(**values))
            except IntegrityError:
                raise _name_taken(checked.name) from None
            self.database.bump(connection, VERSION)
            return next(each for each in self._list(connection) if each.id == record.id)

    def secrets_by_digest(self) -> tuple[dict[str, KeyRecord], int]:
        """What the index holds in memory: every secret's digest with its key, and the version that this is."""
        with self.database.read() as connection:
            version = self.database.version(connection, VERSION)
            return {row.digest: _record(row) for row in connection.execute(_SELECT)}, version

    def _create(self, connection: Connection, request: KeyRequest) -> tuple[KeyRecord, str]:
        now_s = self.now_s()
        key_id = "key_" + secrets.token_hex(8)
        values = {"id": key_id, "created_at": now_s, **_columns(request)}
        try:
            connection.execute(tables.keys.insert().values(**values))
        except IntegrityError:
            raise _name_taken(request.name) from None
        secret = key_secrets.new_secret()
        self._add_secret(connection, key_id, secret, now_s)
        self.database.bump(connection, VERSION)
        return next(each for each in self._list(connection) if each.id == key_id), secret

    def _add_secret(self, connection: Connection, key_id: str, secret: str, now_s: float) -> None:
        connection.execute(
            tables.key_secrets.insert().values(
                digest=key_secrets.digest(self.pepper, secret),
                key_id=key_id,
                prefix=key_secrets.shown_prefix(secret),
                last4=key_secrets.last_four(secret),
                created_at=now_s,
            )
        )

    def _list(self, connection: Connection) -> list[KeyRecord]:
        newest: dict[str, KeyRecord] = {}
        for row in connection.execute(_SELECT):
            newest[row.id] = _record(row)
        return [newest[key_id] for key_id in newest]

    def _lock(self, connection: Connection) -> None:
        """Makes "look, then create" one step among processes; SQLite's write transactions are that already."""
        self.database.bump(connection, VERSION)


_SELECT = (
    select(
        tables.keys,
        tables.key_secrets.c.digest,
        tables.key_secrets.c.prefix,
        tables.key_secrets.c.last4,
        tables.key_secrets.c.valid_until,
    )
    .join(tables.key_secrets, tables.key_secrets.c.key_id == tables.keys.c.id)
    .order_by(tables.keys.c.created_at, tables.keys.c.id, tables.key_secrets.c.created_at)
)


def _record(row: Row[Any]) -> KeyRecord:
    allowed = tuple(json.loads(row.allowed_ips))
    return KeyRecord(
        id=row.id,
        name=row.name,
        prefix=row.prefix,
        last4=row.last4,
        tags=tuple(json.loads(row.tags)),
        plan=row.plan,
        models=tuple(json.loads(row.models)),
        limits=Limits(
            rpm=row.rpm,
            tpm=row.tpm,
            concurrency=row.concurrency,
            budget_micros=row.budget_micros,
            budget_period=row.budget_period,
        ),
        allowed_ips=allowed,
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        prompts_kept_s=row.prompts_kept_s,
        secret_valid_until=row.valid_until,
        networks=tuple(network(address) for address in allowed),
    )


def _rights(record: KeyRecord) -> KeyRequest:
    """The request that would make such a key."""
    return KeyRequest(**{each.name: getattr(record, each.name) for each in fields(KeyRequest)})


def _columns(request: KeyRequest) -> dict[str, object]:
    limits = request.limits
    return {
        "name": request.name,
        "tags": json.dumps(request.tags),
        "plan": request.plan,
        "models": json.dumps(request.models),
        "rpm": limits.rpm,
        "tpm": limits.tpm,
        "concurrency": limits.concurrency,
        "budget_micros": limits.budget_micros,
        "budget_period": limits.budget_period,
        "allowed_ips": json.dumps(request.allowed_ips),
        "expires_at": request.expires_at,
        "prompts_kept_s": request.prompts_kept_s,
    }


def _one(records: Iterable[KeyRecord], name: str) -> KeyRecord:
    every = list(records)
    found = [record for record in every if record.id == name]
    found = found or [record for record in every if record.name == name and record.revoked_at is None]
    found = found or [record for record in every if name in (record.name, record.prefix, record.shown)]
    if len(found) == 1:
        return found[0]
    if found:
        choices = ", ".join(f"{record.id} ({record.shown})" for record in found)
        raise KeyMistake(f"Several keys are called {name}: {choices}. Name one by its id.")
    near = nearest(name, [record.name for record in every])
    hint = f"Did you mean {near}?" if near else "`headrace key list` shows them all."
    raise KeyMistake(f"There is no key {name[:MAX_NAME_CHARS]}. {hint}")


def _name_taken(name: str) -> KeyMistake:
    return KeyMistake(f"A key called {name} is in use. Choose another name, or revoke or rotate that key.")
