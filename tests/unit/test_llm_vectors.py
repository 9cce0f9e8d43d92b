"""Vectors and scores in process, without a server: `LLM.embed`, `encode` and `score`, and the page about them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace import LLM, PoolingParams
from headrace.protocol.pooling import cosines
from tests.documents import blocks
from tests.encoder_models import minilm, write_random_encoder
from tests.tiny_models import tiny_llama

MILL, STOCKS = "A water wheel turns the mill.", "Stock prices fell today."
(EXAMPLE,) = [block.text for block in blocks() if block.page == "docs/llm.md" and "llm.embed" in block.text]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(minilm()), dtype="float32", threads=1)


def test_the_page_s_example_gives_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(EXAMPLE, "docs/llm.md", "exec"), {})
    width, water, stocks = capsys.readouterr().out.splitlines()
    assert width == "384 numbers"
    assert float(water) > float(stocks)


def test_a_vector_for_each_text_whatever_it_is_given_as(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(MILL, add_special_tokens=True)
    outputs = llm.embed([MILL, {"prompt_token_ids": ids}, STOCKS])
    assert [output.request_id for output in outputs] == ["0", "1", "2"]
    assert outputs[0].prompt_token_ids == ids
    assert outputs[0].outputs.embedding == outputs[1].outputs.embedding == llm.embed(MILL)[0].outputs.embedding
    assert len(outputs[2].outputs.embedding) == 384
    many = llm.embed((f"{MILL} {number}" for number in range(70)), use_tqdm=False)
    assert many[69].outputs.embedding == llm.embed(f"{MILL} 69")[0].outputs.embedding


def test_encode_gives_vectors_and_rows(llm: LLM) -> None:
    (vector,) = llm.encode(MILL)
    assert vector.outputs.data == llm.embed(MILL)[0].outputs.embedding
    (rows,) = llm.encode(MILL, PoolingParams(normalize=False), pooling_task="token_embed")
    assert np.shape(rows.outputs.data) == (len(rows.prompt_token_ids), 384)
    mean = np.mean(rows.outputs.data, axis=0)
    np.testing.assert_allclose(mean / np.linalg.norm(mean), vector.outputs.data, atol=1e-6)


def test_scores_are_cosines(llm: LLM) -> None:
    mill, stocks = (np.array(output.outputs.embedding) for output in llm.embed([MILL, STOCKS]))
    scores = [output.outputs.score for output in llm.score(MILL, [MILL, STOCKS])]
    assert scores == pytest.approx([1.0, mill @ stocks], abs=1e-6)
    assert [output.outputs.score for output in llm.score([MILL, STOCKS], [STOCKS, STOCKS])] == pytest.approx(
        [mill @ stocks, 1.0], abs=1e-6
    )


def test_no_cosine_is_beyond_one_and_a_text_with_itself_has_one() -> None:
    chance = np.random.default_rng(3)
    for size in (1, 2, 64, 384, 1536):
        for vector in chance.standard_normal((60, size)).astype(np.float32):
            vector /= np.float32(np.linalg.norm(vector))
            near = np.nextafter(vector, np.float32(2)).astype(np.float32)
            same, opposite, beside = cosines([vector.tolist()], [each.tolist() for each in (vector, -vector, near)])
            assert (same, opposite) == (1.0, -1.0)
            assert 1 - 1e-6 < beside <= 1.0
    assert cosines([[1.0, 0.0]], [[0.0, 3.0], [2.0, 2.0], [0.0, 0.0]]) == [0.0, pytest.approx(0.5**0.5), 0.0]


def test_what_cannot_be_served_is_named(llm: LLM) -> None:
    long = "water " * 300
    with pytest.raises(ValueError, match=r"prompt 1: it has 302 tokens and this model reads at most 256"):
        llm.embed([MILL, long])
    cut = llm.embed([MILL, long], pooling_params=PoolingParams(truncate_prompt_tokens=-1))
    assert len(cut[1].prompt_token_ids) == 256
    with pytest.raises(ValueError, match="matryoshka_dimensions"):
        llm.embed(MILL, pooling_params=PoolingParams(dimensions=64))
    with pytest.raises(ValueError, match="prompt 1: it is empty"):
        llm.embed([MILL, []])
    with pytest.raises(ValueError, match="2 first and 3 second texts"):
        llm.score([MILL] * 2, [STOCKS] * 3)
    with pytest.raises(ValueError, match="the task score is not to be had"):
        llm.encode(MILL, pooling_task="score")
    with pytest.raises(ValueError, match="gives vectors or scores"):
        llm.generate(MILL)
    assert llm.embed(MILL)[0].finished, "it goes on after each of them"


def test_a_cross_encoder_scores_pairs_and_gives_no_vectors(tmp_path: Path) -> None:
    path = write_random_encoder(tmp_path, "BertForSequenceClassification", num_labels=1)
    llm = LLM(str(path), threads=1)
    one, two = llm.score("what turns", ["a mill", "the river"])
    assert 0 < one.outputs.score < 1 and one.outputs.score != two.outputs.score
    assert llm.score(["what turns"], ["the river"])[0].outputs.score == two.outputs.score
    with pytest.raises(ValueError, match="pair 1: it has"):
        llm.score("a", ["b", "banana " * 120])
    with pytest.raises(ValueError, match="the task embed is not to be had"):
        llm.embed("a")


def test_a_chat_model_gives_vectors_when_it_is_told_to(tmp_path: Path) -> None:
    llm = LLM(str(tiny_llama(tmp_path)), runner="pooling", threads=1, kv_cache_memory_bytes=1 << 24)
    water, river = (output.outputs.embedding for output in llm.embed(["water", "river"]))
    assert len(water) == 64 and np.linalg.norm(river) == pytest.approx(1, abs=1e-6)
    assert llm.embed("river")[0].outputs.embedding == river
    with pytest.raises(ValueError, match="600 tokens and this model reads at most 512"):
        llm.embed("x" * 600)
    assert len(llm.embed("x" * 512)[0].prompt_token_ids) == 512, "nothing need be left for an answer"
