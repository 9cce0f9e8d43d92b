"""What `LLM.embed`, `encode` and `score` take and return, by vLLM's names, and how a pooling engine is given it."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from headrace.config.pooling import Pooler
from headrace.core import EngineCore
from headrace.llm.progress import BatchProgress
from headrace.protocol import ipc
from headrace.protocol.errors import ApiError
from headrace.protocol.pooling import EmbeddingFields, cosines, embedding_params, floats
from headrace.text.tokenizer import Tokenizer

Task = Literal["embed", "token_embed", "score"]


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """How a text becomes a vector; None is what the model's files say."""

    dimensions: int | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None
    """Keep so many tokens of a text, its first ones; -1: what the model reads. Without it a longer text is refused."""


PoolingChoice = PoolingParams | Sequence[PoolingParams] | None


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    data: list[float] | list[list[float]]
    """A vector, the row of every token, or one score."""


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput:
    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True


Read = Callable[[object, int | None], list[int]]
"""The token ids of a prompt, cut to a number of them. Raises ValueError or ApiError."""


@dataclass(frozen=True, slots=True)
class PoolingJob:
    token_ids: list[int]
    params: ipc.PoolingParams


@dataclass(frozen=True, slots=True)
class Pooled:
    """A job's result."""

    token_ids: list[int]
    raw: bytes

    @property
    def values(self) -> list[float]:
        return floats(self.raw).tolist()

    @property
    def rows(self) -> list[list[float]]:
        """Of token_embed: one for each token."""
        values = self.values
        width = len(values) // len(self.token_ids)
        return [values[start : start + width] for start in range(0, len(values), width)]


@dataclass(frozen=True, slots=True)
class PoolingEngine:
    """A core that pools, and what is needed to hand it prompts. Not for two threads at once."""

    core: EngineCore
    pooler: Pooler
    tokenizer: Tokenizer
    read: Read
    most_open: int
    new_id: Callable[[], str]

    def pool(self, prompts: Sequence[object], params: PoolingChoice, task: Task, shown: bool) -> list[Pooled]:
        """Raises ValueError naming the prompt that cannot be served, and for a task that the model is not for."""
        asked = _one_each(params, len(prompts))

        def jobs() -> Iterator[PoolingJob]:
            for number, (prompt, own) in enumerate(zip(prompts, asked, strict=True)):
                wanted = self._params(own, task)
                with _named(f"prompt {number}"):
                    token_ids = _checked(self.read(prompt, self._limit(own)), self.core.info.max_model_len)
                yield PoolingJob(token_ids, wanted)

        return self._run(jobs(), len(prompts), shown)

    def score(
        self, first: Sequence[str], second: Sequence[str], limit: int | None, shown: bool
    ) -> list[tuple[float, list[int]]]:
        """Each pair's score and tokens; a lone first text goes with every second one."""
        if not second or len(first) not in (1, len(second)):
            raise ValueError(f"LLM.score: {len(first)} first and {len(second)} second texts; give one, or as many.")
        asked = PoolingParams(normalize=True, truncate_prompt_tokens=limit)
        if self.pooler.task == "embed":
            results = self.pool([*first, *second], asked, "embed", shown)
            ones, twos = results[: len(first)], results[len(first) :]
            scores = cosines([one.values for one in ones], [two.values for two in twos])
            ids = (ones[number % len(ones)].token_ids + two.token_ids for number, two in enumerate(twos))
            return list(zip(scores, ids, strict=True))
        params = self._params(asked, "score")

        def jobs() -> Iterator[PoolingJob]:
            for number, two in enumerate(second):
                with _named(f"pair {number}"):
                    ids, at = self.tokenizer.encode_pair(first[number % len(first)], two, self._limit(asked))
                    _checked(ids, self.core.info.max_model_len)
                yield PoolingJob(ids, msgspec.structs.replace(params, second_text_at=at))

        return [(result.values[0], result.token_ids) for result in self._run(jobs(), len(second), shown)]

    def _params(self, asked: PoolingParams, task: Task) -> ipc.PoolingParams:
        if (task == "score") != (self.pooler.task == "score"):
            known = "scores of pairs of texts" if self.pooler.task == "score" else "vectors"
            raise ValueError(f"LLM: the task {task} is not to be had of this model, which gives {known}.")
        if task == "score":
            return ipc.PoolingParams(task="score", every_row=False, activation=self.pooler.activation)
        fields = EmbeddingFields(input="", dimensions=asked.dimensions, normalize=asked.normalize)
        with _named("LLM"):
            return embedding_params(self.pooler, fields, task, self.core.info.vector_width)

    def _limit(self, asked: PoolingParams) -> int | None:
        limit, longest = asked.truncate_prompt_tokens, self.core.info.max_model_len
        if limit is not None and limit != -1 and not 1 <= limit <= longest:
            raise ValueError(f"truncate_prompt_tokens must be -1 or between 1 and {longest}, but it is {limit}.")
        return longest if limit == -1 else limit

    def _run(self, jobs: Iterator[PoolingJob], total: int, shown: bool) -> list[Pooled]:
        with BatchProgress(total, shown=shown) as progress:
            return _run(self.core, jobs, self.most_open, self.new_id, progress)


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """What is wrong inside is a ValueError that says where."""
    try:
        yield
    except ApiError as error:
        raise ValueError(f"{what}: {error.message}") from None
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def _one_each(asked: PoolingParams | Sequence[PoolingParams] | None, total: int) -> Sequence[PoolingParams]:
    """Raises ValueError unless there is one for all or one for each."""
    if asked is None or isinstance(asked, PoolingParams):
        return [asked or PoolingParams()] * total
    if len(asked) != total:
        raise ValueError(f"{total} prompts, but {len(asked)} pooling_params; give one, or one for each prompt.")
    return asked


def _checked(token_ids: list[int], longest: int) -> list[int]:
    """Raises ValueError for a text that the model cannot read whole."""
    if len(token_ids) > longest:
        raise ValueError(
            f"it has {len(token_ids)} tokens and this model reads at most {longest}: shorten it, or set "
            "truncate_prompt_tokens."
        )
    return token_ids


def _run(
    core: EngineCore, jobs: Iterator[PoolingJob], most_open: int, new_id: Callable[[], str], progress: BatchProgress
) -> list[Pooled]:
    """The results of all jobs in their order. Raises ValueError for one that is refused, RuntimeError for one on which
    the engine fails; what was in work is then stopped."""
    results: dict[int, Pooled] = {}
    in_work: dict[str, tuple[int, PoolingJob]] = {}
    count = 0
    try:
        while True:
            for job in itertools.islice(jobs, most_open - len(in_work)):
                params = ipc.SamplingParams(max_tokens=1, pooling=job.params)
                request_id = new_id()
                refused = core.add(
                    ipc.AddRequest(
                        request_id=request_id,
                        token_ids=job.token_ids,
                        params=params,
                        arrival_s=time.time(),
                        is_let_in=True,
                    )
                )
                if refused is not None:
                    raise ValueError(f"prompt {count}: {refused.message}")
                in_work[request_id] = (count, job)
                count += 1
            if not in_work:
                break
            step = core.step()
            if step is None:
                raise RuntimeError("requests wait and none can be scheduled: this is a fault of the scheduler")
            for output in step.outputs:
                place, job = in_work[output.request_id]
                if output.pooled is None:
                    raise RuntimeError(f"prompt {place}: {output.error or 'the engine gave nothing'}")
                results[place] = Pooled(job.token_ids, output.pooled)
                del in_work[output.request_id]
                progress.add_prompt(len(job.token_ids))
    finally:
        for request_id in in_work:
            core.abort(request_id)
    while core.has_work:
        core.step()
    return [results[place] for place in range(count)]
