"""What the engine knows of a model, in one form whatever file it was read from."""

from __future__ import annotations

import msgspec

from headrace.config.kv_cache_format import KV_CACHE_FORMATS


class LayerGroup(msgspec.Struct, frozen=True):
    """Layers that share block tables, because they keep the same tokens: all, or those in their `window`."""

    layers: tuple[int, ...]
    window: int | None


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The architecture of a decoder, or of an encoder (config/encoder.py). Names follow Hugging Face's config.json.

    `family` is the key of `headrace.models.FAMILIES`. `dtype` is the checkpoint's own: float32, float16 or
    bfloat16 (bfloat16 for a quantised GGUF). `rope_scaling` is the raw dictionary, None for plain rotary.
    """

    family: str
    architecture: str = ""
    """As config.json calls it, of a family that is not Headrace's own."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, object] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: str | None = None
    """The method named by the checkpoint (awq, gptq, fp8, gguf, ...), None for plain weights."""
    sliding_window: int | None = None
    """Tokens that a row of a sliding layer sees, its own among them; None when every layer sees all."""
    sliding_layers: tuple[bool, ...] = ()
    """For each layer, whether it has the window; empty without one."""
    qk_norm: bool = False
    """Queries and keys are normalised head by head before they are rotated."""
    query_scale: float | None = None
    """What scores are multiplied with; None = head_dim ** -0.5."""
    partial_rotary_factor: float = 1.0
    rope_local_theta: float | None = None
    """Rotary base of the sliding layers, whose rotary is never scaled; None = as all others."""
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_intermediate_size: int = 0
    normalize_expert_weights: bool = True
    """Whether the weights of a token's experts are scaled to a sum of 1."""
    dense_layers: tuple[int, ...] = ()
    """In a mixture of experts, the layers that have a plain feed-forward part."""
    has_output: bool = True
    """Whether there is a matrix that makes logits of rows: not in an encoder, nor in a bare decoder."""
    is_encoder: bool = False
    """Reads a whole text at once, in both directions, and keeps no keys and values; `rms_norm_eps` is then that of its
    layer norms, which are after each part instead of before it."""
    first_position: int = 0
    """Of an encoder's table of positions, which row is the first token's; the limit of positions counts from it."""
    num_token_types: int = 0
    """Of an encoder: 2 where the second of a pair of texts is told from the first."""
    num_labels: int = 0
    """Outputs of an encoder's classification head; 0 without one."""

    @property
    def rotary_dim(self) -> int:
        """The first so many values of a head are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    def window(self, layer: int) -> int | None:
        """How many tokens a row of this layer sees; None = all before it."""
        return self.sliding_window if self.sliding_layers and self.sliding_layers[layer] else None

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """The layers in groups of at most `layers_per_group`, those without a window first.

        A block holds the keys and values of one group's layers. Full layers keep every token, so their groups are
        filled: as many groups as there are full layers for each sliding one (at least one), all of one size.
        Sliding layers, of which a window is kept, take as many groups of that size as they need. 4 full and 22
        sliding layers are groups of 4 and of 4 4 4 4 4 2; layers of one kind are one group. An encoder has none.
        """
        if self.is_encoder:
            return ()
        sliding = [layer for layer in range(self.num_layers) if self.window(layer) is not None]
        full = [layer for layer in range(self.num_layers) if self.window(layer) is None]
        size = self.layers_per_group

        def groups(layers: list[int], window: int | None) -> list[LayerGroup]:
            return [LayerGroup(tuple(layers[i : i + size]), window) for i in range(0, len(layers), size)]

        return (*groups(full, None), *groups(sliding, self.sliding_window))

    @property
    def layers_per_group(self) -> int:
        num_sliding = sum(self.sliding_layers)
        num_full = self.num_layers - num_sliding
        if not num_sliding or not num_full:
            return self.num_layers
        return -(-num_full // max(1, num_full // num_sliding))

    def cache_place(self, layer: int) -> tuple[int, int]:
        """(group, place in the group) of a layer."""
        groups = self.layer_groups
        group = next(g for g, own in enumerate(groups) if layer in own.layers)
        return group, groups[group].layers.index(layer)

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and layer not in self.dense_layers

    def kv_bytes_per_token(self, kv_cache_dtype: str) -> int:
        """Bytes of keys and values that one token takes in a block: over the layers of one group."""
        head_bytes = KV_CACHE_FORMATS[kv_cache_dtype].head_bytes(self.head_dim)
        return 2 * self.layers_per_group * self.num_kv_heads * head_bytes
