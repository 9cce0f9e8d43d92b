"""SentencePiece vocabularies from a tokenizer.model, a GGUF file or a tokenizer.json give the ids of the library that
made them. `tests/data/sentencepiece` holds four models trained by it, and what it gives for some texts."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from headrace.config.errors import ConfigError
from headrace.config.gguf_format import GGUFHeader
from headrace.config.model_files import ModelFiles, open_model
from headrace.text.sentencepiece import read_sentencepiece
from headrace.text.tokenizer import Tokenizer
from tests.small_models import bundled_gguf

DATA = Path(__file__).parents[1] / "data" / "sentencepiece"
EXPECTED: dict[str, list[dict[str, Any]]] = json.loads((DATA / "expected.json").read_text(encoding="utf-8"))
CASES = [pytest.param(name, case, id=f"{name}-{case['text'][:12]!r}") for name in EXPECTED for case in EXPECTED[name]]


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    """A model for the tokenizers to belong to; its own is not used."""
    bundled = open_model(bundled_gguf())
    return replace(bundled, config=msgspec.structs.replace(bundled.config, eos_token_ids=()))


def as_gguf(files: ModelFiles, name: str) -> ModelFiles:
    """The same vocabulary as a converter to GGUF writes it."""
    source = read_sentencepiece(DATA / f"{name}.model")
    assert files.gguf is not None
    ids = {"bos": source.bos_id, "eos": source.eos_id, "unknown": source.unk_id}
    metadata = {
        "tokenizer.ggml.model": "llama" if source.model == "bpe" else "t5",
        "tokenizer.ggml.tokens": source.pieces,
        "tokenizer.ggml.scores": source.scores,
        "tokenizer.ggml.token_type": source.kinds,
        "tokenizer.ggml.add_space_prefix": source.space_prefix,
        "tokenizer.ggml.remove_extra_whitespaces": source.one_space,
        **{f"tokenizer.ggml.{role}_token_id": token_id for role, token_id in ids.items() if token_id is not None},
    }
    if source.charsmap:
        # Arrays of the metadata are of signed bytes.
        metadata["tokenizer.ggml.precompiled_charsmap"] = [b - 256 if b > 127 else b for b in source.charsmap]
    return replace(files, gguf=GGUFHeader(3, metadata, files.gguf.tensors))


@pytest.fixture(scope="module")
def loaded(files: ModelFiles) -> dict[str, tuple[Tokenizer, Tokenizer]]:
    return {
        name: (Tokenizer.load(files, DATA / f"{name}.model"), Tokenizer.load(as_gguf(files, name))) for name in EXPECTED
    }


@pytest.mark.parametrize(("name", "case"), CASES)
def test_ids_and_text_are_those_of_the_library(name: str, case: dict[str, Any], loaded: dict[str, Any]) -> None:
    for tokenizer in loaded[name]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"]
        # The library writes an unknown character as ⁇, we leave it out as all special tokens; and of a mark for a
        # space that stood in the text it makes none in some places.
        if tokenizer.token_id("<unk>") not in case["ids"] and "▁" not in case["text"]:
            assert tokenizer.decode(case["ids"]) == case["decoded"]


def test_special_tokens_come_from_the_model_s_own_ids(files: ModelFiles) -> None:
    tokenizer = Tokenizer.load(files, DATA / "bpe.model")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_ids) == ("<s>", "</s>", (2,))
    assert tokenizer.encode("a</s>", add_special_tokens=True)[:1] == [1] and tokenizer.adds_bos
    assert tokenizer.encode("a</s>", add_special_tokens=False)[-1] == 2
    without = Tokenizer.load(files, DATA / "unigram_bytes.model")
    assert without.bos_token is None and not without.adds_bos
    assert without.special_tokens["pad_token"] == "<pad>"
    assert not without.is_special(without.token_id("<turn>") or 0)


def directory(folder: Path, name: str = "bpe", **jsons: Any) -> Path:
    (folder / "tokenizer.model").write_bytes((DATA / f"{name}.model").read_bytes())
    for file, content in jsons.items():
        (folder / f"{file}.json").write_text(json.dumps(content))
    return folder


def test_tokens_beside_the_model_are_added_after_its_pieces(files: ModelFiles, tmp_path: Path) -> None:
    count = len(read_sentencepiece(DATA / "bpe.model").pieces)
    decoder = {str(count + 1): {"content": "<tool>", "special": False}, "1": {"content": "<s>", "special": True}}
    config = {"added_tokens_decoder": decoder, "add_bos_token": False, "eos_token": "<|end|>"}
    path = directory(tmp_path, added_tokens={"<|end|>": count}, tokenizer_config=config)
    tokenizer = Tokenizer.load(files, path)
    plain = Tokenizer.load(files, DATA / "bpe.model")
    ids = tokenizer.encode("<tool>one<|end|>", add_special_tokens=True)
    assert ids == [count + 1, *plain.encode("one", add_special_tokens=False), count]
    assert tokenizer.decode(ids) == "<tool> one" and tokenizer.eos_token_id == count
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|end|>": count + 7}))
    with pytest.raises(ConfigError, match="which leaves a gap after the 620 pieces"):
        Tokenizer.load(files, path)


def test_without_legacy_only_the_beginning_of_a_text_gets_a_space(files: ModelFiles, tmp_path: Path) -> None:
    legacy = Tokenizer.load(files, DATA / "bpe.model")
    newer = Tokenizer.load(files, directory(tmp_path, tokenizer_config={"legacy": False}))
    for text in ("one two", "你好 世界"):
        assert newer.encode(text, add_special_tokens=False) == legacy.encode(text, add_special_tokens=False)
    ids = newer.encode("<s>one", add_special_tokens=False)
    assert ids == [1, *newer.encode("one", add_special_tokens=False)[-len(ids) + 1 :]]
    assert newer.token_bytes(ids[1])[:1] != b" " and legacy.decode([2, 9]) == newer.decode([2, 9])


@pytest.mark.parametrize("byte_fallback", [False, True])
def test_a_unigram_tokenizer_json_gives_the_library_s_ids_and_text(
    files: ModelFiles, tmp_path: Path, byte_fallback: bool
) -> None:
    backend = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0)], unk_id=0, byte_fallback=byte_fallback))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC()])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    bytes_ = [f"<0x{b:02X}>" for b in range(256)] if byte_fallback else []
    texts = [line for line in inspect.getsource(json.decoder).splitlines() if line.strip()]
    trainer = trainers.UnigramTrainer(
        vocab_size=700, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator([*texts, *["naïve Größe 你好 世界 😀"] * 20], trainer)
    state = json.loads(backend.to_str())
    state["model"]["vocab"] += [[piece, -20.0] for piece in bytes_]
    state["model"]["byte_fallback"] = byte_fallback
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(chain) if byte_fallback else decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    tokenizer = Tokenizer.load(files, tmp_path)
    for text in [
        *texts[:40],
        "naïve Größe",
        "你好 世界 😀",
        "  two  spaces",
        *(["unseen ж🦊"] if byte_fallback else []),
    ]:
        ids = backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == backend.decode(ids)


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (b"", "has no pieces"),
        (b"IQ== 0\nIg== 1\n", "is not a SentencePiece model"),
        (b"\x0a\xff\x01", "runs past the end"),
        (b"\x0a\x03\x0a\x01a\x12\x02\x18\x03", "its model has the type 3; known are 1"),
        (b"\x0a\x05\x0a\x01a\x18\x09", "has the kind 9"),
        (b"\x0a\x03\x0a\x01a" * 2, "1 of its pieces appear twice"),
        (b"\x08" + b"\xff" * 12, "does not end"),
        (b"\x08\xff", "not a SentencePiece model"),
    ],
)
def test_a_file_that_is_no_sentencepiece_model_is_refused(
    files: ModelFiles, tmp_path: Path, raw: bytes, complaint: str
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(raw)
    with pytest.raises(ConfigError, match=complaint):
        Tokenizer.load(files, tmp_path)


def test_a_damaged_model_is_read_or_refused_and_nothing_else(files: ModelFiles, tmp_path: Path) -> None:
    import random

    rng, whole = random.Random(3), (DATA / "bpe.model").read_bytes()
    refused = 0
    for _ in range(60):
        copy = bytearray(whole[: rng.choice((len(whole), rng.randrange(len(whole))))])
        for _ in range(rng.randint(0, 3)):
            copy[rng.randrange(len(copy))] = rng.randrange(256)
        (tmp_path / "tokenizer.model").write_bytes(copy)
        try:
            Tokenizer.load(files, tmp_path)
        except ConfigError:
            refused += 1
    assert refused > 10
