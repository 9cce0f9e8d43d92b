"""Text encoders for tests: the real MiniLM of a package, and tiny random ones as a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from headrace.config.architecture import model_config
from headrace.config.encoder import encoder_shapes
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
    """Two layers of random weights, named as the architecture names them; `overrides` are keys of config.json."""
    config = {
        "architectures": [architecture],
        "model_type": {"Ber": "bert", "Rob": "roberta", "XLM": "xlm-roberta", "Cam": "camembert"}[architecture[:3]],
        "vocab_size": write_word_tokenizer(folder),
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "max_position_embeddings": 96,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "pad_token_id": 0,
        "dtype": "float32",
        **overrides,
    }
    if "num_labels" in config:
        config["id2label"] = {str(i): f"LABEL_{i}" for i in range(config.pop("num_labels"))}
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in encoder_shapes(model_config(config, "config.json")).items():
        is_head = name.startswith("classifier")
        prefix = (
            "" if architecture.endswith("Model") or is_head else f"{'bert' if 'Bert' in architecture else 'roberta'}."
        )
        tensor = random.normal(0, 0.4 if len(shape) > 1 else 0.1, shape) + name.endswith("LayerNorm.weight")
        tensors[prefix + name] = tensor.astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
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
