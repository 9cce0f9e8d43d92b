"""Puts load on an OpenAI-compatible server: streamed completions, each timed token by token from the client's side.

A request is a value, what came of it is a value. Token counts come from the server's `usage`; when a chunk
arrived is when a token arrived, so gaps are true only for servers that send one chunk a token, as ours does.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

WORDS = (
    "river wheel stone water power mill grain flour bread morning light engine table field house market road bridge "
    "garden window paper letter music winter summer north south island forest mountain valley village city street "
    "boat horse metal glass copper silver cotton wool leather salt sugar coffee apple orange green yellow"
).split()
"""Everyday words, most of them one token with the blank before: a prompt of N words has about N tokens."""


@dataclass(frozen=True, slots=True)
class Request:
    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times are seconds of `time.perf_counter()`; `token_s` has one entry a chunk; `error` is None when served."""

    start_s: float
    end_s: float
    token_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, object] | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. `url` is the server's root; `extra_body` is merged into every request."""

    url: str
    model: str
    api_key: str | None = None
    extra_body: dict[str, object] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def random_requests(
    num_requests: int, input_len: int, output_len: int, *, range_ratio: float = 0.0, seed: int = 0
) -> list[Request]:
    """Prompts of about `input_len` tokens. Lengths vary evenly by `range_ratio` of themselves either way."""
    rng = random.Random(seed)

    def vary(length: int) -> int:
        spread = int(length * range_ratio)
        return max(1, rng.randint(length - spread, length + spread))

    return [Request(" ".join(rng.choices(WORDS, k=vary(input_len))), vary(output_len)) for _ in range(num_requests)]


async def send(
    session: aiohttp.ClientSession, target: Target, request: Request, arrived: Callable[[float], object] | None = None
) -> Outcome:
    """One streamed completion; a failure of any kind is an Outcome with `error`. `arrived` hears each token's time."""
    body = {
        "model": target.model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.extra_body,
    }
    start_s = time.perf_counter()
    token_s: list[float] = []
    usage: _Usage | None = None
    error: str | None = None
    ended = False
    try:
        async with session.post(f"{target.url}/v1/completions", json=body, headers=target.headers) as response:
            if response.status != 200:
                text = (await response.text())[:400]
                return Outcome(start_s, time.perf_counter(), error=f"HTTP {response.status}: {text}")
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    ended = True
                    break
                chunk = _decode_chunk(payload)
                if chunk.error is not None:
                    error = str(chunk.error.get("message"))
                    break
                usage = chunk.usage or usage
                if chunk.choices and (chunk.choices[0].text or chunk.choices[0].finish_reason is None):
                    token_s.append(time.perf_counter())
                    if arrived is not None:
                        arrived(token_s[-1])
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    if error is None and not (ended and usage):
        error = "the stream ended without usage and [DONE]"
    return Outcome(
        start_s,
        time.perf_counter(),
        tuple(token_s),
        usage.prompt_tokens if usage else 0,
        usage.completion_tokens if usage else 0,
        error,
    )


async def run_load(
    target: Target, requests: Sequence[Request], *, max_concurrency: int | None, request_rate: float, seed: int = 0,
    last_sent: Callable[[], object] | None = None,
) -> list[Outcome]:  # fmt: skip
    """Send all requests, at most `max_concurrency` at once, `request_rate` a second (Poisson; inf: without waiting).

    `last_sent` is called once, in a thread, when no request waits any more and the last ones are under way."""
    gate = asyncio.Semaphore(max_concurrency or len(requests) or 1)
    rng = random.Random(seed)
    num_waiting = len(requests)
    calls: list[asyncio.Task[object]] = []
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # llama-server drops a connection it kept alive
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def admitted(request: Request) -> Outcome:
            nonlocal num_waiting
            async with gate:
                num_waiting -= 1
                if last_sent is not None and not num_waiting:
                    calls.append(asyncio.create_task(asyncio.to_thread(last_sent)))
                return await send(session, target, request)

        tasks = []
        for request in requests:
            tasks.append(asyncio.create_task(admitted(request)))
            if request_rate != float("inf"):
                await asyncio.sleep(rng.expovariate(request_rate))
        outcomes = list(await asyncio.gather(*tasks))
        await asyncio.gather(*calls)
        return outcomes
