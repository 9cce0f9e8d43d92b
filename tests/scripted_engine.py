"""An engine for tests of the HTTP server: it says the tokens it is told to, one a step, as the real client would.

The server above it is the real one, with the bundled model's own tokenizer and chat template, behind a real
uvicorn on a loopback port.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import httpx
import uvicorn

from headrace.config.model_files import ModelFiles, open_model
from headrace.config.resolve import resolve_model
from headrace.config.settings import EngineSettings, ServerSettings
from headrace.protocol import ipc
from headrace.protocol.errors import ApiError
from headrace.protocol.http_connection import Connection
from headrace.server.app import App, create_app
from headrace.server.engine_state import State, state_refusal
from headrace.server.metrics import EngineMetrics
from headrace.server.room import Group
from headrace.text.chat_template import ChatTemplate
from headrace.text.tokenizer import Tokenizer

MODEL = "smollm2-135m-instruct"
MODEL_PATH = "/models/SmolLM2-135M-Instruct"
END_OF_SEQUENCE = 2
MAX_MODEL_LEN = 512

Script = Callable[[list[int], ipc.SamplingParams, int], Sequence[int]]
"""Prompt, parameters and index of a choice to the tokens it says; the engine ends after the last with a stop token."""


@cache
def model_files() -> ModelFiles:
    return open_model(resolve_model(None))


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(model_files())


def saying(text: str) -> Script:
    """Every choice says `text` and ends."""
    token_ids = tokenizer().encode(text, add_special_tokens=False)
    return lambda prompt, params, index: [*token_ids, END_OF_SEQUENCE]


def for_ever(prompt: list[int], params: ipc.SamplingParams, index: int) -> Sequence[int]:
    return tokenizer().encode(" and so on", add_special_tokens=False) * 200


@dataclass
class ScriptedEngine:
    """Stands where `EngineClient` stands. What it was asked and told to stop is written down."""

    script: Script = field(default_factory=lambda: saying("Hello there!"))
    step_s: float = 0.0
    refuses: ApiError | None = None
    most_open: int = 16
    """Of a request with several prompts, sequences that are sent at a time."""
    fails_after: int | None = None
    """Raises this engine's `failure` when a request has had so many steps."""
    failure: Exception | None = None
    logprob: float = -0.25
    logprobs_of: dict[int, float] = field(default_factory=dict)
    """By index of a choice; the others' tokens have `logprob`."""
    num_cached_tokens: int = 0
    state: State = "ready"
    healthy: bool = True
    loading: ipc.Loading | None = None
    sleep_level: Literal[0, 1, 2] = 0
    num_restarts: int = 0
    last_stats: ipc.StepStats | None = None
    stopped_ids: list[Collection[str] | None] = field(default_factory=list)
    controls: list[tuple[str, str | None]] = field(default_factory=list)
    requests: list[ipc.AddRequest] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    aborted: list[tuple[str, int | None, str]] = field(default_factory=list)
    info: ipc.EngineInfo | None = field(
        default_factory=lambda: ipc.EngineInfo(
            model=MODEL_PATH, family="llama", device="cpu", dtype="float32", kernels="scripted", instruction_set="AVX2",
            threads=1, weight_bytes=1, kv_cache_bytes=1, kv_cache_dtype="float32", block_size=16, num_blocks=64,
            max_model_len=MAX_MODEL_LEN, max_num_seqs=16, max_num_batched_tokens=512, step_time_target_s=0.1,
            kv_cache_tokens=1024, phase_seconds={}, notes=[],
        )
    )  # fmt: skip

    def let_in(self, num_sequences: int, num_tokens: int, *, priority: int = 0) -> contextlib.nullcontext[Group]:
        return contextlib.nullcontext(Group(num_sequences, num_tokens, most_open=self.most_open))

    async def generate(
        self,
        request_id: str,
        token_ids: list[int],
        params: ipc.SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        streamed: bool = True,
        group: Group | None = None,
    ) -> AsyncIterator[ipc.SequenceOutput]:
        if self.refuses is not None:
            raise self.refuses
        self.requests.append(
            ipc.AddRequest(
                request_id=request_id, token_ids=token_ids, params=params, arrival_s=time.time(), priority=priority,
                cache_salt=cache_salt,
            )
        )  # fmt: skip
        self.running.add(request_id)
        if params.prompt_logprobs is not None:
            for at in range(1, len(token_ids), 2):
                scores = [self._score(t, -float(t), params.prompt_logprobs) for t in token_ids[at : at + 2]]
                yield ipc.SequenceOutput(request_id=request_id, index=0, token_ids=[], prompt_logprobs=scores)
        scripts = {index: list(self.script(token_ids, params, index)) for index in range(params.n)}
        try:
            step = 0
            while scripts:
                await asyncio.sleep(self.step_s)
                if self.failure is not None and step == self.fails_after:
                    raise self.failure
                for index in list(scripts):
                    if (request_id, index) in {(name, at) for name, at, _ in self.aborted}:
                        del scripts[index]
                        continue
                    output = self._output(request_id, index, scripts[index][step], step, params)
                    if output.finish_reason is None and step + 1 == len(scripts[index]):
                        raise AssertionError("the script ends without a stop token")
                    if output.finish_reason is not None:
                        del scripts[index]
                    yield output
                step += 1
        finally:
            self.running.discard(request_id)
            if scripts:
                self.aborted.append((request_id, None, "abort"))

    def _output(
        self, request_id: str, index: int, token_id: int, step: int, params: ipc.SamplingParams
    ) -> ipc.SequenceOutput:
        stops = token_id in params.stop_token_ids and step >= params.min_tokens
        reason: ipc.FinishReason | None = "stop" if stops else "length" if step + 1 == params.max_tokens else None
        score = None
        if params.logprobs is not None:
            score = [self._score(token_id, self.logprobs_of.get(index, self.logprob), params.logprobs)]
        return ipc.SequenceOutput(
            request_id=request_id, index=index, token_ids=[token_id], logprobs=score, finish_reason=reason,
            stop_token_id=token_id if stops else None, num_cached_tokens=self.num_cached_tokens if step == 0 else 0,
        )  # fmt: skip

    def _score(self, token_id: int, logprob: float, count: int) -> ipc.TokenLogprobs:
        """The token is the best; next comes the one after it, impossible; then a few more."""
        top = [token_id, *range(token_id + 1, token_id + count)][:count]
        return ipc.TokenLogprobs(token_id, logprob, 1, top, [logprob, *([float("-inf")] * count)][:count])

    def abort(self, request_id: str, index: int | None = None, reason: ipc.FinishReason = "abort") -> None:
        self.aborted.append((request_id, index, reason))

    def refusal(self) -> ApiError | None:
        return state_refusal(self.state, loading=self.loading)

    def abort_requests(self, ids: Collection[str] | None) -> list[str]:
        self.stopped_ids.append(ids)
        return [name for name in self.running if ids is None or name in ids]

    async def control(self, action: ipc.ControlAction, path: str | None = None) -> int:
        self.controls.append((action, path))
        return 7

    async def sleep(self, level: Literal[1, 2], *, abort: bool) -> None:
        self.state, self.sleep_level = "sleeping", level

    async def wake_up(self) -> None:
        self.state, self.sleep_level = "ready", 0


def server_settings(**changes: object) -> ServerSettings:
    names = {"served_model_names": (MODEL,), "model_path": MODEL_PATH}
    return ServerSettings(**{**names, **changes})  # type: ignore[arg-type]


def make_app(
    engine: ScriptedEngine,
    settings: ServerSettings | None = None,
    *,
    template: str | None = "the model's",
    generation_config: dict[str, object] | None = None,
    policy: str = "fcfs",
    seed: int | None = None,
    own_tokenizer: Tokenizer | None = None,
) -> App:
    text = own_tokenizer or tokenizer()
    source = model_files().chat_template if template == "the model's" else template
    return create_app(
        settings or server_settings(),
        EngineSettings(model=MODEL_PATH, scheduling_policy=policy, seed=seed),  # type: ignore[arg-type]
        engine,
        text,
        None if source is None else ChatTemplate(source, text.special_tokens),
        generation_config=generation_config or {},
        metrics=EngineMetrics(MODEL),
    )


def asgi_client(app: App, **options: object) -> httpx.AsyncClient:
    """A client that calls the application directly: for everything that does not need a real connection."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://headrace", **options)  # type: ignore[arg-type]


@contextlib.contextmanager
def listening(app: App) -> Iterator[str]:
    """The application behind uvicorn, set up as the product does it; yields its root URL."""
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, http=Connection, ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, timeout_graceful_shutdown=1,
    )  # type: ignore[arg-type]  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether `condition` came true within `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return condition()


def events(body: str) -> list[str]:
    """The data of each event of a stream."""
    assert body.endswith("\n\n")
    parts = body[:-2].split("\n\n")
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [part.removeprefix("data: ") for part in parts]
