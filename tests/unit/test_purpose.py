"""What a model is served for and how its rows are pooled: by its files, changed by flags, contradictions refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.config.errors import ConfigError
from headrace.config.load import Launch, load
from headrace.config.model_files import open_model
from headrace.config.pooling import Pooler
from tests.encoder_models import minilm, write_pooling, write_random_encoder
from tests.tiny_models import tiny_llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return write_random_encoder(tmp_path)


def launch(path: Path, *flags: str) -> Launch:
    return load([str(path), *flags])


def test_minilm_is_what_its_files_say(tmp_path: Path) -> None:
    engine = launch(minilm()).engine
    assert engine.pooler == Pooler(pooling="mean", normalize=True)
    assert engine.max_model_len == 256
    assert launch(minilm(), "--max-model-len", "512").engine.max_model_len == 512
    with pytest.raises(ConfigError, match="513 is more than the 512 positions"):
        launch(minilm(), "--max-model-len", "513")
    assert launch(Path("all-minilm-l6-v2")).engine.model == str(minilm())


@pytest.mark.parametrize(
    ("flags", "pooling"),
    [
        ("", None),
        ("--runner generate", None),
        ("--runner pooling", "last"),
        ("--task embed", "last"),
        ("--task embedding", "last"),
        ("--task score", "last"),
        ("--convert embed", "last"),
        ("--runner pooling --convert none", "last"),
        ('--runner pooling --pooler-config {"pooling_type":"MEAN"}', "mean"),
        ('--runner pooling --override-pooler-config {"seq_pooling_type":"mean"}', "mean"),
    ],
)
def test_a_chat_model_is_served_for_what_the_flags_say(llama: Path, flags: str, pooling: str | None) -> None:
    pooler = launch(llama, *flags.split()).engine.pooler
    assert (pooler and pooler.pooling) == pooling


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--runner generate --task embed", "--task embed and --runner generate contradict each other"),
        ("--task classify", "--task classify: classification: not built yet"),
        ("--convert reward", "reward models: not built yet"),
        ("--runner draft", "draft models: not built yet"),
        ('--pooler-config {"pooling_type":"MEAN"}', "Use --runner pooling with it"),
        ('--runner pooling --pooler-config {"pooling_type":"CLS"}', "Use LAST or MEAN"),
        ('--runner pooling --pooler-config {"pooling_type":"STEP"}', "pooling_type 'STEP' is not supported; known are"),
        ('--runner pooling --pooler-config {"normalise":true}', "normalise True is not supported"),
        ("--task embde", "embed"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(llama: Path, flags: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        launch(llama, *flags.split())
    assert said in str(caught.value)


def test_an_encoder_gives_no_text(bert: Path) -> None:
    assert launch(bert).engine.pooler == Pooler(pooling="cls")
    with pytest.raises(ConfigError, match="--task generate: this model is an encoder, which gives vectors and no text"):
        launch(bert, "--task", "generate")


@pytest.mark.parametrize(
    ("mode", "normalize", "expected"),
    [("cls_token", False, Pooler(pooling="cls", normalize=False)), ("mean_tokens", True, Pooler(pooling="mean"))],
)
def test_sentence_transformers_files_decide(bert: Path, mode: str, normalize: bool, expected: Pooler) -> None:
    write_pooling(bert, mode, normalize=normalize, max_length=4000)
    engine = launch(bert).engine
    assert engine.pooler == expected
    assert engine.max_model_len == 96, "no more than the model has positions"
    changed = launch(bert, "--pooler-config", '{"pooling_type": "LAST", "normalize": true}').engine.pooler
    assert changed == Pooler(pooling="last")


def test_a_prompt_that_the_model_wants_before_every_text_is_told(bert: Path) -> None:
    write_pooling(bert, "mean_tokens")
    prompts = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}
    (bert / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    assert any("'query: '. The server adds none" in notice for notice in launch(bert).notices)
    prompts["default_prompt_name"] = None  # type: ignore[assignment]
    (bert / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    assert launch(bert).notices == ()


def test_newer_files_name_the_mode(bert: Path) -> None:
    for name, pooling in (("mean", "mean"), ("cls", "cls"), ("lasttoken", "last")):
        write_pooling(bert, "mean_tokens")
        (bert / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": name, "embedding_dimension": 48}))
        assert open_model(bert).pooling.pooling == pooling


def test_a_way_of_pooling_that_is_not_known_is_refused_unless_overridden(bert: Path) -> None:
    write_pooling(bert, "max_tokens")
    with pytest.raises(ConfigError, match="pools by pooling_mode_max_tokens; known is one of"):
        launch(bert)
    assert launch(bert, "--pooler-config", '{"pooling_type": "MEAN"}').engine.pooler == Pooler(pooling="mean")


def test_a_part_behind_the_pooling_that_is_not_known_is_refused(bert: Path) -> None:
    write_pooling(bert, "mean_tokens")
    modules = json.loads((bert / "modules.json").read_text())
    modules.append({"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"})
    (bert / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match="a part of the kind 'Dense'"):
        launch(bert, "--pooler-config", '{"pooling_type": "MEAN"}')


@pytest.mark.parametrize(
    ("name", "text"), [("modules.json", "{}"), ("modules.json", "["), ("1_Pooling/config.json", "")]
)
def test_a_damaged_file_is_named(bert: Path, name: str, text: str) -> None:
    write_pooling(bert, "mean_tokens")
    (bert / name).write_text(text)
    with pytest.raises(ConfigError, match=name):
        launch(bert)


@pytest.mark.parametrize(
    ("overrides", "dimensions"),
    [({}, ()), ({"is_matryoshka": True}, None), ({"matryoshka_dimensions": [16, 32]}, (16, 32))],
)
def test_shorter_vectors_are_those_the_model_was_trained_for(
    bert: Path, overrides: dict[str, Any], dimensions: tuple[int, ...] | None
) -> None:
    assert launch(bert, "--hf-overrides", json.dumps(overrides)).engine.pooler == Pooler(
        pooling="cls", dimensions=dimensions
    )


def test_a_cross_encoder_gives_scores_and_a_classifier_is_refused(tmp_path: Path) -> None:
    one = write_random_encoder(tmp_path / "one", "BertForSequenceClassification", num_labels=1)
    three = write_random_encoder(tmp_path / "three", "BertForSequenceClassification", num_labels=3)
    assert launch(one).engine.pooler == Pooler(task="score", pooling="cls")
    raw = launch(one, "--pooler-config", '{"use_activation": false}').engine.pooler
    assert raw is not None and raw.activation == "identity"
    with pytest.raises(ConfigError, match="Use --task score"):
        launch(one, "--task", "embed")
    with pytest.raises(ConfigError, match="tells 3 classes apart, and classification is not built yet"):
        launch(three)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"hidden_act": "gelu_new"}, "hidden_act 'gelu_new'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ({"is_decoder": True}, "as a decoder is not supported"),
        ({"num_attention_heads": 5}, "48 is not a multiple of 5 heads"),
        ({"num_hidden_layers": 3}, "lacks 16 of the 53 tensors that a bert model of 3 layers needs"),
        ({"vocab_size": 7}, r"word_embeddings.weight has \[\d+, 48\], expected \[7, 48\]"),
    ],
)
def test_what_an_encoder_s_files_ask_for_and_is_not_there_is_refused(
    bert: Path, overrides: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        launch(bert, "--hf-overrides", json.dumps(overrides))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--max-num-batched-tokens 64", "an encoder reads a text in one step. Use --max-num-batched-tokens 96"),
        ("--gpu-memory-utilization 0.000001", "The model and the buffers of a step take"),
    ],
)
def test_an_encoder_that_has_no_room_says_what_to_change(bert: Path, flags: str, said: str) -> None:
    from headrace.core import EngineCore

    with pytest.raises(ConfigError, match=said):
        EngineCore(launch(bert, *flags.split()).engine)
