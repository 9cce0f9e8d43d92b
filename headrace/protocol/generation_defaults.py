"""Sampling values for what a request leaves out: the model author's, as the flags change them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from headrace.config.errors import ConfigError
from headrace.protocol.sampling import RANGES

_DEFAULTABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


def default_sampling(
    generation_config: Mapping[str, object], mode: str, override: Mapping[str, object]
) -> dict[str, float]:
    """The values for fields a request leaves out: the model author's unless `mode` is "none", then `override`.

    Names are generation_config.json's; `max_new_tokens` limits answers whose request names no limit. Raises
    ValueError naming an override that has no meaning here, or a value that no request could send.
    """
    unknown = [name for name in override if name not in _DEFAULTABLE]
    if unknown:
        known = ", ".join(_DEFAULTABLE)
        raise ValueError(f"--override-generation-config does not know `{unknown[0]}`; it takes {known}.")
    own = {} if mode in ("none", "vllm") else generation_config
    chosen = {name: value for source in (own, override) for name, value in source.items() if name in _DEFAULTABLE}
    defaults: dict[str, float] = {}
    for name, value in chosen.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"the generation config's `{name}` must be a number, but it is {value!r}.")
        if not RANGES[name].holds(value):
            raise ValueError(f"the generation config's `{name}` must be {RANGES[name].words}, but it is {value!r}.")
        defaults[name] = value
    return defaults


def sampling_defaults(
    generation_config: Mapping[str, object], mode: str, override: Mapping[str, object]
) -> dict[str, float]:
    """The same, with `mode` as --generation-config says it: auto, none, or a file or directory to read instead.

    Raises ConfigError.
    """
    own = generation_config
    if mode not in ("auto", "model", "none", "vllm"):
        path = Path(mode)
        file = path / "generation_config.json" if path.is_dir() else path
        try:
            own = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--generation-config {mode}: {file} cannot be read: {error}.") from None
        if not isinstance(own, dict):
            raise ConfigError(f"--generation-config {mode}: {file} does not hold a JSON object.")
    try:
        return default_sampling(own, mode, override)
    except ValueError as error:
        raise ConfigError(str(error)) from None
