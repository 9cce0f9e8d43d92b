"""What the engine knows of a model, in one form whatever file it was read from."""

from __future__ import annotations

import msgspec


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The architecture of a decoder. Names follow Hugging Face's config.json.

    `family` is the key of `headrace.models.FAMILIES`. `dtype` is the checkpoint's own: float32, float16 or
    bfloat16 (bfloat16 for a quantised GGUF). `rope_scaling` is the raw dictionary, None for plain rotary.
    """

    family: str
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

    def kv_bytes_per_token(self, bytes_per_value: float) -> int:
        """Bytes of keys and values that one token takes over all layers."""
        return int(2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value)
