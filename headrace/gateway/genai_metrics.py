"""The gateway's numbers once more, under the names and labels that OpenTelemetry has for generative AI.

Dashboards made for any gateway or engine find them by these. The provider is the upstream's name; a key's tag, which
the conventions do not know, is summed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from prometheus_client.core import HistogramMetricFamily

from headrace.gateway.distribution import Distribution, merged

OPERATIONS = {"chat": "chat", "messages": "chat", "responses": "chat", "completions": "text_completion"}
"""Endpoints whose operation has another name than they."""
LABELS = ("gen_ai_request_model", "gen_ai_provider_name", "gen_ai_operation_name")
TOKEN_TYPE = "gen_ai_token_type"
TOKENS = tuple(float(4**power) for power in range(14))
"""1 to 67,108,864, the conventions' bounds."""


class Served(Protocol):
    """What is counted of one kind of request."""

    @property
    def whole(self) -> Distribution: ...
    @property
    def first_token(self) -> Distribution: ...
    @property
    def between(self) -> Distribution: ...
    @property
    def inputs(self) -> Distribution: ...
    @property
    def outputs(self) -> Distribution: ...


Kind = tuple[str, str, str, str]
"""Requests that are counted together: model, upstream, operation, the key's tag."""


def genai_metrics(served: Iterable[tuple[Kind, Served]]) -> Iterator[HistogramMetricFamily]:
    groups: dict[tuple[str, ...], list[Served]] = {}
    for (model, upstream, operation, _), counted in served:
        groups.setdefault((model, upstream, operation), []).append(counted)
    seconds = HistogramMetricFamily(
        "gen_ai_server_request_duration_seconds", "Arrival to the last byte of the answer.", labels=LABELS
    )
    first = HistogramMetricFamily(
        "gen_ai_server_time_to_first_token_seconds", "Arrival to the first content, streams only.", labels=LABELS
    )
    between = HistogramMetricFamily(
        "gen_ai_server_time_per_output_token_seconds",
        "Mean time between two output tokens of a stream, one value a request.",
        labels=LABELS,
    )
    tokens = HistogramMetricFamily(
        "gen_ai_client_token_usage", "Tokens billed for a request.", labels=(*LABELS, TOKEN_TYPE)
    )
    for labels, parts in groups.items():
        for family, found in (
            (seconds, merged([part.whole for part in parts])),
            (first, merged([part.first_token for part in parts])),
            (between, merged([part.between for part in parts])),
        ):
            family.add_metric(labels, found.buckets(), found.total)
        for token_type, found in (
            ("input", merged([part.inputs for part in parts])),
            ("output", merged([part.outputs for part in parts])),
        ):
            tokens.add_metric((*labels, token_type), found.buckets(), found.total)
    yield from (seconds, first, between, tokens)
