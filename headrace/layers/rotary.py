"""Rotary position embedding: pairs of a head's two halves turn by an angle that grows with the position.

Pair i turns by position * theta^(-2i / rotary_dim); values of a head beyond rotary_dim stay as they are. Scalings
change these frequencies and, yarn and longrope, multiply cosines and sines with an attention factor. Where a
scaling depends on the length of a sequence (dynamic, longrope), the length is for every sequence the longest that is
served, `max_positions` (--max-model-len): keys in the cache are rotated already, so another length for each step
would mix two rotations, and a prefix could not be shared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.config.errors import ConfigError
from headrace.config.model import ModelConfig
from headrace.config.rope import ROPE_TYPES
from headrace.kernels.ops import BatchHandle, Buffer, Handle, Kernels

Frequencies = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rotary:
    table: Handle
    head_dim: int

    @classmethod
    def build(cls, kernels: Kernels, config: ModelConfig, max_positions: int) -> Rotary:
        cos, sin = rotary_tables(config, max_positions)
        return cls(kernels.prepare_rope(cos, sin), config.head_dim)

    @classmethod
    def build_local(cls, kernels: Kernels, config: ModelConfig, max_positions: int) -> Rotary:
        """Of layers with a window, where the model gives them a base of their own."""
        cos, sin = _tables(_plain(config.rope_local_theta or config.rope_theta, config.rotary_dim), 1.0, max_positions)
        return cls(kernels.prepare_rope(cos, sin), config.head_dim)

    def forward(self, kernels: Kernels, x: Buffer, batch: BatchHandle) -> Buffer:
        return kernels.rope(x, self.table, self.head_dim, batch)


def rotary_tables(config: ModelConfig, max_positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines [max_positions, rotary_dim / 2], multiplied with the attention factor."""
    frequencies, attention_factor = rotary_frequencies(config, max_positions)
    return _tables(frequencies, attention_factor, max_positions)


def rotary_frequencies(config: ModelConfig, max_positions: int) -> tuple[Frequencies, float]:
    """([rotary_dim / 2] radians a position, attention factor). ConfigError for a scaling that is not known."""
    theta, dim = config.rope_theta, config.rotary_dim
    scaling: dict[str, Any] = config.rope_scaling or {"rope_type": "default"}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return _plain(theta, dim), 1.0
    if kind == "linear":
        return _plain(theta, dim) / float(scaling["factor"]), 1.0
    if kind == "dynamic":
        return _plain(_dynamic_theta(theta, dim, scaling, max_positions), dim), 1.0
    if kind == "llama3":
        return _llama3(_plain(theta, dim), scaling), 1.0
    if kind == "yarn":
        return _yarn(_plain(theta, dim), theta, scaling), _yarn_attention_factor(scaling)
    if kind == "longrope":
        long = max_positions > int(scaling["original_max_position_embeddings"])
        factors = np.array(scaling["long_factor" if long else "short_factor"], np.float64)
        return _plain(theta, dim) / factors, _longrope_attention_factor(scaling)
    raise ConfigError(f"rope_scaling of type {kind!r} is not supported; known are {', '.join(ROPE_TYPES)}.")


def _tables(
    frequencies: Frequencies, attention_factor: float, max_positions: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Angles are float32 products, as models were trained with."""
    angles = np.arange(max_positions, dtype=np.float32)[:, None] * frequencies.astype(np.float32)[None, :]
    cos, sin = np.cos(angles, dtype=np.float64), np.sin(angles, dtype=np.float64)
    return (cos * attention_factor).astype(np.float32), (sin * attention_factor).astype(np.float32)


def _plain(theta: float, dim: int) -> Frequencies:
    frequencies: Frequencies = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    return frequencies


def _dynamic_theta(theta: float, dim: int, scaling: dict[str, Any], max_positions: int) -> float:
    """A larger base for more than the trained length, just large enough for `max_positions`."""
    factor, trained = float(scaling["factor"]), int(scaling["original_max_position_embeddings"])
    stretched = factor * max(max_positions, trained) / trained - (factor - 1)
    return float(theta * stretched ** (dim / (dim - 2)))


def _llama3(plain: Frequencies, scaling: dict[str, Any]) -> Frequencies:
    """By how often a pair turned within the trained length: up to `low_freq_factor` times, slowed by `factor`;
    from `high_freq_factor` times, kept; between, blended by that number."""
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * plain / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * plain + (1 - kept) * plain / float(scaling["factor"])


def _yarn(plain: Frequencies, theta: float, scaling: dict[str, Any]) -> Frequencies:
    """Pairs that turned `beta_fast` times or more within the trained length are kept, those that turned up to
    `beta_slow` times are slowed by `factor`, and between it goes by the pair's number, not by its turns."""
    dim, trained = 2 * len(plain), float(scaling["original_max_position_embeddings"])

    def pair_that_turns(times: float) -> float:
        return dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = pair_that_turns(float(scaling.get("beta_fast") or 32))
    last = pair_that_turns(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    slowed = np.clip((np.arange(len(plain)) - first) / ((last - first) or 0.001), 0, 1)
    return (1 - slowed) * plain + slowed * plain / float(scaling["factor"])


def _yarn_attention_factor(scaling: dict[str, Any]) -> float:
    if scaling.get("attention_factor"):
        return float(scaling["attention_factor"])
    factor = float(scaling["factor"])

    def of_scale(strength: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1

    strength, strength_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if strength and strength_all:
        return of_scale(float(strength)) / of_scale(float(strength_all))
    return of_scale(1.0)


def _longrope_attention_factor(scaling: dict[str, Any]) -> float:
    if scaling.get("attention_factor"):
        return float(scaling["attention_factor"])
    factor, trained = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
