"""The list of operations a device must offer; a model's forward is written in these and nothing else.

Buffers are opaque [rows, width] arrays of the device in the compute dtype; `rows` (tokens of the flat batch)
is the only dynamic size. Handles are what `prepare_*` returned. No operation reads a buffer's values into
Python, so the same forward runs eagerly on the reference and can be recorded once and replayed elsewhere.

Promise: the values of one row never depend on the other rows of the batch, on the number of rows, or on how
the row's own prefix was split into steps. Every implementation keeps it bit for bit on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.kernels.weight import Weight

Buffer = Any
Handle = Any
BatchHandle = Any

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's flat batch of T tokens from S sequences, as host arrays, contiguous. The same object may come again
    with other numbers in its arrays.

    Sequence s owns rows [query_start[s], query_start[s + 1]), which are the last rows of its `seq_lens[s]`
    tokens. Layers are in G groups (config/model.py), and a block holds keys and values of one group's layers:
    `slot_mapping[g, t]` = block_id * block_size + offset is where the layers of group g store row t's,
    `block_tables[g, s]` lists the group's blocks of sequence s, padded with 0. Where a group's layers have a window,
    a block that lies before everything the sequence's rows of this step see belongs to others by now (its entry is
    any number of a block): no value of it may reach a result. `sample_rows` are the rows whose logits are wanted:
    first those that choose a token, then those that score prompt tokens.
    """

    token_ids: Int32  # [T]
    positions: Int32  # [T]
    slot_mapping: Int32  # [G, T]
    query_start: Int32  # [S + 1]
    seq_lens: Int32  # [S]
    block_tables: Int32  # [G, S, max_blocks]
    sample_rows: Int32  # [R]


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """`num_layers` are those of one group: what a block holds."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class TokenLists:
    """For each of R rows a list of (token, number) pairs: row r owns [starts[r], starts[r + 1])."""

    starts: Int32  # [R + 1]
    token_ids: Int32
    numbers: Float32


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How to choose one token in each of R rows. An optional part is None when no row needs it. The same object may
    come again with other numbers in its arrays.

    Applied in this order to float32 logits: the mask, allowed tokens (a row that lists none allows all), forbidden
    tokens, repetition penalty (each token of `seen` once),
    frequency and presence penalties (`generated` with its counts), logit bias, then temperature, top-k, top-p,
    min-p and the draw. A row with temperature 0 takes the largest logit, lowest token id first. `uniforms` in
    [0, 1) select by inverse distribution function. A row whose `given` is not -1 chooses nothing: that token is its
    token, to be scored. Log-probabilities are of the raw logits.
    """

    temperature: Float32  # [R]
    uniforms: Float32  # [R]
    top_k: Int32 | None = None  # [R], 0 = off
    top_p: Float32 | None = None
    min_p: Float32 | None = None
    repetition_penalty: Float32 | None = None
    frequency_penalty: Float32 | None = None
    presence_penalty: Float32 | None = None
    seen: TokenLists | None = None
    generated: TokenLists | None = None
    logit_bias: TokenLists | None = None
    forbidden: TokenLists | None = None
    allowed: TokenLists | None = None
    mask: NDArray[np.uint32] | None = None  # [R, ceil(vocab / 32)], bit t % 32 of word t // 32: token t may be chosen
    masked: NDArray[np.uint8] | None = None  # [R], 0 = the row's mask is not looked at; None: every row's is
    given: Int32 | None = None  # [R], -1 = choose
    scored: TokenLists | None = None
    """Tokens whose log-probabilities are wanted besides; needs `num_logprobs`."""
    num_logprobs: int | None = None
    """Alternatives to report for every row (the largest any row wants); None = no log-probabilities."""


@dataclass(frozen=True, slots=True)
class SampledRows:
    token_ids: Int32  # [R]
    logprobs: Float32 | None = None  # [R]
    ranks: Int32 | None = None  # [R], 1 = most likely
    top_token_ids: Int32 | None = None  # [R, num_logprobs], most likely first
    top_logprobs: Float32 | None = None
    scored_logprobs: Float32 | None = None  # of the tokens of `SamplingRows.scored`, in their order


@dataclass(frozen=True, slots=True)
class DecodeState:
    """S sequences that go on together: in every step each computes the token that was chosen for it in the last one.

    `batch` has one row of each, all of which sample. A step changes what is in its arrays, and in those of `rows`:

        token = chosen, position + 1, seq_len + 1, slot = of the block table, uniform = draws.uniform(stream, seq_len)

    Whoever holds the state writes new blocks to `batch.block_tables` and `num_blocks`.
    """

    batch: Batch
    num_blocks: Int32  # [G, S], entries of the block tables
    block_size: int
    chosen: Int32  # [S], which a step that chooses writes to
    rows: SamplingRows | None = None
    """What is asked in every step; None where that changes by more than the uniforms."""
    streams: NDArray[np.uint64] | None = None  # [S]; None: nothing is drawn


class Decoder(Protocol):
    """Does the steps of a DecodeState. One that raises leaves a state of no use."""

    def advance(self) -> None:
        """Make the state's arrays those of the next step. ValueError if a sequence has no block for its token."""
        ...

    def step(self) -> list[int]:
        """`advance`, the forward, and a token for each sequence, chosen as `rows` says. Raises InvalidLogits too."""
        ...


class Forward(Protocol):
    """What was captured."""

    def __call__(self, batch: Batch) -> Buffer: ...

    def decoder(self, state: DecodeState) -> Decoder:
        """Of use until this is called with another batch."""
        ...


class InvalidLogits(ArithmeticError):
    """Logits that are not numbers: the model or its weights are broken for these `rows` of the sampling batch."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(f"the logits of sampling row {', '.join(map(str, rows))} are not numbers")
        self.rows = tuple(rows)


class Kernels(Protocol):
    """A device's operations and its KV cache."""

    name: str
    """Of the implementation: "reference", ..."""
    device: str
    """cpu or cuda."""
    dtype: str
    """Compute dtype of buffers: float32, bfloat16 or float16."""
    kv_cache_dtype: str
    """Of the KV cache: one of config/kv_cache_format.py."""
    threads: int
    weight_bytes: int
    """Memory of everything prepared so far."""

    # set-up
    def prepare_weight(self, weight: Weight, exact: bool = False) -> Handle:
        """A matrix for `linear`. One wanted `exact` is not quantised beyond what the checkpoint holds."""
        ...

    def prepare_embedding(self, weight: Weight) -> Handle:
        """A matrix for `embedding`."""
        ...

    def prepare_tied(self, table: Handle) -> Handle:
        """The matrix of an embedding as one for `linear`, held once where the implementation can."""
        ...

    def prepare_experts(self, weights: Iterable[Weight]) -> Handle:
        """One matrix of each expert, all of one shape, for `experts`; each is taken when the one before is done."""
        ...

    def prepare_vector(self, values: NDArray[np.generic], exact: bool = False) -> Handle:
        """A norm weight or bias [width], rounded to the compute dtype unless it is wanted `exact` in float32."""
        ...

    def prepare_rope(self, cos: Float32, sin: Float32) -> Handle:
        """Tables [positions, rotary_dim / 2]; halves (x[i], x[i + rotary_dim / 2]) are rotated together."""
        ...

    def allocate_kv_cache(self, layout: KVCacheLayout) -> None: ...

    def release_kv_cache(self) -> None: ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target) in every layer; all sources are read before any target is written."""
        ...

    def read_blocks(self, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        """What blocks hold, [n, bytes of a block], in a form of the implementation's own."""
        ...

    def write_blocks(self, block_ids: Sequence[int], content: NDArray[np.uint8]) -> None:
        """Have blocks hold what `read_blocks` gave of these or others."""
        ...

    # steps
    def capture(self, forward: Callable[[BatchHandle], Buffer]) -> Forward:
        """What does one step of a batch by this forward: kept and called again, or recorded once and replayed.

        Asked for anew after every `allocate_kv_cache`."""
        ...

    # what a forward is made of
    def embedding(self, table: Handle, batch: BatchHandle) -> Buffer: ...

    def position_embedding(self, table: Handle, batch: BatchHandle) -> Buffer:
        """The table's rows at the batch's positions."""
        ...

    def linear(self, x: Buffer, weight: Handle, bias: Handle | None) -> Buffer: ...

    def rms_norm(self, x: Buffer, weight: Handle, eps: float) -> Buffer:
        """Every part of a row as wide as the weight on its own: the whole row, or each of its heads."""
        ...

    def add_rms_norm(self, x: Buffer, residual: Buffer, weight: Handle, eps: float) -> tuple[Buffer, Buffer]:
        """(norm(x + residual), x + residual)."""
        ...

    def layer_norm(self, x: Buffer, weight: Handle, bias: Handle, eps: float) -> Buffer:
        """(x - mean) / sqrt(variance + eps) * weight + bias, over the whole row."""
        ...

    def split(self, x: Buffer, widths: tuple[int, ...]) -> tuple[Buffer, ...]: ...

    def rope(self, x: Buffer, table: Handle, head_dim: int, batch: BatchHandle) -> Buffer:
        """Rotate every head of x [rows, heads * head_dim] by its row's position."""
        ...

    def attention(
        self,
        q: Buffer,
        k: Buffer,
        v: Buffer,
        *,
        group: int,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        scale: float,
        batch: BatchHandle,
        window: int | None = None,
    ) -> Buffer:
        """Store k and v at the batch's slots, then causal attention of each row over its sequence's blocks.

        `layer` is the layer's place in its `group`, whose slots and blocks are meant. With a `window` a row sees that
        many tokens only, itself and those right before it.
        """
        ...

    def encoder_attention(
        self, q: Buffer, k: Buffer, v: Buffer, *, num_heads: int, scale: float, batch: BatchHandle
    ) -> Buffer:
        """Attention of each row over all its sequence's rows of the step, those behind it too. No cache: a step has
        whole sequences."""
        ...

    def gelu(self, x: Buffer) -> Buffer:
        """x (1 + erf(x / sqrt 2)) / 2."""
        ...

    def tanh(self, x: Buffer) -> Buffer: ...

    def silu_mul(self, x: Buffer) -> Buffer:
        """silu(x[:, :width]) * x[:, width:]."""
        ...

    def gelu_mul(self, x: Buffer) -> Buffer:
        """gelu(x[:, :width]) * x[:, width:], gelu by its approximation with tanh."""
        ...

    def experts(
        self, x: Buffer, router: Buffer, gate_up: Handle, down: Handle, *, top_k: int, normalize: bool
    ) -> Buffer:
        """Each row through its `top_k` experts, what they give weighted and added.

        `router` [rows, experts] are scores, their softmax (in float32) the weights; the `top_k` largest count, of
        equal ones the first, scaled to a sum of 1 if `normalize`. An expert is down(silu(gate(x)) * up(x)).
        """
        ...

    def scale(self, x: Buffer, factor: float) -> Buffer:
        """x * factor, the factor rounded to the compute dtype."""
        ...

    def add(self, a: Buffer, b: Buffer) -> Buffer: ...

    def sample_rows(self, x: Buffer, batch: BatchHandle) -> Buffer:
        """Only the rows that sample."""
        ...

    def sample(self, logits: Buffer, rows: SamplingRows) -> SampledRows:
        """Choose tokens, of which a host array comes back. Raises InvalidLogits."""
        ...

    def host_rows(self, rows: Buffer) -> Float32:
        """What a captured forward gave, as a host array of its own."""
        ...
