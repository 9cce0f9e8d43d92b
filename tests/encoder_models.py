"""Text encoders for tests: the real MiniLM of a package, and tiny random ones as a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.config.resolve import embedding_model

WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or one had mill "
    "water wheel river grain stone turns grinds yellow banana what does who where"
).split()


def minilm() -> Path:
    """all-MiniLM-L6-v2: 6 layers of 384, mean pooling, vectors of length 1, texts of at most 256 tokens."""
    return embedding_model()


def write_word_tokenizer(folder: Path) -> int:
    """A small WordPiece vocabulary with BERT's templates for one text and for two; its size."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    tokens = [*special, *letters, *(f"##{letter}" for letter in letters), *(w for w in WORDS if len(w) > 1)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.add_special_tokens(special)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizerFast", **roles}))
    return len(tokens)


def write_random_encoder(folder: Path, architecture: str = "BertModel", *, seed: int = 0, **overrides: Any) -> Path:
    """Two layers of random weights; `overrides` are keys of config.json."""
    import torch
    import transformers

    vocab_size = write_word_tokenizer(folder)
    family = architecture.removesuffix("Model").removesuffix("ForSequenceClassification").removesuffix("ForMaskedLM")
    config = getattr(transformers, f"{family}Config")(
        **{
            "vocab_size": vocab_size,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "max_position_embeddings": 96,
            "initializer_range": 0.4,
            **overrides,
        }
    )
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(config)
    for parameter in model.parameters():  # Biases and norms too, which begin as zeros and ones.
        if parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder)
    return folder


def write_pooling(folder: Path, mode: str, *, normalize: bool = True, max_length: int | None = None) -> Path:
    """The files by which sentence-transformers says how rows are pooled; `mode` is cls_token, mean_tokens, ..."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    if max_length is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_length}))
    return folder
