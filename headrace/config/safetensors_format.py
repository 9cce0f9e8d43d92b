"""Reads the header of a safetensors file: name, shape, dtype and place of every tensor. Reads no weights.

The format: u64 length of the header (little endian), the header as JSON, then the data. Each JSON entry is
{"dtype": "BF16", "shape": [2, 3], "data_offsets": [start, end]}, offsets counted from the end of the header.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeGuard

from headrace.config.errors import ConfigError

# Bytes of one element. Sub-byte types exist, but no supported checkpoint stores them.
ELEMENT_BYTES: dict[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """Where one tensor lies; `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    num_bytes: int


def read_safetensors(path: Path) -> dict[str, SafetensorsTensor]:
    """Read the header of a safetensors file. Raises ConfigError naming the file and the damage."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if prefix == b"version ":
                raise ConfigError(f"{path} is a Git LFS pointer, not the file itself: fetch it with `git lfs pull`.")
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > MAX_HEADER_BYTES or length > size - 8:
                raise ConfigError(
                    f"{path} is cut short or not a safetensors file: its header claims {length:,} bytes, "
                    f"the file has {size:,}."
                )
            raw = file.read(length)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    try:
        entries = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: its header is not JSON ({error}).") from error
    if not isinstance(entries, dict):
        raise ConfigError(f"{path} is damaged: its header is not a JSON object.")
    entries.pop("__metadata__", None)
    return {name: _tensor(path, name, entry, 8 + length, size) for name, entry in entries.items()}


def _tensor(path: Path, name: str, entry: object, data_start: int, size: int) -> SafetensorsTensor:
    if not isinstance(entry, dict):
        raise ConfigError(f"{path} is damaged: the entry of {name!r} is not a JSON object.")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise ConfigError(f"{path} is damaged: the entry of {name!r} is {entry!r}.")
    start, end = offsets
    if dtype in ELEMENT_BYTES and end - start != prod(shape) * ELEMENT_BYTES[dtype]:
        raise ConfigError(f"{path} is damaged: {name!r} of shape {shape} and dtype {dtype} has {end - start} bytes.")
    if end < start or data_start + end > size:
        raise ConfigError(
            f"{path} is cut short: the tensor {name!r} ends at byte {data_start + end:,}, but the file has "
            f"{size:,} bytes. Download it again."
        )
    return SafetensorsTensor(name, tuple(shape), dtype, data_start + start, end - start)


def _naturals(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(isinstance(v, int) and v >= 0 for v in values)
