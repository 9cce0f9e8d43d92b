"""The engine in this process: prompts in, answers out in the same order.

However many prompts there are, only as many are in work as keep the engine busy: the next is read and tokenized
when one is done. So a generator of a million prompts needs memory for the answers alone.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from headrace.config.command_line import parse_table
from headrace.config.errors import ConfigError
from headrace.config.flag_table import ADDRESS, FLAG_BY_NAME
from headrace.config.flags import canonical
from headrace.config.load import load_given
from headrace.core import EngineCore
from headrace.llm.arguments import (
    Messages,
    Params,
    Prompt,
    many_conversations,
    many_prompts,
    model_name,
    one_each,
    text_and_ids,
)
from headrace.llm.outputs import RequestOutput
from headrace.llm.params import SamplingParams
from headrace.llm.pooling import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingChoice,
    PoolingEngine,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    Task,
)
from headrace.llm.progress import BatchProgress
from headrace.llm.request import Job, OpenRequest
from headrace.protocol import ipc, openai_chat
from headrace.protocol.errors import ApiError
from headrace.protocol.generation_defaults import sampling_defaults
from headrace.protocol.sampling import ModelLimits, text_rules
from headrace.protocol.structured_output import JSONStyle
from headrace.protocol.token_limits import check_token_ids, truncated
from headrace.protocol.tools import tool_request
from headrace.text import tool_formats
from headrace.text.bad_words import bad_word_tokens
from headrace.text.chat_template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.text.tool_prompt import prepared

logger = logging.getLogger("headrace.llm")

QUEUED_REQUESTS = 32
"""Prompts that are ready while as many run as the engine takes at once."""


class LLM:
    """A loaded model. Calls from several threads are done one after another."""

    def __init__(self, model: str | os.PathLike[str] | None = None, **flags: object) -> None:
        """`model`: a directory, a .gguf file or a hub id; None is the bundled one. `flags` are those of
        `headrace serve` with underscores for dashes, which are vLLM's: max_model_len=4096, dtype="float32".

        Raises ConfigError naming every flag or file that cannot work.
        """
        for name in flags:
            flag = FLAG_BY_NAME.get(canonical(name))
            if flag is not None and (flag.group == ADDRESS or flag.name == "max-num-queued-tokens"):
                raise ConfigError(f"LLM: {name} belongs to the server; in process there is none. Leave it out.")
        launch = load_given(parse_table(flags, model_name(model)))
        for notice in launch.notices:
            logger.warning("%s", notice)
        engine, server = launch.engine, launch.server
        self._defaults = sampling_defaults(
            launch.files.generation_config, server.generation_config, server.override_generation_config
        )
        self._tokenizer = Tokenizer.load(launch.files, Path(engine.tokenizer) if engine.tokenizer else None)
        source = server.chat_template or launch.files.chat_template
        self._template = self._compiled(source) if source is not None else None
        self._json_style = JSONStyle.of(compact=server.compact_json, closed=server.closed_json_objects)
        self._pooler = engine.pooler
        self._core = EngineCore(engine)
        info = self._core.info
        self._limits = ModelLimits(
            info.max_model_len, self._tokenizer.vocab_size, self._tokenizer.eos_token_ids, server.max_logprobs
        )
        self._most_open = info.max_num_seqs + min(QUEUED_REQUESTS, engine.max_num_queued_reqs)
        self._by_priority = engine.scheduling_policy == "priority"
        self._seeds = random.SystemRandom() if engine.seed is None else random.Random(engine.seed)
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    @property
    def info(self) -> ipc.EngineInfo:
        """What the engine found out while starting: sizes, device, kernels."""
        return self._core.info

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's author recommends, as `generate` uses it when no parameters are given."""
        own: dict[str, Any] = {name: value for name, value in self._defaults.items() if name != "max_new_tokens"}
        if "top_k" in own:
            own["top_k"] = int(own["top_k"])
        if "max_new_tokens" in self._defaults:
            own["max_tokens"] = int(self._defaults["max_new_tokens"])
        return SamplingParams(**own)

    def reset_prefix_cache(self) -> int:
        """Forget cached prefixes; how many blocks there were."""
        with self._lock:
            return self._core.reset_prefix_cache()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt; the outputs are in the prompts' order.

        `prompts` is one prompt, a list, or anything that yields them; `sampling_params` one for all or a list with
        one each; `use_tqdm` shows the progress. A prompt on which the engine fails has `finish_reason` "error", and
        the others are not disturbed. Raises ValueError naming the prompt that cannot be served; what was in work is
        then stopped.
        """
        many, total = many_prompts(prompts)
        params = one_each(sampling_params, total, self.get_default_sampling_params)
        priorities = self._priorities(priority, total)
        return self._run(self._jobs(many, params, priorities), total, use_tqdm)

    def chat(
        self,
        messages: Messages | Iterable[Messages],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, object] | None = None,
        documents: list[dict[str, object]] | None = None,
        tools: list[dict[str, object]] | None = None,
    ) -> list[RequestOutput]:
        """The same for one conversation, or several, by the model's chat template or `chat_template`.

        `tools` are shown to the model, in OpenAI's form; what it calls is in its text, as its family writes calls.
        """
        if continue_final_message and add_generation_prompt:
            raise ValueError("LLM.chat: for continue_final_message set add_generation_prompt=False.")
        template = self._compiled(chat_template) if chat_template is not None else self._template
        if template is None:
            raise ValueError("The model has no chat template: give one with LLM(..., chat_template=FILE_OR_TEXT).")
        try:
            variables = openai_chat.template_variables(chat_template_kwargs)
            shown = tool_request(tools, None, None).shown
        except ApiError as error:
            raise ValueError(f"LLM.chat: {error.message}") from None
        if documents is not None:
            if "documents" not in template.source:
                raise ValueError("LLM.chat: documents would have no effect: the chat template does not quote any.")
            variables["documents"] = documents
        conversations = many_conversations(messages)
        calls = tool_formats.detected(template.source) or tool_formats.FORMATS["hermes"]

        def rendered() -> Iterator[Prompt]:
            for conversation in conversations:
                plain = openai_chat.plain_messages(conversation, knows_developer="developer" in template.source)
                told, listed = prepared(template, calls, plain, shown)
                text = template.render(
                    told,
                    tools=listed,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    **variables,
                )
                yield {"prompt": text, "prompt_token_ids": self._tokenizer.encode_chat(text)}

        total = len(conversations)
        params = one_each(sampling_params, total, self.get_default_sampling_params)
        return self._run(self._jobs(rendered(), params, itertools.repeat(0)), total, use_tqdm)

    def embed(
        self, prompts: Prompt | Iterable[Prompt], use_tqdm: bool = True, *, pooling_params: PoolingChoice = None
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each text; the outputs are in the prompts' order.

        Raises ValueError naming the prompt that cannot be served, and where the model generates text.
        """
        with self._lock:
            results = self._pooling().pool(list(many_prompts(prompts)[0]), pooling_params, "embed", use_tqdm)
        return [
            EmbeddingRequestOutput(str(number), EmbeddingOutput(result.values), result.token_ids)
            for number, result in enumerate(results)
        ]

    def encode(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: PoolingChoice = None,
        use_tqdm: bool = True,
        *,
        pooling_task: Task | None = None,
    ) -> list[PoolingRequestOutput]:
        """The same by the task's name: `embed`, `token_embed` (the row of every token), or of a cross-encoder `score`;
        left out, what the model is for."""
        with self._lock:
            pooling = self._pooling()
            task = pooling_task or pooling.pooler.task
            results = pooling.pool(list(many_prompts(prompts)[0]), pooling_params, task, use_tqdm)
        return [
            PoolingRequestOutput(
                str(number), PoolingOutput(result.rows if task == "token_embed" else result.values), result.token_ids
            )
            for number, result in enumerate(results)
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        use_tqdm: bool = True,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well each pair of texts fits; one first text goes with every second one. A cross-encoder reads the pairs;
        of a model that gives vectors it is their cosine."""
        first, second = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
        with self._lock:
            results = self._pooling().score(first, second, truncate_prompt_tokens, use_tqdm)
        return [
            ScoringRequestOutput(str(number), ScoringOutput(score), token_ids)
            for number, (score, token_ids) in enumerate(results)
        ]

    def classify(self, *_: object, **__: object) -> NoReturn:
        """Refused until classification is built."""
        raise NotImplementedError("LLM.classify: classification and reward models are not built yet.")

    reward = classify

    def _pooling(self) -> PoolingEngine:
        if self._pooler is None:
            raise ValueError('This model generates text. For vectors load it with LLM(..., runner="pooling").')

        def read(prompt: Any, limit: int | None) -> list[int]:
            return self._read(prompt, limit)[1]

        new_id = (f"{number}" for number in self._numbers)
        return PoolingEngine(self._core, self._pooler, self._tokenizer, read, self._most_open, new_id.__next__)

    def _compiled(self, source: str) -> ChatTemplate:
        try:
            return ChatTemplate(source, self._tokenizer.special_tokens)
        except ValueError as error:
            raise ConfigError(f"LLM: {error}.") from None

    def _priorities(self, priority: Sequence[int] | None, total: int | None) -> Iterator[int]:
        if priority is None:
            return itertools.repeat(0)
        if not self._by_priority and any(priority):
            raise ValueError('LLM.generate: priority has an effect only with LLM(..., scheduling_policy="priority").')
        if total is not None and len(priority) != total:
            raise ValueError(f"LLM.generate: {total} prompts, but {len(priority)} priorities; give one for each.")
        return iter(priority)

    def _jobs(
        self, prompts: Iterable[Prompt], params: Iterator[SamplingParams], priorities: Iterator[int]
    ) -> Iterator[Job]:
        """Raises ValueError naming the prompt that cannot be served, by its place in the input."""
        words: dict[int, tuple[SamplingParams, tuple[tuple[int, ...], ...]]] = {}
        iterator = iter(prompts)
        for number in itertools.count():
            try:
                prompt = next(iterator)
                asked, priority = next(params, None), next(priorities, None)
                if asked is None or priority is None:
                    raise ValueError("there are fewer sampling_params or priorities than prompts; give one for each.")
                if id(asked) not in words:
                    words = {id(asked): (asked, bad_word_tokens(self._tokenizer, asked.bad_words or ()))}
                yield self._job(prompt, asked, words[id(asked)][1], priority)
            except StopIteration:
                return
            except ApiError as error:
                raise ValueError(f"prompt {number}: {error.message}") from None
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}") from None

    def _job(self, prompt: Prompt, asked: SamplingParams, bad_words: tuple[tuple[int, ...], ...], priority: int) -> Job:
        text, token_ids = self._read(prompt)
        fields = asked.fields()
        whole = truncated(
            token_ids,
            fields.truncate_prompt_tokens,
            fields.truncation_side,
            max_model_len=self._limits.max_model_len,
            max_tokens=asked.max_tokens or 1,
        )
        params = asked.for_engine(
            fields,
            self._defaults,
            self._limits,
            prompt_tokens=len(whole),
            fresh_seed=self._seeds.getrandbits(63),
            bad_words=bad_words,
            special_tokens=self._tokenizer.special_token_ids,
            style=self._json_style,
        )
        return Job(text, whole, asked, params, text_rules(fields), priority)

    def _read(self, prompt: Prompt, limit: int | None = None) -> tuple[str | None, list[int]]:
        """The text, where there is one, and the token ids, of which the first `limit` are kept."""
        text, token_ids = text_and_ids(prompt)
        if token_ids is None:
            assert text is not None
            if limit is None:
                token_ids = self._tokenizer.encode(text, add_special_tokens=True)
            else:
                token_ids = self._tokenizer.encode_within(text, limit, "right")
        ids = token_ids[:limit]
        if not ids:
            raise ValueError("it is empty; there is nothing to continue.")
        check_token_ids("prompt", ids, self._limits.vocab_size)
        return text, ids

    def _run(self, jobs: Iterator[Job], total: int | None, use_tqdm: bool) -> list[RequestOutput]:
        with self._lock, BatchProgress(total, shown=use_tqdm) as progress:
            return self._answers(jobs, progress)

    def _answers(self, jobs: Iterator[Job], progress: BatchProgress) -> list[RequestOutput]:
        core = self._core
        results: dict[int, RequestOutput] = {}
        open_requests: dict[str, OpenRequest] = {}
        places: dict[str, int] = {}
        try:
            while True:
                for job in itertools.islice(jobs, self._most_open - len(open_requests)):
                    request = self._add(job, len(places) + len(results))
                    places[request.request_id] = len(places) + len(results)
                    open_requests[request.request_id] = request
                if not open_requests:
                    break
                step = core.step()
                if refusals := core.gate.take_refused():
                    request_id, refused = refusals[0]
                    raise ValueError(f"prompt {places[request_id]}: {refused.message}")
                if step is None and core.gate.is_waiting:
                    core.gate.wait()
                    continue
                if step is None:
                    raise RuntimeError("requests wait and none can be scheduled: this is a fault of the scheduler")
                for output in step.outputs:
                    request_of = open_requests.get(output.request_id)
                    if request_of is None:
                        continue
                    if request_of.add(output):
                        core.abort(output.request_id, output.index)
                    if request_of.done:
                        place = places.pop(output.request_id)
                        results[place] = open_requests.pop(output.request_id).result(place)
                        progress.add_prompt(len(request_of.job.token_ids))
                progress.add_tokens(sum(len(output.token_ids) for output in step.outputs))
        finally:
            for request_id in open_requests:
                core.abort(request_id)
        while core.has_work:
            core.step()
        return [results[place] for place in range(len(results))]

    def _add(self, job: Job, number: int) -> OpenRequest:
        request_id = f"{next(self._numbers)}"
        message = ipc.AddRequest(
            request_id=request_id,
            token_ids=job.token_ids,
            params=job.params,
            arrival_s=time.time(),
            priority=job.priority,
            is_let_in=True,
        )
        refused = self._core.add(message)
        if refused is not None:
            raise ValueError(f"prompt {number}: {refused.message}")
        return OpenRequest(request_id, job, self._tokenizer)
