"""Text encoders against transformers in float32: the real MiniLM, and tiny random ones of every kind that is served;
and the promise that a text's vector does not depend on what it is computed with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config.model_files import open_model
from headrace.core import EngineCore
from headrace.text.tokenizer import Tokenizer
from tests.encoder_models import minilm, write_pooling, write_random_encoder
from tests.vector_runs import Vector, pooling_core, transformers_quiet, vectors

TEXTS = (
    "a",
    "What does the mill do?",
    "The water wheel turns the stone, and the stone grinds the grain. " * 3,
    "banana " * 40,
    "The river",
)


def token_ids(path: Path, texts: tuple[str, ...] = TEXTS) -> list[list[int]]:
    tokenizer = Tokenizer.load(open_model(path))
    return [tokenizer.encode(text, add_special_tokens=True) for text in texts]


def oracle(path: Path, architecture: str) -> Any:
    import transformers

    with transformers_quiet():
        return getattr(transformers, architecture).from_pretrained(path).eval()


def hidden(model: Any, ids: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0].numpy().astype(np.float64)


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


@pytest.fixture(scope="module")
def minilm_core() -> EngineCore:
    return pooling_core(minilm())


def test_minilm_gives_the_vectors_of_transformers(minilm_core: EngineCore) -> None:
    ids = token_ids(minilm())
    model = oracle(minilm(), "BertModel")
    expected = [unit(hidden(model, own).mean(0)) for own in ids]
    for got, wanted in zip(vectors(minilm_core, ids), expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5)  # The promise is 1e-4.


def test_minilm_tells_what_a_text_is_about(minilm_core: EngineCore) -> None:
    texts = (
        "A water wheel drives the mill.",
        "The mill is turned by a wheel in the river.",
        "Stock prices fell today.",
    )
    mill, river, stocks = vectors(minilm_core, token_ids(minilm(), texts))
    assert mill @ river > 0.6 > 0.2 > mill @ stocks


def test_a_text_has_the_same_vector_alone_and_in_any_batch(minilm_core: EngineCore) -> None:
    ids = token_ids(minilm())
    together = vectors(minilm_core, ids)
    np.testing.assert_array_equal(together, vectors(minilm_core, ids[::-1])[::-1])
    for own, vector in zip(ids, together, strict=True):
        np.testing.assert_array_equal(vectors(minilm_core, [own])[0], vector)


def test_more_texts_than_a_step_holds_come_out_the_same(minilm_core: EngineCore) -> None:
    (ids,) = token_ids(minilm(), ("banana river " * 50,))
    many = vectors(minilm_core, [ids] * 12 + [ids[:40]] * 9)
    np.testing.assert_array_equal(many[:12], [many[0]] * 12)
    np.testing.assert_array_equal(many[12:], [vectors(minilm_core, [ids[:40]])[0]] * 9)


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("BertModel", {}),
        ("BertForMaskedLM", {"layer_norm_eps": 1e-5}),
        ("RobertaModel", {"type_vocab_size": 1, "pad_token_id": 4, "layer_norm_eps": 1e-5}),
        ("XLMRobertaModel", {"type_vocab_size": 1, "pad_token_id": 0}),
        ("CamembertModel", {"type_vocab_size": 1, "pad_token_id": 4, "hidden_size": 32, "num_attention_heads": 2}),
    ],
)
def test_random_encoders_give_the_rows_of_transformers(
    tmp_path: Path, architecture: str, overrides: dict[str, Any]
) -> None:
    path = write_random_encoder(tmp_path, architecture, **overrides)
    ids = [own[:80] for own in token_ids(path)]
    model = oracle(path, architecture.replace("ForMaskedLM", "Model"))
    for kernels in ("native", "reference"):
        core = pooling_core(path, "--kernels", kernels)
        rows = vectors(core, ids, task="token_embed", every_row=True, normalize=False)
        for own, got in zip(ids, rows, strict=True):
            np.testing.assert_allclose(got.reshape(len(own), -1), hidden(model, own), atol=5e-5)


@pytest.mark.parametrize(
    ("mode", "normalize", "pooled"),
    [
        ("cls_token", True, lambda rows: unit(rows[0])),
        ("mean_tokens", False, lambda rows: rows.mean(0)),
        ("lasttoken", True, lambda rows: unit(rows[-1])),
    ],
)
def test_rows_are_pooled_as_the_model_s_files_say(tmp_path: Path, mode: str, normalize: bool, pooled: Any) -> None:
    path = write_pooling(write_random_encoder(tmp_path), mode, normalize=normalize)
    ids = token_ids(path)[:2]
    model, core = oracle(path, "BertModel"), pooling_core(path)
    for own, got in zip(ids, vectors(core, ids), strict=True):
        np.testing.assert_allclose(got, pooled(hidden(model, own)), atol=5e-5)


def pair_ids(path: Path) -> tuple[list[list[int]], list[int | None]]:
    tokenizer = Tokenizer.load(open_model(path))
    pairs = [("What does the mill do?", "the mill grinds grain"), ("who is he", "banana " * 20), ("a", "b")]
    encoded = [tokenizer.encode_pair(*pair) for pair in pairs]
    return [ids for ids, _ in encoded], [at for _, at in encoded]


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("BertForSequenceClassification", {}),
        ("RobertaForSequenceClassification", {"type_vocab_size": 1, "pad_token_id": 4}),
        ("BertForSequenceClassification", {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}),
    ],
)
def test_cross_encoders_give_the_scores_of_transformers(
    tmp_path: Path, architecture: str, overrides: dict[str, Any], kernels: str
) -> None:
    import torch

    path = write_random_encoder(tmp_path, architecture, num_labels=1, **overrides)
    ids, second_at = pair_ids(path)
    assert None not in second_at
    core, model = pooling_core(path, "--kernels", kernels), oracle(path, architecture)
    scores = vectors(core, ids, second_text_at=second_at, activation=core.settings.pooler.activation)
    typed = architecture.startswith("Bert")  # The other has one type of tokens, whatever its tokenizer says.
    for own, at, got in zip(ids, second_at, scores, strict=True):
        types = torch.tensor([[int(typed and place >= at) for place in range(len(own))]])
        with torch.no_grad():
            logit = float(model(torch.tensor([own]), token_type_ids=types).logits[0, 0])
        expected = logit if "sbert_ce_default_activation_function" in overrides else 1 / (1 + np.exp(-logit))
        assert got[0] == pytest.approx(expected, abs=5e-5)
        np.testing.assert_array_equal(
            vectors(core, [own], second_text_at=at, activation=core.settings.pooler.activation)[0], got
        )


def test_an_encoder_s_int8_weights_are_close(tmp_path: Path) -> None:
    ids = token_ids(minilm())
    exact = vectors(pooling_core(minilm()), ids)
    rounded = vectors(pooling_core(minilm(), "--quantization", "int8"), ids)
    assert min(float(a @ b) for a, b in zip(exact, rounded, strict=True)) > 0.999


def test_weights_under_tensorflow_s_names_are_the_same_model(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    path = write_random_encoder(tmp_path / "new")
    old = tmp_path / "old"
    shutil.copytree(path, old)
    tensors = load_file(path / "model.safetensors")
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {
        "bert." + next((n.replace(a, b) for a, b in names.items() if n.endswith(a)), n): tensor
        for n, tensor in tensors.items()
    }
    save_file(renamed, old / "model.safetensors")
    ids = token_ids(path)[:3]
    both: list[list[Vector]] = [vectors(pooling_core(folder), ids) for folder in (path, old)]
    np.testing.assert_array_equal(*both)
