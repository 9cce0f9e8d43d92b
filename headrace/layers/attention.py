"""Self-attention over the paged KV cache, with rotary positions and grouped key-value heads."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config.model import ModelConfig
from headrace.kernels.ops import BatchHandle, Buffer, Kernels
from headrace.layers.linear import Linear
from headrace.layers.rotary import Rotary
from headrace.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Attention:
    layer: int
    config: ModelConfig
    qkv: Linear
    output: Linear
    rotary: Rotary

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        kernels: Kernels,
        name: str,
        *,
        layer: int,
        config: ModelConfig,
        rotary: Rotary,
        qkv_bias: bool,
        output_bias: bool,
    ) -> Attention:
        """`name` is the module that holds q_proj, k_proj, v_proj and o_proj."""
        qkv = Linear.load(checkpoint, kernels, [f"{name}.{part}_proj" for part in "qkv"], bias=qkv_bias)
        output = Linear.load(checkpoint, kernels, [f"{name}.o_proj"], bias=output_bias)
        return cls(layer, config, qkv, output, rotary)

    def forward(self, kernels: Kernels, x: Buffer, batch: BatchHandle) -> Buffer:
        config = self.config
        kv_width = config.num_kv_heads * config.head_dim
        widths = (config.num_heads * config.head_dim, kv_width, kv_width)
        q, k, v = kernels.split(self.qkv.forward(kernels, x), widths)
        attended = kernels.attention(
            self.rotary.forward(kernels, q, batch),
            self.rotary.forward(kernels, k, batch),
            v,
            layer=self.layer,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            scale=config.head_dim**-0.5,
            batch=batch,
        )
        return self.output.forward(kernels, attended)
