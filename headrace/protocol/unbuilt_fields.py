"""Request fields this server knows by name and does not implement yet.

A value that asks for something is refused by the field's name, so that nobody gets unconstrained text while
believing it constrained. A value that asks for nothing (`"tools": []`, `"length_penalty": 1`) passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.protocol import errors


def _asks_nothing(value: object) -> bool:
    return value is None or value is False or value in ("", [], {})


def _one_of(*harmless: object) -> Callable[[object], bool]:
    """Nothing, or one of these."""
    return lambda value: _asks_nothing(value) or _equals_one(value, harmless)


def _only(*harmless: object) -> Callable[[object], bool]:
    """Null or one of these: here false asks for something."""
    return lambda value: value is None or _equals_one(value, harmless)


def _equals_one(value: object, harmless: tuple[object, ...]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in harmless)


def _anything(value: object) -> bool:
    return True


@dataclass(frozen=True)
class Unbuilt:
    """`harmless` says which values have no effect; `advice` ends the refusal."""

    harmless: Callable[[object], bool] = _asks_nothing
    advice: str = ""


_PLAIN = Unbuilt()
_CHAT_ONLY = "It works on /v1/chat/completions."
_FUNCTIONS = "Send `tools` and `tool_choice`, which took its place."
_ZERO = Unbuilt(_one_of(0))
_WITHOUT_EFFECT_ALONE = Unbuilt(_anything)
"""Only tunes another field of this table, which is refused itself."""

UNBUILT: Mapping[str, Unbuilt] = {
    # Tools.
    "functions": Unbuilt(advice=_FUNCTIONS),
    "function_call": Unbuilt(_one_of("none", "auto"), _FUNCTIONS),
    "tools": Unbuilt(advice=_CHAT_ONLY),
    "tool_choice": Unbuilt(_one_of("none", "auto"), _CHAT_ONLY),
    "parallel_tool_calls": _WITHOUT_EFFECT_ALONE,
    "guided_decoding_backend": _WITHOUT_EFFECT_ALONE,
    # Sampling.
    "use_beam_search": Unbuilt(advice="Draw several answers with `n` or `best_of` and a `temperature`, or take 0."),
    "length_penalty": Unbuilt(_one_of(1), "It belongs to beam search."),
    "early_stopping": Unbuilt(advice="It belongs to beam search."),
    "thinking_token_budget": Unbuilt(advice=_CHAT_ONLY),
    "watermarking": _PLAIN,
    "logits_processors": _PLAIN,
    "custom_logit_processor": _PLAIN,
    "stop_regex": _PLAIN,
    "no_stop_trim": Unbuilt(advice="Use `include_stop_str_in_output`."),
    "dry_multiplier": _ZERO,
    "dry_base": _WITHOUT_EFFECT_ALONE,
    "dry_allowed_length": _WITHOUT_EFFECT_ALONE,
    "dry_penalty_last_n": _WITHOUT_EFFECT_ALONE,
    "dry_sequence_breakers": _WITHOUT_EFFECT_ALONE,
    "xtc_probability": _ZERO,
    "xtc_threshold": _WITHOUT_EFFECT_ALONE,
    "mirostat": _ZERO,
    "mirostat_tau": _WITHOUT_EFFECT_ALONE,
    "mirostat_eta": _WITHOUT_EFFECT_ALONE,
    "samplers": _PLAIN,
    "n_probs": Unbuilt(_one_of(0), "Use `logprobs`."),
    # Template and input.
    "mm_processor_kwargs": _PLAIN,
    "media_io_kwargs": _PLAIN,
    "reasoning_effort": Unbuilt(_one_of("none"), _CHAT_ONLY),
    "include_reasoning": Unbuilt(_only(True), _CHAT_ONLY),
    "separate_reasoning": _WITHOUT_EFFECT_ALONE,
    "stream_reasoning": _WITHOUT_EFFECT_ALONE,
    "prompt_embeds": _PLAIN,
    "suffix": Unbuilt(advice="Only text after the prompt is generated; nothing can be inserted before a suffix."),
    "modalities": Unbuilt(_one_of(["text"])),
    "audio": _PLAIN,
    "prediction": _PLAIN,
    "web_search_options": Unbuilt(_only()),
    "verbosity": Unbuilt(_one_of("medium")),
    "service_tier": Unbuilt(_one_of("auto", "default")),
    # Control.
    "kv_transfer_params": _PLAIN,
    "vllm_xargs": _PLAIN,
    "session_id": _PLAIN,
    "session_params": _PLAIN,
    "rid": Unbuilt(advice="Use `request_id`."),
    "lora_path": _PLAIN,
    "return_token_offsets": _PLAIN,
    "return_prompt_text": _PLAIN,
    "return_hidden_states": _PLAIN,
    "stream_interval": Unbuilt(_one_of(1)),
    "cache_prompt": Unbuilt(_only(True), "The prefix cache is a setting of the server: --no-enable-prefix-caching."),
    "id_slot": Unbuilt(_one_of(-1)),
    "timings_per_token": _PLAIN,
}


def unknown_fields(others: Mapping[str, object]) -> list[str]:
    """Names in `others` that no dialect knows. Raises ApiError (400) for a known one that asks for something."""
    unknown = []
    for name, value in others.items():
        if name in UNBUILT:
            if not UNBUILT[name].harmless(value):
                raise errors.unsupported_field(name, UNBUILT[name].advice)
        else:
            unknown.append(name)
    return unknown
