"""Secrets of keys: how they are made, and the one form in which they are kept.

    sk-hr-4fQ0...   shown once, 256 random bits in base 62, nowhere stored
        | HMAC-SHA-256 with the pepper, a file of the data directory
    9c41d2...       stored, and compared

Whoever has the database alone can neither use a key nor test a guess. A slow hash would buy nothing against
256 random bits and would let anybody keep the gateway busy with wrong keys.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Any

from sqlalchemy import select

from headrace.config.errors import ConfigError
from headrace.gateway.storage import tables
from headrace.gateway.storage.database import Database

PREFIX = "sk-hr-"
RANDOM_BITS = 256
SECRET_CHARS = 43
"""62 ** 43 is just above 2 ** 256."""
SHOWN_PREFIX_CHARS = len(PREFIX) + 4
PEPPER_FILE = "pepper"
PEPPER_BYTES = 32

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_CHECK = "pepper_check"


def new_secret() -> str:
    """A new key as its owner sees it, this once."""
    number = secrets.randbits(RANDOM_BITS)
    digits = []
    for _ in range(SECRET_CHARS):
        number, digit = divmod(number, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return PREFIX + "".join(digits)


def shown_prefix(secret: str) -> str:
    return secret[:SHOWN_PREFIX_CHARS]


def last_four(secret: str) -> str:
    return secret[-4:]


def digest(pepper: bytes, secret: str) -> str:
    """What is stored of a secret: 64 hexadecimal digits, HMAC-SHA-256.

    Every request needs one. From the two begun hashes it takes 2 us, with hmac.digest and its set-up 10 to 90.
    """
    begun = _begun(pepper)
    inner, outer = begun[0].copy(), begun[1].copy()
    inner.update(secret.encode("utf-8", "replace"))
    outer.update(inner.digest())
    return str(outer.hexdigest())


@functools.lru_cache(maxsize=4)
def _begun(pepper: bytes) -> tuple[Any, Any]:
    """RFC 2104's two hashes, each after its block of key and padding."""
    block = (pepper if len(pepper) <= 64 else hashlib.sha256(pepper).digest()).ljust(64, b"\0")
    return hashlib.sha256(bytes(byte ^ 0x36 for byte in block)), hashlib.sha256(bytes(byte ^ 0x5C for byte in block))


def load_pepper(data_dir: Path) -> bytes:
    """The pepper of this data directory, made at the first call. Raises ConfigError when it cannot be used."""
    path = data_dir / PEPPER_FILE
    try:
        if not path.exists():
            _create(path)
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
        pepper = bytes.fromhex(path.read_text().strip())
    except ValueError:
        pepper = b""
    except OSError as error:
        raise ConfigError(f"The file {path} cannot be used: {error.strerror}.") from None
    if len(pepper) != PEPPER_BYTES:
        raise ConfigError(f"The file {path} must hold {2 * PEPPER_BYTES} hexadecimal digits. Restore it from a backup.")
    return pepper


def _create(path: Path) -> None:
    """Written beside and linked into place, so that two processes that start together end with one pepper."""
    draft = path.with_name(f"{PEPPER_FILE}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        os.write(descriptor, secrets.token_hex(PEPPER_BYTES).encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()


def check_pepper(database: Database, pepper: bytes, data_dir: Path) -> None:
    """Raises ConfigError when the database's keys were made with another pepper: each of them would be refused."""
    mine = hmac.digest(pepper, b"headrace pepper check", hashlib.sha256).hex()
    settings = tables.settings
    question = select(settings.c.value).where(settings.c.name == _CHECK)
    with database.read() as connection:
        stored = connection.execute(question).scalar()
    if stored is None:
        with database.write() as connection:
            statement = database.insert(settings).values(name=_CHECK, value=mine)
            connection.execute(statement.on_conflict_do_nothing(index_elements=["name"]))
            stored = connection.execute(question).scalar_one()
    if stored != mine:
        raise ConfigError(
            f"The keys in {database.shown_url} were made with another pepper than the one in {data_dir / PEPPER_FILE}, "
            "so that none of them would be recognised. Start with the data directory they were made with, or copy "
            "its file `pepper` here."
        )
