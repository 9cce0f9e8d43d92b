"""What the routes know of the server they run in: the model's names and limits, its tokenizer and template,
the engine, and the defaults for what a request leaves out.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import headrace
from headrace.config.settings import EngineSettings, ServerSettings
from headrace.protocol import errors
from headrace.protocol.answers import AnswerHead
from headrace.protocol.errors import ApiError
from headrace.protocol.ipc import BACKGROUND_PRIORITY, ControlAction, EngineInfo, GrammarSpec, StepStats
from headrace.protocol.sampling import ModelLimits, SamplingFields, num_generated
from headrace.protocol.structured_output import JSONStyle, asked_grammar
from headrace.protocol.token_limits import WordTokens, check_bad_words, truncated
from headrace.server.chat_format import ChatFormat
from headrace.server.engine_state import State
from headrace.server.generation import Engine
from headrace.server.http import Exchange
from headrace.server.metrics import EngineMetrics
from headrace.server.response_store import ResponseStore
from headrace.text.bad_words import bad_word_tokens
from headrace.text.chat_template import ChatTemplate
from headrace.text.tokenizer import LONG_TEXT_CHARS, Tokenizer

if TYPE_CHECKING:
    from headrace.server.batch_place import BatchPlace

logger = logging.getLogger("headrace.server")

T = TypeVar("T")

NUM_TEMPLATES = 16
"""Chat templates of requests that are kept compiled."""
MAX_TEMPLATE_CHARS = 65_536
PROMPT_CHARS = 50
"""A prompt takes the tokenizer as long as so many characters take it, even if it is empty."""


class Client(Engine, Protocol):
    """`EngineClient` as the routes see it."""

    info: EngineInfo | None

    @property
    def healthy(self) -> bool: ...

    def refusal(self) -> ApiError | None: ...

    state: State
    sleep_level: Literal[0, 1, 2]
    num_restarts: int
    last_stats: StepStats | None

    def abort_requests(self, ids: Collection[str] | None) -> list[str]: ...

    async def control(self, action: ControlAction, path: str | None = None) -> int: ...

    async def sleep(self, level: Literal[1, 2], *, abort: bool) -> None: ...

    async def wake_up(self) -> None: ...


class ModelNames:
    """The names that mean the served model: the served ones, its path as given and in full, the path's last part."""

    def __init__(self, served: tuple[str, ...], given_path: str, full_path: str) -> None:
        self.served = served
        full_path = os.path.normpath(full_path)
        last = [PurePath(path).name for path in (given_path, full_path)]
        accepted = (*served, given_path, full_path, *last, *(name.removesuffix(".gguf") for name in last))
        self._accepted = frozenset(name.strip("/") for name in accepted) - {""}

    @property
    def primary(self) -> str:
        """The name that answers carry."""
        return self.served[0]

    def check(self, name: str | None) -> None:
        """Absent and empty mean the default model. Raises ApiError (404) with the nearest name."""
        if name and name.strip("/") not in self._accepted:
            raise errors.model_not_found(name, self.served)


@contextmanager
def refused_text(param: str) -> Iterator[None]:
    """What the tokenizer cannot take inside is the request's fault: ApiError (400) naming the field."""
    try:
        yield
    except ValueError as error:
        raise errors.invalid_value(param, f"`{param}` cannot be read: {error}.") from None


class Serving:
    batches: BatchPlace
    """Set by the application, whose routes answer their lines."""

    def __init__(
        self,
        server_settings: ServerSettings,
        engine_settings: EngineSettings,
        client: Client,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        tool_template: ChatTemplate | None,
        sampling_defaults: Mapping[str, float],
        metrics: EngineMetrics,
    ) -> None:
        self.settings = server_settings
        self.client = client
        self.tokenizer = tokenizer
        self.chat = None if chat_template is None else self._format(chat_template, tool_template)
        """How the model's conversations are written and read; None where it has no chat template."""
        self.responses = ResponseStore()
        self.sampling_defaults = sampling_defaults
        self.metrics = metrics
        self.names = ModelNames(server_settings.served_model_names, server_settings.model_path, engine_settings.model)
        self.started_at = int(time.time())
        self.num_generating = 0
        """Requests for text that are being answered now."""
        self._compiled = lru_cache(maxsize=NUM_TEMPLATES)(lambda source: ChatTemplate(source, tokenizer.special_tokens))
        self.engine_settings = engine_settings
        self.exchanges: set[Exchange] = set()
        """Requests of any kind that are being answered now."""
        # `--seed` makes the draws of requests without a seed of their own repeat from start to start.
        self._json_style = JSONStyle.of(
            compact=server_settings.compact_json, closed=server_settings.closed_json_objects
        )
        self._seeds = random.SystemRandom() if engine_settings.seed is None else random.Random(engine_settings.seed)

    def not_ready(self) -> ApiError | None:
        """Why the server takes no request for text now; None when it does."""
        return self.client.refusal()

    def ready_info(self) -> EngineInfo:
        """What the engine said of itself. Raises ApiError (503) unless it takes requests."""
        refusal = self.not_ready()
        if refusal is not None or self.client.info is None:
            raise refusal or errors.unavailable("engine_loading", "The model is still loading.")
        return self.client.info

    def check_gives(self, wanted: Literal["text", "vectors", "scores"]) -> None:
        """Raises ApiError (400) where the model is served for something else; of vectors scores are made too."""
        pooler = self.engine_settings.pooler
        if pooler is None and wanted != "text":
            raise errors.wrong_for_model(
                f"This model generates text. For {wanted} serve a model that gives them, or this one with --runner "
                "pooling (it then gives vectors and no text)."
            )
        if pooler is not None and wanted == "text":
            asked = "/v1/embeddings" if pooler.task == "embed" else "/v1/rerank and /v1/score"
            kind = "vectors" if pooler.task == "embed" else "scores of pairs of texts"
            raise errors.wrong_for_model(f"This model gives {kind} and no text: ask {asked}.")
        if pooler is not None and pooler.task == "score" and wanted == "vectors":
            raise errors.wrong_for_model("This model scores pairs of texts, and gives no vectors: ask /v1/rerank.")

    def fresh_seed(self) -> int:
        """The seed of a request that names none, 63 bits."""
        return self._seeds.getrandbits(63)

    def limits(self) -> ModelLimits:
        tokenizer, longest = self.tokenizer, self.ready_info().max_model_len
        return ModelLimits(longest, tokenizer.usable_vocab_size, tokenizer.eos_token_ids, self.settings.max_logprobs)

    def priority(self, exchange: Exchange, fields: SamplingFields) -> int:
        """Raises ApiError (400) when the scheduler does not look at a request's own priorities."""
        if fields.priority and self.engine_settings.scheduling_policy != "priority":
            raise errors.invalid_value(
                "priority", "`priority` has an effect only when the server runs with --scheduling-policy priority."
            )
        return (fields.priority or 0) + (BACKGROUND_PRIORITY if exchange.is_background else 0)

    def check_sequences(self, num_prompts: int, sampling: SamplingFields) -> None:
        """Raises ApiError (400) for more answers than would find a place were nobody else there."""
        n = num_generated(sampling)
        running, waiting = self.ready_info().max_running, self.engine_settings.max_num_queued_reqs
        if num_prompts * n > running + waiting:
            param = "prompt" if num_prompts > 1 else "n" if n == sampling.n else "best_of"
            raise errors.too_many_sequences(param, num_prompts, n, running=running, waiting=waiting)

    def check_queued_tokens(self, prompts: Sequence[list[int]]) -> None:
        """Raises ApiError (400) where those that cannot run at once are more than the queue holds."""
        limit = self.engine_settings.max_num_queued_tokens
        num_tokens = sum(map(len, prompts[self.ready_info().max_running :]))
        if limit is not None and num_tokens > limit:
            raise errors.too_many_queued_tokens(num_tokens, limit)

    def head(self, prefix: str) -> AnswerHead:
        """The head of a new answer, its id unique in this process's life and beyond."""
        info = self.ready_info()
        about = f"{headrace.__version__} {info.model} {info.dtype} {info.kernels} {info.kv_cache_dtype}"
        fingerprint = f"fp_{hashlib.sha256(about.encode()).hexdigest()[:12]}"
        return AnswerHead(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), self.names.primary, fingerprint)

    async def encode(self, prompts: Sequence[str | list[int]], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each prompt. Raises ApiError (400) for a text that holds a token the model lacks."""

        def ids_of(prompt: str | list[int]) -> list[int]:
            return self.tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt

        def work() -> list[list[int]]:
            with refused_text("prompt"):
                return [ids_of(prompt) for prompt in prompts]

        num_chars = sum(PROMPT_CHARS + len(prompt) for prompt in prompts if isinstance(prompt, str))
        return await self.aside(num_chars, work)

    async def aside(self, num_chars: int | None, work: Callable[[], T]) -> T:
        """Run `work` here when it is short, in a thread when it would (or, with None, might) hold up the others."""
        if num_chars is not None and num_chars <= LONG_TEXT_CHARS:
            return work()
        return await asyncio.to_thread(work)

    def _format(self, template: ChatTemplate, tool_template: ChatTemplate | None = None) -> ChatFormat:
        return ChatFormat.of(template, tool_template, self.settings, self.tokenizer)

    @property
    def thinks(self) -> bool:
        """Whether the model's answers can have thinking."""
        return self.chat is not None and self.chat.reasoning is not None

    def chat_format(self, own_template: str | None) -> ChatFormat:
        """The model's, or that of a request's own chat template. Raises ApiError (400)."""
        own = own_template
        if own is None:
            if self.chat is None:
                raise errors.no_chat_template()
            return self.chat
        if not self.settings.trust_request_chat_template:
            raise errors.invalid_value(
                "chat_template",
                "`chat_template` is taken from requests only by a server that runs with --trust-request-chat-template; "
                "its own template is set with --chat-template FILE.",
            )
        if len(own) > MAX_TEMPLATE_CHARS:
            message = f"`chat_template` has {len(own)} characters; at most {MAX_TEMPLATE_CHARS} are allowed."
            raise errors.invalid_value("chat_template", message)
        try:
            return self._format(self._compiled(own))
        except ValueError as error:
            raise errors.chat_template_failed(str(error)) from None

    async def bad_words(self, fields: SamplingFields) -> WordTokens:
        """The tokens of the request's bad words. Raises ApiError (400)."""
        words = check_bad_words(fields.bad_words)
        if not words:
            return ()

        def work() -> WordTokens:
            with refused_text("bad_words"):
                return bad_word_tokens(self.tokenizer, words)

        return await self.aside(sum(map(len, words)), work)

    async def grammar(self, exchange: Exchange, fields: SamplingFields) -> GrammarSpec | None:
        """What the answer must match. Raises ApiError (400)."""
        length = exchange.headers.get("content-length", "")
        special = self.tokenizer.special_token_ids
        return await self.aside(
            int(length) if length.isdigit() else None, lambda: asked_grammar(fields, special, self._json_style)
        )

    def truncated(self, token_ids: list[int], fields: SamplingFields, max_tokens: int) -> list[int]:
        """The prompt as `truncate_prompt_tokens` leaves it. Raises ApiError (400)."""
        return truncated(
            token_ids,
            fields.truncate_prompt_tokens,
            fields.truncation_side,
            max_model_len=self.ready_info().max_model_len,
            max_tokens=max_tokens,
        )

    def answer_ids(self, name: str) -> list[str]:
        """The ids of the open answers that `name` means: such an id itself, or a request's `x-request-id`."""
        named = (exchange.answer_id for exchange in self.exchanges if exchange.request_id == name)
        return [name, *(answer_id for answer_id in named if answer_id is not None)]

    @contextmanager
    def generating(self) -> Iterator[None]:
        self.num_generating += 1
        try:
            yield
        finally:
            self.num_generating -= 1
