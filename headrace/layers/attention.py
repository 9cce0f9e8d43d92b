"""Self-attention over the paged KV cache, with rotary positions and grouped key-value heads.

What differs between families: biases, one projection for q, k and v in the checkpoint, a norm over each head of q
and k, and a window, which is the layer's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config.model import ModelConfig
from headrace.kernels.ops import BatchHandle, Buffer, Kernels
from headrace.layers.linear import Linear
from headrace.layers.norm import RMSNorm
from headrace.layers.rotary import Rotary
from headrace.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Attention:
    layer: int
    group: int
    place: int
    """Where the layer's keys and values are: its group, and its place in it."""
    config: ModelConfig
    qkv: Linear
    output: Linear
    rotary: Rotary
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None

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
        qkv_bias: bool = False,
        output_bias: bool = False,
        fused: bool = False,
        norms_around_one: bool = False,
    ) -> Attention:
        """`name` is the module that holds q_proj, k_proj, v_proj and o_proj; `fused`: qkv_proj and o_proj.

        q_norm and k_norm are there if the configuration says so, `norms_around_one` as RMSNorm.load has it.
        """
        inputs = [f"{name}.qkv_proj"] if fused else [f"{name}.{part}_proj" for part in "qkv"]
        qkv = Linear.load(checkpoint, kernels, inputs, bias=qkv_bias)
        output = Linear.load(checkpoint, kernels, [f"{name}.o_proj"], bias=output_bias)
        group, place = config.cache_place(layer)
        if not config.qk_norm:
            return cls(layer, group, place, config, qkv, output, rotary)
        q_norm, k_norm = (
            RMSNorm.load(checkpoint, kernels, f"{name}.{part}_norm", config.rms_norm_eps, around_one=norms_around_one)
            for part in "qk"
        )
        return cls(layer, group, place, config, qkv, output, rotary, q_norm, k_norm)

    def forward(self, kernels: Kernels, x: Buffer, batch: BatchHandle) -> Buffer:
        config = self.config
        kv_width = config.num_kv_heads * config.head_dim
        widths = (config.num_heads * config.head_dim, kv_width, kv_width)
        q, k, v = kernels.split(self.qkv.forward(kernels, x), widths)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm.forward(kernels, q), self.k_norm.forward(kernels, k)
        attended = kernels.attention(
            self.rotary.forward(kernels, q, batch),
            self.rotary.forward(kernels, k, batch),
            v,
            group=self.group,
            layer=self.place,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            scale=config.attention_scale,
            batch=batch,
            window=config.window(self.layer),
        )
        return self.output.forward(kernels, attended)
