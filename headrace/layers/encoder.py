"""The encoder that BERT and its relatives share: every row attends to all of its text, norms come after each part."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.kernels.ops import BatchHandle, Buffer, Handle, Kernels
from headrace.layers.linear import Linear
from headrace.layers.norm import LayerNorm


@dataclass(frozen=True, slots=True)
class EncoderBlock:
    num_heads: int
    head_dim: int
    qkv: Linear
    attention_output: Linear
    attention_norm: LayerNorm
    inner: Linear
    outer: Linear
    mlp_norm: LayerNorm

    def forward(self, kernels: Kernels, x: Buffer, batch: BatchHandle) -> Buffer:
        width = self.num_heads * self.head_dim
        q, k, v = kernels.split(self.qkv.forward(kernels, x), (width, width, width))
        attended = kernels.encoder_attention(q, k, v, num_heads=self.num_heads, scale=self.head_dim**-0.5, batch=batch)
        attended = self.attention_output.forward(kernels, attended)
        x = self.attention_norm.forward(kernels, kernels.add(attended, x))
        fed = self.outer.forward(kernels, kernels.gelu(self.inner.forward(kernels, x)))
        return self.mlp_norm.forward(kernels, kernels.add(fed, x))


@dataclass(frozen=True, slots=True)
class ClassificationHead:
    dense: Linear
    output: Linear

    def forward(self, kernels: Kernels, x: Buffer) -> Buffer:
        """[rows, labels]"""
        return self.output.forward(kernels, kernels.tanh(self.dense.forward(kernels, x)))


@dataclass(frozen=True, slots=True)
class Encoder:
    """`positions` has what is added at each position of a first text, then of a second one."""

    words: Handle
    positions: Handle
    norm: LayerNorm
    blocks: tuple[EncoderBlock, ...]
    head: ClassificationHead | None

    def hidden(self, kernels: Kernels, batch: BatchHandle) -> Buffer:
        """[rows, hidden] after the last norm."""
        x = kernels.add(kernels.embedding(self.words, batch), kernels.position_embedding(self.positions, batch))
        x = self.norm.forward(kernels, x)
        for block in self.blocks:
            x = block.forward(kernels, x, batch)
        return x

    def forward(self, kernels: Kernels, batch: BatchHandle) -> Buffer:
        """[sampling rows, labels]: what the head makes of the first row of each text."""
        assert self.head is not None
        return self.head.forward(kernels, kernels.sample_rows(self.hidden(kernels, batch), batch))
