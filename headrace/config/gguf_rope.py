"""Rotary scaling as a GGUF file describes it, written as the `rope_scaling` of a config.json.

Two scalings are stored as tensors of factors. Those of Llama 3 stand for parameters, which are recovered here and
checked; those of longrope (Phi-3) are what config.json holds as well.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path

from headrace.config.errors import ConfigError
from headrace.config.gguf_format import GGUFHeader

_ROPE_FACTORS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
MAX_FACTORS = 1 << 16

# Llama 3.1, 3.2 and 3.3 share these; only the factor (8 or 32) differs.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192.0}


def rope_scaling(
    path: Path, header: GGUFHeader, key: Callable[[str], object], *, theta: object, head_dim: object
) -> dict[str, object] | None:
    """None for plain rotary. `key` gives the metadata of the file's architecture.

    Raises ConfigError for factors that are not Llama 3's or not there; other types are passed on by name.
    """
    if _ROPE_FACTORS in header.tensors:
        return _llama3_scaling(path, header, theta, head_dim)
    original = key("rope.scaling.original_context_length")
    if _LONG in header.tensors:
        found: dict[str, object] = {
            "rope_type": "longrope",
            "original_max_position_embeddings": original,
            "attention_factor": key("rope.scaling.attn_factor"),
        }
        for name, tensor in (("long_factor", _LONG), ("short_factor", _SHORT)):
            found[name] = _factors(path, header, tensor)
        return {name: value for name, value in found.items() if value is not None}
    scaling = key("rope.scaling.type")
    if scaling is None and key("rope.scale_linear") is not None:
        scaling, factor = "linear", key("rope.scale_linear")
    else:
        factor = key("rope.scaling.factor")
    if scaling in (None, "none") or (scaling == "linear" and factor == 1.0):
        return None
    found = {
        "rope_type": scaling,
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": _yarn_attention_factor(key("rope.scaling.yarn_attn_factor"), factor),
        "beta_fast": key("rope.scaling.yarn_beta_fast"),
        "beta_slow": key("rope.scaling.yarn_beta_slow"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _yarn_attention_factor(stored: object, factor: object) -> float | None:
    """The file's number multiplies yarn's own factor; None where it changes nothing."""
    if not isinstance(stored, int | float) or not isinstance(factor, int | float) or stored == 1 or factor <= 1:
        return None
    return stored * (0.1 * math.log(factor) + 1)


def _factors(path: Path, header: GGUFHeader, name: str) -> list[float]:
    tensor = header.tensors.get(name)
    if tensor is None or tensor.type != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_FACTORS:
        found = "missing" if tensor is None else f"{tensor.type} of shape {tensor.shape}"
        raise ConfigError(f"{path}: {name} is {found}, not F32 of one dimension.")
    with path.open("rb") as file:
        file.seek(tensor.offset)
        return list(struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.num_bytes)))


def _llama3_scaling(path: Path, header: GGUFHeader, theta: object, head_dim: object) -> dict[str, object]:
    """Recover the parameters whose factors the file stores, and check that they give these factors."""
    theta = theta or 10000.0
    if not isinstance(theta, int | float) or not 1 < theta < 1e12:
        raise ConfigError(f"{path}: rope.freq_base is {theta!r}, not a number above 1.")
    factors = _factors(path, header, _ROPE_FACTORS)
    if not isinstance(head_dim, int) or len(factors) != head_dim // 2:
        raise ConfigError(f"{path}: {_ROPE_FACTORS} holds {len(factors)} factors, not half of head_dim {head_dim}.")
    largest = float(max(factors))
    if not 0.9 < min(factors) <= largest < 1e6:
        raise ConfigError(f"{path}: {_ROPE_FACTORS} holds {min(factors):g} to {largest:g}, which are no factors.")
    low, high, length = _LLAMA3.values()
    for index, stored in enumerate(factors):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        smooth = min(1.0, max(0.0, (length / wavelength - low) / (high - low)))
        expected = 1 / ((1 - smooth) / largest + smooth)
        if not math.isclose(stored, expected, rel_tol=1e-3):
            raise ConfigError(
                f"{path}: the rotary factors of {_ROPE_FACTORS} are not those of Llama 3 (factor {largest:g}: entry "
                f"{index} is {stored:g}, expected {expected:g}); other long-context scalings are not supported."
            )
    return {"rope_type": "llama3", "factor": largest, **_LLAMA3}
