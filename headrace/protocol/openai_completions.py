"""The dialect of /v1/completions: prompts in four forms, answers whole and in chunks.

Several prompts with n choices each give choices numbered prompt by prompt: the j-th choice of the i-th prompt
has index i * n + j.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.protocol import errors
from headrace.protocol.answers import AnswerHead, Delta, Usage
from headrace.protocol.ipc import TokenLogprobs
from headrace.protocol.logprobs import PromptScores, ScoredToken, completion_logprobs

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024

Prompt = str | list[int]


class CompletionFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a completion request besides those of `SamplingFields`."""

    prompt: str | list[str | int | list[int]]
    model: str | None = None
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


def prompts(fields: CompletionFields) -> list[Prompt]:
    """The request's prompts, each a text or token ids. Raises ApiError (400) for empty and mixed lists."""
    prompt = fields.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise errors.invalid_value("prompt", "`prompt` is an empty list; send a text, token ids, or a list of either.")
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return [ids]
    if ids:
        raise errors.invalid_value("prompt", "`prompt` mixes token ids with texts or lists; send a list of one kind.")
    if len(prompt) > MAX_PROMPTS:
        raise errors.invalid_value("prompt", f"`prompt` has {len(prompt)} entries; at most {MAX_PROMPTS} are allowed.")
    return [item for item in prompt if not isinstance(item, int)]


def asked_logprobs(fields: CompletionFields, most: int) -> int | None:
    """How many alternatives to return beside each token; None for no log-probabilities."""
    if fields.logprobs is None:
        return None
    if not 0 <= fields.logprobs <= most:
        raise errors.out_of_range("logprobs", fields.logprobs, f"between 0 and {most}")
    return fields.logprobs


def only_scores(fields: CompletionFields, max_tokens: int | None, prompt_logprobs: int | None) -> bool:
    """Whether nothing is to be generated: `max_tokens` 0, which makes sense only where the prompt is answered."""
    return max_tokens == 0 and (bool(fields.echo) or prompt_logprobs is not None)


class CompletionAnswer:
    """Builds the answer to one completion request from deltas.

    `echoes[i]` is the text put before the choices of prompt i, empty without `echo`. `scores[i]` writes what
    `scored_prompt` is told of prompt i; without it nothing of the prompt has log-probabilities.
    """

    def __init__(
        self,
        head: AnswerHead,
        *,
        n: int,
        echoes: Sequence[str],
        with_logprobs: bool,
        with_token_ids: bool,
        prompt_ids: Sequence[Sequence[int]],
        scores: Sequence[PromptScores] = (),
    ) -> None:
        self._head = head
        self._scores = scores
        self._n = n
        self._echoes = echoes
        self._with_logprobs = with_logprobs
        self._with_token_ids = with_token_ids
        self._prompt_ids = prompt_ids

    def scored_prompt(self, index: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """The log-probabilities of the prompt of choice `index`: of all its tokens but the first."""
        self._scores[index // self._n].take(logprobs)

    def opening(self, index: int) -> list[dict[str, object]]:
        """The chunk that begins a choice: the echoed prompt, if any."""
        echo = self._echoes[index // self._n]
        if not echo and not self._with_token_ids:
            return []
        choice = self._text_choice(index, echo, None, None)
        if echoed := self._echoed(index):
            choice["logprobs"] = completion_logprobs(echoed, 0)
        if self._with_token_ids:
            choice["prompt_token_ids"] = self._prompt_ids[index // self._n]
        return [self._with_head([choice])]

    def chunks(self, delta: Delta) -> list[dict[str, object]]:
        chunks = []
        if delta.text or delta.token_ids:
            choice = self._text_choice(delta.index, delta.text, None, None)
            if self._with_logprobs:
                choice["logprobs"] = completion_logprobs(delta.tokens or (), self._echo_chars(delta.index))
            if self._with_token_ids:
                choice["token_ids"] = delta.token_ids
            chunks.append(self._with_head([choice]))
        if delta.finish_reason is not None:
            chunks.append(self._with_head([self._text_choice(delta.index, "", delta.finish_reason, delta.stop_reason)]))
        return chunks

    def usage_chunk(self, usage: Usage) -> dict[str, object]:
        return {**self._with_head([]), "usage": usage.wire()}

    def whole(self, choices: Sequence[Delta], usage: Usage) -> dict[str, object]:
        """`choices`: each choice's deltas joined into one."""
        return {**self._with_head([self._choice(choice) for choice in choices]), "usage": usage.wire()}

    def _choice(self, choice: Delta) -> dict[str, object]:
        text = self._echoes[choice.index // self._n] + choice.text
        wire = self._text_choice(choice.index, text, choice.finish_reason, choice.stop_reason)
        if self._with_logprobs:
            generated = completion_logprobs(choice.tokens or (), self._echo_chars(choice.index))
            echoed = completion_logprobs(self._echoed(choice.index), 0)
            wire["logprobs"] = {name: echoed[name] + values for name, values in generated.items()}
        if self._scores and (listed := self._scores[choice.index // self._n].listed()) is not None:
            wire["prompt_logprobs"] = listed
        if self._with_token_ids:
            wire["token_ids"] = choice.token_ids
            wire["prompt_token_ids"] = self._prompt_ids[choice.index // self._n]
        return wire

    def _echoed(self, index: int) -> Sequence[ScoredToken]:
        return self._scores[index // self._n].echoed() if self._scores and self._with_logprobs else ()

    def _echo_chars(self, index: int) -> int:
        return len(self._echoes[index // self._n])

    def _text_choice(
        self, index: int, text: str, finish_reason: str | None, stop_reason: str | int | None
    ) -> dict[str, object]:
        choice: dict[str, object] = {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
        if finish_reason is not None:
            choice["stop_reason"] = stop_reason
        return choice

    def _with_head(self, choices: list[dict[str, object]]) -> dict[str, object]:
        head = self._head
        return {
            "id": head.id,
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.system_fingerprint,
            "choices": choices,
        }
