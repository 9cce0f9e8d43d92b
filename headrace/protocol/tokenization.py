"""The requests and answers of /tokenize and /detokenize, shaped as vLLM's."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class TokenizeFields(msgspec.Struct, frozen=True, kw_only=True):
    """Either `prompt` or `messages`. `add_special_tokens` defaults to true for a prompt, false for messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, object]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    tools: list[dict[str, object]] | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


def tokenized(tokens: Sequence[int], max_model_len: int, token_strs: Sequence[str] | None) -> dict[str, object]:
    return {
        "count": len(tokens),
        "max_model_len": max_model_len,
        "tokens": tokens,
        "token_strs": token_strs,
    }


def detokenized(prompt: str) -> dict[str, object]:
    return {"prompt": prompt}
