"""What callers of `headrace.LLM` hand in: prompts, conversations and parameters, one or many, checked before any work.

Whatever is none of the forms is a ValueError that says which forms there are; nothing is guessed.
"""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

from headrace.config.errors import ConfigError
from headrace.llm.params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, object]
"""A text, token ids, or vLLM's {"prompt": text} and {"prompt_token_ids": ids}."""
Messages = list[dict[str, object]]
Params = SamplingParams | Sequence[SamplingParams] | None

PROMPT_FORMS = "a text, a list of token ids, or a dict with `prompt` or `prompt_token_ids`"
_PROMPT_KEYS = ("prompt", "prompt_token_ids")


def model_name(model: object) -> str | None:
    """Of a directory, a file or a hub id. Raises ConfigError for what is none of them."""
    name = os.fspath(model) if isinstance(model, os.PathLike) else model
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"LLM: model is a directory, a .gguf file or a hub id, and not {_kind(model)}.")
    return name


def many_prompts(prompts: Prompt | Iterable[Prompt]) -> tuple[Iterable[Any], int | None]:
    """The prompts one by one, and how many there are where that is known."""
    if isinstance(prompts, str | Mapping):
        return [prompts], 1
    if isinstance(prompts, bytes | bytearray | memoryview) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts are {PROMPT_FORMS}; or several of these; but this is {_kind(prompts)}.")
    if isinstance(prompts, Sequence):
        if prompts and all(isinstance(item, Integral) for item in prompts):
            return [prompts], 1
        return prompts, len(prompts)
    return prompts, None


def text_and_ids(prompt: object) -> tuple[str | None, list[int] | None]:
    """A prompt's text and its token ids, of which one may be missing."""
    text: object = None
    token_ids: object = prompt
    if isinstance(prompt, str):
        text, token_ids = prompt, None
    elif isinstance(prompt, Mapping):
        if unknown := [str(name) for name in prompt if name not in _PROMPT_KEYS]:
            raise ValueError(f"a prompt has no {', '.join(unknown)}; it may have {' and '.join(_PROMPT_KEYS)}.")
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"`prompt` is a text, and not {_kind(text)}.")
    if token_ids is None and text is not None:
        return text, None
    if isinstance(token_ids, str | bytes | bytearray | memoryview) or not isinstance(token_ids, Sequence):
        raise ValueError(f"a prompt is {PROMPT_FORMS}, and not {_kind(token_ids)}.")
    return text, [_token_id(item) for item in token_ids]


def _token_id(item: object) -> int:
    if isinstance(item, bool) or not isinstance(item, Integral):
        raise ValueError(f"token ids are integers, but one is {_kind(item)}.")
    return operator.index(item)


def many_conversations(messages: Messages | Iterable[Messages]) -> list[Messages]:
    """Conversations, each a list of messages."""
    forms = 'messages are a list of dicts such as {"role": "user", "content": "Hi"}, or several such lists'
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise ValueError(f"LLM.chat: {forms}; but this is {_kind(messages)}.")
    whole: list[Any] = list(messages)
    conversations = [whole] if whole and isinstance(whole[0], Mapping) else whole
    for place, conversation in enumerate(conversations):
        if not isinstance(conversation, list | tuple):
            raise ValueError(f"LLM.chat: {forms}; but conversation {place} is {_kind(conversation)}.")
        for at, message in enumerate(conversation):
            if not isinstance(message, Mapping):
                raise ValueError(f"LLM.chat: {forms}; but message {at} is {_kind(message)}.")
    return conversations


def one_each(params: Params, total: int | None, default: Callable[[], SamplingParams]) -> Iterator[SamplingParams]:
    """Parameters for every prompt; None takes the default's."""
    if params is None:
        return itertools.repeat(default())
    if isinstance(params, SamplingParams):
        return itertools.repeat(params)
    if isinstance(params, str | bytes | Mapping) or not isinstance(params, Sequence):
        raise ValueError(f"sampling_params is a SamplingParams, or a list of them, and not {_kind(params)}.")
    for item in params:
        if not isinstance(item, SamplingParams):
            raise ValueError(f"sampling_params is a list with a SamplingParams for each prompt, not {_kind(item)}.")
    if total is not None and len(params) != total:
        raise ValueError(f"{total} prompts, but {len(params)} sampling_params; give one, or one for each prompt.")
    return iter(params)


def _kind(value: object) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"
