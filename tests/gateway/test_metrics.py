"""What /metrics says after requests of known shape."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.gateway.metrics import GatewayMetrics


@dataclass(frozen=True)
class Event:
    model: str = "qwen"
    upstream: str = "local"
    endpoint: str = "chat"
    status: int = 200
    outcome: str = "ok"
    input_tokens: int = 100
    output_tokens: int = 11
    cached_tokens: int = 40
    cost_micros: int = 1234
    stream: bool = True
    ttft_s: float | None = 0.3
    total_s: float = 1.3


def samples(metrics: GatewayMetrics) -> dict[tuple[str, tuple[str, ...]], float]:
    """(name without prefix, label values in order of their names) -> value."""
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            found[sample.name.removeprefix("headrace_gateway_"), labels] = sample.value
    return found


@pytest.fixture
def metrics() -> GatewayMetrics:
    return GatewayMetrics()


def test_a_finished_request_is_counted_with_its_tokens_cost_and_times(metrics: GatewayMetrics) -> None:
    metrics.finished(Event(), "production")
    metrics.finished(Event(), "production")
    seen = samples(metrics)
    assert seen["requests_total", ("chat", "production", "qwen", "ok", "200", "local")] == 2
    assert seen["tokens_total", ("production", "input", "qwen", "local")] == 200
    assert seen["tokens_total", ("production", "output", "qwen", "local")] == 22
    assert seen["tokens_total", ("production", "cached_input", "qwen", "local")] == 80
    assert seen["cost_micros_total", ("production", "qwen", "local")] == 2468
    assert seen["time_to_first_token_seconds_sum", ("production", "qwen", "local")] == pytest.approx(0.6)
    assert seen["request_seconds_sum", ("production", "qwen", "local")] == pytest.approx(2.6)


def test_the_time_between_tokens_leaves_the_first_one_out(metrics: GatewayMetrics) -> None:
    metrics.finished(Event(ttft_s=0.3, total_s=1.3, output_tokens=11))
    assert samples(metrics)["inter_token_latency_seconds_sum", ("", "qwen", "local")] == pytest.approx(0.1)


def test_a_whole_answer_has_no_first_token_time(metrics: GatewayMetrics) -> None:
    metrics.finished(Event(stream=False, ttft_s=0.3))
    assert samples(metrics)["time_to_first_token_seconds_count", ("", "qwen", "local")] == 0


def test_failures_and_fallbacks_are_counted_apart(metrics: GatewayMetrics) -> None:
    metrics.attempt_failed("local", "qwen", "upstream_unreachable", falls_back=True)
    metrics.attempt_failed("cloud", "qwen", "upstream_timeout_idle", falls_back=False)
    seen = samples(metrics)
    assert seen["fallbacks_total", ("qwen", "upstream_unreachable", "local")] == 1
    assert ("fallbacks_total", ("qwen", "upstream_timeout_idle", "cloud")) not in seen
    assert seen["upstream_failures_total", ("qwen", "upstream_timeout_idle", "cloud")] == 1


def test_states_are_read_when_asked_for(metrics: GatewayMetrics) -> None:
    states = [("local", "qwen", "closed")]
    metrics.breakers = lambda: states
    metrics.usage_waiting = lambda: 17
    metrics.num_in_flight = 3
    assert samples(metrics)["breaker_state", ("qwen", "local")] == 0
    states[:] = [("local", "qwen", "open")]
    seen = samples(metrics)
    assert seen["breaker_state", ("qwen", "local")] == 2
    assert seen["usage_rows_waiting", ()] == 17
    assert seen["requests_in_flight", ()] == 3


def test_refusals_are_counted_by_code(metrics: GatewayMetrics) -> None:
    metrics.refused("concurrency_exceeded", "dev")
    assert samples(metrics)["refused_total", ("concurrency_exceeded", "dev")] == 1


def test_model_names_that_clients_invent_do_not_fill_the_memory(
    metrics: GatewayMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.gateway.metrics.MAX_MODELS", 5)
    for number in range(20):
        metrics.finished(Event(model=f"invented-{number}"))
    seen = samples(metrics)
    assert {labels[2] for name, labels in seen if name == "requests_total"} == {
        *(f"invented-{number}" for number in range(5)),
        "other",
    }
    assert seen["requests_total", ("chat", "", "other", "ok", "200", "local")] == 15


def test_a_value_on_a_buckets_bound_is_in_that_bucket(metrics: GatewayMetrics) -> None:
    for total_s in (0.05, 0.06, 700.0):
        metrics.finished(Event(stream=False, total_s=total_s))
    text = metrics.text().decode()
    buckets = [line for line in text.splitlines() if line.startswith("headrace_gateway_request_seconds_bucket")]
    counts = {line.partition('le="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in buckets}
    assert (counts["0.025"], counts["0.05"], counts["0.1"], counts["600.0"], counts["+Inf"]) == (0, 1, 2, 2, 3)


def test_the_same_is_told_under_the_names_of_opentelemetry(metrics: GatewayMetrics) -> None:
    for event, tag in ((Event(), "a"), (Event(endpoint="messages"), "b"), (Event(endpoint="embeddings"), "a")):
        metrics.finished(event, tag)
    seen = samples(metrics)
    chat = ("chat", "local", "qwen")
    assert seen["gen_ai_server_request_duration_seconds_count", chat] == 2
    assert seen["gen_ai_server_request_duration_seconds_sum", chat] == pytest.approx(2.6)
    assert seen["gen_ai_server_time_to_first_token_seconds_sum", chat] == pytest.approx(0.6)
    assert seen["gen_ai_server_time_per_output_token_seconds_sum", chat] == pytest.approx(0.2)
    assert seen["gen_ai_client_token_usage_sum", ("chat", "local", "qwen", "input")] == 200
    assert seen["gen_ai_client_token_usage_sum", ("chat", "local", "qwen", "output")] == 22
    assert seen["gen_ai_client_token_usage_count", ("embeddings", "local", "qwen", "input")] == 1
    assert seen["request_seconds_count", ("a", "qwen", "local")] == 2, "ours are of all operations together"
    assert seen["tokens_total", ("a", "input", "qwen", "local")] == 200


def test_the_opentelemetry_names_are_those_of_its_conventions(metrics: GatewayMetrics) -> None:
    metrics.finished(Event())
    families = [f for f in text_string_to_metric_families(metrics.text().decode()) if f.name.startswith("gen_ai")]
    assert {family.name for family in families} == {
        "gen_ai_server_request_duration_seconds",
        "gen_ai_server_time_to_first_token_seconds",
        "gen_ai_server_time_per_output_token_seconds",
        "gen_ai_client_token_usage",
    }
    for family in families:
        labels = {name for sample in family.samples for name in sample.labels} - {"le", "gen_ai_token_type"}
        assert labels == {"gen_ai_request_model", "gen_ai_provider_name", "gen_ai_operation_name"}
