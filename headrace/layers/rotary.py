"""Rotary position embedding: pairs of a head's two halves turn by an angle that grows with the position.

Pair i turns by position * theta^(-2i / head_dim). Scalings change these frequencies only: linear divides all
of them, llama3 divides the slow ones, keeps the fast ones and blends between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.config.errors import ConfigError
from headrace.config.model import ModelConfig
from headrace.kernels.ops import BatchHandle, Buffer, Handle, Kernels


@dataclass(frozen=True, slots=True)
class Rotary:
    table: Handle
    head_dim: int

    @classmethod
    def build(cls, kernels: Kernels, config: ModelConfig, max_positions: int) -> Rotary:
        cos, sin = rotary_tables(config, max_positions)
        return cls(kernels.prepare_rope(cos, sin), config.head_dim)

    def forward(self, kernels: Kernels, x: Buffer, batch: BatchHandle) -> Buffer:
        return kernels.rope(x, self.table, self.head_dim, batch)


def rotary_tables(config: ModelConfig, max_positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines [max_positions, head_dim / 2]. Angles are float32 products, as models were trained with."""
    frequencies = rotary_frequencies(config)
    angles = np.arange(max_positions, dtype=np.float32)[:, None] * frequencies[None, :]
    return np.cos(angles, dtype=np.float64).astype(np.float32), np.sin(angles, dtype=np.float64).astype(np.float32)


def rotary_frequencies(config: ModelConfig) -> NDArray[np.float32]:
    """[head_dim / 2], in radians a position. ConfigError for a scaling that is not known."""
    pairs = np.arange(0, config.head_dim, 2, dtype=np.float64)
    plain = config.rope_theta ** (-pairs / config.head_dim)
    scaling: dict[str, Any] = config.rope_scaling or {"rope_type": "default"}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return plain.astype(np.float32)
    if kind == "linear":
        return (plain / float(scaling["factor"])).astype(np.float32)
    if kind == "llama3":
        return _llama3(plain, scaling).astype(np.float32)
    raise ConfigError(f"rope_scaling of type {kind!r} is not supported; known are default, linear and llama3.")


def _llama3(plain: NDArray[np.float64], scaling: dict[str, Any]) -> NDArray[np.float64]:
    """By how often a pair turned within the trained length: up to `low_freq_factor` times, slowed by `factor`;
    from `high_freq_factor` times, kept; between, blended by that number."""
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * plain / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * plain + (1 - kept) * plain / float(scaling["factor"])
