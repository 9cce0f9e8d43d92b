"""`SamplingParams` as people write them in Python: vLLM's names, checked where they are written.

They become the very fields that a request over HTTP has, so a value means the same here and there. One difference
to vLLM is meant: what is left out takes the model author's default (generation_config.json), as on the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from headrace.llm.structured import GuidedDecodingParams, StructuredOutputsParams
from headrace.protocol import ipc
from headrace.protocol.errors import ApiError
from headrace.protocol.sampling import ModelLimits, SamplingFields, sampling_params, text_rules
from headrace.protocol.structured_output import USUAL_STYLE, JSONStyle, asked_grammar
from headrace.protocol.token_limits import ANY_VOCABULARY, WordTokens, check_bad_words

_ANY_MODEL = ModelLimits(max_model_len=2**31, vocab_size=ANY_VOCABULARY, eos_token_ids=(), max_logprobs=2**31)
_UNBUILT = ("logits_processors",)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to generate. Raises ValueError, naming the field, for a value that no model could take."""

    n: int = 1
    best_of: int | None = None
    max_tokens: int | None = 16
    """None: as many as fit."""
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    repetition_detection: Mapping[str, int] | None = None
    """max_pattern_size, min_pattern_size, min_count."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    detokenize: bool = True
    """False leaves `text` empty."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | Mapping[str, object] | None = None
    """What the text must match."""
    guided_decoding: GuidedDecodingParams | Mapping[str, object] | None = None
    """The same under its older name."""
    logits_processors: object = None

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            object.__setattr__(self, name, _plain(getattr(self, name)))
        for name in _UNBUILT:
            if getattr(self, name):
                raise ValueError(f"SamplingParams: {name} is not supported yet.")
        if not isinstance(self.detokenize, bool):
            raise ValueError(f"SamplingParams: detokenize must be true or false, but it is {self.detokenize!r}.")
        try:
            fields = self.fields()
            text_rules(fields)
            check_bad_words(fields.bad_words)
            self.for_engine(fields, {}, _ANY_MODEL, prompt_tokens=1, fresh_seed=0)
        except ApiError as error:
            raise ValueError(f"SamplingParams: {error.message}") from None

    def fields(self) -> SamplingFields:
        """The same as the fields of a request."""
        own = {name: value for name in _SHARED if (value := getattr(self, name)) is not None}
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                raise ValueError("SamplingParams: structured_outputs and guided_decoding mean the same, give one.")
            own["structured_outputs"] = self.guided_decoding
        if isinstance(structured := own.get("structured_outputs"), StructuredOutputsParams | GuidedDecodingParams):
            own["structured_outputs"] = structured.field()
        try:
            return msgspec.convert(own, SamplingFields, str_keys=False)
        except msgspec.ValidationError as error:
            raise ValueError(f"SamplingParams: {str(error).replace('$.', '')}") from None

    def for_engine(
        self,
        fields: SamplingFields,
        defaults: Mapping[str, float],
        limits: ModelLimits,
        *,
        prompt_tokens: int,
        fresh_seed: int,
        bad_words: WordTokens = (),
        special_tokens: Mapping[str, int] = MappingProxyType({}),
        style: JSONStyle = USUAL_STYLE,
    ) -> ipc.SamplingParams:
        """For one prompt; `special_tokens` are the tokenizer's. Raises ApiError."""
        logprobs = self.logprobs
        if logprobs is not None and (type(logprobs) is not int or not 0 <= logprobs <= limits.max_logprobs):
            raise ApiError(400, f"`logprobs` must be between 0 and {limits.max_logprobs}, but it is {logprobs!r}.")
        if self.logprob_token_ids and logprobs is None:
            logprobs = 0
        return sampling_params(
            fields,
            defaults,
            limits,
            prompt_tokens=prompt_tokens,
            where="prompt",
            max_tokens=fields.max_tokens,
            fresh_seed=lambda: fresh_seed,
            logprobs=logprobs,
            bad_words=bad_words,
            grammar=asked_grammar(fields, special_tokens, style),
        )


def _plain(value: object) -> object:
    """Numbers and arrays of numpy and torch as Python's own."""
    if callable(tolist := getattr(value, "tolist", None)):
        return tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return value


_SHARED = frozenset(SamplingParams.__dataclass_fields__) & frozenset(SamplingFields.__struct_fields__)
