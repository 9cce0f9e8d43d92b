"""`${VAR}`, `${VAR:-default}` and `${file:PATH}` in the strings of a configuration file.

The environment is read when the process starts and never again; a file is read at every load, so a secret in a file
changes without a restart. `$${` stands for `${`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.protocol.errors import nearest

_PLACEHOLDER = re.compile(r"\$\$\{|\$\{(?P<body>[^{}]*)\}|\$\{")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_SECRET_BYTES = 64 * 1024


@dataclass(slots=True)
class Placeholders:
    """Where values come from; `files` collects every file that was asked for, whether it could be read or not."""

    environment: Mapping[str, str]
    folder: Path
    """What a relative PATH is relative to: the folder of the configuration file."""
    files: list[Path] = field(default_factory=list)

    def fill(self, text: str) -> str:
        """The text with its placeholders replaced. ValueError says what is missing; it never quotes a value."""
        return _PLACEHOLDER.sub(self._value, text) if "$" in text else text

    def _value(self, match: re.Match[str]) -> str:
        if match[0] == "$${":
            return "${"
        body = match["body"]
        if body is None:
            raise ValueError(
                "has `${` without `}`, or one placeholder inside another; write $${ for the characters themselves"
            )
        if body.startswith("file:"):
            return self._file(body.removeprefix("file:"))
        name, separator, default = body.partition(":-")
        if not _NAME.fullmatch(name):
            raise ValueError(f"has ${{{body}}}; write ${{NAME}}, ${{NAME:-default}} or ${{file:PATH}}")
        value = self.environment.get(name)
        if separator:
            return value if value else default
        if value is None:
            near = nearest(name, self.environment)
            hint = f" Is it {near}?" if near else ""
            raise ValueError(
                f"needs the environment variable {name}, which is not set.{hint} Set it, or write ${{{name}:-default}}"
            )
        if not value.strip():
            raise ValueError(f"needs the environment variable {name}, which is empty")
        return value

    def _file(self, name: str) -> str:
        path = Path(name).expanduser()
        path = path if path.is_absolute() else self.folder / path
        self.files.append(path)
        try:
            with path.open("rb") as file:
                content = file.read(MAX_SECRET_BYTES + 1)
        except OSError as error:
            raise ValueError(f"needs the file {path}, which cannot be read: {error.strerror}") from None
        if len(content) > MAX_SECRET_BYTES:
            raise ValueError(f"needs the file {path}, which is larger than {MAX_SECRET_BYTES} bytes")
        try:
            return content.decode("utf-8-sig").rstrip("\r\n")
        except UnicodeDecodeError:
            raise ValueError(f"needs the file {path}, which is not UTF-8 text") from None
