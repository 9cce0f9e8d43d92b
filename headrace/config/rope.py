"""Rotary positions as a config.json describes them: base, scaling and the part of a head that turns.

Three spellings end in one: `rope_theta` with `rope_scaling`, the newer `rope_parameters` with everything in it,
and Gemma 3's, which has one set for the layers that see all and one for those with a window. What a scaling
needs and does not say is filled in here, so that the layer that turns it into angles has every number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.config.errors import ConfigError
from headrace.config.json_fields import JsonFields

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Rope:
    """`scaling` is None for plain rotary, else has a `rope_type` of ROPE_TYPES and all that type needs.

    `max_positions` is the longest sequence that the scaling is made for: what dynamic and yarn add to the
    configuration's max_position_embeddings, which in their files may be the length before scaling.
    """

    theta: float
    scaling: dict[str, object] | None
    partial_factor: float
    local_theta: float | None
    max_positions: int


def read_rope(raw: Mapping[str, object], source: str, *, head_dim: int, max_positions: int) -> Rope:
    """Raises ConfigError for a type of scaling that is not known and for numbers that are missing or cannot be."""
    scaling: dict[str, object] = {}
    local: dict[str, object] = {}
    # A file has one of the two; with both, the old one was asked for on the command line.
    for key in ("rope_parameters", "rope_scaling"):
        part = raw.get(key)
        if part is None:
            continue
        if not isinstance(part, dict):
            raise ConfigError(f"{source}: {key} is {part!r}, not an object.")
        if _FULL in part or _SLIDING in part:
            scaling.update(part.get(_FULL) or {})
            local.update(part.get(_SLIDING) or {})
        else:
            scaling.update(part)
    fields = JsonFields(raw, source)
    inner = JsonFields(scaling, f"{source}: rope_scaling")
    theta = JsonFields(scaling, source).number("rope_theta", fields.number("rope_theta", 10000.0))
    partial = inner.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial > 1 or int(head_dim * partial) % 2:
        raise ConfigError(
            f"{source}: partial_rotary_factor {partial!r} is not supported: of heads of {head_dim} it must "
            "leave an even number of values, and at most all of them."
        )
    local_theta = _local_theta(fields, local, source)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "su":
        kind = "longrope"
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"{source}: rotary scaling of type {kind!r} is not supported; known are {', '.join(ROPE_TYPES)}."
        )
    if kind == "default":
        return Rope(theta, None, partial, local_theta, max_positions)
    for name in ("rope_theta", "partial_rotary_factor", "type"):
        scaling.pop(name, None)
    scaling["rope_type"] = kind
    wanted = {"llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
    for name in wanted.get(str(kind), ("factor",) if kind in ("linear", "dynamic") else ()):
        scaling[name] = inner.number(name)
    if kind in ("dynamic", "yarn", "longrope"):
        original = raw.get("original_max_position_embeddings") if kind == "longrope" else None
        scaling.setdefault("original_max_position_embeddings", original or max_positions)
        trained = inner.size("original_max_position_embeddings")
        scaling.setdefault("factor", max_positions / trained)
        factor = inner.number("factor")
        if kind != "longrope":
            max_positions = max(max_positions, int(trained * factor))
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            scaling[name] = inner.numbers(name, int(head_dim * partial) // 2)
    for name in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        if scaling.get(name):
            scaling[name] = inner.number(name)
    return Rope(theta, scaling, partial, local_theta, max_positions)


def _local_theta(fields: JsonFields, local: dict[str, object], source: str) -> float | None:
    if not local and fields.raw.get("rope_local_base_freq") is None:
        return None
    kind = local.get("rope_type", "default")
    if kind != "default":
        raise ConfigError(f"{source}: sliding layers with rotary scaling of type {kind!r} are not supported.")
    return JsonFields(local, source).number("rope_theta", fields.number("rope_local_base_freq", 10000.0))
