"""The pre-norm decoder that most families share: blocks around a residual stream, and the projection to logits.

The residual is added where the next norm needs it, so every block takes and gives a pair: what the last part
computed, not added yet, and the stream it belongs to. A family may also normalise what a part gives to the stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.kernels.ops import BatchHandle, Buffer, Kernels
from headrace.layers.attention import Attention
from headrace.layers.embedding import Embedding
from headrace.layers.linear import Linear
from headrace.layers.norm import RMSNorm


class FeedForward(Protocol):
    def forward(self, kernels: Kernels, x: Buffer) -> Buffer: ...


@dataclass(frozen=True, slots=True)
class DecoderBlock:
    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: FeedForward
    attention_out_norm: RMSNorm | None = None
    mlp_out_norm: RMSNorm | None = None

    def forward(
        self, kernels: Kernels, x: Buffer, residual: Buffer | None, batch: BatchHandle
    ) -> tuple[Buffer, Buffer]:
        if residual is None:
            normed, residual = self.attention_norm.forward(kernels, x), x
        else:
            normed, residual = self.attention_norm.of_sum(kernels, x, residual)
        x = self.attention.forward(kernels, normed, batch)
        if self.attention_out_norm is not None:
            x = self.attention_out_norm.forward(kernels, x)
        normed, residual = self.mlp_norm.of_sum(kernels, x, residual)
        x = self.mlp.forward(kernels, normed)
        if self.mlp_out_norm is not None:
            x = self.mlp_out_norm.forward(kernels, x)
        return x, residual


@dataclass(frozen=True, slots=True)
class Decoder:
    embedding: Embedding
    blocks: tuple[DecoderBlock, ...]
    norm: RMSNorm
    output: Linear | None
    """None where no logits are wanted."""

    def hidden(self, kernels: Kernels, batch: BatchHandle) -> Buffer:
        """[rows, hidden] after the last norm."""
        x, residual = self.embedding.forward(kernels, batch), None
        for block in self.blocks:
            x, residual = block.forward(kernels, x, residual, batch)
        return self.norm.of_sum(kernels, x, residual)[0]

    def forward(self, kernels: Kernels, batch: BatchHandle) -> Buffer:
        """Logits [sampling rows, vocab]."""
        assert self.output is not None
        return self.output.forward(kernels, kernels.sample_rows(self.hidden(kernels, batch), batch))
