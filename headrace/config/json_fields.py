"""Typed reading of a JSON object; every complaint names the source, the field and what was found there."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.config.errors import ConfigError


class JsonFields:
    """Fields of `raw`, which was read from `source`."""

    def __init__(self, raw: Mapping[str, object], source: str) -> None:
        self.raw = raw
        self.source = source

    def size(self, name: str, default: int | None = None, limit: int = 1 << 40) -> int:
        """A whole number above 0 and up to `limit`; an absent one takes the default."""
        value = self.raw.get(name)
        if value is None:
            if default is None:
                raise ConfigError(f"{self.source}: {name} is missing.")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= limit:
            raise ConfigError(f"{self.source}: {name} is {value!r}, not a whole number from 1 to {limit:,}.")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(name)
        if value is None:
            if default is None:
                raise ConfigError(f"{self.source}: {name} is missing.")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ConfigError(f"{self.source}: {name} is {value!r}, not a number above 0.")
        return float(value)

    def numbers(self, name: str, count: int) -> list[float]:
        """A list of `count` numbers above 0."""
        value = self.raw.get(name)
        if not isinstance(value, list) or len(value) != count:
            found = (
                f"a list of {len(value)}" if isinstance(value, list) else "missing" if value is None else repr(value)
            )
            raise ConfigError(f"{self.source}: {name} is {found}, not a list of {count} numbers.")
        return [JsonFields({f"{name}[{i}]": v}, self.source).number(f"{name}[{i}]") for i, v in enumerate(value)]

    def flag(self, name: str) -> bool:
        value = self.raw.get(name)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{self.source}: {name} is {value!r}, not true or false.")
        return bool(value)

    def token_id(self, name: str) -> int | None:
        value = self.raw.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None
