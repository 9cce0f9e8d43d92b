"""The flags that have their effect, grouped by what a person wants to do; `FLAGS` is the whole table.

Defaults here are those of EngineSettings and ServerSettings (a test compares them). Flags that only keep other
people's commands working stand in `flag_table_compat`.
"""

from __future__ import annotations

from headrace.config.flag_table_compat import COMPATIBILITY_FLAGS
from headrace.config.flags import Flag, by_name

MODEL = "Choose the model"
ADDRESS = "Address and access"
MEMORY = "Memory"
BATCHING = "Batching and latency"
CACHING = "Caching"
TEXT = "Text"
LOGGING = "Logging"
DEVICE = "Device and numbers"
STARTING = "Starting and stopping"

REAL_FLAGS: tuple[Flag, ...] = (
    Flag(
        "model",
        "text",
        "The model to serve: a directory, a .gguf file or a hub id; left out, the bundled SmolLM2-135M-Instruct.",
        MODEL,
        example="/models/Qwen2.5-7B-Instruct",
    ),
    Flag(
        "served-model-name",
        "text",
        "The names clients send as `model`; answers carry the first. Use it to hide the path behind a short name.",
        MODEL,
        many=True,
        example="qwen2.5-7b",
    ),
    Flag("tokenizer", "text", "Take the tokenizer from another directory, when the model's own lacks one.", MODEL),
    Flag("revision", "text", "Branch, tag or commit of a hub id; pin it so that the weights cannot change.", MODEL),
    Flag("download-dir", "text", "Where files from the hub are kept; the hub's usual cache when left out.", MODEL),
    Flag(
        "load-format",
        "text",
        "Kind of weight files: auto takes what is there, the others insist on it.",
        MODEL,
        default="auto",
        choices=("auto", "safetensors", "gguf"),
        same=(("hf", "safetensors"),),
    ),
    Flag(
        "quantization",
        "text",
        "Insist on the checkpoint's quantisation (awq, gptq, fp8, gguf ...); left out, the checkpoint says.",
        MODEL,
        aliases=("q",),
        choices=(
            "awq",
            "gptq",
            "fp8",
            "gguf",
            "compressed-tensors",
            "bitsandbytes",
            "int8",
            "awq_marlin",
            "gptq_marlin",
        ),
        same=(
            ("awq-marlin", "awq_marlin"),
            ("gptq-marlin", "gptq_marlin"),
            ("compressed_tensors", "compressed-tensors"),
        ),
    ),
    Flag(
        "hf-overrides",
        "json",
        "Replace values of the model's config.json, to try another context length or rotary scaling.",
        MODEL,
        example="'{\"max_position_embeddings\": 16384}'",
    ),
    Flag(
        "host",
        "text",
        "Address to listen on; 0.0.0.0 lets other machines in (then set --api-key).",
        ADDRESS,
        default="127.0.0.1",
    ),
    Flag(
        "port",
        "int",
        "Port to listen on; 0 takes a free one.",
        ADDRESS,
        default=8000,
        minimum=0,
        maximum=65535,
    ),
    Flag(
        "api-key",
        "text",
        "Keys that clients must send as `Authorization: Bearer KEY`; left out, every client is let in.",
        ADDRESS,
        many=True,
        example="sk-your-local-key",
    ),
    Flag(
        "allowed-origins",
        "list",
        "Web pages' origins that may call the server from a browser (CORS); none when left out.",
        ADDRESS,
        many=True,
        example="'[\"https://example.org\"]'",
    ),
    Flag("allowed-methods", "list", "HTTP methods those pages may use.", ADDRESS, default=("*",), many=True),
    Flag("allowed-headers", "list", "Request headers those pages may send.", ADDRESS, default=("*",), many=True),
    Flag("ssl-keyfile", "text", "Private key file, to serve https by itself; needs --ssl-certfile.", ADDRESS),
    Flag("ssl-certfile", "text", "Certificate file, to serve https by itself; needs --ssl-keyfile.", ADDRESS),
    Flag(
        "root-path", "text", "Path prefix that a proxy in front strips, so that links are right.", ADDRESS, default=""
    ),
    Flag(
        "disable-fastapi-docs",
        "switch",
        "Close /docs and /openapi.json, to tell strangers less.",
        ADDRESS,
        default=False,
    ),
    Flag(
        "enable-force-include-usage",
        "switch",
        "End every stream with its usage, for metering clients that do not set `stream_options`.",
        TEXT,
        default=False,
    ),
    Flag(
        "gpu-memory-utilization",
        "float",
        "Share of the device's memory (on a CPU: of the memory at hand) that may be used; lower it beside others.",
        MEMORY,
        default=0.9,
        aliases=("device-memory-utilization",),
        example="0.85",
    ),
    Flag(
        "kv-cache-memory-bytes",
        "bytes",
        "Size of the KV cache, instead of working it out from the utilisation; use it for a fixed footprint.",
        MEMORY,
        minimum=1,
        example="2G",
    ),
    Flag(
        "max-model-len",
        "tokens or auto",
        "Longest prompt plus answer in tokens; lower it to save memory. 8k is 8,000, 8K is 8,192, auto is what fits.",
        MEMORY,
        default="auto",
        minimum=1,
        example="8192",
    ),
    Flag("block-size", "int", "Tokens in one block of the KV cache; seldom worth changing.", MEMORY, minimum=1),
    Flag(
        "kv-cache-dtype",
        "text",
        "How keys and values are stored; auto is the compute dtype.",
        MEMORY,
        default="auto",
        choices=("auto", "float32", "float16", "bfloat16", "fp8", "fp8_e5m2", "fp8_e4m3", "int8"),
        same=(
            ("half", "float16"),
            ("fp16", "float16"),
            ("bf16", "bfloat16"),
            ("float", "float32"),
            ("fp32", "float32"),
        ),
    ),
    Flag(
        "max-num-seqs",
        "int",
        "Requests computed at once; raise it while memory lasts, lower it when the first token comes late.",
        BATCHING,
        default=256,
        minimum=1,
    ),
    Flag(
        "max-num-batched-tokens",
        "tokens",
        "Tokens computed in one step; higher for throughput, lower for smoother streams.",
        BATCHING,
        minimum=1,
        example="2048",
    ),
    Flag(
        "enable-chunked-prefill",
        "switch",
        "Cut long prompts into pieces computed beside running answers, so that nobody waits for them.",
        BATCHING,
        default=True,
    ),
    Flag(
        "step-time-target-ms",
        "float",
        "Time a step may take while answers stream; long prompts get what is left of it.",
        BATCHING,
        minimum=1,
        example="100",
    ),
    Flag(
        "step-timeout",
        "float",
        "Seconds without a finished step before the engine counts as stuck; at twice that it is restarted.",
        BATCHING,
        minimum=1,
    ),
    Flag(
        "max-num-queued-reqs",
        "int",
        "Requests that may wait; further ones get 429 with Retry-After.",
        BATCHING,
        default=1024,
        minimum=1,
    ),
    Flag(
        "scheduling-policy",
        "text",
        "Who runs first: fcfs in order of arrival, priority by the request's `priority` (lower runs earlier).",
        BATCHING,
        default="fcfs",
        choices=("fcfs", "priority"),
    ),
    Flag(
        "enable-prefix-caching",
        "switch",
        "Compute the common beginning of prompts once; leave it on for chats, agents and RAG.",
        CACHING,
        default=True,
    ),
    Flag("chat-template", "text", "The chat template, as a file or as the Jinja text itself.", TEXT),
    Flag(
        "trust-request-chat-template",
        "switch",
        "Let requests bring a `chat_template`; a template can keep a processor busy, so only with clients you trust.",
        TEXT,
        default=False,
    ),
    Flag(
        "max-logprobs",
        "int",
        "Alternatives to each token that a request may ask for with `logprobs`, `top_logprobs` or `prompt_logprobs`.",
        TEXT,
        default=20,
        minimum=0,
    ),
    Flag(
        "generation-config",
        "text",
        "Where sampling defaults come from: auto (the model's generation_config.json), a directory, or none.",
        TEXT,
        default="auto",
        example="none",
    ),
    Flag(
        "override-generation-config",
        "json",
        "Sampling defaults that replace the model's; a request's own values always win.",
        TEXT,
        example="'{\"temperature\": 0.7}'",
    ),
    Flag(
        "seed",
        "int",
        "Seed of the random choices of requests that bring none of their own; left out, they differ at every start.",
        TEXT,
        minimum=0,
        maximum=2**63 - 1,
    ),
    Flag(
        "uvicorn-log-level",
        "text",
        "How much the HTTP server logs; `warning` in production.",
        LOGGING,
        default="info",
        choices=("critical", "error", "warning", "info", "debug", "trace"),
    ),
    Flag("enable-log-requests", "switch", "Log every request, to find out who sends what.", LOGGING, default=False),
    Flag(
        "max-log-len",
        "int",
        "Characters of a request's parameters that the log shows; all when left out.",
        LOGGING,
        minimum=0,
    ),
    Flag(
        "disable-log-stats", "switch", "Do not log throughput and cache use every ten seconds.", LOGGING, default=False
    ),
    Flag(
        "trace-steps", "switch", "Print one line for every step of the engine, for debugging.", LOGGING, default=False
    ),
    Flag(
        "device",
        "text",
        "What computes: auto takes a GPU when one is there.",
        DEVICE,
        default="auto",
        choices=("auto", "cpu", "cuda"),
        same=(("gpu", "cuda"),),
    ),
    Flag(
        "dtype",
        "text",
        "Type of the arithmetic; float32 is exact, float16 (half) and bfloat16 halve the memory.",
        DEVICE,
        default="auto",
        choices=("auto", "float32", "float16", "bfloat16"),
        same=(
            ("half", "float16"),
            ("fp16", "float16"),
            ("bf16", "bfloat16"),
            ("float", "float32"),
            ("fp32", "float32"),
        ),
    ),
    Flag(
        "kernels",
        "text",
        "What computes on a CPU: auto is native; reference is torch's, slow, to compare with.",
        DEVICE,
        default="auto",
        choices=("auto", "native", "reference"),
    ),
    Flag(
        "threads",
        "int",
        "CPU threads that compute; left out, as many as the container or the affinity allows.",
        DEVICE,
        minimum=1,
        maximum=4096,
    ),
    Flag(
        "config",
        "text",
        "Read flags from a YAML or TOML file; the command line wins.",
        STARTING,
        example="headrace.yaml",
    ),
    Flag(
        "dry-run",
        "switch",
        "Check flags, model files and memory, say what would start, and stop.",
        STARTING,
        default=False,
    ),
    Flag("json", "switch", "Print the result of --dry-run as JSON.", STARTING, default=False),
    Flag(
        "shutdown-timeout",
        "float",
        "Seconds that running requests may take to finish after SIGTERM.",
        STARTING,
        default=10.0,
        minimum=0,
    ),
)

FLAGS: tuple[Flag, ...] = REAL_FLAGS + COMPATIBILITY_FLAGS
FLAG_BY_NAME: dict[str, Flag] = by_name(FLAGS)
GROUPS: tuple[str, ...] = tuple(dict.fromkeys(flag.group for flag in FLAGS))
