"""What the soak's clients do: requests of every kind and length, some left early, some that cannot be served.

Every outcome is counted, and one that is not as it should be is kept with what was asked.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

WORDS = "river wheel stone water power turns the mill grain flour bread morning light engine block table queue".split()
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2, 3]}}, "required": ["a"], "additionalProperties": False}
BAD: tuple[tuple[str, Any, int], ...] = (
    ("/v1/completions", b'{"prompt": "x", ', 400),
    ("/v1/completions", {"prompt": "x", "max_tokens": 100_000}, 400),
    ("/v1/completions", {"prompt": "x", "temperature": "warm"}, 400),
    ("/v1/completions", {"prompt": []}, 400),
    ("/v1/completions", {"prompt": [10**9]}, 400),
    ("/v1/completions", {"prompt": "x", "model": "gpt-4o"}, 404),
    ("/v1/completions", {"prompt": "x", "guided_json": {"type": "strnig"}}, 400),
    ("/v1/completions", {"prompt": "word " * 6000}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400),
    ("/v1/chat/completions", {"messages": "hello"}, 400),
    ("/v1/chat/complétions", {}, 404),
    ("/v1/embeddings", {"input": "x"}, 400),
)


@dataclass
class Tally:
    """How many of what came out, tokens that were counted, and what was wrong."""

    outcomes: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)

    def check(self, ok: bool, what: object) -> None:
        if not ok and len(self.wrong) < 20:
            self.wrong.append(str(what)[:400])
        self.outcomes["wrong"] += not ok


def random_body(rng: random.Random, longest_prompt: int) -> dict[str, Any]:
    """Mostly short, some long; sampled, greedy, several answers, log-probabilities, stop strings, schemas."""
    words = int(3 + (longest_prompt - 3) * rng.random() ** 3)
    body: dict[str, Any] = {
        "prompt": " ".join(rng.choices(WORDS, k=words)),
        "max_tokens": int(1 + 150 * rng.random() ** 2),
        "temperature": rng.choice([0.0, 0.8, 1.2]),
        "seed": rng.randint(0, 1000),
        "ignore_eos": True,
    }
    extra = rng.random()
    if extra < 0.1:
        body |= {"n": rng.randint(2, 3)}
    elif extra < 0.2:
        body |= {"logprobs": rng.randint(0, 5)}
    elif extra < 0.25:
        body |= {"stop": ["wheel", " the"], "ignore_eos": False}
    elif extra < 0.3:
        body |= {"guided_json": SCHEMA, "max_tokens": 100, "ignore_eos": False}
    elif extra < 0.35:
        body |= {"prompt_logprobs": 1, "max_tokens": 2}
    elif extra < 0.4:
        body |= {"presence_penalty": 0.5, "repetition_penalty": 1.1, "top_k": 40}
    return body


class Client:
    """One of many that ask one thing after another until `until` says so."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, tally: Tally, rng: random.Random, longest: int
    ) -> None:
        self._url = url
        self._session = session
        self._tally = tally
        self._rng = rng
        self._longest = longest

    async def work(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            kind = self._rng.random()
            if kind < 0.15:
                await self._bad()
            elif kind < 0.3:
                await self._leave()
            elif kind < 0.35:
                await self._look()
            elif kind < 0.65:
                await self._stream()
            else:
                await self._whole()

    async def _whole(self) -> None:
        body = random_body(self._rng, self._longest)
        async with self._session.post(self._url + "/v1/completions", json=body) as answer:
            if self._refused(answer):
                return
            result = await answer.json()
        self._tally.check(answer.status == 200, (answer.status, result, body))
        if answer.status == 200:
            self._tally.check(len(result["choices"]) == body.get("n", 1), result)
            self._tally.tokens += result["usage"]["completion_tokens"]
            if "guided_json" in body:
                self._tally.check(json.loads(result["choices"][0]["text"])["a"] in (1, 2, 3), result)
            self._tally.outcomes["whole"] += 1

    async def _stream(self) -> None:
        body = {**random_body(self._rng, self._longest), "stream": True, "stream_options": {"include_usage": True}}
        body.pop("prompt_logprobs", None)
        async with self._session.post(self._url + "/v1/completions", json=body) as answer:
            if self._refused(answer):
                return
            lines = [line async for line in answer.content if line.strip()]
        self._tally.check(lines[-1] == b"data: [DONE]\n", (answer.status, lines[-1], body))
        if len(lines) > 1:
            usage = json.loads(lines[-2].removeprefix(b"data: ")).get("usage") or {}
            self._tally.tokens += usage.get("completion_tokens", 0)
        self._tally.outcomes["streamed"] += 1

    async def _leave(self) -> None:
        """In the middle of a stream, or of the wait for a whole answer."""
        stream = self._rng.random() < 0.6
        body = {**random_body(self._rng, self._longest), "stream": stream, "max_tokens": 400}
        body.pop("prompt_logprobs", None)
        asking = self._session.post(self._url + "/v1/completions", json=body)
        if stream:
            async with asking as answer:
                for _ in range(self._rng.randint(0, 6)):
                    await answer.content.readline()
                answer.close()
        else:
            try:
                async with asyncio.timeout(0.3 * self._rng.random()), asking as answer:
                    await answer.read()
            except TimeoutError:
                pass
        self._tally.outcomes["left early"] += 1

    async def _bad(self) -> None:
        path, body, status = self._rng.choice(BAD)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        async with self._session.post(self._url + path, data=data, headers=headers) as answer:
            if self._refused(answer):
                return
            error = await answer.json()
        self._tally.check((answer.status, bool(error["message"])) == (status, True), (path, answer.status, error))
        self._tally.outcomes["bad, refused"] += 1

    async def _look(self) -> None:
        path = self._rng.choice(["/health", "/metrics", "/v1/models", "/server_info", "/load", "/is_sleeping"])
        async with self._session.get(self._url + path) as answer:
            await answer.read()
        self._tally.check(answer.status == 200, (path, answer.status))
        self._tally.outcomes["looked"] += 1

    def _refused(self, answer: aiohttp.ClientResponse) -> bool:
        if answer.status == 429:
            self._tally.outcomes["queue full"] += 1
        return answer.status == 429
