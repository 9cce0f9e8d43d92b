"""The tensors of a GGUF file under the names, and in the pieces, that Hugging Face's checkpoints have.

One tensor of a GGUF file may hold all experts of a layer, one after another; each becomes a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from headrace.config.gguf_format import GGUFTensor

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# By GGUF architecture, what differs.
_OWN_NAMES: dict[str, dict[str, str]] = {
    "llama": {"ffn_gate_inp": "block_sparse_moe.gate"},
    "qwen3moe": {"ffn_gate_inp": "mlp.gate"},
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_EXPERTS: dict[str, tuple[str, dict[str, str]]] = {
    "llama": ("block_sparse_moe.experts", {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}),
    "qwen3moe": ("mlp.experts", {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}),
}


def hugging_face_tensors(architecture: str, tensor: GGUFTensor) -> Iterator[tuple[str, GGUFTensor]]:
    """blk.7.attn_q.weight as model.layers.7.self_attn.q_proj.weight; nothing for a name with no counterpart.

    The two forms of experts: blk.7.ffn_up_exps.weight [experts, out, in], and blk.7.ffn_up.3.weight [out, in].
    """
    parts = tensor.name.split(".")
    if len(parts) == 2 and parts[0] in _TOP_NAMES:
        yield f"{_TOP_NAMES[parts[0]]}.{parts[1]}", tensor
        return
    if len(parts) not in (4, 5) or parts[0] != "blk" or not parts[1].isdecimal():
        return
    layer, kind = f"model.layers.{parts[1]}", parts[2]
    module, projections = _EXPERTS.get(architecture, ("", {}))
    if len(parts) == 5:
        if kind in projections and parts[3].isdecimal():
            yield f"{layer}.{module}.{parts[3]}.{projections[kind]}.{parts[4]}", tensor
        return
    names = {**_LAYER_NAMES, **_OWN_NAMES.get(architecture, {})}
    if kind in names:
        yield f"{layer}.{names[kind]}.{parts[3]}", tensor
    elif kind.removesuffix("_exps") in projections and kind.endswith("_exps") and len(tensor.shape) == 3:
        count, *shape = tensor.shape
        size = tensor.num_bytes // count
        for expert in range(count):
            one = replace(tensor, shape=tuple(shape), offset=tensor.offset + expert * size, num_bytes=size)
            yield f"{layer}.{module}.{expert}.{projections[kind.removesuffix('_exps')]}.{parts[3]}", one
