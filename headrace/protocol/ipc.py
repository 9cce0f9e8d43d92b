"""Messages between the server process and the core process: one msgpack message a step each way.

The core sees token ids only; text, stop strings and templates stay on the server's side. A request may ask
for `n` sequences; every sequence is named by (request_id, index).
"""

from __future__ import annotations

from typing import Literal

import msgspec

BACKGROUND_PRIORITY = 1 << 32
"""Added to the priority of work that nobody waits for: behind any that a request can name (31 bits and a sign)."""


def is_background(priority: int) -> bool:
    """Nobody waits for a request of this priority."""
    return priority >= BACKGROUND_PRIORITY >> 1


FinishReason = Literal["stop", "length", "repetition", "abort", "error"]


class RepetitionDetection(msgspec.Struct, frozen=True, array_like=True):
    """End a sequence whose generated tokens end in one pattern, `min_count` times in a row.

    Patterns of `min_pattern_size` to `max_pattern_size` tokens count; see engine/repetition.py.
    """

    max_pattern_size: int
    min_pattern_size: int
    min_count: int


class GrammarSpec(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What the generated text must match; protocol/structured_output.py and grammar_text.py make it.

    `text` is a JSON Schema, a regular expression (for the whole text), a JSON list of the texts to choose from, a
    grammar as people write it (GBNF, EBNF or Lark), or one in the grammar library's own language ("lark").
    """

    kind: Literal["json_schema", "regex", "choice", "grammar", "lark"]
    text: str
    after_token_ids: tuple[int, ...] = ()
    """With these, the grammar begins where the generated tokens first hold them in a row (the end of a reasoning
    part, for instance); whatever comes before is free."""
    field: str = ""
    """The request's field it came from, for error messages."""


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """After `max_tokens` tokens of thinking `end_token_ids` come next, whatever the model would say.

    Thinking begins behind `begin_token_ids` where the answer begins with them; where they are (), with the answer.
    """

    max_tokens: int
    end_token_ids: tuple[int, ...]
    begin_token_ids: tuple[int, ...] = ()


class PoolingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What is wanted of a text's rows instead of a next token.

    embed: one vector, pooled as the engine's settings say. token_embed: the row of every token. score: one number of
    the engine's classification head. `every_row` says that the rows of all tokens are needed, so that none may be taken
    from the prefix cache. A vector is cut to `dimensions`, then scaled to length 1 with `normalize`.
    """

    task: Literal["embed", "token_embed", "score"]
    every_row: bool
    normalize: bool = True
    dimensions: int | None = None
    activation: Literal["sigmoid", "identity"] = "sigmoid"
    """Of a score."""
    second_text_at: int | None = None
    """Where the second of a pair of texts begins, for an encoder that is told so."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How the tokens of one request are chosen. Every default is "has no effect".

    `top_k` 0 means no limit. `seed` is always set by the time the core sees it, so a preempted sequence
    draws the same tokens again; sequence `index` of a request draws from (seed, index, position).
    `stop_token_ids` already holds the model's end-of-sequence ids unless the request ignores them.
    `logprobs` is the number of alternatives to return besides the chosen token; None means none at all.
    With `logprob_token_ids` (and `logprobs` set) the alternatives are these tokens, in this order, not the best.
    `prompt_logprobs` is the number of alternatives for every prompt token but the first; such a prompt is computed,
    not taken from the prefix cache.

    `allowed_token_ids` None allows every token. A sequence of `bad_words` may not be completed: its last token is
    forbidden where the generated tokens end in the others. Whoever makes these leaves a token to take everywhere.

    With a `grammar` the sequence ends, with finish_reason "stop", as soon as the grammar allows nothing more. What
    else is asked for takes away from what the grammar allows; where nothing is left the sequence ends in an error.
    """

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    seed: int = 0
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    repetition_detection: RepetitionDetection | None = None
    grammar: GrammarSpec | None = None
    thinking: ThinkingBudget | None = None
    pooling: PoolingParams | None = None
    """With it nothing is chosen: the sequence ends, with finish_reason "stop", when its prompt has been computed."""


class AddRequest(msgspec.Struct, frozen=True, tag="add", kw_only=True):
    """Start generating. `arrival_s` is `time.time()` at the server; lower `priority` runs earlier."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    arrival_s: float
    priority: int = 0
    cache_salt: str | None = None
    is_let_in: bool = False
    """Its sender bounds how much waits, and the queue's limits are not asked: the first prompt of its client's request
    has been let in, or there is no client."""
    queued_tokens: int | None = None
    """Prompt tokens of all prompts of the client's request, where that has more than this one."""

    @property
    def is_background(self) -> bool:
        """Nobody waits for it."""
        return is_background(self.priority)


class AbortRequest(msgspec.Struct, frozen=True, tag="abort", kw_only=True):
    """Stop a sequence (or, with index None, all sequences of the request) and free its blocks."""

    request_id: str
    index: int | None = None


ControlAction = Literal["reset_prefix_cache", "release_kv_cache", "restore_kv_cache", "start_profile", "stop_profile"]


class Control(msgspec.Struct, frozen=True, tag="control", omit_defaults=True, kw_only=True):
    """Something the core does between two steps and answers with `Controlled`.

    reset_prefix_cache forgets every cached block that no running sequence holds. release_kv_cache gives the memory of
    the whole KV cache back, and restore_kv_cache takes it again: between them there must be no request.
    stop_profile writes what was profiled since start_profile to `path`.
    """

    number: int
    action: ControlAction
    path: str | None = None


class Stop(msgspec.Struct, frozen=True, tag="stop", kw_only=True):
    """Leave the loop and exit 0."""


ToCore = AddRequest | AbortRequest | Control | Stop


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of one token: of itself and of the alternatives, best first (or as `logprob_token_ids`)."""

    token_id: int
    logprob: float
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


class SequenceOutput(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What one step gave one sequence. `stop_token_id` is set when a token ended it.

    `prompt_logprobs` continue where the request's last ones ended, beginning with the second prompt token; all of
    them come before the first generated token. An output may hold them and no token.
    """

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    pooled: bytes | None = None
    """What `SamplingParams.pooling` asked for, as float32 little-endian."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    error_code: str = "engine_error"
    """With finish_reason "error": engine_error, or grammar_dead_end."""
    num_cached_tokens: int = 0
    """Prompt tokens served from the prefix cache; set with the sequence's first token."""
    queue_s: float = 0.0
    """Seconds from arrival to being scheduled for the first time; set with the first token."""
    num_preemptions: int = 0


class StepStats(msgspec.Struct, kw_only=True):
    """Counters after a step. `*_total` grow for the life of the core; the rest are the present state."""

    step: int
    step_s: float
    num_running: int
    num_waiting: int
    waiting_reason: Literal["", "max_num_seqs", "kv_cache"]
    num_prefill_tokens: int
    num_decode_tokens: int
    kv_blocks_used: int
    kv_blocks_total: int
    prefix_queries_total: int
    prefix_hits_total: int
    """Prompt tokens found in the KV cache."""
    preemptions_total: int
    host_blocks_used: int = 0
    host_blocks_total: int = 0
    num_swapped: int = 0
    """Preempted sequences that wait and whose blocks lie in the host tier."""
    host_hits_total: int = 0
    """Prompt tokens found in the host tier."""
    host_saved_total: int = 0
    """Blocks moved to the host tier, and back."""
    host_loaded_total: int = 0


class StepOutput(msgspec.Struct, frozen=True, tag="step", kw_only=True):
    """Sent after every step, also when it gave no token: it is the heartbeat."""

    outputs: list[SequenceOutput]
    stats: StepStats


class Loading(msgspec.Struct, frozen=True, tag="loading", kw_only=True):
    """Progress while the core starts, `done` and `total` in bytes or steps of `phase`."""

    phase: str
    done: int
    total: int


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the core found out while starting; everything the start-up block prints."""

    model: str
    family: str
    device: str
    dtype: str
    kernels: str
    instruction_set: str
    threads: int
    weight_bytes: int
    kv_cache_bytes: int
    kv_cache_dtype: str
    block_size: int
    num_blocks: int
    num_host_blocks: int = 0
    """Of the tier in host memory behind the KV cache (--swap-space)."""
    kv_cache_tokens: int
    """Tokens of requests of `max_model_len` that fit the KV cache together."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    step_time_target_s: float
    gives: str = "text"
    """What comes of a request: text, or what vectors or scores are made of, in words."""
    vector_width: int = 0
    """Numbers of a vector, where vectors are given."""
    phase_seconds: dict[str, float]
    notes: list[str]

    @property
    def max_running(self) -> int:
        """Sequences that run at once: each must be able to get one token of every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_concurrency(self) -> float:
        """Requests of `max_model_len` tokens that fit the KV cache at once."""
        return self.kv_cache_tokens / self.max_model_len


class Ready(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    info: EngineInfo


class Refused(msgspec.Struct, frozen=True, tag="refused", kw_only=True):
    """The answer to an AddRequest that can never run, or that finds the queue full. It has left no trace."""

    request_id: str
    code: str
    """context_length_exceeded, kv_cache_too_small, queue_full, invalid_grammar, invalid_request or engine_error."""
    message: str
    param: str | None = None
    """The field of the request that is at fault, where that is known."""


class Controlled(msgspec.Struct, frozen=True, tag="controlled", omit_defaults=True, kw_only=True):
    """The answer to the Control of that number. `count`: blocks forgotten, or bytes released or taken."""

    number: int
    count: int = 0
    error: str | None = None
    """Why it was not done."""


class Failed(msgspec.Struct, frozen=True, tag="failed", kw_only=True):
    """The core could not start. `message` says what to change."""

    message: str


FromCore = StepOutput | Loading | Ready | Refused | Controlled | Failed

to_core_decoder = msgspec.msgpack.Decoder(ToCore)
from_core_decoder = msgspec.msgpack.Decoder(FromCore)
encode = msgspec.msgpack.Encoder().encode
