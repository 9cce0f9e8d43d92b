"""Ids are the ones the model was trained with, and every token has its exact bytes."""

from __future__ import annotations

import asyncio
import inspect
import json
import json.decoder
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from headrace.config.errors import ConfigError
from headrace.config.gguf_format import GGUFHeader
from headrace.config.model_files import ModelFiles, open_model
from headrace.text.detokenizer import Detokenizer
from headrace.text.tokenizer import LONG_TEXT_CHARS, Tokenizer
from tests.small_models import bundled_gguf, write_byte_tokenizer


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return open_model(bundled_gguf())


@pytest.fixture(scope="module")
def tokenizer(files: ModelFiles) -> Tokenizer:
    return Tokenizer.load(files)


# Recorded from transformers' tokenizer of the same file, except the last: its GGUF import leaves out the rule of the
# model's own tokenizer.json that every digit, fractions among them, is a word of its own.
RECORDED = {
    "Hello, world!": [19556, 28, 905, 17],
    "In 2024, 3.14159": [788, 216, 34, 32, 34, 36, 28, 216, 35, 30, 33, 36, 33, 37, 41],
    "naïve café Größe": [3546, 46494, 37366, 9171, 7466, 34878, 85],
    "你好，世界": [18645, 250, 48392, 138, 12831, 7906, 240, 178, 239, 230],
    "👩\u200d👩\u200d👧": [10813, 235, 119, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117],
    " 🇨🇭": [15107, 225, 118, 10813, 225, 251],
    "a\tb\n\n  c   d": [81, 197, 82, 8866, 265, 256, 287],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    " leading and trailing ": [2899, 284, 35079, 216],
    "I'll don't we've": [57, 3060, 1326, 982, 392, 3543],
    "\r\n\x00\x7f": [201, 198, 190, 217],
    "def f(x):\n    return x**2": [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34],
    " ½ ²": [216, 16738, 216, 19133],
}


@pytest.mark.parametrize("text", RECORDED)
def test_text_becomes_the_recorded_ids_and_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text, add_special_tokens=True) == RECORDED[text]
    assert tokenizer.decode(RECORDED[text], skip_special_tokens=False) == text


def test_the_bundled_tokenizer_says_what_the_file_says(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.eos_token_ids) == ("<|im_end|>", 2, (2,))
    assert not tokenizer.adds_bos
    assert tokenizer.special_tokens["unk_token"] == "<|endoftext|>"


def test_special_tokens_are_flagged_and_left_out_of_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.is_special(2) and not tokenizer.is_special(19556)
    assert tokenizer.decode([1, 19556, 2]) == "Hello"
    assert tokenizer.decode([1, 19556, 2], skip_special_tokens=False) == "<|im_start|>Hello<|im_end|>"
    assert tokenizer.token_bytes(2) == b"<|im_end|>"


def test_a_token_inside_a_character_has_exact_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("世", add_special_tokens=False)
    assert len(ids) > 1
    assert b"".join(map(tokenizer.token_bytes, ids)) == "世".encode()
    assert "�" in tokenizer.token_text(ids[-1])


def test_ids_without_a_token_have_no_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(49152) == b"" and tokenizer.token_bytes(-1) == b""


# The model's vocabulary has no token for 21 bytes that its training text never held (control characters, and the
# first bytes of planes without characters); its tokenizer drops them, here as everywhere.
BUNDLED = Tokenizer.load(open_model(bundled_gguf()))
SPELT = {BUNDLED.token_bytes(i) for i in range(BUNDLED.vocab_size)}
spelt_characters = st.characters(codec="utf-8").filter(lambda c: all(bytes([b]) in SPELT for b in c.encode()))


@settings(deadline=None)
@given(st.text(spelt_characters, max_size=40))
def test_any_text_survives_the_way_to_ids_and_back(text: str) -> None:
    ids = BUNDLED.encode(text, add_special_tokens=False)
    assert BUNDLED.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "x" * 5000 + "\ud83d"])
def test_a_lone_surrogate_is_refused_with_its_place(tokenizer: Tokenizer, text: str) -> None:
    place = next(i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff")
    with pytest.raises(ValueError, match=f"lone surrogate U\\+D[0-9A-F]+ at character {place}$"):
        tokenizer.encode(text, add_special_tokens=True)


# tokenizer.json


def test_a_long_text_has_the_ids_of_its_parts_and_a_lone_surrogate_in_it_is_found(tokenizer: Tokenizer) -> None:
    line = " What turns a water wheel?"
    lines = 2 + LONG_TEXT_CHARS // len(line)
    assert tokenizer.encode(line * lines, False) == tokenizer.encode(line, False) * lines
    with pytest.raises(ValueError, match=f"U\\+D83D at character {lines * len(line)}"):
        tokenizer.encode(line * lines + "\ud83d", False)


def test_the_server_goes_on_while_a_long_text_is_tokenized_in_a_thread(tokenizer: Tokenizer) -> None:
    async def turns_of_the_loop() -> int:
        turns = 0
        work = asyncio.create_task(asyncio.to_thread(tokenizer.encode, "ab " * 400_000, False))
        while not work.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert len(work.result()) > 400_000
        return turns

    assert asyncio.run(turns_of_the_loop()) > 20


def llama2_like(path: Path, *, post_processor: bool = True) -> None:
    """SentencePiece-style BPE with byte fallback, in the form of Llama 2's tokenizer.json."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "h", "i", "▁h", "▁hi"]
    merges = [("▁", "h"), ("▁h", "i")]
    vocab = {p: i for i, p in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    if post_processor:
        backend.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))


def with_config(path: Path, **config: Any) -> Path:
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_sentencepiece_tokens_have_exact_bytes(files: ModelFiles, tmp_path: Path) -> None:
    llama2_like(tmp_path)
    tokenizer = Tokenizer.load(files, with_config(tmp_path, bos_token="<s>", eos_token={"content": "</s>"}))
    ids = tokenizer.encode("hi é\n", add_special_tokens=False)
    assert [tokenizer.token_bytes(i) for i in ids] == [b" hi", b" ", b"\xc3", b"\xa9", b"\n"]
    assert tokenizer.decode(ids) == "hi é\n"
    assert tokenizer.decode([1, *ids, 2]) == "hi é\n"
    assert tokenizer.eos_token_ids == (2,)


def test_a_stream_keeps_the_space_between_prompt_and_answer(files: ModelFiles, tmp_path: Path) -> None:
    llama2_like(tmp_path)
    tokenizer = Tokenizer.load(files, tmp_path)
    assert Detokenizer(tokenizer).add([263]) == " hi"
    assert tokenizer.decode([263]) == "hi"


def test_bos_is_added_by_the_tokenizer_once_and_not_where_a_template_wrote_it(
    files: ModelFiles, tmp_path: Path
) -> None:
    llama2_like(tmp_path)
    tokenizer = Tokenizer.load(files, with_config(tmp_path, bos_token="<s>"))
    assert tokenizer.adds_bos
    assert tokenizer.encode("hi", add_special_tokens=True) == [1, 263]
    assert tokenizer.encode("hi", add_special_tokens=False) == [263]
    assert tokenizer.encode_chat("<s>hi")[:2] != [1, 1] and tokenizer.encode_chat("<s>hi")[0] == 1
    assert tokenizer.encode_chat("hi") == [1, 263]


@pytest.mark.parametrize(("post_processor", "adds"), [(True, False), (False, True), (True, True), (False, False)])
def test_the_tokenizer_config_decides_about_bos(
    files: ModelFiles, tmp_path: Path, post_processor: bool, adds: bool
) -> None:
    llama2_like(tmp_path, post_processor=post_processor)
    tokenizer = Tokenizer.load(files, with_config(tmp_path, bos_token="<s>", add_bos_token=adds))
    assert tokenizer.adds_bos == adds
    assert tokenizer.encode("hi", add_special_tokens=True) == ([1, 263] if adds else [263])


def test_truncation_and_padding_of_a_tokenizer_json_are_switched_off(files: ModelFiles, tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(files, tmp_path).encode("abcdef", add_special_tokens=True)) == 6


def test_a_tokenizer_json_can_be_named_itself(files: ModelFiles, tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(files, tmp_path / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode("né<|im_end|>", add_special_tokens=True)) == "né"
    assert tokenizer.eos_token_id == 258
    assert tokenizer.eos_token_ids == (258, 2), "the tokenizer's own and the model's"


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda p: None, r"tokenizer\.json does not exist"),
        (lambda p: (p / "tokenizer.model").touch(), r"tokenizer\.model is not a SentencePiece model"),
        (lambda p: (p / "tokenizer.json").write_text("{}"), "is not a tokenizer.json that can be read"),
    ],
)
def test_a_missing_or_damaged_tokenizer_is_named(files: ModelFiles, tmp_path: Path, spoil: Any, complaint: str) -> None:
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=complaint):
        Tokenizer.load(files, tmp_path)


def test_an_unknown_decoder_is_refused_by_name(files: ModelFiles, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = decoders.CTC()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="decoder CTC is not supported"):
        Tokenizer.load(files, tmp_path)


# GGUF vocabularies other than the bundled one


def gguf_files(files: ModelFiles, **changes: Any) -> ModelFiles:
    """The bundled file with other tokenizer metadata; a value of None removes the key."""
    assert files.gguf is not None
    metadata = {**files.gguf.metadata, **{f"tokenizer.ggml.{k}": v for k, v in changes.items()}}
    header = GGUFHeader(3, {k: v for k, v in metadata.items() if v is not None}, files.gguf.tensors)
    return replace(files, gguf=header)


BYTE_LEVEL = sorted(pre_tokenizers.ByteLevel.alphabet())


def tiny(**changes: Any) -> dict[str, Any]:
    """A vocabulary of the 256 bytes, four numbers and two marks."""
    tokens = [*BYTE_LEVEL, "12", "123", "<|end|>", "<think>"]
    vocabulary = {
        "tokens": tokens,
        "token_type": [1] * 258 + [3, 4],
        "merges": ["1 2", "12 3"],
        "bos_token_id": 258,
        "eos_token_id": 258,
        "add_bos_token": None,
    }
    return {**vocabulary, **changes}


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", [b"123", b"4"]),
        ("llama-bpe", [b"123", b"4"]),
        ("smollm", [b"1", b"2", b"3", b"4"]),
        ("qwen2", [b"1", b"2", b"3", b"4"]),
        ("tekken", [b"1", b"2", b"3", b"4"]),
        ("gpt-4o", [b"123", b"4"]),
        ("dbrx", [b"123", b"4"]),
    ],
)
def test_each_word_split_treats_digits_its_own_way(files: ModelFiles, pre: str, pieces: list[bytes]) -> None:
    tokenizer = Tokenizer.load(gguf_files(files, **tiny(pre=pre)))
    ids = tokenizer.encode("1234", add_special_tokens=False)
    assert [tokenizer.token_bytes(i) for i in ids] == pieces


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-4o", "dbrx"])
def test_word_splits_are_those_that_transformers_knows(pre: str) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    from headrace.text.gguf_vocabulary import _WORD_SPLITS, _WORDS

    words = pre_tokenizers.Split(tokenizers.Regex(_WORDS[_WORD_SPLITS[pre]]), behavior="isolated")
    theirs = pre_tokenizers.Split(tokenizers.Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated")
    text = "It's HelloWORLDs don'T 12345 x/y\n\n  tab\t你好 Größe ÉCOLE e\u0301 😀!?\r\n/ end  "
    assert words.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


def test_llama3_adds_bos_unless_the_file_says_no(files: ModelFiles) -> None:
    assert Tokenizer.load(gguf_files(files, **tiny(pre="llama-bpe"))).encode("", add_special_tokens=True) == [258]
    silent = Tokenizer.load(gguf_files(files, **tiny(pre="llama-bpe", add_bos_token=False)))
    assert not silent.adds_bos and silent.encode("", add_special_tokens=True) == []


def test_control_tokens_are_special_and_user_defined_ones_are_text(files: ModelFiles) -> None:
    tokenizer = Tokenizer.load(gguf_files(files, **tiny(pre="gpt-2")))
    ids = tokenizer.encode("<think>1<|end|>", add_special_tokens=False)
    assert ids == [259, BYTE_LEVEL.index("1"), 258]
    assert tokenizer.decode(ids) == "<think>1"


def sentencepiece_oracle() -> tuple[tokenizers.Tokenizer, list[str]]:
    """A trained BPE of SentencePiece's form, whose merges the vocabulary below no longer holds."""
    text = inspect.getsource(json.decoder) + " naïve Größe 你好 世界 " * 40
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False
    )
    trained.train_from_iterator([line for line in text.splitlines() if line.strip()], trainer)
    vocab = trained.get_vocab()
    return trained, sorted(vocab, key=lambda piece: vocab[piece])


def test_a_sentencepiece_vocabulary_gives_the_ids_of_the_merges_it_was_trained_with(files: ModelFiles) -> None:
    trained, tokens = sentencepiece_oracle()
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    scores = [-float(i) for i in range(len(tokens))]
    changes = {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores, "merges": None}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "add_bos_token": None, "add_space_prefix": None}
    tokenizer = Tokenizer.load(gguf_files(files, **changes, **ids))
    texts = [line for line in inspect.getsource(json.decoder).splitlines() if line.strip()]
    for text in [*texts, "naïve Größe", "你好 世界", "  two  spaces", "unseen: ж👩\u200d👧"]:
        wanted = trained.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=True) == [1, *wanted], text
        assert tokenizer.decode([1, *wanted, 2]) == text
    assert tokenizer.encode_chat("<s>hi</s>") == [1, *tokenizer.encode("hi", add_special_tokens=False), 2]


def test_a_tokenizer_of_another_model_is_refused(files: ModelFiles) -> None:
    import msgspec

    small = replace(files, config=msgspec.structs.replace(files.config, vocab_size=1000))
    with pytest.raises(ConfigError, match="has 49,152 tokens, the model only 1,000"):
        Tokenizer.load(small)


def test_an_added_token_beyond_the_model_s_rows_is_refused_in_a_text_alone(files: ModelFiles, tmp_path: Path) -> None:
    import msgspec

    write_byte_tokenizer(tmp_path)
    small = replace(files, config=msgspec.structs.replace(files.config, vocab_size=258, eos_token_ids=()))
    tokenizer = Tokenizer.load(small, tmp_path)
    assert len(tokenizer.encode("fine", add_special_tokens=True)) == 4
    with pytest.raises(ValueError, match="token 258, which the model has no embedding for"):
        tokenizer.encode("bad<|im_end|>", add_special_tokens=True)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model": "bert"}, "GGUF tokenizer 'bert' is not supported; known are gpt2, llama and t5"),
        ({"model": "llama"}, "has no score for each token"),
        ({"pre": "jais"}, "pre-tokenizer 'jais' is not supported; known are gpt-2, smollm"),
        ({"pre": None}, "pre-tokenizer None"),
        ({"merges": None}, r"has no tokenizer\.ggml\.merges"),
        ({"tokens": None}, r"has no tokenizer\.ggml\.tokens"),
        ({"merges": ["no such"]}, "do not fit together"),
        ({"merges": ["nospace"]}, "do not fit together"),
        ({"tokens": ["a", "a"]}, "1 tokens of its vocabulary appear twice"),
    ],
)
def test_a_vocabulary_that_cannot_be_read_is_refused_with_a_way_out(
    files: ModelFiles, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        Tokenizer.load(gguf_files(files, **changes))
    assert "--tokenizer DIRECTORY" in str(caught.value)
