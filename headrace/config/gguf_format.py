"""Reads the header of a GGUF file: the metadata and where each tensor lies. Reads no weights.

The file is mapped and walked once with bounds checked at every step, because a download may be cut short and
a file from elsewhere may lie. The layout, all little endian:

    "GGUF"  u32 version  u64 tensors  u64 pairs | (key, type, value) * pairs | (name, dims, type, offset) * tensors
    | padding to general.alignment | tensor data, each tensor's offset counted from here

A string is a u64 length and that many bytes of UTF-8. Dimensions are stored innermost first.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import overload

from headrace.config.errors import ConfigError

# Number in the file: (name, elements in a block, bytes of a block).
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

# Number in the file: (struct format, bytes) of a plain value.
_SCALARS: dict[int, tuple[str, int]] = {
    0: ("B", 1),
    1: ("b", 1),
    2: ("H", 2),
    3: ("h", 2),
    4: ("I", 4),
    5: ("i", 4),
    6: ("f", 4),
    7: ("?", 1),
    10: ("Q", 8),
    11: ("q", 8),
    12: ("d", 8),
}
_STRING, _ARRAY = 8, 9

MAX_PAIRS = 100_000
MAX_TENSORS = 1_000_000
MAX_ARRAY_LENGTH = 1 << 24
MAX_ARRAY_DEPTH = 4
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies. `shape` is row-major ([out, in]), `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    num_bytes: int


class Strings(Sequence[str]):
    """The strings of an array, each made when it is asked for: only a tokenizer reads a whole vocabulary."""

    def __init__(self, raw: bytes, starts: array[int]) -> None:
        """`raw`: the array's bytes in the file; `starts`: where in them each text begins, behind its length."""
        self._raw = raw
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start = self._starts[index]
        return self._raw[start : start + _U64.unpack_from(self._raw, start - 8)[0]].decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        raw, unpack = self._raw, _U64.unpack_from
        for start in self._starts:
            yield raw[start : start + unpack(raw, start - 8)[0]].decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Everything before the weights. Arrays in `metadata` are lists, those of strings are `Strings`."""

    version: int
    metadata: dict[str, object]
    tensors: dict[str, GGUFTensor]


def read_gguf(path: str | os.PathLike[str]) -> GGUFHeader:
    """Read the header of a GGUF file, version 2 or 3. Raises ConfigError naming the file and the damage."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise ConfigError(f"{path} is not a GGUF file: it has {size} bytes, fewer than the 24 of the header.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return _Reader(path, mapped).header()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error


class _Reader:
    """A position in the mapped file; every read checks that the bytes are there."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path = path
        self.mapped = mapped
        self.size = len(mapped)
        self.position = 0

    def header(self) -> GGUFHeader:
        magic = self.mapped[:4]
        if magic != b"GGUF":
            if self.mapped[:7] == b"version":
                raise ConfigError(f"{self.path} is a Git LFS pointer, not the file: fetch it with `git lfs pull`.")
            raise ConfigError(f"{self.path} is not a GGUF file: it starts with {magic!r} instead of b'GGUF'.")
        self.position = 4
        version = self.u32("the version")
        if version not in (2, 3):
            if version in (2 << 24, 3 << 24):
                raise ConfigError(f"{self.path} is a big-endian GGUF file; only little-endian files are supported.")
            raise ConfigError(f"{self.path} has GGUF version {version}; versions 2 and 3 are supported.")
        num_tensors = self.count("the number of tensors", MAX_TENSORS)
        num_pairs = self.count("the number of metadata pairs", MAX_PAIRS)
        metadata: dict[str, object] = {}
        for _ in range(num_pairs):
            key = self.string("a metadata key")
            if key in metadata:
                raise self.damage(f"the metadata key {key!r} appears twice")
            metadata[key] = self.value(key, self.u32(f"the type of {key!r}"), 0)
        found = [self.tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise self.damage(f"general.alignment is {alignment!r}, not a power of two")
        data_start = -(-self.position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for tensor in found:
            if tensor.name in tensors:
                raise self.damage(f"the tensor {tensor.name!r} appears twice")
            if tensor.offset % alignment:
                raise self.damage(
                    f"the tensor {tensor.name!r} starts at {tensor.offset}, not a multiple of {alignment}"
                )
            start = data_start + tensor.offset
            if start + tensor.num_bytes > self.size:
                raise ConfigError(
                    f"{self.path} is cut short: the tensor {tensor.name!r} ends at byte {start + tensor.num_bytes:,}, "
                    f"but the file has {self.size:,} bytes. Download it again."
                )
            tensors[tensor.name] = GGUFTensor(tensor.name, tensor.shape, tensor.type, start, tensor.num_bytes)
        return GGUFHeader(version, metadata, tensors)

    def damage(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path} is damaged: {what} (near byte {self.position:,} of {self.size:,}).")

    def need(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.size - self.position:
            raise ConfigError(
                f"{self.path} is cut short or damaged: {what} needs {num_bytes:,} bytes at byte {self.position:,}, "
                f"but the file has {self.size:,} bytes. Download it again."
            )

    def u32(self, what: str) -> int:
        self.need(4, what)
        value: int = _U32.unpack_from(self.mapped, self.position)[0]
        self.position += 4
        return value

    def u64(self, what: str) -> int:
        self.need(8, what)
        value: int = _U64.unpack_from(self.mapped, self.position)[0]
        self.position += 8
        return value

    def count(self, what: str, limit: int) -> int:
        value = self.u64(what)
        if value > limit:
            raise self.damage(f"{what} is {value:,}, more than {limit:,}")
        return value

    def string(self, what: str) -> str:
        length = self.u64(f"the length of {what}")
        self.need(length, what)
        raw = self.mapped[self.position : self.position + length]
        self.position += length
        return raw.decode("utf-8", errors="replace")

    def value(self, key: str, kind: int, depth: int) -> object:
        if kind == _STRING:
            return self.string(f"the value of {key!r}")
        if kind == _ARRAY:
            return self.array(key, depth)
        if kind not in _SCALARS:
            raise self.damage(f"{key!r} has the unknown value type {kind}")
        form, width = _SCALARS[kind]
        self.need(width, f"the value of {key!r}")
        value: object = struct.unpack_from("<" + form, self.mapped, self.position)[0]
        self.position += width
        return value

    def array(self, key: str, depth: int) -> Sequence[object]:
        if depth >= MAX_ARRAY_DEPTH:
            raise self.damage(f"{key!r} nests arrays more than {MAX_ARRAY_DEPTH} deep")
        kind = self.u32(f"the element type of {key!r}")
        length = self.count(f"the length of {key!r}", MAX_ARRAY_LENGTH)
        if kind == _STRING:
            return self.strings(key, length)
        if kind == _ARRAY:
            self.need(12 * length, f"the {length:,} arrays of {key!r}")
            return [self.array(key, depth + 1) for _ in range(length)]
        if kind not in _SCALARS:
            raise self.damage(f"{key!r} has the unknown element type {kind}")
        form, width = _SCALARS[kind]
        self.need(width * length, f"the {length:,} values of {key!r}")
        values = struct.unpack_from(f"<{length}{form}", self.mapped, self.position)
        self.position += width * length
        return list(values)

    def strings(self, key: str, length: int) -> Strings:
        """The hot loop: a vocabulary and its merges are a few hundred thousand strings."""
        self.need(8 * length, f"the {length:,} strings of {key!r}")
        mapped, size, first = self.mapped, self.size, self.position
        unpack = _U64.unpack_from
        starts = array("Q")
        position = first
        for _ in range(length):
            position += 8
            if position > size:
                raise self.damage(f"the strings of {key!r} run past the end")
            starts.append(position - first)
            position += unpack(mapped, position - 8)[0]
            if position > size:
                raise self.damage(f"the strings of {key!r} run past the end")
        self.position = position
        return Strings(mapped[first:position], starts)

    def tensor(self) -> GGUFTensor:
        """A tensor's entry, its offset still counted from the start of the data."""
        name = self.string("a tensor's name")
        num_dimensions = self.u32(f"the number of dimensions of {name!r}")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self.damage(f"the tensor {name!r} has {num_dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
        dimensions = [self.u64(f"the shape of {name!r}") for _ in range(num_dimensions)]
        if any(d == 0 or d > 1 << 48 for d in dimensions):
            raise self.damage(f"the tensor {name!r} has the shape {dimensions}")
        number = self.u32(f"the type of {name!r}")
        offset = self.u64(f"the offset of {name!r}")
        if number not in TENSOR_TYPES:
            raise ConfigError(
                f"{self.path}: the tensor {name!r} has the type number {number}, which is not known here; "
                f"known are {', '.join(t[0] for t in TENSOR_TYPES.values())}."
            )
        type_name, block, block_bytes = TENSOR_TYPES[number]
        if dimensions[0] % block:
            raise self.damage(f"the tensor {name!r} of type {type_name} has rows of {dimensions[0]}, not whole blocks")
        num_bytes = prod(dimensions) // block * block_bytes
        return GGUFTensor(name, tuple(reversed(dimensions)), type_name, offset, num_bytes)
