"""Families that Headrace has no file for, in transformers' own code: the same logits and tokens as without Headrace,
alone, in chunks, in a crowd, from the prefix cache and after a preemption.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from headrace.config.errors import ConfigError
from headrace.config.model_files import open_model
from headrace.config.settings import EngineSettings
from headrace.core import EngineCore
from tests.engine_runs import request, run
from tests.small_models import END_TOKEN_ID, VOCAB_SIZE, write_byte_tokenizer

SMALL = {"vocab_size": VOCAB_SIZE, "bos_token_id": None, "eos_token_id": END_TOKEN_ID, "pad_token_id": None}
HF = {
    **SMALL, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 512,
}  # fmt: skip
FAMILIES = {
    "GPT2": {**SMALL, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "GPTNeoX": HF,
    "OPT": {**HF, "ffn_dim": 160, "word_embed_proj_dim": 64},
    "Olmo2": {**HF, "num_key_value_heads": 2},
    "StableLm": {**HF, "num_key_value_heads": 4},
    "Granite": {**HF, "num_key_value_heads": 2, "logits_scaling": 2.0, "attention_multiplier": 0.3},
    "Starcoder2": {**HF, "num_key_value_heads": 2, "sliding_window": 8},
}
CLASSES = {"GPT2": ("GPT2Config", "GPT2LMHeadModel")}
PROMPT = [(11 * i + 3) % 200 for i in range(40)]


def write(folder: Path, family: str, **changes: object) -> Path:
    config_name, model_name = CLASSES.get(family, (f"{family}Config", f"{family}ForCausalLM"))
    config = getattr(transformers, config_name)(**{**FAMILIES.get(family, HF), **changes})
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
    model.save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


def load(model: Path, **changes: object) -> EngineCore:
    values = {"dtype": "float32", "threads": 1, "block_size": 16, "kv_cache_memory_bytes": 2 << 20, **changes}
    return EngineCore(EngineSettings(model=str(model), **values))


def greedy(model: Path, prompt: list[int], count: int) -> list[int]:
    """What transformers' own attention and no cache say."""
    other = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            logits = other(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_of_transformers_gives_its_own_tokens_however_it_is_scheduled(family: str, tmp_path: Path) -> None:
    model = write(tmp_path, family)
    expected = greedy(model, PROMPT, 12)
    asked = request("r", PROMPT, max_tokens=12, temperature=0.0, stop_token_ids=())
    core = load(model, max_num_batched_tokens=16)
    assert core.info.family == "other" and core.info.kernels == "reference"
    assert run(core, [asked])[("r", 0)].token_ids == expected
    crowd = [request(f"c{i}", [i + 1] * (5 + 7 * i), max_tokens=20, seed=i) for i in range(5)]
    together = run(core, [*crowd, request("again", PROMPT, max_tokens=12, temperature=0.0)])[("again", 0)]
    assert together.token_ids == expected
    assert together.num_cached_tokens == 32


def test_a_preempted_sequence_of_such_a_family_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    model = write(tmp_path, "GPT2")
    block = 2 * 2 * 64 * 4 * 16
    asked = [request(f"r{i}", [i + 1] * 20, max_tokens=60, temperature=0.0) for i in range(4)]
    roomy = run(load(model), asked)
    squeezed = run(load(model, kv_cache_memory_bytes=7 * block), asked)
    assert sum(sequence.num_preemptions for sequence in squeezed.values()) > 0
    assert {k: s.token_ids for k, s in squeezed.items()} == {k: s.token_ids for k, s in roomy.items()}


def test_the_sizes_are_read_under_the_names_of_older_files(tmp_path: Path) -> None:
    config = open_model(write(tmp_path, "GPT2")).config
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (64, 2, 4, 4)
    assert (config.max_position_embeddings, config.intermediate_size, config.head_dim) == (512, 256, 16)


@pytest.mark.parametrize("family", ["Bloom", "Mamba", "Gemma2"])
def test_what_a_paged_cache_cannot_express_is_refused_at_the_start(family: str, tmp_path: Path) -> None:
    """A bias in place of positions, a state instead of a cache, scores that are capped."""
    changes: dict[str, object] = {}
    if family == "Bloom":
        changes = {"n_layer": 2, "n_head": 4, "seq_length": 512}
    model = write(tmp_path, family, **changes)
    with pytest.raises(ConfigError, match=r"own families|is missing"):
        load(model)


def test_code_that_comes_with_the_weights_is_never_run(tmp_path: Path) -> None:
    model = write(tmp_path, "GPT2")
    text = (model / "config.json").read_text().replace("GPT2LMHeadModel", "OwnForCausalLM").replace('"gpt2"', '"own"')
    auto_map = '{"auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},'
    (model / "config.json").write_text(auto_map + text.strip()[1:])
    (model / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ConfigError, match="transformers cannot load this model"):
        load(model)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("flags", [{"kernels": "native"}, {"quantization": "int8"}])
def test_what_only_own_families_have_is_refused_by_name(flags: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=next(iter(flags))):
        load(write(tmp_path, "GPT2"), **flags)
