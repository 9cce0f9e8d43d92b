"""A GPU that is not there: tensors that say they are on `cuda:0`, keep their numbers on the CPU, and mix with nothing.

Whatever is made for device "cuda" becomes a `PretendCuda`; every operation on one is done by the CPU and gives others.
As on a real GPU a tensor of the host beside one is an error, reading one without copying it to the host is too, and
memory has an end. What a GPU rounds differently, and which operations lack a CUDA kernel, only tests/gpu can show.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda", 0)


@dataclass
class Memory:
    """`limit` bytes, of which others hold `taken`; `held` counts the storages that have a tensor. What torch had once
    it keeps, `reserved`, until its cache is emptied."""

    limit: int = 8 << 30
    taken: int = 0
    reserved: int = 0
    _tensors: dict[int, int] = field(default_factory=dict)
    _sizes: dict[int, int] = field(default_factory=dict)

    @property
    def held(self) -> int:
        return sum(self._sizes.values())

    def info(self) -> tuple[int, int]:
        """What `torch.cuda.mem_get_info` tells: free, total."""
        return self.limit - self.taken - self.reserved, self.limit

    def empty_cache(self) -> None:
        self.reserved = self.held

    def hold(self, tensor: PretendCuda) -> None:
        """Until the last tensor of its storage is gone. Raises torch.OutOfMemoryError."""
        storage = tensor.numbers.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes and self.held + size > self.limit - self.taken:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
        self._sizes[key] = size
        self._tensors[key] = self._tensors.get(key, 0) + 1
        self.reserved = max(self.reserved, self.held)
        weakref.finalize(tensor, self._release, key)

    def _release(self, key: int) -> None:
        self._tensors[key] -= 1
        if not self._tensors[key]:
            del self._tensors[key], self._sizes[key]


_memory = Memory()


class PretendCuda(Tensor):
    """`numbers` are on the CPU, and nobody but this file sees them."""

    numbers: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers: Tensor) -> PretendCuda:
        # For torch itself it is a CPU tensor of Python's: a build without CUDA cannot make one of another device.
        tensor: PretendCuda = Tensor._make_wrapper_subclass(
            cls, numbers.size(), strides=numbers.stride(), storage_offset=numbers.storage_offset(), dtype=numbers.dtype
        )
        tensor.numbers = numbers
        _memory.hold(tensor)
        return tensor

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PretendCuda({self.numbers})"

    def to(self, *wanted: Any, **named: Any) -> Tensor:  # type: ignore[override]
        device, wanted, named = _device_of(wanted, named)
        if device is None or device.type == "cuda":
            return Tensor.to(self, *wanted, **named)
        return self.numbers.to(*wanted, **named).clone()

    def cpu(self) -> Tensor:  # type: ignore[override]
        return self.numbers.clone()

    def tolist(self) -> Any:
        return self.numbers.tolist()

    def numpy(self, **named: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        strangers = [t for t in tensors if not isinstance(t, PretendCuda) and t.dim()]
        if strangers:
            raise RuntimeError(
                f"{func}: expected all tensors to be on the same device, but found cuda:0 and cpu {strangers[0].shape}"
            )
        numbers, named = tree_map(lambda x: x.numbers if isinstance(x, PretendCuda) else x, (args, kwargs or {}))
        result = func(*numbers, **named)
        written = func._schema.name.endswith("_") and isinstance(args[0], PretendCuda)
        return args[0] if written else _on_cuda(result)


def _on_cuda(result: Any) -> Any:
    with torch.inference_mode(False):  # a view of what was made outside of it could not be made otherwise
        return tree_map(lambda x: PretendCuda(x) if isinstance(x, Tensor) else x, result)


def _device_of(args: Any, kwargs: Any) -> tuple[torch.device | None, Any, Any]:
    """The device that is asked for, and the arguments without it."""
    named = dict(kwargs or {})
    found = named.pop("device", None)
    for place, arg in enumerate(args):
        if isinstance(arg, torch.device) or (isinstance(arg, str) and arg in ("cpu", "cuda", "cuda:0")):
            # Behind it a dtype or None may come, and whether to wait.
            found, args = arg, (*args[:place], *(a for a in args[place + 1 :] if isinstance(a, torch.dtype)))
            break
        if isinstance(arg, Tensor) and place == 1:  # x.to(other)
            found, args = arg.device, (args[0], arg.dtype, *args[2:])
            break
    return None if found is None else torch.device(found), args, named


class _MadeOnCuda(TorchFunctionMode):
    """What is made for device "cuda", or sent there, becomes a PretendCuda."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to or (kwargs and kwargs.get("device") is not None):
            device, rest, named = _device_of(args, kwargs)
            if device is not None and device.type == "cuda" and not isinstance(rest[0], PretendCuda):
                made = func(*rest, **named)
                return _on_cuda(made.clone() if func is Tensor.to else made)
            if device is not None and device.type == "cuda":
                return func(*rest, **named)
        return func(*args, **(kwargs or {}))


@contextmanager
def pretend_cuda(
    monkeypatch: pytest.MonkeyPatch, memory: Memory | None = None, *, bfloat16: bool = True
) -> Iterator[Memory]:
    """torch finds one GPU with this memory, in this thread. Without `bfloat16` it is an old one, where torch emulates
    that."""
    global _memory
    _memory = memory or Memory()
    answers = {
        "is_available": True,
        "synchronize": None,
        "get_device_name": "Pretended GPU",
        "get_device_capability": (9, 0),
    }
    with monkeypatch.context() as patch, _MadeOnCuda():
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, lambda *a, _answer=answer, **k: _answer)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bfloat16 or including_emulation)
        patch.setattr(torch.cuda, "mem_get_info", lambda *a: _memory.info())
        patch.setattr(torch.cuda, "empty_cache", lambda: _memory.empty_cache())
        # A module's parameters are replaced: what torch takes for a tensor of the CPU would be written into.
        patch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
        yield _memory
