"""What a scheduler is given to work with, and which requests it must refuse because they can never be served.

Everything accepted here fits the model's context and, alone, the whole KV cache; from that follows that the
scheduler can never wait for ever: when nothing runs, whatever is first in the queue can be started.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.config.kv_blocks import KVBlocks
from headrace.config.settings import SCORED_ROWS_PER_STEP
from headrace.engine.block_hash import domain_digest
from headrace.engine.request import Request
from headrace.protocol.ipc import AddRequest

RefusalCode = Literal[
    "invalid_request", "invalid_grammar", "context_length_exceeded", "kv_cache_too_small", "queue_full"
]

_LARGEST_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Sizes in tokens, blocks and seconds; `windows`, of each group of layers with block tables of its own (an encoder
    has none, and no blocks), and `num_host_blocks`, of the tier in host memory.

    `step_time_target_s` bounds steps in which prefill joins decodes, `max_scored_rows` the prompt tokens that one
    step gives log-probabilities of."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    windows: tuple[int | None, ...] = (None,)
    num_host_blocks: int = 0
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    max_num_queued_reqs: int = 1024
    max_num_queued_tokens: int | None = None
    step_time_target_s: float = 0.1
    max_scored_rows: int = SCORED_ROWS_PER_STEP

    def __post_init__(self) -> None:
        sizes = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "max_scored_rows")
        for name in (*sizes, "num_blocks") if self.windows else sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def blocks(self) -> KVBlocks:
        return KVBlocks(self.windows, self.block_size, self.max_num_batched_tokens)

    @property
    def max_running(self) -> int:
        """Sequences that may run at once, as in `EngineInfo`."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was not accepted. `message` is written for the client."""

    code: RefusalCode
    message: str
    param: str | None = None
    """The field of the request that is at fault, where that is known."""


def refusal(message: AddRequest, settings: SchedulerSettings) -> Refusal | None:
    """The reason this request could never be served, if there is one."""
    num_prompt, num_new = len(message.token_ids), message.params.max_tokens
    if num_prompt == 0:
        return Refusal("invalid_request", "The prompt is empty; it must have at least one token.")
    if min(message.token_ids) < 0 or max(message.token_ids) > _LARGEST_TOKEN_ID:
        return Refusal("invalid_request", "The prompt holds a token id that is negative or beyond any vocabulary.")
    if num_new < 1:
        return Refusal("invalid_request", f"max_tokens is {num_new}; it must be at least 1.")
    if message.params.n < 1:
        return Refusal("invalid_request", f"n is {message.params.n}; it must be at least 1.")
    if message.params.pooling is not None:
        num_new = 0
        if num_prompt > settings.max_model_len:
            return Refusal(
                "context_length_exceeded",
                f"This model's maximum context length is {settings.max_model_len} tokens. However, the text has "
                f"{num_prompt}. Shorten it, or send truncate_prompt_tokens.",
            )
    if num_prompt + num_new > settings.max_model_len:
        return Refusal(
            "context_length_exceeded",
            f"This model's maximum context length is {settings.max_model_len} tokens. However, you requested "
            f"{num_prompt + num_new} tokens ({num_prompt} in the prompt, {num_new} for the completion). "
            "Please shorten the prompt or ask for fewer tokens (max_tokens).",
        )
    num_stored = num_prompt + max(num_new, 1) - 1
    blocks = settings.blocks
    if blocks.most_held(num_stored) > settings.num_blocks:
        capacity = blocks.longest(settings.num_blocks, num_stored)
        return Refusal(
            "kv_cache_too_small",
            f"The request needs {num_stored} tokens of KV cache ({num_prompt} for the prompt, up to "
            f"{num_stored - num_prompt} for the completion), but the whole cache holds {capacity}. Ask for at most "
            f"{capacity + 1} tokens in all, or start the server with a larger --kv-cache-memory-bytes "
            "(or --gpu-memory-utilization).",
        )
    if not settings.enable_chunked_prefill and num_prompt > settings.max_num_batched_tokens:
        return Refusal(
            "context_length_exceeded",
            f"The prompt has {num_prompt} tokens, but without chunked prefill a prompt must fit one step of "
            f"{settings.max_num_batched_tokens} tokens. Shorten the prompt, or start the server with "
            f"--enable-chunked-prefill or --max-num-batched-tokens {num_prompt}.",
        )
    return None


def request_of(message: AddRequest, settings: SchedulerSettings, order: int) -> Request:
    """What is let in; `order` counts the arrivals."""
    by_priority = settings.policy == "priority"
    # What names of its blocks begin with: without prefix caching no other request has the same.
    salt = [] if message.cache_salt is None else ["cache_salt", message.cache_salt]
    own = [] if settings.enable_prefix_caching else ["request", str(order)]
    return Request(
        message=message,
        rank=(message.priority, message.arrival_s, order) if by_priority else (message.is_background, 0.0, order),
        domain=domain_digest([*salt, *own]),
        # What is pooled has no next token, but ends as if after one.
        max_new_tokens=max(1, min(message.params.max_tokens, settings.max_model_len - len(message.token_ids))),
        held=list(range(1, message.params.n)),
    )
