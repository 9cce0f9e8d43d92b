"""A request and its sequences: everything the engine remembers of them, in one object each.

The one idea is a pair of counters. A sequence has `num_tokens` known and `num_planned_tokens` of them given to
steps; the difference is what it still wants. Prompt, cached prefix, chunk, decode and recomputation after a
preemption differ only in these two numbers:

    tokens    [p p p p p p p p p p | g g g]        p prompt, g generated
    computed   ^^^^^^^^^^^^ results are in; planned may be ahead of it while steps are in flight
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from headrace.engine.block_hash import BlockKey
from headrace.protocol.ipc import AddRequest, SamplingParams


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


Rank = tuple[int, float, int, int]


@dataclass(slots=True, eq=False)
class Request:
    """What a client asked for. `held` are the indexes of sequences not made yet: forks of the first one's prompt."""

    message: AddRequest
    rank: tuple[int, float, int]
    """(priority, arrival, order of arrival here): lower is served earlier and preempted later."""
    domain: bytes
    max_new_tokens: int
    """The most tokens one sequence may generate: `max_tokens`, or less where the context ends."""
    held: list[int] = field(default_factory=list)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    """By index; those that wait or run."""
    started: bool = False
    num_cached_tokens: int = 0
    num_scored_tokens: int = 0
    """Prompt tokens after the first whose log-probabilities have been given out."""

    @property
    def params(self) -> SamplingParams:
        return self.message.params

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.message.token_ids)

    @property
    def scores(self) -> bool:
        """Log-probabilities of prompt tokens are still to come, so the prompt must be computed, cached or not."""
        return self.params.prompt_logprobs is not None and self.num_scored_tokens < self.num_prompt_tokens - 1

    @property
    def is_background(self) -> bool:
        return self.message.is_background

    @property
    def needs_every_row(self) -> bool:
        """Whatever the prefix cache holds of the prompt is of no use: it has keys and values, not rows."""
        return self.scores or (self.params.pooling is not None and self.params.pooling.every_row)


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's n answers. Owns its block tables, one for each group of layers; nobody else writes here but
    scheduler and KV cache.

    `seq_id` names its row in the runtime's table. It changes when the sequence is preempted, so whatever a
    step in flight still reports under the old name belongs to nobody.
    """

    seq_id: int
    request: Request
    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_tokens: int = field(init=False)
    """Tokens known, and those being sampled by steps in flight, whose values are not."""
    most_tokens: int = field(init=False)
    """At so many the sequence ends; the last one is never computed."""
    name: str = field(init=False)
    """Its request's."""
    params: SamplingParams = field(init=False)
    state: SequenceState = SequenceState.WAITING
    num_planned_tokens: int = 0
    num_computed_tokens: int = 0
    num_settled_tokens: int = 0
    """Up to so many tokens the next one needs no other blocks than those the runtime has been told of."""
    block_tables: list[list[int]] = field(default_factory=list)
    first_blocks: list[int] = field(default_factory=list)
    """Where in each block table the blocks held begin; later than 0 only where the group's layers have a window."""
    num_announced_blocks: list[int] = field(default_factory=list)
    """Leading entries of each block table that plans have told the runtime."""
    block_keys: list[BlockKey] = field(default_factory=list)
    num_published_blocks: int = 0
    loads: list[tuple[int, int]] = field(default_factory=list)
    """Slots of the host tier and blocks that the sequence's next step fetches."""
    fetching: bool = False
    """More of its blocks lie in the host tier than a step may fetch."""
    num_kept_blocks: int = 0
    """Of a preempted sequence, how many blocks of each group had a name when it gave them up."""
    num_passed_tokens: int = 0
    """Prefill tokens that went to later comers while this one had more to compute."""
    num_overtaken: int = 0
    """Sequences of better priority that came later and were started while this one waited longest of all."""
    num_preemptions: int = 0
    queue_s: float | None = None

    def __post_init__(self) -> None:
        self.num_tokens = len(self.token_ids)
        self.most_tokens = self.num_prompt_tokens + self.request.max_new_tokens
        self.name, self.params = self.request.message.request_id, self.request.params

    @property
    def rank(self) -> Rank:
        return (*self.request.rank, self.index)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def remaining_tokens(self) -> int:
        """Tokens still to be given to steps."""
        return 0 if self.num_tokens >= self.most_tokens else self.num_tokens - self.num_planned_tokens

    def forget_progress(self) -> None:
        """Back to nothing computed; the tokens generated so far stay."""
        self.num_kept_blocks = self.num_published_blocks
        self.num_tokens = len(self.token_ids)
        self.num_planned_tokens = self.num_computed_tokens = self.num_settled_tokens = 0
        self.num_published_blocks = 0
