"""The exposition: the names that dashboards of both generations ask for, and the values behind them."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.config.settings import EngineSettings
from headrace.protocol import ipc
from headrace.server.metrics import EngineMetrics, RequestRecord, ThroughputLog, one_two_five


def stats(**changes) -> ipc.StepStats:
    values = {
        "step": 1,
        "step_s": 0.1,
        "num_running": 3,
        "num_waiting": 2,
        "waiting_reason": "kv_cache",
        "num_prefill_tokens": 90,
        "num_decode_tokens": 3,
        "kv_blocks_used": 25,
        "kv_blocks_total": 100,
        "prefix_queries_total": 200,
        "prefix_hits_total": 50,
        "preemptions_total": 4,
    }
    return ipc.StepStats(**{**values, **changes})


def info() -> ipc.EngineInfo:
    return ipc.EngineInfo(
        model="m", family="llama", device="cpu", dtype="float32", kernels="reference", instruction_set="AVX2",
        threads=2, weight_bytes=1, kv_cache_bytes=1000, kv_cache_dtype="float32", block_size=32, num_blocks=100,
        max_model_len=300, max_num_seqs=8, max_num_batched_tokens=512, step_time_target_s=0.25, phase_seconds={},
        notes=[], kv_cache_tokens=3200,
    )  # fmt: skip


@pytest.fixture
def metrics() -> EngineMetrics:
    made = EngineMetrics("tiny")
    made.engine_ready(info(), EngineSettings(model="m"))
    return made


def samples(metrics: EngineMetrics) -> dict[str, float]:
    """`name` or `name{label}` to value, of labels that tell samples apart."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            own = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name + (str(own) if own else "")] = sample.value
    return found


def test_the_tier_in_host_memory_is_shown_by_the_names_it_has_had(metrics):
    metrics.step(
        stats(host_blocks_used=30, host_blocks_total=40, num_swapped=2, host_hits_total=70, host_saved_total=9,
              host_loaded_total=5)
    )  # fmt: skip
    shown = samples(metrics)
    assert shown["vllm:cpu_cache_usage_perc"] == 0.75
    assert shown["vllm:num_requests_swapped"] == 2
    assert shown["vllm:prefix_cache_hits_total"] == 50
    assert shown["vllm:external_prefix_cache_queries_total"] == 150
    assert shown["vllm:external_prefix_cache_hits_total"] == 70
    assert (shown["vllm:gpu_prefix_cache_hit_rate"], shown["vllm:cpu_prefix_cache_hit_rate"]) == (0.25, 0.35)
    assert (shown["headrace:host_blocks_saved_total"], shown["headrace:host_blocks_loaded_total"]) == (9, 5)
    assert metrics.prefix_cache_hit_rate == 0.6
    metrics.core_lost()
    metrics.step(stats(host_hits_total=1))
    assert samples(metrics)["vllm:external_prefix_cache_hits_total"] == 71


def test_names_of_both_generations_are_there_from_the_start(metrics):
    text = metrics.render().decode()
    for name in (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:gpu_cache_usage_perc",
        "vllm:kv_cache_usage_perc", "vllm:gpu_prefix_cache_queries_total", "vllm:gpu_prefix_cache_hits_total",
        "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total",
        "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:iteration_tokens_total_bucket",
        "vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket",
        "vllm:request_max_num_generation_tokens_bucket", "vllm:request_params_max_tokens_bucket",
        "vllm:request_params_n_bucket", "vllm:time_to_first_token_seconds_bucket",
        "vllm:time_per_output_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket",
        "vllm:request_time_per_output_token_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket",
        "vllm:prompt_tokens_cached_total", "vllm:prompt_tokens_by_source_total", "vllm:request_num_preemptions_bucket",
        "vllm:prompt_tokens_cached_by_source_total", "vllm:request_prefill_kv_computed_tokens_bucket",
        "vllm:request_queue_time_seconds_bucket", "vllm:request_inference_time_seconds_bucket",
        "vllm:request_prefill_time_seconds_bucket", "vllm:request_decode_time_seconds_bucket",
    ):  # fmt: skip
        assert f'{name}{{engine="0"' in text or f'{name}{{model_name="tiny",engine="0"' in text, name
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in text.replace(
        '{model_name="tiny",engine="0"}', '{engine="0",model_name="tiny"}'
    )


def test_gauges_show_the_last_step(metrics):
    metrics.count_open = lambda: 5
    metrics.step(stats())
    shown = samples(metrics)
    assert shown["vllm:num_requests_running"] == 3
    assert shown["vllm:num_requests_waiting"] == 2
    assert shown["vllm:num_requests_waiting_by_reason{'reason': 'capacity'}"] == 2
    assert shown["vllm:gpu_cache_usage_perc"] == shown["vllm:kv_cache_usage_perc"] == 0.25
    assert shown["vllm:prefix_cache_hits_total"] == shown["vllm:gpu_prefix_cache_hits_total"] == 50
    assert shown["vllm:iteration_tokens_total_sum"] == 93


def in_flight(metrics: EngineMetrics, num_open: int) -> tuple[float, float]:
    """(running, waiting) as shown."""
    metrics.count_open = lambda: num_open
    shown = samples(metrics)
    assert shown["vllm:num_requests_waiting_by_reason{'reason': 'capacity'}"] == shown["vllm:num_requests_waiting"]
    return shown["vllm:num_requests_running"], shown["vllm:num_requests_waiting"]


def test_everything_open_is_running_or_waiting_whatever_the_last_step_said(metrics):
    assert in_flight(metrics, 0) == (0, 0)
    assert in_flight(metrics, 3) == (3, 0), "before the first step"
    assert in_flight(metrics, 11) == (8, 3), "no more than run at once"
    metrics.step(stats(num_running=2, num_waiting=9, waiting_reason="kv_cache"))
    assert in_flight(metrics, 12) == (2, 10), "the last came behind those that wait for the KV cache"
    assert in_flight(metrics, 1) == (1, 0), "the others were aborted since"
    metrics.core_lost()
    assert in_flight(metrics, 4) == (0, 4), "nobody computes while the core is dead"


def test_texts_whose_only_step_is_over_when_it_is_told_are_running_all_the_same(metrics):
    record = RequestRecord(num_prompt_tokens=40, params=ipc.SamplingParams(max_tokens=1), arrived=100.0)
    metrics.step(stats(num_running=0, num_waiting=7, waiting_reason="max_num_seqs"))
    for i in range(3):
        metrics.output(
            record, ipc.SequenceOutput(request_id=str(i), index=0, token_ids=[], finish_reason="stop"), 101.0
        )
    assert in_flight(metrics, 7) == (3, 4), "as many as in the step before"
    metrics.step(stats(num_running=0, num_waiting=0, waiting_reason=""))
    assert in_flight(metrics, 1) == (1, 0)


def test_counters_of_the_core_go_on_when_it_is_restarted(metrics):
    metrics.step(stats(preemptions_total=4))
    metrics.core_lost()
    metrics.step(stats(preemptions_total=1, prefix_queries_total=10, prefix_hits_total=10))
    shown = samples(metrics)
    assert shown["vllm:num_preemptions_total"] == 5
    assert shown["vllm:prefix_cache_queries_total"] == 210
    assert shown["headrace:engine_restarts_total"] == 1


def test_a_request_is_counted_in_every_histogram(metrics):
    record = RequestRecord(num_prompt_tokens=40, params=ipc.SamplingParams(max_tokens=50), arrived=100.0)
    first = ipc.SequenceOutput(request_id="r", index=0, token_ids=[5], queue_s=0.25, num_cached_tokens=32)
    metrics.output(record, first, 101.0)
    metrics.output(record, ipc.SequenceOutput(request_id="r", index=0, token_ids=[6, 7]), 101.5)
    last = ipc.SequenceOutput(request_id="r", index=0, token_ids=[8], finish_reason="stop")
    metrics.output(record, last, 102.0)
    metrics.request_finished(record)
    shown = samples(metrics)
    assert shown["vllm:time_to_first_token_seconds_sum"] == 1.0
    assert shown["vllm:inter_token_latency_seconds_sum"] == 0.75  # 0.25 for each of two, 0.5 for the last
    assert shown["vllm:time_per_output_token_seconds_sum"] == 0.75
    assert shown["vllm:request_time_per_output_token_seconds_sum"] == pytest.approx(1.0 / 3)
    assert shown["vllm:request_queue_time_seconds_sum"] == 0.25
    assert shown["vllm:request_prefill_time_seconds_sum"] == 0.75
    assert shown["vllm:request_decode_time_seconds_sum"] == 1.0
    assert shown["vllm:request_inference_time_seconds_sum"] == 1.75
    assert shown["vllm:e2e_request_latency_seconds_sum"] == 2.0
    assert shown["vllm:prompt_tokens_total"] == 40
    assert shown["vllm:prompt_tokens_cached_total"] == 32
    assert shown["vllm:prompt_tokens_cached_by_source_total{'source': 'local_cache_hit'}"] == 32
    assert shown["vllm:request_prefill_kv_computed_tokens_sum"] == 8
    assert shown["vllm:generation_tokens_total"] == 4
    assert shown["vllm:request_success_total{'finished_reason': 'stop'}"] == 1
    assert shown["vllm:request_generation_tokens_sum"] == 4
    assert shown["vllm:request_params_max_tokens_bucket{'le': '50.0'}"] == 1


def test_length_buckets_run_in_one_two_five_up_to_the_model_length(metrics):
    assert one_two_five(300) == (1, 2, 5, 10, 20, 50, 100, 200)
    text = metrics.render().decode()
    assert 'vllm:request_prompt_tokens_bucket{engine="0",le="200.0"' in text
    assert 'le="500.0",model_name="tiny"} 0.0' not in text.split("vllm:request_prompt_tokens")[1]


def test_cache_config_and_memory_are_told(metrics):
    shown = metrics.render().decode()
    assert 'num_gpu_blocks="100"' in shown and 'block_size="32"' in shown
    assert samples(metrics)["headrace:resident_memory_bytes{'process': 'server'}"] > 1e6


def test_http_requests_are_counted_by_route_and_status_class(metrics):
    metrics.http_request("POST", "/v1/completions", 404, 0.02)
    metrics.http_request("POST", "/v1/completions", 400, 0.02)
    labels = "{'handler': '/v1/completions', 'method': 'POST', 'status': '4xx'}"
    shown = samples(metrics)
    assert next(v for k, v in shown.items() if k.startswith("http_requests_total") and "4xx" in k) == 2, labels
    assert any(k.startswith("http_request_duration_seconds_count") and v == 2 for k, v in shown.items())


def test_the_log_line_appears_while_active_and_once_after(metrics):
    log = ThroughputLog(metrics)
    idle = stats(num_running=0, num_waiting=0, kv_blocks_used=0)
    assert log.line(0.0, idle) is None
    metrics.step(stats())
    metrics.count_open = lambda: 5
    metrics.prompt_tokens, metrics.generation_tokens = 100, 50
    assert log.line(10.0, stats()) == (
        "Engine 000: Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 5.0 tokens/s, "
        "Running: 3 reqs, Waiting: 2 reqs, GPU KV cache usage: 25.0%, Prefix cache hit rate: 25.0%, "
        "Waiting for: KV cache"
    )
    metrics.step(idle)
    metrics.count_open = lambda: 0
    assert "Avg generation throughput: 0.0" in (log.line(20.0, idle) or "")
    assert log.line(30.0, idle) is None
