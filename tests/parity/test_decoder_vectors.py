"""Vectors of decoders against the hidden states of transformers in float32; the same bits in chunks, from the prefix
cache and in any batch; and a text that the model cannot compute fails alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config.errors import ConfigError
from headrace.core import EngineCore
from headrace.protocol.ipc import AddRequest, PoolingParams, SamplingParams
from tests.encoder_models import write_pooling, write_random_encoder
from tests.small_models import write_random_model
from tests.vector_runs import pooling_core, transformers_quiet, vectors

RANDOM = np.random.default_rng(5)
TEXTS = [RANDOM.integers(0, 250, length).tolist() for length in (1, 7, 150, 31, 64)]
MEAN = ("--override-pooler-config", '{"pooling_type": "MEAN", "normalize": false}')


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("llama"), "llama", initializer_range=0.2)


def hidden(path: Path) -> list[np.ndarray]:
    """Of every text the rows [tokens, hidden] after the last norm."""
    import torch
    import transformers

    with transformers_quiet(), torch.no_grad():
        model = transformers.AutoModel.from_pretrained(path).eval()
        return [model(torch.tensor([ids])).last_hidden_state[0].numpy().astype(np.float64) for ids in TEXTS]


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_the_last_row_and_the_mean_are_those_of_transformers(llama: Path, kernels: str) -> None:
    rows = hidden(llama)
    last = vectors(pooling_core(llama, "--runner", "pooling", "--kernels", kernels), TEXTS)
    mean = vectors(pooling_core(llama, "--task", "embed", "--kernels", kernels, *MEAN), TEXTS)
    for got_last, got_mean, own in zip(last, mean, rows, strict=True):
        np.testing.assert_allclose(got_last, own[-1] / np.linalg.norm(own[-1]), atol=2e-5)
        np.testing.assert_allclose(got_mean, own.mean(0), atol=2e-5)


@pytest.mark.parametrize("flags", [(), MEAN])
def test_a_text_in_chunks_and_in_any_batch_has_the_same_vector(llama: Path, flags: tuple[str, ...]) -> None:
    whole = vectors(pooling_core(llama, "--runner", "pooling", "--max-num-batched-tokens", "1024", *flags), TEXTS)
    core = pooling_core(llama, "--runner", "pooling", "--max-num-batched-tokens", "17", *flags)
    np.testing.assert_array_equal(vectors(core, TEXTS), whole)
    np.testing.assert_array_equal(vectors(core, TEXTS[::-1])[::-1], whole)
    for ids, vector in zip(TEXTS, whole, strict=True):
        np.testing.assert_array_equal(vectors(core, [ids])[0], vector)


def test_rows_of_all_tokens_come_in_chunks_too(llama: Path) -> None:
    rows = hidden(llama)
    core = pooling_core(llama, "--runner", "pooling", "--max-num-batched-tokens", "32")
    got = vectors(core, TEXTS, task="token_embed", every_row=True, normalize=False)
    for own, expected in zip(got, rows, strict=True):
        np.testing.assert_allclose(own.reshape(expected.shape), expected, atol=2e-5)


def cached_tokens(core: EngineCore, ids: list[int], every_row: bool) -> tuple[int, bytes]:
    pooling = PoolingParams(task="embed", every_row=every_row)
    core.add(
        AddRequest(request_id="x", token_ids=ids, params=SamplingParams(max_tokens=1, pooling=pooling), arrival_s=0)
    )
    outputs = []
    while core.has_work:
        step = core.step()
        outputs += step.outputs if step is not None else []
    (output,) = outputs
    assert output.pooled is not None
    return output.num_cached_tokens, output.pooled


def test_the_last_row_may_come_behind_a_cached_prefix_and_a_mean_never_does(llama: Path) -> None:
    last = pooling_core(llama, "--runner", "pooling")
    first_time, again = (cached_tokens(last, TEXTS[2], every_row=False) for _ in range(2))
    assert first_time[0] == 0 and again[0] >= 128
    assert first_time[1] == again[1]
    mean = pooling_core(llama, "--runner", "pooling", *MEAN)
    first_time, again = (cached_tokens(mean, TEXTS[2], every_row=True) for _ in range(2))
    assert first_time == again and again[0] == 0


def test_a_decoder_saved_without_its_output_matrix_is_served_for_vectors(llama: Path, tmp_path: Path) -> None:
    import transformers

    with transformers_quiet():
        transformers.AutoModel.from_pretrained(llama).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(llama / name, tmp_path)
    expected = vectors(pooling_core(llama, "--runner", "pooling"), TEXTS[:3])
    np.testing.assert_array_equal(vectors(pooling_core(tmp_path), TEXTS[:3]), expected)
    with pytest.raises(ConfigError, match=r"gives vectors and no text\. Use --runner pooling"):
        pooling_core(tmp_path, "--runner", "generate")


def test_a_decoder_with_the_files_of_sentence_transformers_gives_vectors_as_they_say(tmp_path: Path) -> None:
    path = write_random_model(tmp_path, "qwen3", initializer_range=0.2, tie_word_embeddings=False)
    write_pooling(path, "lasttoken", max_length=200)
    core = pooling_core(path)
    assert core.settings.pooler.pooling == "last" and core.info.max_model_len == 200
    row = hidden(path)[1][-1]
    np.testing.assert_allclose(vectors(core, TEXTS[1:2])[0], row / np.linalg.norm(row), atol=2e-5)


def spoilt(path: Path, name: str, token: int) -> Path:
    """The row of one token is not numbers."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    tensors[name] = tensors[name].copy()
    tensors[name][token] = np.nan
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_a_text_that_the_model_cannot_compute_fails_alone(tmp_path: Path, kind: str) -> None:
    if kind == "decoder":
        path = spoilt(write_random_model(tmp_path, "llama"), "model.embed_tokens.weight", 42)
        core = pooling_core(path, "--runner", "pooling", *MEAN)
    else:
        path = spoilt(write_random_encoder(tmp_path), "embeddings.word_embeddings.weight", 42)
        core = pooling_core(path)
    texts = [[5, 6, 7], [5, 42, 7], [8, 9], [42], [10, 11, 12, 13]]
    good = [text for text in texts if 42 not in text]
    expected = vectors(core, good)
    params = SamplingParams(
        max_tokens=1, pooling=PoolingParams(task="embed", every_row=True, normalize=kind != "decoder")
    )
    for number, ids in enumerate(texts):
        core.add(AddRequest(request_id=str(number), token_ids=ids, params=params, arrival_s=float(number)))
    outputs: dict[str, Any] = {}
    while core.has_work:
        step = core.step()
        outputs |= {o.request_id: o for o in step.outputs} if step is not None else {}
    assert [outputs[str(n)].finish_reason for n in range(5)] == ["stop", "error", "stop", "error", "stop"]
    got = [np.frombuffer(outputs[n].pooled, "<f4") for n in ("0", "2", "4")]
    np.testing.assert_array_equal(got, expected)
    core.check_integrity()


def test_text_and_vectors_are_not_asked_of_the_same_engine(llama: Path) -> None:
    core = pooling_core(llama, "--runner", "pooling")
    refused = core.add(AddRequest(request_id="x", token_ids=[1], params=SamplingParams(max_tokens=1), arrival_s=0))
    assert refused is not None and "gives vectors or scores" in refused.message
