"""The compiled library csrc/ behind ctypes: its structs, its functions, and where it is.

Structs mirror csrc/ops.h, program.h, decode.h and abi.cpp field by field. Calls release the interpreter's lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PATH = Path(__file__).with_name("libheadrace.so")
ABI_VERSION = 5

OP_KINDS = (
    "embed",
    "linear",
    "norm",
    "rope",
    "attention",
    "silu_mul",
    "gelu_mul",
    "scale",
    "add",
    "pick",
    "experts",
    "layer_norm",
    "gelu",
    "tanh",
    "encoder_attention",
)
STORAGE = {"float32": 0, "bfloat16": 1, "float16": 2, "int4": 4, "int8": 8}
SCHEMES = {"float": 0, "bfloat16": 1, "int8": 2}
KV_DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "fp8_e4m3": 3, "fp8_e5m2": 4, "int8": 5}


class LibraryMissing(ImportError):
    """The library was not built, or for another version of this package."""


class Struct(ctypes.Structure):
    pass


class View(Struct):
    _fields_ = (("data", c_void_p), ("stride", c_int64))


class SourceWeight(Struct):
    _fields_ = (
        ("values", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("out", c_int64),
        ("in_", c_int64),
        ("storage", c_int32),
        ("group_size", c_int32),
    )


class BatchView(Struct):
    _fields_ = (
        ("num_rows", c_int64),
        ("num_sequences", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
        ("table_width", c_int64),
    )


class Slot(Struct):
    _fields_ = (("buffer", c_int32), ("column", c_int32))


class Op(Struct):
    _fields_ = (
        ("kind", c_int32),
        ("sampling", c_int32),
        ("inputs", Slot * 3),
        ("outputs", Slot * 2),
        ("n", c_int64 * 6),
        ("f", c_float * 2),
        ("p", c_void_p * 2),
    )


class Buffer(Struct):
    _fields_ = (("data", c_void_p), ("width", c_int64))


class Step(Struct):
    _fields_ = (
        ("cache", c_void_p),
        ("groups", POINTER(BatchView)),
        ("sample_rows", c_void_p),
        ("num_sample_rows", c_int64),
        ("buffers", POINTER(Buffer)),
    )


class TokenLists(Struct):
    _fields_ = (("starts", c_void_p), ("token_ids", c_void_p), ("numbers", c_void_p))


class SampleArgs(Struct):
    _fields_ = (
        ("logits", View),
        ("rows", c_int64),
        ("vocab", c_int64),
        ("temperature", c_void_p),
        ("uniforms", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("repetition_penalty", c_void_p),
        ("frequency_penalty", c_void_p),
        ("presence_penalty", c_void_p),
        ("seen", TokenLists),
        ("generated", TokenLists),
        ("logit_bias", TokenLists),
        ("forbidden", TokenLists),
        ("allowed", TokenLists),
        ("scored", TokenLists),
        ("given", c_void_p),
        ("mask", c_void_p),
        ("masked", c_void_p),
        ("num_logprobs", c_int64),
        ("token_ids", c_void_p),
        ("logprobs", c_void_p),
        ("ranks", c_void_p),
        ("top_token_ids", c_void_p),
        ("top_logprobs", c_void_p),
        ("scored_logprobs", c_void_p),
        ("broken", c_void_p),
    )


class Decodes(Struct):
    _fields_ = (
        ("sequences", c_int64),
        ("groups", c_int64),
        ("block_size", c_int64),
        ("table_width", c_int64),
        ("chosen", c_void_p),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("seq_lens", c_void_p),
        ("slot_mapping", c_void_p),
        ("block_tables", c_void_p),
        ("num_blocks", c_void_p),
        ("streams", c_void_p),
        ("uniforms", c_void_p),
    )


class DecodeStep(Struct):
    _fields_ = (
        ("device", c_void_p),
        ("ops", POINTER(Op)),
        ("count", c_int64),
        ("step", POINTER(Step)),
        ("sample", POINTER(SampleArgs)),
        ("decodes", Decodes),
    )


_PROTOTYPES: dict[str, tuple[Any, Sequence[Any]]] = {
    "hr_abi_version": (c_int32, ()),
    "hr_variant_name": (c_char_p, (c_int32,)),
    "hr_device_new": (c_void_p, (c_int32, c_int32)),
    "hr_device_free": (None, (c_void_p,)),
    "hr_matrix_new": (c_void_p, (c_void_p, POINTER(SourceWeight), c_int32)),
    "hr_quantise": (None, (c_void_p, POINTER(SourceWeight), c_void_p, c_void_p)),
    "hr_matrix_free": (None, (c_void_p,)),
    "hr_matrix_bytes": (c_int64, (c_void_p,)),
    "hr_matrix_rows": (None, (c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64)),
    "hr_cache_new": (c_void_p, (c_int64, c_int64, c_int64, c_int64, c_int64, c_int32)),
    "hr_cache_free": (None, (c_void_p,)),
    "hr_cache_block_bytes": (c_int64, (c_void_p,)),
    "hr_cache_copy_blocks": (c_int32, (c_void_p, c_void_p, c_int64)),
    "hr_cache_read_block": (None, (c_void_p, c_int64, c_void_p)),
    "hr_cache_write_block": (None, (c_void_p, c_int64, c_void_p)),
    "hr_run": (None, (c_void_p, c_void_p, c_int64, POINTER(Step))),
    "hr_sample": (c_int32, (c_void_p, POINTER(SampleArgs))),
    "hr_advance": (c_int32, (POINTER(Decodes),)),
    "hr_decode": (c_int32, (POINTER(DecodeStep),)),
}


@cache
def load() -> ctypes.CDLL:
    """Raises LibraryMissing, saying how to get the library."""
    try:
        library = ctypes.CDLL(str(PATH))
    except OSError as error:
        raise LibraryMissing(
            "the CPU kernels were not built when headrace was installed, for want of a C++ compiler: install one "
            f"(Debian, Ubuntu: apt-get install g++) and install headrace again ({error})"
        ) from error
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    found = library.hr_abi_version()
    if found != ABI_VERSION:
        raise LibraryMissing(
            f"the CPU kernels at {PATH} are of another version of headrace ({found}, not {ABI_VERSION}): install "
            "headrace again, or `make native` in a checkout"
        )
    return library


@cache
def variants() -> tuple[str, ...]:
    """The kernels' variants that this CPU can run, best first; the last is "portable"."""
    library, names = load(), list[str]()
    while (name := library.hr_variant_name(len(names))) is not None:
        names.append(name.decode())
    return tuple(names)


def address(array: NDArray[Any] | None, dtype: Any = None) -> int | None:
    """Of the first element, which must be of the `dtype` if one is given; the caller keeps the array alive as long as
    the address is used."""
    if array is None:
        return None
    assert array.flags.c_contiguous
    assert dtype is None or array.dtype == dtype
    return array.ctypes.data


def contiguous(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """The same values, in a row and of this type: the array itself where it is that already."""
    return np.ascontiguousarray(array, dtype)
