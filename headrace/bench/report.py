"""From outcomes to numbers to the block of text that vLLM's benchmark prints, label by label, so that tables compare.

For a request with tokens at t0 t1 t2 ... and start s, end e:

    TTFT = t0 - s      ITL = t1 - t0, t2 - t1, ...      TPOT = (last - t0) / (tokens - 1)      E2EL = e - s
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headrace.bench.load import Outcome

WIDTH = 50


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, median and 99th percentile, in milliseconds."""

    mean_ms: float
    median_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Report:
    completed: int
    failed: int
    duration_s: float
    input_tokens: int
    output_tokens: int
    peak_output_tokens_per_s: float
    peak_concurrency: int
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2el: Spread
    max_concurrency: int | None
    request_rate: float

    def render(self) -> str:
        duration_s = self.duration_s or math.inf
        rows: list[tuple[str, str]] = [
            ("Successful requests:", f"{self.completed}"),
            ("Failed requests:", f"{self.failed}"),
        ]
        if self.max_concurrency is not None:
            rows.append(("Maximum request concurrency:", f"{self.max_concurrency}"))
        if self.request_rate != math.inf:
            rows.append(("Request rate configured (RPS):", f"{self.request_rate:.2f}"))
        rows += [
            ("Benchmark duration (s):", f"{self.duration_s:.2f}"),
            ("Total input tokens:", f"{self.input_tokens}"),
            ("Total generated tokens:", f"{self.output_tokens}"),
            ("Request throughput (req/s):", f"{self.completed / duration_s:.2f}"),
            ("Output token throughput (tok/s):", f"{self.output_tokens / duration_s:.2f}"),
            ("Peak output token throughput (tok/s):", f"{self.peak_output_tokens_per_s:.2f}"),
            ("Peak concurrent requests:", f"{self.peak_concurrency}"),
            ("Total Token throughput (tok/s):", f"{(self.input_tokens + self.output_tokens) / duration_s:.2f}"),
        ]
        lines = ["{s:{c}^{n}}".format(s=" Serving Benchmark Result ", n=WIDTH, c="="), *map(_row, rows)]
        for title, name, spread in (
            ("Time to First Token", "TTFT", self.ttft),
            ("Time per Output Token (excl. 1st token)", "TPOT", self.tpot),
            ("Inter-token Latency", "ITL", self.itl),
            ("End-to-end Latency", "E2EL", self.e2el),
        ):
            lines.append(f"{title:-^{WIDTH}}")
            lines.append(_row((f"Mean {name} (ms):", f"{spread.mean_ms:.2f}")))
            lines.append(_row((f"Median {name} (ms):", f"{spread.median_ms:.2f}")))
            lines.append(_row((f"P99 {name} (ms):", f"{spread.p99_ms:.2f}")))
        lines.append("=" * WIDTH)
        return "\n".join(lines)


def _row(row: tuple[str, str]) -> str:
    label, value = row
    return f"{label:<40} {value:<{WIDTH - 41}}".rstrip()


def summarise(outcomes: Sequence[Outcome], *, max_concurrency: int | None, request_rate: float) -> Report:
    served = [o for o in outcomes if o.error is None]
    timed = [o for o in served if o.token_s]
    duration_s = max((o.end_s for o in outcomes), default=0.0) - min((o.start_s for o in outcomes), default=0.0)
    return Report(
        completed=len(served),
        failed=len(outcomes) - len(served),
        duration_s=duration_s,
        input_tokens=sum(o.prompt_tokens for o in served),
        output_tokens=sum(o.completion_tokens for o in served),
        peak_output_tokens_per_s=_peak_per_second(t for o in served for t in o.token_s),
        peak_concurrency=_peak_concurrency(outcomes),
        ttft=spread(o.token_s[0] - o.start_s for o in timed),
        tpot=spread(
            (o.token_s[-1] - o.token_s[0]) / (o.completion_tokens - 1) for o in timed if o.completion_tokens > 1
        ),
        itl=spread(later - earlier for o in timed for earlier, later in pairwise(o.token_s)),
        e2el=spread(o.end_s - o.start_s for o in served),
        max_concurrency=max_concurrency,
        request_rate=request_rate,
    )


def spread(seconds: Iterable[float]) -> Spread:
    """Of no values: nan, which prints as such and cannot be mistaken for a good result."""
    values = sorted(seconds)
    if not values:
        return Spread(math.nan, math.nan, math.nan)
    return Spread(1e3 * sum(values) / len(values), 1e3 * percentile(values, 50), 1e3 * percentile(values, 99))


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear between neighbours; `ordered` ascending and not empty."""
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _peak_per_second(times_s: Iterable[float]) -> float:
    """The most tokens in one second, seconds counted from the first token."""
    times = sorted(times_s)
    return float(max(Counter(int(t - times[0]) for t in times).values())) if times else 0.0


def _peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """The most requests in hand at one moment; one that ends as another starts does not count twice."""
    changes = sorted([(o.start_s, 1) for o in outcomes] + [(o.end_s, -1) for o in outcomes])
    peak = now = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak
