"""Every key in memory: the check of a request costs a hash and a look-up, never a query.

What is stored of a key is an HMAC of its secret. Headers that have been found to carry a key are known again by a
shorter hash of them as they are, which spares reading them and the HMAC. All of it is replaced as a whole when the
database says that keys have changed, which a thread asks it four times a second: on SQLite through
`PRAGMA data_version`, which costs microseconds, on PostgreSQL with one SELECT of one row. So a revocation, made
anywhere, is seen by every process within a second. When the database cannot be reached the last known keys stay in
force.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import threading
import time
from collections.abc import Callable, Mapping

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from headrace.gateway import key_secrets
from headrace.gateway.keys import VERSION, WARNING_S, KeyRecord, KeyStore, matches_any
from headrace.gateway.sent_key import KEY_HEADERS, hint, sent_key
from headrace.gateway.snapshot import Plan
from headrace.protocol import access_errors
from headrace.protocol.access_errors import shown_date
from headrace.protocol.errors import ApiError

POLL_S = 0.25
KEY_CHARS = len(key_secrets.PREFIX) + key_secrets.SECRET_CHARS

CARRIERS = (b"authorization", *sorted(KEY_HEADERS))
MAX_MARKS = 10_000

logger = logging.getLogger("headrace.gateway.keys")


class _Keys:
    """The keys in force at one moment, by the digest of their secret and by marks of headers that carried them."""

    __slots__ = ("_pepper", "by_digest", "by_mark")

    def __init__(self, pepper: bytes, by_digest: Mapping[str, KeyRecord]) -> None:
        self._pepper = pepper
        self.by_digest = by_digest
        self.by_mark: dict[bytes, KeyRecord] = {}

    def mark(self, headers: Mapping[bytes, bytes]) -> bytes:
        carried = b"\0".join([headers.get(name, b"") for name in CARRIERS])
        return hashlib.blake2b(carried, key=self._pepper, digest_size=32).digest()

    def with_secret(self, secret: str) -> KeyRecord | None:
        return self.by_digest.get(key_secrets.digest(self._pepper, secret))

    def know(self, mark: bytes, record: KeyRecord) -> None:
        if len(self.by_mark) >= MAX_MARKS:
            self.by_mark.clear()
        self.by_mark[mark] = record


class KeyIndex:
    """Answers who asks. `authenticate` may be called from any thread; `start` begins to follow the database."""

    def __init__(
        self,
        store: KeyStore,
        *,
        page: str | None = None,
        poll_s: float = POLL_S,
        now_s: Callable[[], float] = time.time,
        changed: Callable[[], None] | None = None,
    ) -> None:
        self.store = store
        self.page = page
        self.reload_error: str | None = None
        """Why the keys in memory may be out of date; None = they are not."""
        self._poll_s = poll_s
        self._now_s = now_s
        self._changed = changed
        self._keys = _Keys(store.pepper, {})
        self._version = -1
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.reload()

    @property
    def records(self) -> Mapping[str, KeyRecord]:
        """The keys in force by digest of their secret."""
        return self._keys.by_digest

    def authenticate(self, headers: Mapping[bytes, bytes], client_ip: str | None) -> KeyRecord:
        """The key that the request carries. Header names are in lower case. Raises ApiError 401 or 403.

        Unknown, revoked and expired keys take the same way, and so the same time.
        """
        keys = self._keys
        mark = keys.mark(headers)
        record = keys.by_mark.get(mark)
        if record is not None and self._is_usable(record, client_ip):
            return record
        sent = sent_key(headers, self.page)
        record = keys.with_secret(sent.value)
        if record is None or not self._is_usable(record, client_ip):
            raise self._refusal(record, sent.value, client_ip)
        if sent.conflicting:
            logger.warning("A request with key %s carries another key in another header; Bearer wins.", record.shown)
        else:
            keys.know(mark, record)
        return record

    def check_model(self, record: KeyRecord, plan: Plan | None, name: str) -> None:
        """Raises ApiError (403) when the key or its plan does not open the model (a name that exists)."""
        if not record.allows_model(name):
            raise access_errors.model_not_allowed(name, "API key", ", ".join(record.models))
        if plan is not None and not matches_any(name, plan.models):
            raise access_errors.model_not_allowed(name, f"API key's plan {plan.name}", ", ".join(plan.models))

    def warning_headers(self, record: KeyRecord) -> list[tuple[bytes, bytes]]:
        """What an answer says in the last seven days of a key; [] before that."""
        if record.expires_at is None and record.secret_valid_until is None:
            return []
        end = record.ends_at
        if end is None or end - self._now_s() > WARNING_S:
            return []
        why = "is replaced" if end == record.secret_valid_until else "expires"
        place = f"; see {self.page}" if self.page is not None else ""
        text = f'299 headrace "The API key {why} on {shown_date(end)}{place}"'
        return [(b"warning", text.encode()), (b"x-headrace-key-expires", shown_date(end).encode())]

    def reload(self) -> None:
        """Read the keys from the database now. Blocks."""
        by_digest, self._version = self.store.secrets_by_digest()
        self._keys = _Keys(self.store.pepper, by_digest)
        if self._changed is not None:
            self._changed()

    def start(self) -> None:
        """Follow the database from now on, in a thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="headrace-keys", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _is_usable(self, record: KeyRecord, client_ip: str | None) -> bool:
        if record.revoked_at is not None or (record.networks and not _is_within(client_ip, record)):
            return False
        if record.expires_at is None and record.secret_valid_until is None:
            return True
        return record.ends_at > self._now_s()  # type: ignore[operator]  # one of the two is set

    def _refusal(self, record: KeyRecord | None, value: str, client_ip: str | None) -> ApiError:
        now_s = self._now_s()
        text = hint(value, key_secrets.PREFIX, KEY_CHARS)
        if record is None:
            return access_errors.unknown_key(text, self.page)
        if record.revoked_at is not None:
            return access_errors.key_revoked(record.revoked_at, self.page)
        if record.expires_at is not None and record.expires_at <= now_s:
            return access_errors.key_expired(record.expires_at, self.page)
        if record.secret_valid_until is not None and record.secret_valid_until <= now_s:
            return access_errors.key_replaced(record.secret_valid_until, self.page)
        return access_errors.ip_not_allowed(client_ip)

    def _follow(self) -> None:
        while not self._stop.wait(self._poll_s):
            try:
                with self.store.database.engine.connect() as connection:
                    self._follow_over(connection)
            except SQLAlchemyError as error:
                if self.reload_error is None:
                    logger.error("The keys cannot be read again; the last known stay in force: %s", error)
                self.reload_error = " ".join(str(error).split())

    def _follow_over(self, connection: Connection) -> None:
        """Look again and again over one connection, until the end or until the connection fails."""
        seen: object = None
        while True:
            mark = _data_version(connection) if self.store.database.is_sqlite else None
            if mark is None or mark != seen:
                with connection.begin():
                    version = self.store.database.version(connection, VERSION)
                if version != self._version:
                    self.reload()
                seen = mark
            self.reload_error = None
            if self._stop.wait(self._poll_s):
                return


def _data_version(connection: Connection) -> object:
    """A number that changes when another connection has committed anything. Needs no transaction."""
    return connection.connection.cursor().execute("PRAGMA data_version").fetchone()[0]


def _is_within(client_ip: str | None, record: KeyRecord) -> bool:
    try:
        address = ipaddress.ip_address((client_ip or "").partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return any((mapped or address) in network for network in record.networks)
