"""The typed settings that flags and config files resolve to; what the processes are given."""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.config.pooling import Pooler

SCORED_ROWS_PER_STEP = 64
"""Prompt tokens that a step gives log-probabilities of, at most: each takes a row of logits, wide as the vocabulary."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the core process needs. Sent to it as one msgpack message on its standard input.

    `model` is a local path (directory or GGUF file), already resolved. Sizes left None are worked out by the
    planner from the model and the memory at hand.
    """

    model: str
    tokenizer: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    kernels: Literal["auto", "native", "reference"] = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    pooler: Pooler | None = None
    """How the rows of a text become a vector or a score; None: the model generates text."""
    hf_overrides: dict[str, object] = {}
    max_model_len: int | None = None
    """None = the model's limit, shortened to what fits the memory."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    block_size: int | None = None
    swap_space_bytes: int | None = None
    """Host memory for what the KV cache gives up; None = none on a CPU, some beside a GPU."""
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    max_num_queued_reqs: int = 1024
    max_num_queued_tokens: int | None = None
    """Prompt tokens of those that wait; None = any number."""
    step_time_target_s: float | None = None
    step_timeout_s: float | None = None
    seed: int | None = None
    """Where the seeds of requests that bring none are drawn from; None = from the system's entropy."""
    threads: int | None = None
    trace_steps: bool = False


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the HTTP server needs besides the engine's settings."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...]
    """The first is the one that answers carry."""
    model_path: str
    """As the user wrote it; accepted as a model name too, as is its last component."""
    chat_template: str | None = None
    """The template's text."""
    tool_call_parser: str = "auto"
    """The name of a format in headrace/text/tool_formats.py; auto = what the chat template says."""
    reasoning_parser: str = "auto"
    """The name of a format in headrace/text/reasoning.py, or none; auto = what the chat template says."""
    compact_json: bool = False
    """JSON that a request demands has no blanks, unless the request says how."""
    closed_json_objects: bool = False
    """Objects of such JSON have no properties but those that the schema names, unless the request says otherwise."""
    generation_config: Literal["auto", "model", "none"] | str = "auto"
    override_generation_config: dict[str, object] = {}
    uvicorn_log_level: str = "info"
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    root_path: str = ""
    log_requests: bool = False
    log_stats: bool = True
    max_log_len: int | None = None
    max_logprobs: int = 20
    """Alternatives to a token that a request may ask for."""
    force_include_usage: bool = False
    """Every stream tells its usage at the end."""
    serve_docs: bool = True
    """Whether /docs and /openapi.json exist."""
    trust_request_chat_template: bool = False
    profiler_dir: str | None = None
    """Where /stop_profile has the core write; None refuses profiles."""
    batch_dir: str | None = None
    """Where files and batches are kept; None = a directory of this server's under ~/.headrace/engine."""
    batch_concurrency: int | None = None
    """Lines of batches in flight; None = as many as half of the engine's requests."""
    batch_file_limit_bytes: int = 512 << 20
    batch_storage_limit_bytes: int = 8 << 30
    max_body_bytes: int = 32 * 1024 * 1024
    shutdown_timeout_s: float = 10.0
