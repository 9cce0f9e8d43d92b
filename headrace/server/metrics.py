"""What the server counts, under vLLM's names: those of 0.9.2 and of 0.33 together, so that no dashboard goes blank.

On the hot path there is only `observe` on children bound in advance. Gauges and the core's counters are worked out
when somebody asks, from its last `StepStats` and what is open. A renamed metric is kept once and shown under every
name it has had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.config.settings import EngineSettings
from headrace.planner.host import resident_bytes
from headrace.protocol import ipc

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

LABELS = ("model_name", "engine")

CORE_TOTALS = (
    "preemptions_total",
    "prefix_queries_total",
    "prefix_hits_total",
    "host_hits_total",
    "host_saved_total",
    "host_loaded_total",
)
"""Fields of StepStats that start again from zero with every core."""

FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
OUTPUT_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PARAMS_N = (1, 2, 5, 10, 20)
PREEMPTIONS = (0, 1, 2, 5, 10, 20, 50)
HTTP_S = (0.1, 0.5, 1.0)

WAITS_FOR = {"max_num_seqs": "--max-num-seqs", "kv_cache": "KV cache"}
"""What the scheduler says that the first in the queue waits for, in words."""


def one_two_five(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `largest`."""
    steps = (digit * 10**power for power in range(len(str(largest))) for digit in (1, 2, 5))
    return tuple(step for step in steps if step <= largest)


@dataclass(slots=True)
class RequestRecord:
    """What is known of one request for the metrics; times are `time.perf_counter()` seconds."""

    num_prompt_tokens: int
    params: ipc.SamplingParams
    arrived: float
    queue_s: float = 0.0
    first_token: float | None = None
    last_token: float = 0.0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    sequences: dict[int, tuple[int, float]] = field(default_factory=dict)
    """For each sequence that has tokens: how many, and when the last one came."""

    @property
    def num_generated(self) -> int:
        return sum(count for count, _ in self.sequences.values())

    @property
    def longest(self) -> int:
        return max((count for count, _ in self.sequences.values()), default=0)


class _AlsoNamed:
    """The samples of another metric under a second name."""

    def __init__(self, histogram: Histogram, old: str, new: str) -> None:
        self._collector, self._old, self._new = histogram, old, new

    def collect(self) -> Iterator[Metric]:
        for metric in self._collector.collect():
            twin = Metric(self._new, metric.documentation, metric.type)
            twin.samples = [s._replace(name=s.name.replace(self._old, self._new, 1)) for s in metric.samples]
            yield twin


class EngineMetrics:
    """All metrics of one served model. `core_pid` may be set so that the core's memory is shown too."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.core_pid: int | None = None
        self.count_open: Callable[[], int] = lambda: 0
        """How many sequences were asked for and have not ended, wherever they are."""
        self.num_restarts = 0
        self.sleep_level = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self._model_name = model_name
        self._labels = (model_name, "0")
        self._stats: ipc.StepStats | None = None
        self._num_in_step = 0
        """Sequences that were running in the last step, those that ended with it included."""
        self._max_running = 0
        self._cache_labels: dict[str, str] = {}
        self._cached_tokens = 0
        self._lost = dict.fromkeys(CORE_TOTALS, 0)
        self._lengths: dict[str, Histogram] = {}

        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_S)
        self._between = self._histogram(
            "inter_token_latency_seconds",
            "Time per output token.",
            OUTPUT_TOKEN_S,
            also="time_per_output_token_seconds",
        )
        self._mean_between = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per output token of a request.", OUTPUT_TOKEN_S
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", REQUEST_S)
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to first step.", REQUEST_S)
        self._inference = self._histogram("request_inference_time_seconds", "First step to last token.", REQUEST_S)
        self._prefill = self._histogram("request_prefill_time_seconds", "First step to first token.", REQUEST_S)
        self._decode = self._histogram("request_decode_time_seconds", "First to last token.", REQUEST_S)
        self._iteration = self._histogram("iteration_tokens_total", "Tokens computed in a step.", ITERATION_TOKENS)
        self._n = self._histogram("request_params_n", "The n of a request.", PARAMS_N)
        self._preempted = self._histogram("request_num_preemptions", "Preemptions of a request.", PREEMPTIONS)

        success = Counter(
            "vllm:request_success", "Finished sequences.", (*LABELS, "finished_reason"), registry=self.registry
        )
        reasons: tuple[ipc.FinishReason, ...] = ("stop", "length", "repetition", "abort", "error")
        self._success = {reason: success.labels(*self._labels, reason) for reason in reasons}
        self._rejections = Counter(
            "vllm:admission_rejections", "Requests refused.", (*LABELS, "reason"), registry=self.registry
        )
        self._http = Counter("http_requests", "HTTP requests.", ("method", "handler", "status"), registry=self.registry)
        self._http_s = Histogram(
            "http_request_duration_seconds", "HTTP request to the last byte of its answer.", ("method", "handler"),
            buckets=HTTP_S, registry=self.registry,
        )  # fmt: skip
        self._http_children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    # what happens

    def engine_ready(self, info: ipc.EngineInfo, settings: EngineSettings) -> None:
        self._max_running = info.max_running
        self._cache_labels = {
            "block_size": str(info.block_size),
            "cache_dtype": info.kv_cache_dtype,
            "enable_prefix_caching": str(settings.enable_prefix_caching),
            "gpu_memory_utilization": str(settings.gpu_memory_utilization),
            "kv_cache_memory_bytes": str(info.kv_cache_bytes),
            "num_gpu_blocks": str(info.num_blocks),
            "num_cpu_blocks": str(info.num_host_blocks),
        }
        if not self._lengths:
            buckets = one_two_five(info.max_model_len)
            for name, text in (
                ("request_prompt_tokens", "Prompt tokens of a request."),
                ("request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not in the cache."),
                ("request_generation_tokens", "Generated tokens of a request."),
                ("request_max_num_generation_tokens", "Generated tokens of a request's longest sequence."),
                ("request_params_max_tokens", "The max_tokens of a request."),
            ):
                self._lengths[name] = self._histogram(name, text, buckets)

    def step(self, stats: ipc.StepStats) -> None:
        self._stats = stats
        self._num_in_step = stats.num_running
        tokens = stats.num_prefill_tokens + stats.num_decode_tokens
        if tokens:
            self._iteration.observe(tokens)

    def output(self, record: RequestRecord, output: ipc.SequenceOutput, now: float) -> None:
        """A step gave one sequence of the request something at `now`."""
        count = len(output.token_ids)
        if output.pooled is not None:
            record.queue_s = output.queue_s
            record.first_token = record.last_token = now
            self.prompt_tokens += record.num_prompt_tokens
            record.num_cached_tokens = output.num_cached_tokens
            self._cached_tokens += output.num_cached_tokens
        if count:
            if record.first_token is None:
                record.first_token = now
                record.queue_s = output.queue_s
                self._first_token.observe(now - record.arrived)
                self.prompt_tokens += record.num_prompt_tokens
                record.num_cached_tokens = output.num_cached_tokens
                self._cached_tokens += output.num_cached_tokens
            generated, last = record.sequences.get(output.index, (0, now))
            if generated:
                self._between.observe((now - last) / count)
            record.sequences[output.index] = (generated + count, now)
            record.last_token = now
            self.generation_tokens += count
        if output.num_preemptions > record.num_preemptions:
            record.num_preemptions = output.num_preemptions
        if output.finish_reason is not None:
            self._num_in_step += 1
            self._success[output.finish_reason].inc()

    def sequence_finished(self, reason: ipc.FinishReason) -> None:
        """A sequence ended on the server's side: a stop string, a client that left, a core that died."""
        self._success[reason].inc()

    def request_finished(self, record: RequestRecord) -> None:
        self._n.observe(record.params.n)
        self._preempted.observe(record.num_preemptions)
        if self._lengths:
            self._lengths["request_prompt_tokens"].observe(record.num_prompt_tokens)
            self._lengths["request_generation_tokens"].observe(record.num_generated)
            self._lengths["request_max_num_generation_tokens"].observe(record.longest)
            self._lengths["request_params_max_tokens"].observe(record.params.max_tokens)
        if record.first_token is None:
            return
        if self._lengths:
            computed = record.num_prompt_tokens - record.num_cached_tokens
            self._lengths["request_prefill_kv_computed_tokens"].observe(computed)
        decode_s = record.last_token - record.first_token
        prefill_s = record.first_token - record.arrived - record.queue_s
        self._queue.observe(record.queue_s)
        self._prefill.observe(prefill_s)
        self._decode.observe(decode_s)
        self._inference.observe(prefill_s + decode_s)
        self._whole.observe(record.last_token - record.arrived)
        if record.longest > 1:
            self._mean_between.observe(decode_s / (record.longest - 1))

    def refused(self, code: str) -> None:
        self._rejections.labels(*self._labels, code).inc()

    def core_lost(self) -> None:
        """The core died: its totals start again from zero, ours must not."""
        self.num_restarts += 1
        if self._stats is not None:
            for name in CORE_TOTALS:
                self._lost[name] += getattr(self._stats, name)
        self._stats = None
        self._max_running = 0

    def http_request(self, method: str, handler: str, status: int, seconds: float) -> None:
        """`handler` is the route's path as written in the route table, never what the client sent."""
        key = (method, handler, status)
        if key not in self._http_children:
            group = f"{status // 100}xx"
            self._http_children[key] = (
                self._http.labels(method, handler, group),
                self._http_s.labels(method, handler),
            )
        counter, histogram = self._http_children[key]
        counter.inc()
        histogram.observe(seconds)

    # what is shown

    def render(self) -> bytes:
        """The exposition for `/metrics`, of type CONTENT_TYPE."""
        return generate_latest(self.registry)

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of prompt tokens that were found in the KV cache or the tier behind it so far, 0 to 1."""
        return self._rate(self._total("prefix_hits_total") + self._total("host_hits_total"))

    def in_flight(self) -> tuple[int, int]:
        """(running, waiting) sequences, together all that are open.

        The core tells after each step what is left, and a text that became a vector in its only step never is; what
        has come since starts with the next step, if nobody was waiting for a place.
        """
        num_open = self.count_open()
        has_queue = self._stats is not None and self._stats.num_waiting > 0
        running = min(num_open, self._num_in_step if has_queue else self._max_running)
        return running, num_open - running

    def _rate(self, num_found: int) -> float:
        queries = self._total("prefix_queries_total")
        return num_found / queries if queries else 0.0

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        running, waiting = self.in_flight()
        usage = stats.kv_blocks_used / stats.kv_blocks_total if stats and stats.kv_blocks_total else 0.0
        yield self._gauge("num_requests_running", "Requests being computed.", running)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", waiting)
        by_reason = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Requests in the queue.", labels=(*LABELS, "reason")
        )
        by_reason.add_metric((*self._labels, "capacity"), waiting)
        by_reason.add_metric((*self._labels, "deferred"), 0)
        yield by_reason
        swapped = stats.num_swapped if stats else 0
        host_usage = stats.host_blocks_used / stats.host_blocks_total if stats and stats.host_blocks_total else 0.0
        yield self._gauge("num_requests_swapped", "Preempted sequences in host memory.", swapped)
        yield self._gauge("cpu_cache_usage_perc", "Share of the swap space in use, 0 to 1.", host_usage)
        yield self._gauge("kv_cache_usage_perc", "Share of KV cache blocks in use, 0 to 1.", usage)
        yield self._gauge("gpu_cache_usage_perc", "Share of KV cache blocks in use, 0 to 1.", usage)
        queries, hits = self._total("prefix_queries_total"), self._total("prefix_hits_total")
        host_hits = self._total("host_hits_total")
        for prefix in ("prefix_cache", "gpu_prefix_cache"):
            yield self._counter(f"{prefix}_queries", "Prompt tokens looked up.", queries)
            yield self._counter(f"{prefix}_hits", "Prompt tokens found.", hits)
        yield self._gauge("gpu_prefix_cache_hit_rate", "Share of prompt tokens found.", self._rate(hits))
        yield self._counter(
            "external_prefix_cache_queries", "Prompt tokens looked up in the swap space.", max(0, queries - hits)
        )
        yield self._counter("external_prefix_cache_hits", "Prompt tokens found in the swap space.", host_hits)
        yield self._gauge("cpu_prefix_cache_hit_rate", "Share of prompt tokens found there.", self._rate(host_hits))
        for name, text in (("saved", "moved to the swap space"), ("loaded", "brought back from it")):
            moved = CounterMetricFamily(f"headrace:host_blocks_{name}", f"KV cache blocks {text}.", labels=LABELS)
            moved.add_metric(self._labels, self._total(f"host_{name}_total"))
            yield moved
        yield self._counter("num_preemptions", "Preempted sequences.", self._total("preemptions_total"))
        yield self._counter("prompt_tokens", "Prompt tokens of started requests.", self.prompt_tokens)
        yield self._counter("prompt_tokens_cached", "Prompt tokens from the cache.", self._cached_tokens)
        by_source = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where they came from.", labels=(*LABELS, "source")
        )
        by_source.add_metric((*self._labels, "local_compute"), self.prompt_tokens - self._cached_tokens)
        by_source.add_metric((*self._labels, "local_cache_hit"), self._cached_tokens)
        yield by_source
        cached_by_source = CounterMetricFamily(
            "vllm:prompt_tokens_cached_by_source",
            "Prompt tokens by the cache they came from.",
            labels=(*LABELS, "source"),
        )
        cached_by_source.add_metric((*self._labels, "local_cache_hit"), self._cached_tokens)
        yield cached_by_source
        yield self._counter("generation_tokens", "Generated tokens.", self.generation_tokens)
        if self._cache_labels:
            names = list(self._cache_labels)
            cache = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=(*LABELS, *names))
            cache.add_metric((*self._labels, *self._cache_labels.values()), 1)
            yield cache
        sleep = GaugeMetricFamily(
            "vllm:engine_sleep_state",
            "1 for the state it is in: awake, without KV cache (level 1), without anything (level 2).",
            labels=(*LABELS, "sleep_state"),
        )
        for level, name in enumerate(("awake", "weights_offloaded", "discard_all")):
            sleep.add_metric((*self._labels, name), self.sleep_level == level)
        yield sleep
        yield CounterMetricFamily("headrace:engine_restarts", "Times the core was restarted.", self.num_restarts)
        memory = GaugeMetricFamily("headrace:resident_memory_bytes", "Resident memory.", labels=("process",))
        for process, pid in (("server", "self"), ("core", self.core_pid)):
            resident = resident_bytes(pid) if pid is not None else None
            if resident is not None:
                memory.add_metric((process,), resident)
        yield memory

    def _total(self, name: str) -> int:
        """One of CORE_TOTALS, over all cores there have been."""
        now: int = getattr(self._stats, name) if self._stats is not None else 0
        return self._lost[name] + now

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...] | tuple[int, ...], also: str | None = None
    ) -> Histogram:
        parent = Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self.registry)
        if also is not None:
            self.registry.register(_AlsoNamed(parent, f"vllm:{name}", f"vllm:{also}"))
        return parent.labels(*self._labels)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family


class ThroughputLog:
    """The line that the log gets every few seconds while there is work, and once more when it has ended."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._at: float | None = None
        self._prompt = 0
        self._generated = 0
        self._was_active = False

    def line(self, now: float, stats: ipc.StepStats | None) -> str | None:
        """The line for the time since the last call; None while idle."""
        prompt, generated = self._metrics.prompt_tokens, self._metrics.generation_tokens
        elapsed_s = now - self._at if self._at is not None else 0.0
        new_prompt, new_generated = prompt - self._prompt, generated - self._generated
        self._at, self._prompt, self._generated = now, prompt, generated
        running, waiting = self._metrics.in_flight()
        active = bool(new_prompt or new_generated or running or waiting)
        show = elapsed_s > 0 and (active or self._was_active)
        self._was_active = active
        if not show or stats is None:
            return None
        usage = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        waits_for = WAITS_FOR.get(stats.waiting_reason) if waiting else None
        return (
            f"Engine 000: Avg prompt throughput: {new_prompt / elapsed_s:.1f} tokens/s, "
            f"Avg generation throughput: {new_generated / elapsed_s:.1f} tokens/s, "
            f"Running: {running} reqs, Waiting: {waiting} reqs, "
            f"GPU KV cache usage: {100 * usage:.1f}%, "
            f"Prefix cache hit rate: {100 * self._metrics.prefix_cache_hit_rate:.1f}%"
            + (f", Waiting for: {waits_for}" if waits_for else "")
        )
