"""The weights of a model by their Hugging Face names, in canonical form, read only when asked for.

Files are mapped, never read whole: a dense matrix is a view of the file until a kernel packs it, a block
format is taken apart one matrix at a time. `close` unmaps everything, so hold nothing that was not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.config.errors import ConfigError
from headrace.config.model_files import ModelFiles, TensorInfo
from headrace.kernels.weight import Weight, to_float32
from headrace.weights.gguf import BLOCK_BYTES, import_blocks, rotary_rows

DENSE: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}

Progress = Callable[[int, int], None]
"""Told (done, total) in bytes."""


class Checkpoint:
    """Reads tensors of `files`. `read_bytes` of `total_bytes` have been asked for so far, each tensor once."""

    def __init__(self, files: ModelFiles) -> None:
        self.files = files
        self.total_bytes = files.total_bytes
        self.read_bytes = 0
        self._seen: set[str] = set()
        self._maps: dict[Path, NDArray[np.uint8]] = {}

    def has(self, name: str) -> bool:
        return name in self.files.tensors

    def matrix(self, name: str) -> Weight:
        """A weight [out, in]. ConfigError when the name is missing or its format is not supported."""
        info = self._info(name)
        if len(info.shape) != 2:
            raise ConfigError(f"{info.file}: the tensor {name} has the shape {info.shape}, not two dimensions.")
        shape = (info.shape[0], info.shape[1])
        if info.dtype in DENSE:
            weight = Weight(shape, self._dense(info))
        elif info.dtype in BLOCK_BYTES:
            weight = import_blocks(self._bytes(info), info.dtype, shape)
        else:
            raise self._unsupported(info)
        order = self._row_order(name)
        return weight if order is None else weight.rows(order)

    def stacked(self, names: Sequence[str]) -> Weight:
        """Matrices of one input joined along their outputs. Differing forms are joined as float32."""
        parts = [self.matrix(name) for name in names]
        if len(parts) == 1:
            return parts[0]
        if len({_form(part) for part in parts}) > 1:
            parts = [Weight(part.shape, part.to_float32()) for part in parts]
        first = parts[0]
        return Weight(
            shape=(sum(part.shape[0] for part in parts), first.shape[1]),
            values=np.concatenate([part.values for part in parts]),
            bits=first.bits,
            group_size=first.group_size,
            scales=_joined([part.scales for part in parts]),
            offsets=_joined([part.offsets for part in parts]),
        )

    def vector(self, name: str) -> NDArray[np.float32]:
        """A bias or norm weight [width], a new float32 array."""
        info = self._info(name)
        if len(info.shape) != 1:
            raise ConfigError(f"{info.file}: the tensor {name} has the shape {info.shape}, not one dimension.")
        if info.dtype not in DENSE:
            raise self._unsupported(info)
        values = to_float32(self._dense(info))
        if self.files.kind == "gguf" and self.files.config.family == "gemma3" and name.endswith("norm.weight"):
            values -= 1
        order = self._row_order(name)
        return values if order is None else values[order]

    def close(self) -> None:
        """Unmap the files. Views handed out keep their file mapped until they are dropped."""
        self._maps.clear()

    def _info(self, name: str) -> TensorInfo:
        info = self.files.tensors.get(name)
        if info is None:
            raise ConfigError(f"{self.files.path} has no tensor {name}; it has {len(self.files.tensors)} others.")
        if name not in self._seen:
            self._seen.add(name)
            self.read_bytes += info.num_bytes
        return info

    def _unsupported(self, info: TensorInfo) -> ConfigError:
        known = ", ".join([*DENSE, *BLOCK_BYTES])
        return ConfigError(f"{info.file}: the tensor {info.name} is stored as {info.dtype}; known are {known}.")

    def _bytes(self, info: TensorInfo) -> NDArray[np.uint8]:
        mapped = self._maps.get(info.file)
        if mapped is None:
            mapped = self._maps[info.file] = np.memmap(info.file, np.uint8, mode="r")
        end = info.offset + info.num_bytes
        if end > mapped.size:
            raise ConfigError(
                f"{info.file} is cut short: {info.name} ends at byte {end}, the file has {mapped.size}. "
                "Download it again."
            )
        return np.asarray(mapped[info.offset : end])

    def _dense(self, info: TensorInfo) -> NDArray[np.generic]:
        # A safetensors file may place a tensor at an odd byte; such a view works, only slower.
        return self._bytes(info).view(DENSE[info.dtype]).reshape(info.shape)

    def _row_order(self, name: str) -> NDArray[np.int64] | None:
        """The order of a q or k projection's stored rows, None where they lie as the model wants them."""
        config = self.files.config
        if self.files.kind != "gguf" or config.family not in ("llama", "mixtral"):
            return None
        projection = name.rpartition(".")[0]
        if projection.endswith("self_attn.q_proj"):
            return rotary_rows(config.num_heads, config.head_dim)
        if projection.endswith("self_attn.k_proj"):
            return rotary_rows(config.num_kv_heads, config.head_dim)
        return None


def _form(weight: Weight) -> tuple[object, ...]:
    return weight.bits, weight.group_size, weight.values.dtype, weight.offsets is None


def _joined(parts: Sequence[NDArray[np.float32] | None]) -> NDArray[np.float32] | None:
    present = [part for part in parts if part is not None]
    return np.concatenate(present) if present else None
