"""Weights read from files equal what the formats' own libraries read, whatever the form and the order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from headrace.config.errors import ConfigError
from headrace.config.model import ModelConfig
from headrace.config.model_files import ModelFiles, TensorInfo
from headrace.weights.checkpoint import Checkpoint

CONFIG = ModelConfig(
    family="llama",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)
Q, K, V = (f"model.layers.0.self_attn.{n}_proj.weight" for n in "qkv")


def files_of(path: Path, tensors: dict[str, tuple[np.ndarray, str, tuple[int, ...]]], kind: str = "hf") -> ModelFiles:
    """A model whose one file holds `tensors`: name -> (stored array, dtype name, shape), at odd offsets."""
    file = path / "weights.bin"
    infos, data = {}, b"\x07"
    for name, (array, dtype, shape) in tensors.items():
        infos[name] = TensorInfo(name, shape, dtype, file, len(data), array.nbytes)
        data += array.tobytes() + b"\x07"
    file.write_bytes(data)
    return ModelFiles(path, kind, CONFIG, infos, {}, {}, {}, None, None)  # type: ignore[arg-type]


def stored(values: np.ndarray, dtype: str) -> tuple[np.ndarray, str, tuple[int, ...]]:
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16), dtype, values.shape
    if dtype in ("F32", "F16"):
        return values.astype({"F32": np.float32, "F16": np.float16}[dtype]), dtype, values.shape
    return quantize(values, GGMLQuantizationType[dtype]), dtype, values.shape


@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_any_block_gives_the_numbers_of_the_formats_own_library(dtype: str, tmp_path: Path) -> None:
    """Random bytes but for the scales, which stay small: every value of every field, as no quantiser makes them."""
    kind = GGMLQuantizationType[dtype]
    width, size = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(5).integers(0, 256, (6, 3, size), dtype=np.uint8)
    for byte in {"Q4_K": (1, 3), "Q5_K": (1, 3), "Q6_K": (209,), "Q4_1": (1, 3), "Q5_1": (1, 3)}.get(dtype, (1,)):
        blocks[..., byte] &= 0xBB
    blocks = blocks.reshape(6, -1)
    weight = Checkpoint(files_of(tmp_path, {"w": (blocks, dtype, (6, 3 * width))}, "gguf")).matrix("w")
    expected = dequantize(blocks, kind).reshape(6, 3 * width)
    assert np.isfinite(expected).all() and expected.std() > 0
    np.testing.assert_array_equal(weight.to_float32(), expected)
    np.testing.assert_array_equal(weight.rows(np.array([4, 0])).to_float32(), expected[[4, 0]])


def random(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1", "Q8_0", "F32", "F16", "BF16"])
def test_every_gguf_type_gives_the_values_of_the_formats_own_library(dtype: str, tmp_path: Path) -> None:
    array, name, shape = stored(random((37, 96)), dtype)
    checkpoint = Checkpoint(files_of(tmp_path, {"w": (array, name, shape)}, "gguf"))
    expected = dequantize(array.view(np.uint8), GGMLQuantizationType[dtype])
    weight = checkpoint.matrix("w")
    assert weight.shape == (37, 96)
    np.testing.assert_array_equal(weight.to_float32(), expected.reshape(37, 96))
    np.testing.assert_array_equal(weight.rows(np.array([5, 0, 36])).to_float32(), expected.reshape(37, 96)[[5, 0, 36]])


def test_a_block_format_stays_small_in_memory(tmp_path: Path) -> None:
    tensors = {d: stored(random((64, 64)), d) for d in ("Q4_0", "Q4_1", "Q8_0")}
    checkpoint = Checkpoint(files_of(tmp_path, tensors, "gguf"))
    bits = {d: 8 * checkpoint.matrix(d).num_bytes / 64**2 for d in tensors}
    assert bits == {"Q4_0": 6.0, "Q4_1": 6.0, "Q8_0": 9.0}
    assert checkpoint.matrix("Q8_0").offsets is None


def test_llama_rows_of_q_and_k_from_gguf_are_put_back_and_v_is_left_alone(tmp_path: Path) -> None:
    q, k, v = random((64, 64), 1), random((32, 64), 2), random((32, 64), 3)
    bias = random((64,), 4)

    def permuted(w: np.ndarray, heads: int) -> np.ndarray:
        """What the converter to GGUF does."""
        return np.ascontiguousarray(w.reshape(heads, 2, 8, -1).swapaxes(1, 2).reshape(w.shape))

    tensors = {
        Q: stored(permuted(q, 4), "F32"),
        K: stored(permuted(k, 2), "Q8_0"),
        V: stored(v, "F32"),
        Q.replace("weight", "bias"): stored(permuted(bias, 4), "F32"),
    }
    checkpoint = Checkpoint(files_of(tmp_path, tensors, "gguf"))
    np.testing.assert_array_equal(checkpoint.matrix(Q).to_float32(), q)
    np.testing.assert_allclose(checkpoint.matrix(K).to_float32(), k, atol=0.02)
    np.testing.assert_array_equal(checkpoint.matrix(V).to_float32(), v)
    np.testing.assert_array_equal(checkpoint.vector(Q.replace("weight", "bias")), bias)

    qwen = replace(checkpoint.files, config=ModelConfig(**{**_fields(CONFIG), "family": "qwen2"}))
    np.testing.assert_array_equal(Checkpoint(qwen).matrix(Q).to_float32(), permuted(q, 4))


def _fields(config: ModelConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


@pytest.mark.parametrize(
    ("dtypes", "bits"), [(("Q4_1", "Q4_1"), 4), (("Q8_0", "Q8_0"), 8), (("BF16", "BF16"), 0), (("Q4_0", "Q8_0"), 0)]
)
def test_stacked_matrices_are_joined_in_their_form_or_as_float32(
    dtypes: tuple[str, str], bits: int, tmp_path: Path
) -> None:
    tensors = {str(i): stored(random((10 + i, 64), i), d) for i, d in enumerate(dtypes)}
    checkpoint = Checkpoint(files_of(tmp_path, tensors))
    joined = checkpoint.stacked(["0", "1"])
    assert (joined.shape, joined.bits) == ((21, 64), bits)
    expected = np.concatenate([checkpoint.matrix("0").to_float32(), checkpoint.matrix("1").to_float32()])
    np.testing.assert_array_equal(joined.to_float32(), expected)


def test_a_dense_matrix_is_a_view_of_the_file(tmp_path: Path) -> None:
    checkpoint = Checkpoint(files_of(tmp_path, {"w": stored(random((8, 8)), "BF16")}))
    assert not checkpoint.matrix("w").values.flags.owndata


def test_progress_counts_each_tensor_once(tmp_path: Path) -> None:
    checkpoint = Checkpoint(files_of(tmp_path, {"w": stored(random((8, 8)), "F32"), "b": stored(random((8,)), "F32")}))
    assert checkpoint.total_bytes == 288
    checkpoint.matrix("w")
    checkpoint.matrix("w")
    assert checkpoint.read_bytes == 256
    checkpoint.vector("b")
    assert checkpoint.read_bytes == 288


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    files = files_of(tmp_path, {"w": stored(random((8, 8)), "F32"), "e": (np.zeros(8, np.uint8), "F8_E4M3", (2, 4))})
    checkpoint = Checkpoint(files)
    assert checkpoint.has("w") and not checkpoint.has("v")
    with pytest.raises(ConfigError, match="no tensor v"):
        checkpoint.matrix("v")
    with pytest.raises(ConfigError, match="stored as F8_E4M3; known are F32"):
        checkpoint.matrix("e")
    with pytest.raises(ConfigError, match="not one dimension"):
        checkpoint.vector("w")
    (tmp_path / "weights.bin").write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"cut short.*Download it again"):
        Checkpoint(files).matrix("w")
