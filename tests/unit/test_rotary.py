"""Frequencies and attention factors of every rotary scaling are transformers' own, at the length that is served."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

transformers = pytest.importorskip("transformers")

from headrace.config.architecture import model_config  # noqa: E402
from headrace.config.errors import ConfigError  # noqa: E402
from headrace.layers.rotary import rotary_frequencies, rotary_tables  # noqa: E402

HEAD_DIM, TRAINED = 16, 64
FACTORS = {"short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}
CASES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": TRAINED},
    "yarn without the trained length": {"rope_type": "yarn", "factor": 8.0},
    "yarn with a factor": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.3, "beta_fast": 20.0},
    "yarn with mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn not rounded": {"rope_type": "yarn", "factor": 8.0, "truncate": False},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": TRAINED, "factor": 8.0, **FACTORS},
    "longrope with a factor": {"rope_type": "longrope", "attention_factor": 1.2, "factor": 8.0, **FACTORS},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
}


def raw(scaling: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 4 * HEAD_DIM,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": TRAINED,
        "rope_theta": 5000.0,
        "rope_scaling": scaling,
        **changes,
    }


@pytest.mark.parametrize("length", [40, TRAINED, 300])
@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_transformers_own(name: str, length: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    ours = model_config(raw(dict(CASES[name])), "config.json")
    values = {key: value for key, value in raw({}).items() if key not in ("architectures", "rope_scaling")}
    theirs = transformers.LlamaConfig(**values, rope_parameters={**CASES[name], "rope_theta": 5000.0})
    wanted, factor = ROPE_INIT_FUNCTIONS[CASES[name]["rope_type"]](theirs, "cpu", seq_len=length)
    frequencies, attention_factor = rotary_frequencies(ours, length)
    np.testing.assert_allclose(frequencies, wanted.numpy(), rtol=1e-5)
    assert attention_factor == pytest.approx(factor)
    cos, sin = rotary_tables(ours, length)
    assert cos.shape == sin.shape == (length, HEAD_DIM // 2)
    np.testing.assert_allclose(cos**2 + sin**2, factor**2, rtol=1e-5)


def test_a_scaling_says_how_long_a_text_may_be() -> None:
    def longest(scaling: dict[str, Any], **changes: Any) -> int:
        return model_config(raw(scaling, **changes), "config.json").max_position_embeddings

    assert longest(dict(CASES["dynamic"])) == 4 * TRAINED
    assert longest(dict(CASES["yarn"])) == longest(dict(CASES["yarn"]), max_position_embeddings=512) == 512
    # In these files the number is the length after scaling already.
    assert longest(dict(CASES["linear"])) == longest(dict(CASES["llama3"])) == TRAINED
    assert longest(dict(CASES["longrope"]), max_position_embeddings=512) == 512


def test_a_scaling_asked_for_replaces_the_file_s_own_in_either_spelling() -> None:
    new = {"rope_type": "default", "rope_theta": 7.0}
    config = model_config(raw(dict(CASES["yarn"]), rope_parameters=new), "config.json")
    assert (config.rope_theta, config.max_position_embeddings) == (7.0, 512)
    assert (config.rope_scaling or {})["rope_type"] == "yarn"


def test_part_of_a_head_turns() -> None:
    config = model_config(raw({"rope_type": "default"}, partial_rotary_factor=0.5), "config.json")
    assert config.rotary_dim == 8
    np.testing.assert_allclose(rotary_frequencies(config, 10)[0], 5000.0 ** (-np.arange(0, 8, 2) / 8))


def test_the_older_name_of_longrope_is_known_and_its_lists_must_fit() -> None:
    scaling = {**CASES["longrope"], "rope_type": None, "type": "su"}
    del scaling["rope_type"]
    assert (model_config(raw(dict(scaling)), "c").rope_scaling or {})["rope_type"] == "longrope"
    with pytest.raises(ConfigError, match="long_factor is a list of 3, not a list of 8 numbers"):
        model_config(raw({**scaling, "long_factor": [1.0, 2.0, 3.0]}), "c")
    with pytest.raises(ConfigError, match=r"short_factor\[7\] is 'x', not a number above 0"):
        model_config(raw({**scaling, "short_factor": [*FACTORS["short_factor"][:7], "x"]}), "c")
