"""Flags of other servers' commands, past and present, that we accept without having their feature (yet).

`mapped`: the command may go on, and one true line says what happens instead. `refused`: going on would be a lie,
so the start stops and names the feature; values that ask for nothing (`--tensor-parallel-size 1`) pass.
"""

from __future__ import annotations

from headrace.config.flags import Flag, Kind

PARALLEL = "Parallel devices"
ADAPTERS = "Adapters"
TOOLS = "Tools, reasoning and structured output"
SPECULATION = "Speculative decoding"
MEDIA = "Images and sound"
CAPTURE = "Compilation and attention"
OLD_SCHEDULER = "Scheduling of other servers"
TIERS = "Memory tiers"
FILES = "Model files of other kinds"
HTTP = "HTTP server details"
OBSERVING = "Tracing"


def _mapped(
    name: str,
    kind: Kind,
    group: str,
    note: str,
    *,
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    harmless: tuple[object, ...] = (),
    many: bool = False,
) -> Flag:
    return Flag(
        name,
        kind,
        note[0].upper() + note[1:] + ".",
        group,
        aliases=aliases,
        choices=choices,
        many=many,
        state="mapped",
        note=note,
        harmless=harmless,
    )


def _refused(
    name: str,
    kind: Kind,
    group: str,
    feature: str,
    instead: str = "",
    *,
    aliases: tuple[str, ...] = (),
    harmless: tuple[object, ...] = (),
    many: bool = False,
) -> Flag:
    return Flag(
        name,
        kind,
        f"{feature}: not built yet." + (f" Today: {instead}." if instead else ""),
        group,
        aliases=aliases,
        many=many,
        minimum=1 if 1 in harmless and kind == "int" else None,
        state="refused",
        note=feature,
        instead=instead,
        harmless=harmless,
    )


_ONE_RANK = "only matters with more than one replica, which is refused until it is built"
_NO_ADAPTER = "only matters with adapters, and --enable-lora is refused until it is built"
_NO_MEDIA = "only text is served; a request with images, sound or video gets a 400"
_ONE_GRAMMAR = "one backend, llguidance, serves all structured output"
_NO_CAPTURE = "nothing is compiled or captured: every step runs eagerly"
_PREFILL_SHARE = "the share of a step that prompts may take follows --step-time-target-ms and --max-num-batched-tokens"
_TP = "Tensor parallelism"
_PP = "Pipeline parallelism"
_DP = "Data-parallel replicas"
_LORA = "LoRA adapters"
_MERGE = "merge the adapter into the weights (docs/models.md)"
_SPEC = "Speculative decoding"

COMPATIBILITY_FLAGS: tuple[Flag, ...] = (
    # Parallel devices
    _refused(
        "tensor-parallel-size", "int", PARALLEL, _TP, "use --tensor-parallel-size 1", aliases=("tp",), harmless=(1,)
    ),
    _refused("pipeline-parallel-size", "int", PARALLEL, _PP, "use 1", aliases=("pp",), harmless=(1,)),
    _refused("data-parallel-size", "int", PARALLEL, _DP, "use 1", aliases=("dp",), harmless=(1,)),
    _mapped("data-parallel-rank", "int", PARALLEL, _ONE_RANK, aliases=("dpn",), harmless=(0,)),
    _mapped("data-parallel-start-rank", "int", PARALLEL, _ONE_RANK, aliases=("dpr",), harmless=(0,)),
    _mapped("data-parallel-size-local", "int", PARALLEL, _ONE_RANK, aliases=("dpl",), harmless=(1,)),
    _mapped("data-parallel-address", "text", PARALLEL, _ONE_RANK, aliases=("dpa",)),
    _mapped("data-parallel-rpc-port", "int", PARALLEL, _ONE_RANK, aliases=("dpp",)),
    _mapped("data-parallel-backend", "text", PARALLEL, _ONE_RANK, aliases=("dpb",)),
    _refused("data-parallel-hybrid-lb", "switch", PARALLEL, _DP, aliases=("dph",)),
    _refused("data-parallel-external-lb", "switch", PARALLEL, _DP, aliases=("dpe",)),
    _refused("decode-context-parallel-size", "int", PARALLEL, "Context parallelism", aliases=("dcp",), harmless=(1,)),
    _refused("prefill-context-parallel-size", "int", PARALLEL, "Context parallelism", aliases=("pcp",), harmless=(1,)),
    _refused("enable-expert-parallel", "switch", PARALLEL, "Expert parallelism", aliases=("ep",)),
    _refused("enable-eplb", "switch", PARALLEL, "Expert parallelism"),
    _mapped("eplb-config", "json", PARALLEL, "only matters with --enable-eplb, which is refused until it is built"),
    _mapped("num-redundant-experts", "int", PARALLEL, "only matters with expert parallelism", harmless=(0,)),
    Flag(
        "distributed-executor-backend",
        "text",
        "How ranks are started. There is one rank, started as a process; running ranks with Ray is not built yet.",
        PARALLEL,
        choices=("mp", "uni", "ray", "external_launcher"),
        state="refused",
        note="Running a model over several machines (Ray)",
        instead="leave it out",
        harmless=("mp", "uni"),
    ),
    _refused("worker-use-ray", "switch", PARALLEL, "Running a model over several machines (Ray)"),
    _refused("engine-use-ray", "switch", PARALLEL, "Running a model over several machines (Ray)"),
    _mapped("ray-workers-use-nsight", "switch", PARALLEL, "there are no Ray workers"),
    _refused("nnodes", "int", PARALLEL, "Running a model over several machines", aliases=("n",), harmless=(1,)),
    _mapped("node-rank", "int", PARALLEL, _ONE_RANK, aliases=("r",), harmless=(0,)),
    _mapped("master-addr", "text", PARALLEL, _ONE_RANK),
    _mapped("master-port", "int", PARALLEL, _ONE_RANK),
    _mapped("max-parallel-loading-workers", "int", PARALLEL, "weights are read by one process"),
    _mapped(
        "disable-custom-all-reduce", "switch", PARALLEL, "there is one device, so there is no all-reduce to choose"
    ),
    _refused("worker-cls", "text", PARALLEL, "Replacing parts of the engine by one's own classes", harmless=("auto",)),
    _refused("worker-extension-cls", "text", PARALLEL, "Replacing parts of the engine by one's own classes"),
    _refused("kv-transfer-config", "json", PARALLEL, "Disaggregated prefill"),
    _refused("kv-events-config", "json", PARALLEL, "Publishing KV cache events"),
    _refused("headless", "switch", PARALLEL, "Running an engine without its HTTP server"),
    # Memory tiers
    _mapped("kv-offloading-backend", "text", TIERS, "there is one place, the host's memory (--swap-space)"),
    _refused(
        "cpu-offload-gb",
        "float",
        TIERS,
        "Keeping weights in host memory",
        "with --device cpu they are there already",
        harmless=(0.0,),
    ),
    _refused(
        "num-gpu-blocks-override",
        "int",
        TIERS,
        "Setting the number of KV blocks",
        "give the size with --kv-cache-memory-bytes",
    ),
    _mapped(
        "prefix-caching-hash-algo",
        "text",
        TIERS,
        "a cached block is checked token by token, so the hash cannot change an answer",
    ),
    _refused("kv-sharing-fast-prefill", "switch", TIERS, "Sharing KV between layers"),
    _mapped("calculate-kv-scales", "switch", TIERS, "8-bit keys and values are always scaled, each token by itself"),
    _mapped("use-v2-block-manager", "switch", TIERS, "there is one block pool"),
    _mapped("disable-hybrid-kv-cache-manager", "switch", TIERS, "all layers have the same cache here"),
    _mapped("enable-sleep-mode", "switch", TIERS, "/sleep and /wake_up are always there, as admin routes"),
    # Scheduling of other servers
    _mapped(
        "num-scheduler-steps",
        "int",
        OLD_SCHEDULER,
        "multi-step scheduling no longer exists; requests are scheduled anew at every step",
        harmless=(1,),
    ),
    _mapped("multi-step-stream-outputs", "switch", OLD_SCHEDULER, "every token is streamed when its step ends"),
    _refused("async-scheduling", "switch", OLD_SCHEDULER, "Asynchronous scheduling", "leave it out"),
    _mapped("disable-async-output-proc", "switch", OLD_SCHEDULER, "outputs are always processed beside the engine"),
    _mapped(
        "preemption-mode",
        "text",
        OLD_SCHEDULER,
        "a preempted request is fetched from --swap-space or recomputed, whichever was measured to be faster",
        choices=("recompute", "swap"),
    ),
    _mapped("scheduler-delay-factor", "float", OLD_SCHEDULER, "prompts are never held back", harmless=(0.0,)),
    _mapped("num-lookahead-slots", "int", OLD_SCHEDULER, "blocks are taken as tokens come", harmless=(0,)),
    _mapped("max-num-partial-prefills", "int", OLD_SCHEDULER, _PREFILL_SHARE, harmless=(1,)),
    _mapped("max-long-partial-prefills", "int", OLD_SCHEDULER, _PREFILL_SHARE, harmless=(1,)),
    _mapped("long-prefill-token-threshold", "tokens", OLD_SCHEDULER, _PREFILL_SHARE, harmless=(0,)),
    _mapped(
        "scheduler-reserve-full-isl",
        "switch",
        OLD_SCHEDULER,
        "a request that can never fit is refused on arrival; blocks are taken as the prompt is computed",
    ),
    _refused("stream-interval", "int", OLD_SCHEDULER, "Joining several tokens in one chunk", "use 1", harmless=(1,)),
    _refused("scheduler-cls", "text", OLD_SCHEDULER, "Replacing parts of the engine by one's own classes"),
    _mapped("disable-frontend-multiprocessing", "switch", OLD_SCHEDULER, "server and engine are always two processes"),
    _refused(
        "api-server-count",
        "int",
        OLD_SCHEDULER,
        "Several HTTP servers before one engine",
        aliases=("asc",),
        harmless=(1,),
    ),
    # Compilation and attention
    _mapped("enforce-eager", "switch", CAPTURE, "every step runs eagerly already"),
    _mapped("max-seq-len-to-capture", "tokens", CAPTURE, _NO_CAPTURE, aliases=("max-context-len-to-capture",)),
    _mapped("cuda-graph-sizes", "int", CAPTURE, _NO_CAPTURE, many=True),
    _mapped("cudagraph-capture-sizes", "int", CAPTURE, _NO_CAPTURE, many=True),
    _mapped("max-cudagraph-capture-size", "int", CAPTURE, _NO_CAPTURE),
    _mapped("compilation-config", "text or json", CAPTURE, _NO_CAPTURE, aliases=("cc",)),
    _mapped("optimization-level", "text", CAPTURE, _NO_CAPTURE, aliases=("O",)),
    _mapped("attention-backend", "text", CAPTURE, "each device has one attention implementation", harmless=("auto",)),
    _mapped("disable-cascade-attn", "switch", CAPTURE, "there is no cascade attention to disable"),
    _mapped("disable-sliding-window", "switch", CAPTURE, "layers with a window keep it, as they were trained with it"),
    _refused("additional-config", "json", CAPTURE, "Options of other servers' platform plugins"),
    # Tools, reasoning and structured output
    _mapped("enable-auto-tool-choice", "switch", TOOLS, "the model may always choose to call the tools of a request"),
    _refused("tool-parser-plugin", "text", TOOLS, "Parsers for tool calls as plugins", harmless=("",)),
    _refused("tool-server", "text", TOOLS, "Tools that the server itself runs"),
    _refused("expand-tools-even-if-tool-choice-none", "switch", TOOLS, "Showing tools that may not be called"),
    _mapped(
        "exclude-tools-when-tool-choice-none",
        "switch",
        TOOLS,
        "with `tool_choice` none the model is never shown the tools",
    ),
    _mapped("enable-reasoning", "switch", TOOLS, "thinking is told apart wherever --reasoning-parser finds it"),
    _mapped("guided-decoding-backend", "text", TOOLS, _ONE_GRAMMAR, harmless=("auto", "guidance", "llguidance")),
    _mapped("guided-decoding-disable-fallback", "switch", TOOLS, _ONE_GRAMMAR),
    # Adapters
    _refused("enable-lora", "switch", ADAPTERS, _LORA, _MERGE),
    _refused("lora-modules", "text", ADAPTERS, _LORA, _MERGE, many=True),
    _refused("qlora-adapter-name-or-path", "text", ADAPTERS, _LORA),
    _refused("default-mm-loras", "json", ADAPTERS, _LORA),
    _refused("enable-lora-bias", "switch", ADAPTERS, _LORA),
    _mapped("max-loras", "int", ADAPTERS, _NO_ADAPTER),
    _mapped("max-lora-rank", "int", ADAPTERS, _NO_ADAPTER),
    _mapped("max-cpu-loras", "int", ADAPTERS, _NO_ADAPTER),
    _mapped("lora-dtype", "text", ADAPTERS, _NO_ADAPTER, harmless=("auto",)),
    _mapped("lora-extra-vocab-size", "int", ADAPTERS, _NO_ADAPTER),
    _mapped("fully-sharded-loras", "switch", ADAPTERS, _NO_ADAPTER),
    _refused("enable-prompt-adapter", "switch", ADAPTERS, "Prompt adapters"),
    _refused("prompt-adapters", "text", ADAPTERS, "Prompt adapters", many=True),
    _mapped("max-prompt-adapters", "int", ADAPTERS, "only matters with prompt adapters"),
    _mapped("max-prompt-adapter-token", "int", ADAPTERS, "only matters with prompt adapters"),
    # Speculative decoding
    _refused("speculative-config", "json", SPECULATION, _SPEC, "leave it out", aliases=("sc",)),
    _refused("speculative-model", "text", SPECULATION, _SPEC),
    _refused("num-speculative-tokens", "int", SPECULATION, _SPEC, harmless=(0,)),
    _refused("ngram-prompt-lookup-max", "int", SPECULATION, _SPEC, harmless=(0,)),
    _refused("ngram-prompt-lookup-min", "int", SPECULATION, _SPEC, harmless=(0,)),
    _refused("spec-method", "text", SPECULATION, _SPEC),
    _refused("spec-model", "text", SPECULATION, _SPEC),
    _refused("spec-tokens", "int", SPECULATION, _SPEC, harmless=(0,)),
    # Images and sound
    _mapped("limit-mm-per-prompt", "text or json", MEDIA, _NO_MEDIA),
    _mapped("mm-processor-kwargs", "json", MEDIA, _NO_MEDIA),
    _mapped("mm-processor-cache-gb", "float", MEDIA, _NO_MEDIA),
    _mapped("media-io-kwargs", "json", MEDIA, _NO_MEDIA),
    _mapped("disable-mm-preprocessor-cache", "switch", MEDIA, _NO_MEDIA),
    _mapped("skip-mm-profiling", "switch", MEDIA, _NO_MEDIA),
    _mapped("disable-chunked-mm-input", "switch", MEDIA, _NO_MEDIA),
    _mapped("interleave-mm-strings", "switch", MEDIA, _NO_MEDIA),
    _mapped("language-model-only", "switch", MEDIA, _NO_MEDIA),
    _mapped("allowed-local-media-path", "text", MEDIA, _NO_MEDIA, harmless=("",)),
    _mapped("mm-encoder-tp-mode", "text", MEDIA, _NO_MEDIA),
    _refused("enable-prompt-embeds", "switch", MEDIA, "Prompts given as embeddings"),
    # Model files of other kinds
    _mapped(
        "trust-remote-code",
        "switch",
        FILES,
        "built-in families need no code from the checkpoint, and none is ever run",
    ),
    _mapped("code-revision", "text", FILES, "no code from the checkpoint is ever run"),
    _refused(
        "tokenizer-revision", "text", FILES, "Another revision for the tokenizer", "give its directory with --tokenizer"
    ),
    _refused(
        "tokenizer-mode",
        "text",
        FILES,
        "Tokenizers other than tokenizer.json, tokenizer.model and GGUF",
        harmless=("auto", "hf"),
    ),
    _mapped("tokenizer-pool-size", "int", FILES, "the tokenizer needs no pool", harmless=(0,)),
    _mapped("tokenizer-pool-type", "text", FILES, "the tokenizer needs no pool"),
    _mapped("tokenizer-pool-extra-config", "json", FILES, "the tokenizer needs no pool"),
    _refused("skip-tokenizer-init", "switch", FILES, "Serving without a tokenizer"),
    _mapped("rope-scaling", "json", FILES, "the same as --hf-overrides with its rope_scaling"),
    _mapped("rope-theta", "float", FILES, "the same as --hf-overrides with its rope_theta"),
    _refused(
        "hf-config-path", "text", FILES, "A config.json apart from the weights", "change values with --hf-overrides"
    ),
    _refused(
        "hf-token",
        "text",
        FILES,
        "A hub token on the command line, where every user of the machine can read it",
        "log in with `hf auth login`",
    ),
    _refused("config-format", "text", FILES, "Config files other than config.json and GGUF", harmless=("auto", "hf")),
    _refused("model-impl", "text", FILES, "Running models through transformers", harmless=("auto", "vllm", "headrace")),
    _refused("model-loader-extra-config", "json", FILES, "Loaders of other kinds of weight files"),
    _mapped("safetensors-load-strategy", "text", FILES, "weights are mapped from disk and read once"),
    _mapped("ignore-patterns", "text", FILES, "only the files that a model needs are fetched", many=True),
    _mapped("use-tqdm-on-load", "switch", FILES, "progress is shown while loading", harmless=(True,)),
    _mapped("pt-load-map-location", "text", FILES, "only safetensors and GGUF files are read"),
    _refused("override-attention-dtype", "text", FILES, "A dtype of its own for attention"),
    _refused("logits-processor-pattern", "text", FILES, "Logits processors of one's own"),
    _refused("logits-processors", "text", FILES, "Logits processors of one's own", many=True),
    _refused("quantization-param-path", "text", FILES, "KV cache scales from a file"),
    # HTTP server details
    _mapped("disable-log-requests", "switch", HTTP, "requests are not logged unless --enable-log-requests is given"),
    _refused("allow-credentials", "switch", HTTP, "Cookies from other origins", "send the key in a header"),
    _refused("ssl-ca-certs", "text", HTTP, "Client certificates"),
    _refused("ssl-cert-reqs", "int", HTTP, "Client certificates", harmless=(0,)),
    _refused("enable-ssl-refresh", "switch", HTTP, "Reloading a changed certificate", "restart"),
    _refused("uds", "text", HTTP, "Listening on a Unix socket", "use --host and --port"),
    _refused("middleware", "text", HTTP, "ASGI middleware of one's own", "put a proxy in front", many=True),
    _refused("return-tokens-as-token-ids", "switch", HTTP, "Tokens shown as `token_id:N`"),
    _refused("response-role", "text", HTTP, "Another role than assistant in answers", harmless=("assistant",)),
    _refused(
        "chat-template-content-format",
        "text",
        HTTP,
        "Handing messages to the template as lists of parts",
        "use auto or string",
        harmless=("auto", "string"),
    ),
    _refused("default-chat-template-kwargs", "json", HTTP, "Default arguments of the chat template"),
    _mapped("enable-request-id-headers", "switch", HTTP, "every answer carries X-Request-Id"),
    _mapped("enable-prompt-tokens-details", "switch", HTTP, "usage always tells the cached tokens"),
    _mapped("enable-server-load-tracking", "switch", HTTP, "/load is always served"),
    _refused("enable-tokenizer-info-endpoint", "switch", HTTP, "The /tokenizer_info route"),
    _mapped("disable-uvicorn-access-log", "switch", HTTP, "there is no access log; --enable-log-requests makes one"),
    _refused("log-config-file", "text", HTTP, "A logging configuration file", "use --uvicorn-log-level"),
    _refused("enable-log-outputs", "switch", HTTP, "Logging answers"),
    _refused(
        "logprobs-mode",
        "text",
        HTTP,
        "Logprobs after temperature and penalties, or logits",
        "use raw_logprobs",
        harmless=("raw_logprobs",),
    ),
    _mapped("h11-max-incomplete-event-size", "int", HTTP, "requests are parsed by httptools, with its own limits"),
    _mapped("h11-max-header-count", "int", HTTP, "requests are parsed by httptools, with its own limits"),
    # Tracing
    _refused("profiler-config", "json", OBSERVING, "Profiles in torch's format", "--profiler-dir DIR"),
    _refused("otlp-traces-endpoint", "text", OBSERVING, "OpenTelemetry traces"),
    _refused("collect-detailed-traces", "text", OBSERVING, "OpenTelemetry traces"),
    _mapped("show-hidden-metrics-for-version", "text", OBSERVING, "old and new metric names are exported together"),
    _refused("custom-histogram-buckets", "text", OBSERVING, "Histogram buckets of one's own"),
    _refused(
        "per-request-metrics", "switch", OBSERVING, "Metrics of each request", aliases=("enable-per-request-metrics",)
    ),
    _refused("kv-cache-metrics", "switch", OBSERVING, "Metrics of single KV blocks"),
    _refused("enable-mfu-metrics", "switch", OBSERVING, "Metrics of model FLOPs"),
    _refused("enable-layerwise-nvtx-tracing", "switch", OBSERVING, "NVTX tracing"),
    _mapped("aggregate-engine-logging", "switch", OBSERVING, "there is one engine to log"),
)
