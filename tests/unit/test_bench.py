"""The load generator against a scripted server, and its report on outcomes made by hand."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web

from headrace.bench.load import Outcome, Request, Target, random_requests, run_load
from headrace.bench.report import percentile, summarise
from headrace.bench.serve import parser

Script = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


@asynccontextmanager
async def scripted_server(script: Script, seen: list[dict[str, object]]) -> AsyncIterator[Target]:
    async def completions(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await script(request, response)
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield Target(f"http://127.0.0.1:{runner.addresses[0][1]}", "m")
    finally:
        await runner.cleanup()


def event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def text_chunk(text: str, finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


async def load(target: Target, requests: list[Request]) -> list[Outcome]:
    return await run_load(target, requests, max_concurrency=2, request_rate=math.inf)


async def test_tokens_are_timed_by_chunk_and_counted_by_usage() -> None:
    async def script(request: web.Request, response: web.StreamResponse) -> None:
        # The second token is half a character: a chunk with no text yet is a token all the same.
        for part in (text_chunk("a"), text_chunk(""), text_chunk("é"), text_chunk("", "length"), USAGE):
            await response.write(event(part))
        await response.write(b"data: [DONE]\n\n")

    seen: list[dict[str, object]] = []
    async with scripted_server(script, seen) as target:
        outcomes = await load(target, [Request("one two", 3)] * 4)
    assert [o.error for o in outcomes] == [None] * 4
    assert {len(o.token_s) for o in outcomes} == {3}
    assert {(o.prompt_tokens, o.completion_tokens) for o in outcomes} == {(7, 3)}
    assert all(o.start_s <= o.token_s[0] <= o.token_s[-1] <= o.end_s for o in outcomes)
    assert seen[0] == {
        "model": "m",
        "prompt": "one two",
        "max_tokens": 3,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_an_error_within_a_stream_fails_that_request() -> None:
    async def script(request: web.Request, response: web.StreamResponse) -> None:
        await response.write(event(text_chunk("a")) + event({"error": {"message": "the engine stopped"}}))

    async with scripted_server(script, []) as target:
        (outcome,) = await load(target, [Request("x", 3)])
    assert outcome.error == "the engine stopped"


async def test_a_stream_that_only_stops_is_not_a_success() -> None:
    async def script(request: web.Request, response: web.StreamResponse) -> None:
        await response.write(event(text_chunk("a")))

    async with scripted_server(script, []) as target:
        (outcome,) = await load(target, [Request("x", 3)])
    assert outcome.error == "the stream ended without usage and [DONE]"


async def test_no_server_is_an_outcome_not_an_exception() -> None:
    (outcome,) = await load(Target("http://127.0.0.1:9", "m"), [Request("x", 3)])
    assert outcome.error is not None
    assert outcome.error.startswith("ClientConnectorError")


def test_prompts_depend_on_the_seed_and_lengths_stay_in_their_range() -> None:
    first, again, other = (random_requests(50, 100, 20, range_ratio=0.1, seed=s) for s in (1, 1, 2))
    assert first == again
    assert first != other
    assert {len(r.prompt.split()) for r in first} <= set(range(90, 111))
    assert {r.max_tokens for r in first} <= set(range(18, 23))


def test_the_report_computes_each_number_from_the_outcomes() -> None:
    outcomes = [
        Outcome(0.0, 1.0, (0.2, 0.4, 0.8), prompt_tokens=10, completion_tokens=3),
        Outcome(1.0, 2.0, (1.4, 1.5), prompt_tokens=20, completion_tokens=2),
        Outcome(1.5, 1.6, error="refused"),
    ]
    report = summarise(outcomes, max_concurrency=2, request_rate=math.inf)
    assert (report.completed, report.failed) == (2, 1)
    assert (report.input_tokens, report.output_tokens) == (30, 5)
    assert report.duration_s == 2.0
    assert report.peak_concurrency == 2
    assert report.peak_output_tokens_per_s == 3
    assert report.ttft.mean_ms == pytest.approx(300)
    assert report.tpot.mean_ms == pytest.approx((300 + 100) / 2)
    assert report.itl.median_ms == pytest.approx(200)
    assert report.e2el.p99_ms == pytest.approx(1000)


def test_percentiles_are_linear_between_neighbours() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([5.0], 99) == 5.0


def test_the_report_has_the_labels_of_vllms_table() -> None:
    text = summarise([Outcome(0.0, 1.0, (0.5, 0.75), 10, 2)], max_concurrency=1, request_rate=4.0).render()
    lines = text.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[1] == "Successful requests:                     1"
    assert "Request rate configured (RPS):           4.00" in lines
    assert "Output token throughput (tok/s):         2.00" in lines
    assert "---------------Time to First Token----------------" in lines
    assert "Mean TTFT (ms):                          500.00" in lines
    assert "P99 ITL (ms):                            250.00" in lines


def test_no_outcome_gives_nan_rather_than_a_good_number() -> None:
    report = summarise([], max_concurrency=None, request_rate=math.inf)
    assert math.isnan(report.ttft.mean_ms)


def test_flags_have_vllms_names() -> None:
    flags = (
        "--base-url http://x --model m --num-prompts 5 --random-input-len 6 --random-output-len 7 --max-concurrency 8"
    )
    args = parser().parse_args(flags.split())
    assert (args.num_prompts, args.random_input_len, args.random_output_len, args.max_concurrency) == (5, 6, 7, 8)
