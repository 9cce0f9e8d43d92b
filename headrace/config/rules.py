"""Combinations of settings that cannot work or that people regret, one small function each.

A rule looks at the settings and returns None, an error or an advice. All of them run at every start, so that a
person sees all mistakes at once. `MODEL_RULES` run once the model's files have been read.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.config.model import ModelConfig
from headrace.config.other_architecture import OTHER_FAMILY
from headrace.config.settings import EngineSettings, ServerSettings


@dataclass(frozen=True, slots=True)
class Finding:
    severity: Literal["error", "advice"]
    message: str


@dataclass(frozen=True, slots=True)
class Setup:
    """What rules look at. `given` are the names of the flags that a person used."""

    engine: EngineSettings
    server: ServerSettings
    given: frozenset[str]
    load_format: str = "auto"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What rules know of the model. `weight_files` is "safetensors" or "gguf"."""

    config: ModelConfig
    weight_files: Literal["safetensors", "gguf"]
    has_chat_template: bool


Rule = Callable[[Setup], Finding | None]
ModelRule = Callable[[Setup, ModelFacts], Finding | None]

BUILT_QUANTIZATIONS = ("gguf",)
_QUANTIZATION_NAMES = {"awq": "AWQ", "gptq": "GPTQ", "fp8": "FP8", "gguf": "GGUF", "int8": "INT8"}
_LOOPBACK = ("localhost", "::1", "127.")
_STEP_TOKENS_ADVICE = 16384


def findings(setup: Setup) -> list[Finding]:
    """What the rules that need no model say."""
    return _present(rule(setup) for rule in RULES)


def model_findings(setup: Setup, facts: ModelFacts) -> list[Finding]:
    """What the rules that need the model say."""
    return _present(rule(setup, facts) for rule in MODEL_RULES)


def listens_beyond_loopback(host: str) -> bool:
    return not host.startswith(_LOOPBACK)


def quantization_method(name: str) -> str:
    """The method a spelling means: `awq_marlin` is awq with another kernel."""
    return name.lower().replace("-", "_").removesuffix("_marlin")


def _present(found: Iterable[Finding | None]) -> list[Finding]:
    return [finding for finding in found if finding is not None]


def _error(message: str) -> Finding:
    return Finding("error", message)


def _advice(message: str) -> Finding:
    return Finding("advice", message)


def _utilization_in_range(setup: Setup) -> Finding | None:
    share = setup.engine.gpu_memory_utilization
    if not 0 < share <= 1:
        meant = f" Did you mean {share / 100:g}?" if 2 <= share <= 100 else ""
        return _error(
            f"--gpu-memory-utilization {share:g} is a share of the memory: more than 0, at most 1; 0.9 is usual.{meant}"
        )
    if share > 0.95 and "kv-cache-memory-bytes" not in setup.given:
        return _advice(
            f"--gpu-memory-utilization {share:g} leaves {1 - share:.0%} for everything else on the device; "
            "long requests may fail for want of memory. 0.90 to 0.95 is safe."
        )
    return None


def _cache_size_given_twice(setup: Setup) -> Finding | None:
    if {"kv-cache-memory-bytes", "gpu-memory-utilization"} <= setup.given:
        return _advice(
            "--kv-cache-memory-bytes sets the KV cache exactly, so --gpu-memory-utilization no longer decides its size."
        )
    return None


def _prompt_fits_a_step(setup: Setup) -> Finding | None:
    engine = setup.engine
    tokens, length = engine.max_num_batched_tokens, engine.max_model_len
    if engine.enable_chunked_prefill or tokens is None or length is None or tokens >= length:
        return None
    return _error(
        f"max_num_batched_tokens ({tokens}) is smaller than max_model_len ({length}), and without chunked prefill a "
        f"prompt must fit one step. Use --enable-chunked-prefill, or --max-num-batched-tokens {length}, "
        f"or --max-model-len {tokens}."
    )


def _sequences_fit_a_step(setup: Setup) -> Finding | None:
    engine = setup.engine
    tokens = engine.max_num_batched_tokens
    if tokens is None or engine.max_num_seqs <= tokens or "max-num-seqs" not in setup.given:
        return None
    return _error(
        f"max_num_seqs ({engine.max_num_seqs}) is greater than max_num_batched_tokens ({tokens}), but every running "
        f"request needs a token of each step. Use --max-num-seqs {tokens} or "
        f"--max-num-batched-tokens {engine.max_num_seqs}."
    )


def _step_is_not_huge(setup: Setup) -> Finding | None:
    tokens = setup.engine.max_num_batched_tokens
    if tokens is None or tokens <= _STEP_TOKENS_ADVICE or not setup.engine.enable_chunked_prefill:
        return None
    return _advice(
        f"--max-num-batched-tokens {tokens} takes memory for {tokens:,} tokens in one step; with chunked prefill "
        "2048 to 8192 is as fast, and leaves more for the KV cache."
    )


def _step_target_below_timeout(setup: Setup) -> Finding | None:
    target, limit = setup.engine.step_time_target_s, setup.engine.step_timeout_s
    if target is None or limit is None or target < limit:
        return None
    return _error(
        f"--step-time-target-ms {target * 1000:g} is not below --step-timeout {limit:g} s, so every full step would "
        f"count as stuck. Use --step-timeout {max(30, round(20 * target))}."
    )


def _keys_can_be_sent(setup: Setup) -> Finding | None:
    for key in setup.server.api_keys:
        if not key.strip():
            return _error("--api-key is empty: give a key, or leave the flag out to let every client in.")
        if key != key.strip() or not key.isprintable() or not key.isascii() or " " in key:
            return _error(
                "--api-key holds spaces, line breaks or characters outside ASCII, which a client cannot send in the "
                "Authorization header. Check the quotes and the file it came from."
            )
    return None


def _host_is_given(setup: Setup) -> Finding | None:
    if setup.server.host.strip():
        return None
    return _error("--host is empty: use 127.0.0.1 for this machine alone, or 0.0.0.0 to let other machines in.")


def _open_server_has_a_key(setup: Setup) -> Finding | None:
    server = setup.server
    if server.api_keys or not server.host.strip() or not listens_beyond_loopback(server.host):
        return None
    return _advice(f"--host {server.host} without --api-key: anyone who reaches this machine can use the model.")


def _key_and_certificate_together(setup: Setup) -> Finding | None:
    server = setup.server
    if server.ssl_keyfile is None and server.ssl_certfile is None:
        return None
    if server.ssl_certfile is None:
        return _error("--ssl-keyfile needs --ssl-certfile: https takes both a key and a certificate.")
    if server.ssl_keyfile is None:
        return _error("--ssl-certfile needs --ssl-keyfile: https takes both a key and a certificate.")
    for flag, file in (("--ssl-keyfile", server.ssl_keyfile), ("--ssl-certfile", server.ssl_certfile)):
        if not Path(file).is_file():
            return _error(f"{flag} {file}: there is no such file.")
    return _certificate_loads(server.ssl_certfile, server.ssl_keyfile)


def _certificate_loads(certificate: str, key: str) -> Finding | None:
    def ask_nobody() -> str:
        raise ValueError("the key is locked with a passphrase; `openssl pkey -in FILE -out NEW` unlocks a copy")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=ask_nobody)
    except ssl.SSLError as error:
        reason = (error.reason or "not readable as PEM").lower().replace("_", " ")
        return _error(f"--ssl-certfile {certificate} and --ssl-keyfile {key} cannot serve https: {reason}.")
    except (OSError, ValueError) as error:
        return _error(f"--ssl-certfile {certificate} and --ssl-keyfile {key} cannot serve https: {error}.")
    return None


def _root_path_is_a_path(setup: Setup) -> Finding | None:
    path = setup.server.root_path
    if not path or (path.startswith("/") and not path.endswith("/")):
        return None
    return _error(f"--root-path {path} must start with a slash and not end with one: use /{path.strip('/')}.")


def _log_length_has_a_log(setup: Setup) -> Finding | None:
    if setup.server.max_log_len is None or setup.server.log_requests:
        return None
    return _advice("--max-log-len has no effect while requests are not logged; add --enable-log-requests.")


def _names_are_given(setup: Setup) -> Finding | None:
    if any(not name.strip() for name in setup.server.served_model_names):
        return _error("--served-model-name is empty: clients must be able to send it as `model`.")
    return None


def _json_needs_dry_run(setup: Setup) -> Finding | None:
    if "json" in setup.given and "dry-run" not in setup.given:
        return _error("--json prints the result of --dry-run: add --dry-run.")
    return None


def _length_within_the_model(setup: Setup, facts: ModelFacts) -> Finding | None:
    wanted, limit = setup.engine.max_model_len, facts.config.max_position_embeddings
    if wanted is None or wanted <= limit:
        return None
    return _error(
        f"--max-model-len {wanted} is more than the {limit} positions the model was trained for: use --max-model-len "
        f"{limit}. To go beyond at the price of quality: "
        f"--hf-overrides '{{\"max_position_embeddings\": {wanted}}}'."
    )


def _quantization_matches(setup: Setup, facts: ModelFacts) -> Finding | None:
    asked, found = setup.engine.quantization, facts.config.quantization
    method = quantization_method(asked) if asked is not None else None
    stored = quantization_method(found) if found is not None else None
    if method == "int8":
        if facts.config.family == OTHER_FAMILY:
            return _error(
                "--quantization int8: a model that runs in transformers' code keeps its weights. Leave the flag out."
            )
        if stored is None:
            return None
        return _error(
            f"--quantization int8 is made of plain weights while they are loaded; this checkpoint is {found}: "
            "leave the flag out."
        )
    if method is not None and method != stored:
        if stored is None:
            return _error(
                f"--quantization {asked}: the checkpoint is plain: its config.json has no quantization_config. "
                f"Leave the flag out, or serve the {_method_title(method)} version of the model."
            )
        return _error(f"--quantization {asked}: the checkpoint is {found}. Leave the flag out, or use {found}.")
    if stored is not None and stored not in BUILT_QUANTIZATIONS:
        return _error(f"{_method_title(stored)} weights are not built yet: serve the plain checkpoint, or a GGUF file.")
    return None


def _load_format_matches(setup: Setup, facts: ModelFacts) -> Finding | None:
    wanted, found = setup.load_format, facts.weight_files
    if wanted in ("auto", found):
        return None
    return _error(f"--load-format {wanted}: the model's weights are {found}. Leave the flag out, or use {found}.")


def _chat_has_a_template(setup: Setup, facts: ModelFacts) -> Finding | None:
    if facts.has_chat_template or setup.server.chat_template is not None or setup.engine.pooler is not None:
        return None
    return _advice(
        "The model has no chat template, so /v1/chat/completions answers 400; /v1/completions works. "
        "Give one with --chat-template FILE."
    )


def _method_title(method: str) -> str:
    return _QUANTIZATION_NAMES.get(method, method)


RULES: tuple[Rule, ...] = (
    _utilization_in_range,
    _cache_size_given_twice,
    _prompt_fits_a_step,
    _sequences_fit_a_step,
    _step_is_not_huge,
    _step_target_below_timeout,
    _keys_can_be_sent,
    _host_is_given,
    _open_server_has_a_key,
    _key_and_certificate_together,
    _root_path_is_a_path,
    _log_length_has_a_log,
    _names_are_given,
    _json_needs_dry_run,
)

MODEL_RULES: tuple[ModelRule, ...] = (
    _length_within_the_model,
    _quantization_matches,
    _load_format_matches,
    _chat_has_a_template,
)
