"""Request fields that decide which tokens are chosen and how text is made of them: one set for all dialects.

A request's own values win; a field it leaves out takes the model author's default (generation_config.json, as
changed by --override-generation-config); what neither names has no effect. `sampling_params` is where these
become the engine's `SamplingParams`, each value checked against its range.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.protocol import errors
from headrace.protocol.ipc import GrammarSpec, SamplingParams, ThinkingBudget
from headrace.protocol.token_limits import (
    RepetitionFields,
    TruncationSide,
    WordTokens,
    allowed_tokens,
    check_token_ids,
    listed_tokens,
    repetition_detection,
)

GREEDY_BELOW = 1e-5
LARGEST = 1e300
MAX_N = 128
DEFAULT_MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 128
MAX_STOP_CHARS = 4096
SEED_MASK = 2**63 - 1

AnySchema = bool | str | dict[str, Any]
"""A JSON Schema, or its text."""


@dataclass(frozen=True)
class Range:
    """Numbers that a field may be; `words` end "must be ..."."""

    allowed: Callable[[float], bool]
    words: str

    def holds(self, value: float) -> bool:
        return abs(value) < LARGEST and self.allowed(value)


RANGES: Mapping[str, Range] = {
    "temperature": Range(lambda v: 0 <= v <= 100, "between 0 and 100"),
    "top_p": Range(lambda v: 0 <= v <= 1, "between 0 and 1"),
    "top_k": Range(lambda v: v >= -1, "-1 or 0 (off), or the number of tokens to choose from"),
    "min_p": Range(lambda v: 0 <= v <= 1, "between 0 and 1"),
    "repetition_penalty": Range(lambda v: 0 < v <= 100, "more than 0 and at most 100 (1 is off)"),
    "presence_penalty": Range(lambda v: -2 <= v <= 2, "between -2 and 2"),
    "frequency_penalty": Range(lambda v: -2 <= v <= 2, "between -2 and 2"),
    "max_new_tokens": Range(lambda v: v >= 1, "1 or more"),
}
"""Of the fields that are numbers, and of generation_config.json's name for the longest answer."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Usage so far in every chunk."""
    include_obfuscation: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that chat and completions share. None means the client did not send it (or sent null)."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    """Generate so many and answer with the `n` whose log-probabilities add up to the most."""
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    repetition_detection: RepetitionFields | None = None
    # What the answer must match: one of these (structured_output.py).
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: AnySchema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    json_schema: AnySchema | None = None
    grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_tokens_as_token_ids: bool | None = None
    """Name tokens in logprobs as `token_id:N`: exact also where a token is half a character."""
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    # No effect on the answer, by OpenAI's own definition.
    user: str | None = None
    metadata: dict[str, object] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


@dataclass(frozen=True)
class TextRules:
    """How a choice's tokens become text, and which text ends it."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    min_tokens: int = 0
    """Stop strings are not looked for before this many tokens."""
    kept_token_ids: frozenset[int] = frozenset()
    """Special tokens that are text all the same: the marks that somebody reads an answer by."""


@dataclass(frozen=True)
class ModelLimits:
    """What the served model allows; the same for every request."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_logprobs: int = DEFAULT_MAX_LOGPROBS


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """Raises ApiError (400) for an empty, very long or very numerous stop."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > MAX_STOP_STRINGS:
        message = f"`stop` has {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed."
        raise errors.invalid_value("stop", message)
    for string in strings:
        if not string:
            raise errors.invalid_value("stop", "`stop` holds an empty string, which would end every answer at once.")
        if len(string) > MAX_STOP_CHARS:
            raise errors.invalid_value("stop", f"a string in `stop` is longer than {MAX_STOP_CHARS} characters.")
    return strings


def text_rules(fields: SamplingFields) -> TextRules:
    spaces = fields.spaces_between_special_tokens
    return TextRules(
        stop=stop_strings(fields.stop),
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
        spaces_between_special_tokens=spaces is not False,
        min_tokens=fields.min_tokens or 0,
    )


def sampling_params(
    fields: SamplingFields,
    defaults: Mapping[str, float],
    limits: ModelLimits,
    *,
    prompt_tokens: int,
    where: str,
    max_tokens: int | None,
    fresh_seed: Callable[[], int],
    max_tokens_field: str = "max_tokens",
    fallback_max_tokens: int | None = None,
    logprobs: int | None = None,
    echo_logprobs: int | None = None,
    bad_words: WordTokens = (),
    grammar: GrammarSpec | None = None,
    thinking: ThinkingBudget | None = None,
) -> SamplingParams:
    """The engine's parameters. Raises ApiError (400) with the value and what is allowed.

    `where` ("messages" or "prompt") names the input in errors. `max_tokens` None takes the default: the smaller of
    what fits, `fallback_max_tokens` and the generation config's `max_new_tokens`. `fresh_seed` gives the seed of a
    request that names none. `echo_logprobs` are wanted of the prompt's tokens besides the field `prompt_logprobs`.
    `bad_words` are the field's, as tokens. With `best_of` the engine's `n` is that many. With a `grammar` the model's
    end token ends the answer also where `ignore_eos` is set: the grammar says where that may be.
    """

    def number(name: str, neutral: float) -> float:
        sent = getattr(fields, name)
        value = sent if sent is not None else defaults.get(name, neutral)
        if not RANGES[name].holds(value):
            raise errors.out_of_range(name, value, RANGES[name].words)
        return float(value)

    temperature = number("temperature", 1.0)
    top_p = number("top_p", 1.0)
    top_k = int(number("top_k", 0))
    min_p = number("min_p", 0.0)
    repetition = number("repetition_penalty", 1.0)
    presence = number("presence_penalty", 0.0)
    frequency = number("frequency_penalty", 0.0)
    n = num_generated(fields)
    if top_p == 0:
        top_p, top_k = 1.0, 1
    if fields.seed is not None and not -(2**63) <= fields.seed < 2**64:
        raise errors.out_of_range("seed", fields.seed, "between -2^63 and 2^64 - 1")
    if fields.priority is not None and not -(2**31) <= fields.priority < 2**31:
        raise errors.out_of_range("priority", fields.priority, "between -2^31 and 2^31 - 1")

    room = limits.max_model_len - prompt_tokens
    if max_tokens is not None and max_tokens < 1:
        raise errors.out_of_range(max_tokens_field, max_tokens, "1 or more")
    if room < 1 or (max_tokens is not None and max_tokens > room):
        raise errors.context_length_exceeded(
            limit=limits.max_model_len,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            where=where,
            limit_param=max_tokens_field,
        )
    if max_tokens is None:
        config_limit = defaults.get("max_new_tokens")
        candidates = (room, fallback_max_tokens, int(config_limit) if config_limit else None)
        max_tokens = max(1, min(value for value in candidates if value is not None))
    min_tokens = fields.min_tokens or 0
    if not 0 <= min_tokens <= max_tokens:
        raise errors.out_of_range("min_tokens", min_tokens, f"between 0 and the answer's limit of {max_tokens} tokens")

    stop_token_ids = fields.stop_token_ids or []
    check_token_ids("stop_token_ids", stop_token_ids, limits.vocab_size)
    eos = () if fields.ignore_eos and grammar is None else limits.eos_token_ids
    stops = tuple(dict.fromkeys((*eos, *stop_token_ids)))
    if n > (fields.n or 1) and logprobs is None:
        logprobs = 0
    if fields.prompt_logprobs is not None and not 0 <= fields.prompt_logprobs <= limits.max_logprobs:
        allowed = f"between 0 and {limits.max_logprobs}"
        raise errors.out_of_range("prompt_logprobs", fields.prompt_logprobs, allowed)
    of_prompt = [count for count in (fields.prompt_logprobs, echo_logprobs) if count is not None]
    return SamplingParams(
        max_tokens=max_tokens,
        n=n,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=top_p,
        top_k=top_k if 0 < top_k < limits.vocab_size else 0,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=_logit_bias(fields.logit_bias, limits.vocab_size),
        stop_token_ids=stops,
        min_tokens=min_tokens,
        seed=fresh_seed() if fields.seed is None else fields.seed & SEED_MASK,
        logprobs=logprobs,
        logprob_token_ids=listed_tokens(fields.logprob_token_ids, logprobs, limits.vocab_size),
        prompt_logprobs=max(of_prompt, default=None),
        allowed_token_ids=allowed_tokens(
            fields.allowed_token_ids, bad_words, stops if min_tokens else (), limits.vocab_size
        ),
        bad_words=bad_words,
        repetition_detection=repetition_detection(fields.repetition_detection),
        grammar=grammar,
        thinking=thinking,
    )


def num_generated(fields: SamplingFields) -> int:
    """How many answers to generate: `n`, or `best_of` to choose `n` from. Raises ApiError (400)."""
    n = 1 if fields.n is None else fields.n
    if not 1 <= n <= MAX_N:
        raise errors.out_of_range("n", n, f"between 1 and {MAX_N}")
    best_of = fields.best_of
    if best_of is None or best_of == n:
        return n
    if not n <= best_of <= MAX_N:
        raise errors.out_of_range("best_of", best_of, f"between `n`, which is {n}, and {MAX_N}")
    if fields.stream:
        message = "`best_of` cannot be streamed: which answers are best is known at the end. Send `stream` false."
        raise errors.invalid_value("best_of", message)
    return best_of


def _logit_bias(bias: dict[int, float] | None, vocab_size: int) -> dict[int, float] | None:
    if not bias:
        return None
    check_token_ids("logit_bias", bias.keys(), vocab_size)
    for token_id, value in bias.items():
        if not -100 <= value <= 100:
            raise errors.out_of_range(f"logit_bias.{token_id}", value, "between -100 and 100")
    return bias
