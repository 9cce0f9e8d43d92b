"""A model written as a GGUF file, under the names the format's own library has for its tensors, is read as the same
model that lies in a directory: same configuration, same weights."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.numpy import load_file

from headrace.config.model_files import ModelFiles, open_model
from headrace.weights.checkpoint import Checkpoint
from tests.small_models import Family, write_random_model

LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 4.0, 8.0, 16.0]}
MODELS: dict[str, tuple[Family, str, dict[str, object]]] = {
    "mixtral": ("mixtral", "llama", {"num_local_experts": 3, "sliding_window": None}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 24}),
    "qwen3_moe": (
        "qwen3_moe",
        "qwen3moe",
        {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "phi3": ("phi3", "phi3", {"pad_token_id": 0, "sliding_window": 50, "partial_rotary_factor": 0.75}),
    "phi3_longrope": (
        "phi3",
        "phi3",
        {
            "pad_token_id": 0,
            "hidden_size": 32,
            "rope_scaling": LONGROPE,
            "original_max_position_embeddings": 2048,
        },
    ),
    "gemma3": (
        "gemma3",
        "gemma3",
        {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 40, "tie_word_embeddings": True},
    ),
}


def as_gguf(folder: Path, architecture: str, files: ModelFiles) -> Path:
    """What a converter writes: fields of the configuration as metadata, tensors renamed, permuted and joined."""
    config = files.config
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.rotary_dim)
    writer.add_eos_token_id(config.eos_token_ids[0])
    if config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if config.num_experts:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_token)
        if architecture != "llama":
            writer.add_expert_feed_forward_length(config.expert_intermediate_size)
    if config.rope_scaling:
        writer.add_rope_scaling_orig_ctx_len(int(str(config.rope_scaling["original_max_position_embeddings"])))
        for name in ("long", "short"):
            factors = np.array(config.rope_scaling[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    stored = load_file(folder / "model.safetensors")
    number = gguf.MODEL_ARCH_NAMES
    arch = next(key for key, name in number.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_layers)
    experts: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for name, values in stored.items():
        if config.family == "mixtral" and (found := re.search(r"\.([qk])_proj", name)):
            heads = config.num_heads if found[1] == "q" else config.num_kv_heads
            values = values.reshape(heads, 2, config.head_dim // 2, -1).swapaxes(1, 2).reshape(values.shape)
        if config.family == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        if found := re.search(r"\.experts\.(\d+)\.", name):
            experts[name.replace(found[0], ".experts.")][int(found[1])] = values
        else:
            writer.add_tensor(names.get_name(name, (".weight",)), np.ascontiguousarray(values))
    for name, parts in experts.items():
        joined = np.stack([parts[i] for i in range(len(parts))])
        writer.add_tensor(names.get_name(name, (".weight",)), joined)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


@pytest.mark.parametrize("name", MODELS)
def test_a_gguf_file_is_the_model_of_the_directory(name: str, tmp_path: Path) -> None:
    family, architecture, overrides = MODELS[name]
    directory = open_model(write_random_model(tmp_path, family, **overrides))
    file = open_model(as_gguf(tmp_path, architecture, directory))
    wanted, found = msgspec.structs.asdict(directory.config), msgspec.structs.asdict(file.config)
    scaling = wanted.pop("rope_scaling"), found.pop("rope_scaling")
    for field, value in wanted.items():
        if field != "quantization":
            assert found[field] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), field
    assert found["quantization"] == "gguf" and scaling[0] == scaling[1]
    ours, theirs = Checkpoint(file), Checkpoint(directory)
    assert file.tensors.keys() == directory.tensors.keys()
    for tensor, info in directory.tensors.items():
        if len(info.shape) == 2:
            np.testing.assert_array_equal(ours.matrix(tensor).to_float32(), theirs.matrix(tensor).to_float32())
        else:
            np.testing.assert_allclose(ours.vector(tensor), theirs.vector(tensor), atol=1e-6)


def test_the_experts_of_an_old_mixtral_file_lie_one_by_one() -> None:
    from headrace.config.gguf_format import GGUFTensor
    from headrace.config.gguf_names import hugging_face_tensors

    tensor = GGUFTensor("blk.3.ffn_down.7.weight", (4, 8), "F32", 0, 128)
    ((name, same),) = hugging_face_tensors("llama", tensor)
    assert (name, same) == ("model.layers.3.block_sparse_moe.experts.7.w2.weight", tensor)
