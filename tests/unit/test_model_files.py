"""What a model says of itself is read the same from a directory and a GGUF file, and what cannot work is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.config.errors import ConfigError
from headrace.config.model import ModelConfig
from headrace.config.model_files import open_model
from headrace.config.model_tensors import needed_tensors
from tests.small_models import bundled_gguf

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True, "sliding_window": 256}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Written out here once more, apart from the code under test."""
    hidden, ffn, kv = 64, 128, 32
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (96, hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        shapes |= {
            p + "input_layernorm.weight": (hidden,),
            p + "post_attention_layernorm.weight": (hidden,),
            p + "self_attn.q_proj.weight": (hidden, hidden),
            p + "self_attn.k_proj.weight": (kv, hidden),
            p + "self_attn.v_proj.weight": (kv, hidden),
            p + "self_attn.o_proj.weight": (hidden, hidden),
            p + "mlp.gate_proj.weight": (ffn, hidden),
            p + "mlp.up_proj.weight": (ffn, hidden),
            p + "mlp.down_proj.weight": (hidden, ffn),
        }
        if config["architectures"] == ["Qwen2ForCausalLM"]:
            shapes |= {p + f"self_attn.{n}_proj.bias": (w,) for n, w in (("q", hidden), ("k", kv), ("v", kv))}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (96, hidden)
    return shapes


def arrays(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    return {name: np.full(shape, i, np.float32) for i, (name, shape) in enumerate(shapes.items())}


@pytest.fixture
def directory(tmp_path: Path) -> Callable[..., Path]:
    """Writes a model directory: config.json of `base` with changes (None removes a key) and its weights."""

    def write(base: dict[str, Any] = LLAMA, drop: tuple[str, ...] = (), **changes: Any) -> Path:
        config = {k: v for k, v in {**base, **changes}.items() if v is not None}
        (tmp_path / "config.json").write_text(json.dumps(config))
        kept = {n: a for n, a in arrays(tensor_shapes(base)).items() if n not in drop}
        save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return tmp_path

    return write


# Directories


def test_a_llama_directory_is_described(directory: Callable[..., Path]) -> None:
    files = open_model(directory())
    config = files.config
    assert files.kind == "hf" and config.family == "llama"
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.rope_theta, config.rope_scaling, config.rms_norm_eps) == (500000.0, None, 1e-5)
    assert (config.dtype, config.bos_token_id, config.eos_token_ids) == ("bfloat16", 1, (2,))
    assert not config.attention_bias and not config.tie_word_embeddings and config.quantization is None


def test_a_tensor_s_bytes_lie_where_the_description_says(directory: Callable[..., Path]) -> None:
    files = open_model(directory())
    expected = arrays(tensor_shapes(LLAMA))
    assert files.tensors.keys() == expected.keys()
    for name, info in files.tensors.items():
        raw = info.file.read_bytes()[info.offset : info.offset + info.num_bytes]
        assert np.array_equal(np.frombuffer(raw, np.float32).reshape(info.shape), expected[name]), name
    assert files.total_bytes == sum(a.nbytes for a in expected.values())


@pytest.mark.parametrize(
    ("kinds", "groups"),
    [
        ("ffff", ["0 1 2 3"]),
        ("ssss", ["0 1 2 3"]),
        (
            "sssssf" * 4 + "ss",
            ["5 11 17 23", "0 1 2 3", "4 6 7 8", "9 10 12 13", "14 15 16 18", "19 20 21 22", "24 25"],
        ),
        ("fsfsf", ["0 2 4", "1 3"]),
        ("fffffs", ["0", "1", "2", "3", "4", "5"]),
        ("fffffss", ["0 1 2", "3 4", "5 6"]),
    ],
)
def test_layers_are_cut_into_groups_that_the_full_ones_fill(kinds: str, groups: list[str]) -> None:
    """Full layers keep every token, so a place that they leave unused would cost the most."""
    sliding = tuple(kind == "s" for kind in kinds)
    model = ModelConfig(
        family="gemma3", vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=len(kinds), num_heads=1,
        num_kv_heads=1, head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-6, rope_theta=1e4,
        sliding_window=16 if any(sliding) else None, sliding_layers=sliding if any(sliding) else (),
    )  # fmt: skip
    assert [" ".join(map(str, group.layers)) for group in model.layer_groups] == groups
    for group in model.layer_groups:
        assert {sliding[layer] for layer in group.layers} == {group.window is not None}
        assert len(group.layers) <= model.layers_per_group
    assert [model.cache_place(int(own)) for own in groups[-1].split()] == [
        (len(groups) - 1, place) for place in range(len(groups[-1].split()))
    ]


def test_qwen2_has_biases_and_ignores_a_sliding_window_that_is_off(directory: Callable[..., Path]) -> None:
    config = open_model(directory(QWEN2, use_sliding_window=False)).config
    assert config.family == "qwen2" and config.attention_bias and config.tie_word_embeddings


def test_kv_heads_and_head_dim_have_defaults(directory: Callable[..., Path]) -> None:
    path = directory()
    with pytest.raises(ConfigError, match=r"k_proj\.weight has \[32, 64\], expected \[64, 64\]"):
        open_model(path, {"num_key_value_heads": None})
    assert open_model(path, {"head_dim": 16}).config.head_dim == 16


def test_sharded_weights_are_read_through_their_index(directory: Callable[..., Path]) -> None:
    path = directory()
    (path / "model.safetensors").unlink()
    everything = arrays(tensor_shapes(LLAMA))
    names = sorted(everything)
    parts = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, held in parts.items():
        save_file({n: everything[n] for n in held}, path / file)
    weight_map = {n: file for file, held in parts.items() for n in held}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert {n: t.file.name for n, t in open_model(path).tensors.items()} == weight_map
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"1 of 2 weight files .* missing: model-00002-of-00002"):
        open_model(path)


def test_an_index_may_not_point_outside_its_directory(directory: Callable[..., Path]) -> None:
    path = directory()
    index = {"weight_map": {"a": "../secret.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="not a file beside it"):
        open_model(path)


def test_end_tokens_of_both_config_files_count_once(directory: Callable[..., Path]) -> None:
    path = directory(eos_token_id=[5, 6])
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 7], "temperature": 0.7}))
    files = open_model(path)
    assert files.config.eos_token_ids == (5, 6, 7)
    assert files.generation_config["temperature"] == 0.7


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": None}, 7.0, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 500000.0, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_scaling": LLAMA3_SCALING}, 500000.0, LLAMA3_SCALING),
        ({"rope_parameters": {**LLAMA3_SCALING, "rope_theta": 9.0}}, 9.0, LLAMA3_SCALING),
        ({"rope_theta": None}, 10000.0, None),
    ],
)
def test_rotary_parameters_are_read_in_old_and_new_form(
    directory: Callable[..., Path], changes: dict[str, Any], theta: float, scaling: dict[str, Any] | None
) -> None:
    config = open_model(directory(**changes)).config
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [({"torch_dtype": "torch.float16"}, "float16"), ({"torch_dtype": None, "dtype": "float32"}, "float32")],
)
def test_the_dtype_is_read_in_old_and_new_form(
    directory: Callable[..., Path], changes: dict[str, Any], dtype: str
) -> None:
    assert open_model(directory(**changes)).config.dtype == dtype


def test_without_a_named_dtype_the_weights_own_counts(directory: Callable[..., Path]) -> None:
    assert open_model(directory(torch_dtype=None)).config.dtype == "float32"


def test_overrides_are_merged_key_by_key(directory: Callable[..., Path]) -> None:
    path = directory(rope_scaling=LLAMA3_SCALING)
    config = open_model(path, {"rope_scaling": {"factor": 4.0}, "max_position_embeddings": 99}).config
    assert config.max_position_embeddings == 99
    assert config.rope_scaling == {**LLAMA3_SCALING, "factor": 4.0}


def test_a_quantised_checkpoint_names_its_method(directory: Callable[..., Path]) -> None:
    path = directory(quantization_config={"quant_method": "AWQ", "bits": 4}, drop=("lm_head.weight",))
    assert open_model(path).config.quantization == "awq"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"architectures": ["WhisperForConditionalGeneration"]},
            "WhisperForConditionalGeneration is not supported; known are LlamaForCausalLM, Mistral",
        ),
        (
            {"architectures": ["MambaForCausalLM"], "num_attention_heads": None},
            "num_attention_heads is missing",
        ),
        ({"architectures": None}, "names no architecture; known architectures are LlamaForCausalLM"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64', not a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_hidden_layers": 1 << 31}, "num_hidden_layers is 2147483648, not a whole number from 1 to 4,096"),
        ({"num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads 3"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "axial", "factor": 4}}, "type 'axial' is not supported; known are default, li"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4}}, "short_factor is missing, not a list of 8 numbers"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4}}, "low_freq_factor is missing"),
        ({"use_sliding_window": True}, "the llama family has no sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layers of type 'sliding_attention'"),
        ({"layer_types": ["full_attention"]}, "not a list of 2 names"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.2}}, "partial_rotary_factor 0.2"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, which is not supported"),
        ({"torch_dtype": "float8"}, "dtype 'float8' is not supported; known are float32"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"quantization_config": {"bits": 4}}, "no quant_method"),
        ({"num_hidden_layers": 3}, r"lacks 9 of the 30 tensors .* model\.layers\.2\.input_layernorm\.weight"),
        ({"vocab_size": 97}, r"embed_tokens\.weight has \[96, 64\], expected \[97, 64\]"),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    directory: Callable[..., Path], changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        open_model(directory(**changes))


def test_a_tied_model_needs_no_output_matrix_and_an_untied_one_does(directory: Callable[..., Path]) -> None:
    path = directory(drop=("lm_head.weight",))
    with pytest.raises(ConfigError, match=r"lacks 1 of .*lm_head\.weight"):
        open_model(path)
    assert open_model(path, {"tie_word_embeddings": True}).config.tie_word_embeddings


def test_llama_with_attention_bias_needs_all_four(directory: Callable[..., Path]) -> None:
    config = open_model(directory()).config
    import msgspec

    needed = needed_tensors(msgspec.structs.replace(config, attention_bias=True))
    names = [n for n in needed if n.startswith("model.layers.0.") and n.endswith("bias")]
    assert [n.split(".")[-2] for n in names] == ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda p: (p / "config.json").unlink(), r"config\.json \(or one \.gguf file\) was looked for"),
        (lambda p: (p / "config.json").write_text("{"), r"config\.json is not valid JSON"),
        (lambda p: (p / "config.json").write_text("[]"), "holds a JSON list"),
        (lambda p: (p / "model.safetensors").unlink(), "has neither model.safetensors nor .* there are no weights"),
        (lambda p: (p / "model.safetensors").rename(p / "pytorch_model.bin"), "is a pickle"),
        (lambda p: (p / "model.safetensors").write_bytes(b"version https://git-lfs"), "Git LFS pointer"),
        (lambda p: (p / "model.safetensors").write_bytes(b"\xff" * 8), "cut short or not a safetensors file"),
        (lambda p: (p / "model.safetensors").write_bytes(bytes([2]) + bytes(7) + b"[1"), "cut short|not JSON"),
        (
            lambda p: (p / "model.safetensors").write_bytes((p / "model.safetensors").read_bytes()[:-8]),
            "is cut short: the tensor",
        ),
    ],
)
def test_a_missing_or_damaged_file_is_named(
    directory: Callable[..., Path], spoil: Callable[[Path], Any], complaint: str
) -> None:
    path = directory()
    spoil(path)
    with pytest.raises(ConfigError, match=complaint):
        open_model(path)


# Chat templates


def test_a_chat_template_is_found_in_each_of_its_places(directory: Callable[..., Path]) -> None:
    path = directory()
    assert open_model(path).chat_template is None
    config = path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "plain"}))
    assert open_model(path).chat_template == "plain"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert open_model(path).chat_template == "usual"
    assert open_model(path).chat_templates["tool_use"] == "tools"
    (path / "chat_template.jinja").write_text("from its own file")
    assert open_model(path).chat_template == "from its own file"


# GGUF


def write_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F16,
    rope_factors: np.ndarray | None = None,
    metadata: dict[str, int | str | float] | None = None,
    output: bool = True,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(0.5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (metadata or {}).items():
        {int: writer.add_uint32, str: writer.add_string, float: writer.add_float32}[type(value)](key, value)

    def matrix(name: str, *shape: int) -> None:
        values = np.ones(shape, np.float32)
        if kind == gguf.GGMLQuantizationType.TQ2_0:
            writer.add_tensor(name, np.zeros((shape[0], 66), np.uint8), raw_dtype=kind)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    def vector(name: str, size: int) -> None:
        writer.add_tensor(name, np.ones(size, np.float32))

    matrix("token_embd.weight", 96, 64)
    vector("output_norm.weight", 64)
    for name, shape in {
        "attn_q": (64, 64),
        "attn_k": (32, 64),
        "attn_v": (32, 64),
        "attn_output": (64, 64),
        "ffn_gate": (128, 64),
        "ffn_up": (128, 64),
        "ffn_down": (64, 128),
    }.items():
        matrix(f"blk.0.{name}.weight", *shape)
    vector("blk.0.attn_norm.weight", 64)
    vector("blk.0.ffn_norm.weight", 64)
    if architecture == "qwen2":
        for name, size in {"attn_q": 64, "attn_k": 32, "attn_v": 32}.items():
            vector(f"blk.0.{name}.bias", size)
    if output:
        matrix("output.weight", 96, 64)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_bundled_file_is_described() -> None:
    files = open_model(bundled_gguf())
    config = files.config
    assert files.kind == "gguf" and config.family == "llama" and config.quantization == "gguf"
    assert (config.num_layers, config.hidden_size, config.intermediate_size, config.vocab_size) == (
        30,
        576,
        1536,
        49152,
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope_theta, config.max_position_embeddings) == (100000.0, 8192)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.tie_word_embeddings and config.dtype == "bfloat16"
    assert files.tensors.keys() == needed_tensors(config).keys()
    assert files.tensors["model.embed_tokens.weight"].dtype == "Q8_0"
    assert files.tensors["model.layers.29.self_attn.k_proj.weight"].shape == (192, 576)
    assert files.chat_template is not None and "<|im_start|>" in files.chat_template


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_gguf_file_and_a_directory_use_the_same_names(tmp_path: Path, family: str) -> None:
    files = open_model(write_gguf(tmp_path / "m.gguf", family))
    assert files.config.family == family and not files.config.tie_word_embeddings
    assert files.config.attention_bias == (family == "qwen2")
    assert files.tensors.keys() == needed_tensors(files.config).keys()
    assert files.config.dtype == "float16"


def test_a_gguf_file_without_an_output_matrix_is_tied(tmp_path: Path) -> None:
    assert open_model(write_gguf(tmp_path / "m.gguf", output=False)).config.tie_word_embeddings


def test_a_directory_with_one_gguf_file_means_that_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    assert open_model(tmp_path).path == tmp_path / "m.gguf"


def test_every_end_token_of_a_gguf_file_counts(tmp_path: Path) -> None:
    extra: dict[str, int | str | float] = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
    assert open_model(write_gguf(tmp_path / "m.gguf", metadata=extra)).config.eos_token_ids == (2, 7)


def test_llama3_scaling_is_recovered_from_its_factors(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {**LLAMA3_SCALING, "factor": 32.0, "rope_theta": 10000.0}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=scaling)
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
    factors = 1 / (10000.0 ** (np.arange(0, 16, 2) / 16)) / scaled
    found = open_model(write_gguf(tmp_path / "m.gguf", rope_factors=factors)).config.rope_scaling
    assert found == {**LLAMA3_SCALING, "factor": pytest.approx(32.0)}
    with pytest.raises(ConfigError, match="not those of Llama 3"):
        open_model(write_gguf(tmp_path / "n.gguf", rope_factors=factors + np.linspace(0, 1, 8)))


def test_yarn_is_read_from_a_gguf_file_s_metadata(tmp_path: Path) -> None:
    keys: dict[str, int | str | float] = {"type": "yarn", "factor": 4.0, "original_context_length": 256}
    found = []
    for more in ({}, {"yarn_attn_factor": 1.0, "yarn_beta_fast": 16.0}, {"yarn_attn_factor": 2.0}):
        metadata = {f"llama.rope.scaling.{name}": value for name, value in {**keys, **more}.items()}
        config = open_model(write_gguf(tmp_path / "m.gguf", metadata=metadata)).config
        assert config.max_position_embeddings == 1024
        found.append(config.rope_scaling)
    plain = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    own_factor = 0.1 * np.log(4) + 1
    assert found == [plain, {**plain, "beta_fast": 16.0}, {**plain, "attention_factor": pytest.approx(2 * own_factor)}]


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_of_a_model_of_text_and_images_the_text_part_is_described(tmp_path: Path, prefix: str) -> None:
    text = {**LLAMA, "architectures": None, "eos_token_id": 1, "sliding_window": None}
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text, "eos_token_id": [2, 3]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    stored = {
        n.replace("model.", prefix, 1): a for n, a in arrays(tensor_shapes(LLAMA)).items() if n != "lm_head.weight"
    }
    head = "language_model.lm_head.weight" if prefix.startswith("language") else "lm_head.weight"
    stored |= {head: np.zeros((96, 64), np.float32), "vision_tower.conv.weight": np.zeros((5, 5), np.float32)}
    save_file(stored, tmp_path / "model.safetensors")
    files = open_model(tmp_path, {"rope_theta": 7.0})
    assert (files.config.family, files.config.eos_token_ids, files.config.rope_theta) == ("mistral", (2, 3), 7.0)
    assert files.tensors.keys() == needed_tensors(files.config).keys()
    assert all(name == info.name for name, info in files.tensors.items())


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"architecture": "mamba"}, "GGUF architecture 'mamba' is not supported; known are llama, qwen2"),
        ({"kind": gguf.GGMLQuantizationType.TQ2_0}, "type TQ2_0 .* known are F32, F16, BF16, Q4_0, Q4_1, Q5_0"),
        ({"metadata": {"split.count": 3}}, "one of 3 parts"),
        ({"metadata": {"llama.expert_count": 8}}, "num_experts_per_tok|lacks .* block_sparse_moe"),
        ({"architecture": "qwen2", "metadata": {"qwen2.expert_count": 8}}, "mixture of 8 experts is not supported"),
        ({"metadata": {"llama.attention.value_length": 32}}, "value_length is 32"),
        ({"metadata": {"llama.rope.scaling.type": "axial", "llama.rope.scaling.factor": 4.0}}, "'axial'"),
    ],
)
def test_a_gguf_file_that_cannot_work_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        open_model(write_gguf(tmp_path / "m.gguf", **options))


def test_random_damage_gives_a_description_or_a_config_error_never_anything_else(tmp_path: Path) -> None:
    factors = np.ones(8)
    raw = write_gguf(tmp_path / "m.gguf", "llama", rope_factors=factors, kind=gguf.GGMLQuantizationType.Q4_0)
    whole = raw.read_bytes()
    rng = random.Random(11)
    damaged = tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(400):
        copy = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            copy[rng.randrange(2000)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        damaged.write_bytes(copy)
        try:
            open_model(damaged)
        except ConfigError:
            refused += 1
    assert refused > 60
