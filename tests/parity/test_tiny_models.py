"""Random models of every family against transformers in float32, and the same bits for every way of batching."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from headrace.config.model_files import open_model  # noqa: E402
from headrace.kernels.native import NativeKernels, variants  # noqa: E402
from headrace.kernels.ops import Batch, Kernels, KVCacheLayout  # noqa: E402
from headrace.kernels.reference import ReferenceKernels  # noqa: E402
from headrace.models import Model, build_model  # noqa: E402
from headrace.weights.checkpoint import Checkpoint  # noqa: E402

VOCAB, BLOCK_SIZE, NUM_BLOCKS = 211, 8, 64

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
YARN_TUNED = {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3, "truncate": False}
YARN_MSCALE = {**YARN, "mscale": 1.5, "mscale_all_dim": 0.7}


def longrope(pairs: int) -> dict[str, object]:
    factors = {"short_factor": [1.0 + i / 10 for i in range(pairs)], "long_factor": [1.0 + i for i in range(pairs)]}
    return {"rope_type": "longrope", "rope_theta": 10000.0, **factors}


PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 40, "sliding_window": 40, "tie_word_embeddings": True}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 16}


def rope(parameters: dict[str, object], **more: object) -> dict[str, object]:
    return {"rope_parameters": parameters, "rope_scaling": parameters, **more}


VARIANTS: dict[str, tuple[str, str, dict[str, object]]] = {
    "llama": ("Llama", "float32", {}),
    "llama_tied_bfloat16": ("Llama", "bfloat16", {"tie_word_embeddings": True}),
    "llama_float16": ("Llama", "float16", {}),
    "llama_biases": ("Llama", "float32", {"attention_bias": True, "mlp_bias": True}),
    "llama_wide_heads": ("Llama", "float32", {"head_dim": 40, "num_key_value_heads": 1}),
    "llama_no_groups": ("Llama", "float32", {"num_key_value_heads": 6}),
    "llama_llama3_rope": ("Llama", "float32", {"rope_parameters": LLAMA3, "rope_scaling": LLAMA3}),
    "llama_linear_rope": ("Llama", "float32", {"rope_parameters": LINEAR, "rope_scaling": LINEAR}),
    "qwen2": ("Qwen2", "float32", {}),
    "llama_dynamic_rope": ("Llama", "float32", rope(DYNAMIC, max_position_embeddings=64)),
    "llama_yarn_rope": ("Llama", "float32", rope(YARN)),
    "llama_yarn_tuned": ("Llama", "float32", rope(YARN_TUNED)),
    "llama_yarn_mscale": ("Llama", "float32", rope(YARN_MSCALE)),
    "mistral": ("Mistral", "float32", {"head_dim": 20, "sliding_window": None}),
    "mistral_window": ("Mistral", "float32", {"sliding_window": 37}),
    "mistral_window_wider_than_a_key_tile": ("Mistral", "float32", {"sliding_window": 131}),
    "mistral_window_of_one": ("Mistral", "float32", {"sliding_window": 1}),
    "qwen2_window_in_later_layers": ("Qwen2", "float32", WINDOW),
    "qwen3": ("Qwen3", "float32", {"head_dim": 24}),
    "qwen3_biases_and_window": ("Qwen3", "float32", {"head_dim": 16, "attention_bias": True, **WINDOW}),
    "phi3": ("Phi3", "float32", {"pad_token_id": 0, "sliding_window": 50}),
    "phi3_partial": ("Phi3", "float32", rope(PARTIAL, pad_token_id=0)),
    "phi3_longrope": ("Phi3", "float32", rope(longrope(8), pad_token_id=0, original_max_position_embeddings=64)),
    "phi3_longrope_partial": (
        "Phi3",
        "float32",
        rope(
            {**longrope(6), "partial_rotary_factor": 0.75},
            pad_token_id=0,
            original_max_position_embeddings=64,
        ),
    ),
    "gemma3": ("Gemma3", "float32", {**GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "gemma3_linear_rope": ("Gemma3", "float32", {**GEMMA, "rope_parameters": GEMMA_ROPE, "sliding_window_pattern": 3}),
    "mixtral": ("Mixtral", "float32", {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 48}),
    "qwen3_moe": ("Qwen3Moe", "float32", {**MOE, "mlp_only_layers": [1]}),
    "qwen3_moe_normalized": ("Qwen3Moe", "float32", {**MOE, "norm_topk_prob": True, "num_experts_per_tok": 3}),
    "qwen2_tied_bfloat16": ("Qwen2", "bfloat16", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
}


def write(folder: Path, family: str, dtype: str, overrides: dict[str, object]) -> torch.nn.Module:
    """Save a random model in three shards; give back transformers' in float32, as read from the files."""
    values = {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 150,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        **overrides,
    }
    values["num_hidden_layers"] = len(values.get("layer_types") or range(values["num_hidden_layers"]))  # type: ignore[arg-type]
    config = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")(**values)
    torch.manual_seed(7)
    model_class = getattr(transformers, f"{family}ForCausalLM")
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="300KB")
    assert len(list(folder.glob("*.safetensors"))) > 1 or dtype != "float32"
    return model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


IMPLEMENTATIONS: dict[str, Callable[[str], Kernels]] = {
    "reference": lambda dtype: ReferenceKernels("cpu", dtype),
    **{variant: lambda dtype, v=variant: NativeKernels(dtype, 2, variant=v) for variant in variants()},
}
both = pytest.mark.parametrize("kernels", ["reference", "native"])


class Served:
    """Our model with a cache, fed by hand. `kernels` is one of IMPLEMENTATIONS, or "native" for the best variant."""

    def __init__(
        self, folder: Path, dtype: str = "float32", max_positions: int = 512, kernels: str = "reference"
    ) -> None:
        files = open_model(folder)
        config = files.config
        self.kernels = IMPLEMENTATIONS[variants()[0] if kernels == "native" else kernels](dtype)
        model: Model = build_model(config, Checkpoint(files), self.kernels, max_positions, lambda done, total: None)
        self.groups = np.arange(len(config.layer_groups))[:, None]
        num_blocks = NUM_BLOCKS * len(self.groups)
        layout = KVCacheLayout(config.layers_per_group, num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        self.kernels.allocate_kv_cache(layout)
        self.forward = self.kernels.capture(lambda batch: model.forward(self.kernels, batch))
        self.forward_hidden = self.kernels.capture(lambda batch: model.hidden(self.kernels, batch))

    def batch(self, parts: list[tuple[np.ndarray, int, int, int]]) -> Batch:
        """Parts (tokens, start, stop, first block); every row's logits are wanted."""
        counts = np.array([stop - start for _, start, stop, _ in parts])
        query_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = np.concatenate([np.arange(start, stop) for _, start, stop, _ in parts]).astype(np.int32)
        first = np.repeat([block for *_, block in parts], counts)
        longest = max(-(-stop // BLOCK_SIZE) for _, _, stop, _ in parts)
        return Batch(
            token_ids=np.concatenate([t[a:b] for t, a, b, _ in parts]).astype(np.int32),
            positions=positions,
            slot_mapping=((first + self.groups * NUM_BLOCKS) * BLOCK_SIZE + positions).astype(np.int32),
            query_start=query_start,
            seq_lens=np.array([stop for _, _, stop, _ in parts], np.int32),
            block_tables=(
                np.array([np.arange(b, b + longest) for *_, b in parts]) + self.groups[..., None] * NUM_BLOCKS
            ).astype(np.int32),
            sample_rows=np.arange(query_start[-1], dtype=np.int32),
        )

    def logits(self, parts: list[tuple[np.ndarray, int, int, int]]) -> list[torch.Tensor]:
        out = tensor(self.forward(self.batch(parts)))
        return list(out.split([stop - start for _, start, stop, _ in parts]))

    def hidden(self, tokens: np.ndarray) -> torch.Tensor:
        return tensor(self.forward_hidden(self.batch([(tokens, 0, len(tokens), 0)])))


def tensor(rows: object) -> torch.Tensor:
    """A copy: the next step may write where these rows lie."""
    return rows if isinstance(rows, torch.Tensor) else torch.tensor(rows)


def tokens(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length)


@pytest.mark.parametrize("name", VARIANTS)
def test_hidden_states_and_logits_equal_transformers_in_float32(name: str, tmp_path: Path) -> None:
    family, dtype, overrides = VARIANTS[name]
    oracle = write(tmp_path, family, dtype, overrides)
    ids = tokens(150)
    with torch.no_grad():
        expected = oracle(torch.from_numpy(ids)[None], output_hidden_states=True)
    hidden, wanted = expected.hidden_states[-1][0].numpy(), expected.logits[0].numpy()
    assert wanted.std() > 0.3
    for kernels in IMPLEMENTATIONS:
        served = Served(tmp_path, max_positions=150, kernels=kernels)
        np.testing.assert_allclose(served.hidden(ids).numpy(), hidden, atol=1e-4, rtol=1e-4, err_msg=kernels)
        (logits,) = served.logits([(ids, 0, 150, 0)])
        np.testing.assert_allclose(logits.numpy(), wanted, atol=1e-4, rtol=1e-4, err_msg=kernels)


@pytest.mark.parametrize("family", ["Gemma3", "Mistral3"])
def test_of_a_model_of_text_and_images_the_text_part_is_served(family: str, tmp_path: Path) -> None:
    text = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1, "sliding_window": 40}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 32, "patch_size": 8, "head_dim": 8}
    text_type, vision_type = {"Gemma3": ("gemma3_text", "siglip_vision_model"), "Mistral3": ("mistral", "pixtral")}[
        family
    ]
    config = getattr(transformers, f"{family}Config")(
        text_config={"model_type": text_type, **text}, vision_config={"model_type": vision_type, **vision}
    )
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    model.save_pretrained(tmp_path)
    ids = tokens(70)
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids)[None]).logits[0]
    (logits,) = Served(tmp_path).logits([(ids, 0, 70, 0)])
    np.testing.assert_allclose(logits.numpy(), expected.numpy(), atol=1e-4, rtol=1e-4)


@both
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_stays_near_float32(dtype: str, kernels: str, tmp_path: Path) -> None:
    oracle = write(tmp_path, "Llama", "bfloat16", {})
    ids = tokens(60)
    (logits,) = Served(tmp_path, dtype, kernels=kernels).logits([(ids, 0, 60, 0)])
    with torch.no_grad():
        expected = oracle(torch.from_numpy(ids)[None]).logits[0]
    error = (logits.float() - expected).abs().mean() / expected.std()
    assert error < {"bfloat16": 0.02, "float16": 0.003}[dtype]


@both
@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_have_the_same_bits_whole_in_chunks_and_one_by_one(
    name: str, dtype: str, kernels: str, tmp_path: Path
) -> None:
    family, _, overrides = VARIANTS[name]
    write(tmp_path, family, "float32", overrides)
    ids = tokens(140, seed=1)
    (whole,) = Served(tmp_path, dtype, kernels=kernels).logits([(ids, 0, 140, 0)])
    for size in (7, 1, 64):
        served = Served(tmp_path, dtype, kernels=kernels)
        parts = [served.logits([(ids, a, min(a + size, 140), 5)])[0] for a in range(0, 140, size)]
        assert torch.equal(torch.cat(parts), whole)


@both
@pytest.mark.parametrize("name", ["mistral_window", "qwen3", "phi3_partial", "gemma3", "mixtral", "qwen3_moe"])
def test_a_row_has_the_same_bits_in_any_chunk_and_beside_any_others(name: str, kernels: str, tmp_path: Path) -> None:
    family, _, overrides = VARIANTS[name]
    write(tmp_path, family, "float32", overrides)
    served = Served(tmp_path, kernels=kernels)
    ids, other = tokens(150, seed=1), tokens(70, seed=2)
    (whole,) = served.logits([(ids, 0, 150, 0)])
    (whole_other,) = served.logits([(other, 0, 70, 20)])
    chunks = [served.logits([(ids, a, min(a + 23, 143), 40)])[0] for a in range(0, 143, 23)]
    ones = []
    for a in range(143, 150):
        # The other's rows go from a few to many, so that this one's lie in tiles and items of every size.
        one, rest = served.logits([(ids, a, a + 1, 40), (other, 0, 10 * (a - 142), 20)])
        ones.append(one)
        assert torch.equal(rest, whole_other[: 10 * (a - 142)])
    assert torch.equal(torch.cat(chunks + ones), whole)


@both
def test_logits_have_the_same_bits_alone_and_in_a_batch(kernels: str, tmp_path: Path) -> None:
    write(tmp_path, "Llama", "float32", {})
    prompts = [tokens(n, seed=n) for n in (1, 3, 33, 100)]
    alone = [Served(tmp_path, kernels=kernels).logits([(ids, 0, len(ids), 0)])[0] for ids in prompts]
    together = Served(tmp_path, kernels=kernels).logits([(ids, 0, len(ids), 15 * i) for i, ids in enumerate(prompts)])
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_an_unknown_family_and_an_unknown_quantisation_are_refused_by_name(tmp_path: Path) -> None:
    from headrace.config.errors import ConfigError
    from tests.tiny_models import tiny_llama

    files = open_model(tiny_llama(tmp_path))
    for change, message in (({"family": "gpt5"}, "known are llama, mistral"), ({"quantization": "awq"}, "'awq'")):
        values = {name: getattr(files.config, name) for name in files.config.__struct_fields__} | change
        broken = replace(files, config=type(files.config)(**values))
        with pytest.raises(ConfigError, match=message):
            build_model(broken.config, Checkpoint(broken), ReferenceKernels(), 64, lambda done, total: None)
