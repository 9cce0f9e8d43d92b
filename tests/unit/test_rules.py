"""Combinations of settings: what cannot work is an error with the number to use, what people regret is advice."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config.command_line import parse_command_line
from headrace.config.load import settings
from headrace.config.model import ModelConfig
from headrace.config.rules import Finding, ModelFacts, Setup, findings, model_findings

TLS = Path(__file__).parents[1] / "data" / "tls"


def setup(*words: str) -> Setup:
    given = parse_command_line(words)
    return Setup(*settings(given), frozenset(given.values), str(given.value("load-format")))


def facts(*, limit: int = 8192, quantization: str | None = None, template: bool = True) -> ModelFacts:
    config = ModelConfig(
        family="llama",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=160,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=limit,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        quantization=quantization,
    )
    return ModelFacts(config, "gguf" if quantization == "gguf" else "safetensors", template)


def errors(found: list[Finding]) -> list[str]:
    return [finding.message for finding in found if finding.severity == "error"]


def advice(found: list[Finding]) -> list[str]:
    return [finding.message for finding in found if finding.severity == "advice"]


def test_the_defaults_break_no_rule() -> None:
    assert findings(setup()) == []
    assert model_findings(setup(), facts()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--gpu-memory-utilization 0", "more than 0, at most 1"),
        ("--gpu-memory-utilization 1.2", "0.9 is usual."),
        ("--gpu-memory-utilization 90", "Did you mean 0.9?"),
        ("--gpu-memory-utilization -0.5", "more than 0, at most 1"),
        (
            "--no-enable-chunked-prefill --max-num-batched-tokens 2048 --max-model-len 4096",
            "--max-num-batched-tokens 4096, or --max-model-len 2048.",
        ),
        ("--max-num-seqs 64 --max-num-batched-tokens 32", "Use --max-num-seqs 32 or --max-num-batched-tokens 64."),
        ("--step-time-target-ms 60000 --step-timeout 30", "Use --step-timeout 1200."),
        ("--ssl-keyfile k.pem", "--ssl-keyfile needs --ssl-certfile"),
        ("--ssl-certfile c.pem", "--ssl-certfile needs --ssl-keyfile"),
        ("--ssl-keyfile /nowhere/k --ssl-certfile /nowhere/c", "--ssl-keyfile /nowhere/k: there is no such file"),
        ("--root-path api/", "use /api."),
        ("--json", "add --dry-run"),
        ("--host=", "--host is empty: use 127.0.0.1 for this machine alone, or 0.0.0.0"),
    ],
)
def test_what_cannot_work_is_an_error_with_the_way_out(words: str, said: str) -> None:
    (message,) = errors(findings(setup(*words.split())))
    assert said in message


@pytest.mark.parametrize("key", ["", "  ", "sk-a b", "sk-a\n", " sk-a", "schlüssel"])
def test_a_key_that_no_client_can_send_is_an_error(key: str) -> None:
    (message,) = errors(findings(setup("--api-key", "sk-good", key)))
    assert message.startswith("--api-key")
    assert "sk-" not in message


def test_an_empty_served_name_is_an_error() -> None:
    assert errors(findings(setup("--served-model-name", ""))) == [
        "--served-model-name is empty: clients must be able to send it as `model`."
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--gpu-memory-utilization 0.98", "0.90 to 0.95 is safe"),
        ("--host 0.0.0.0", "--host 0.0.0.0 without --api-key"),
        ("--max-log-len 10", "add --enable-log-requests"),
        ("--max-num-batched-tokens 65536", "2048 to 8192"),
        ("--kv-cache-memory-bytes 2G --gpu-memory-utilization 0.8", "sets the KV cache exactly"),
    ],
)
def test_what_people_regret_is_advice(words: str, said: str) -> None:
    found = findings(setup(*words.split()))
    assert errors(found) == []
    assert said in advice(found)[0]


@pytest.mark.parametrize(
    "words",
    [
        "--gpu-memory-utilization 0.95",
        "--gpu-memory-utilization 1 --kv-cache-memory-bytes 1G",
        "--max-num-batched-tokens 128",
        "--kv-cache-dtype half --dtype float32",
        "--kv-cache-dtype fp8",
        "--host 0.0.0.0 --api-key sk-a",
        "--host ::1",
        "--no-enable-chunked-prefill --max-num-batched-tokens 4096 --max-model-len 4096",
        "--root-path /api",
    ],
)
def test_what_works_is_no_error(words: str) -> None:
    assert errors(findings(setup(*words.split()))) == []


def test_several_mistakes_are_all_found() -> None:
    words = "--gpu-memory-utilization 2 --root-path api/ --ssl-keyfile k --max-num-seqs 9 --max-num-batched-tokens 4"
    assert len(errors(findings(setup(*words.split())))) == 4


@pytest.mark.parametrize(
    ("certificate", "key", "said"),
    [
        ("certificate.pem", "key.pem", None),
        ("certificate.pem", "other_key.pem", "key values mismatch"),
        ("certificate.pem", "locked_key.pem", "the key is locked with a passphrase"),
        ("certificate.pem", "certificate.pem", "cannot serve https"),
        ("key.pem", "key.pem", "cannot serve https"),
        ("../../unit/test_rules.py", "key.pem", "cannot serve https"),
    ],
)
def test_a_certificate_and_a_key_must_belong_together(certificate: str, key: str, said: str | None) -> None:
    found = errors(findings(setup("--ssl-certfile", str(TLS / certificate), "--ssl-keyfile", str(TLS / key))))
    assert [said in message for message in found] if said else found == []


def test_a_length_beyond_the_model_is_an_error_with_the_number_to_use() -> None:
    (message,) = errors(model_findings(setup("--max-model-len", "16384"), facts(limit=8192)))
    assert "use --max-model-len 8192" in message
    assert """--hf-overrides '{"max_position_embeddings": 16384}'""" in message
    assert errors(model_findings(setup("--max-model-len", "8192"), facts(limit=8192))) == []


def test_awq_on_a_plain_checkpoint_names_both() -> None:
    (message,) = errors(model_findings(setup("--quantization", "awq"), facts()))
    assert "--quantization awq" in message and "the checkpoint is plain" in message and "Leave the flag out" in message


def test_awq_on_a_gptq_checkpoint_names_both() -> None:
    (message,) = errors(model_findings(setup("--quantization", "awq"), facts(quantization="gptq")))
    assert message == "--quantization awq: the checkpoint is gptq. Leave the flag out, or use gptq."


@pytest.mark.parametrize("words", [[], ["-q", "awq"], ["-q", "awq_marlin"]])
def test_an_awq_checkpoint_is_refused_by_name(words: list[str]) -> None:
    (message,) = errors(model_findings(setup(*words), facts(quantization="awq")))
    assert message.startswith("AWQ weights are not built yet")


def test_int8_is_made_of_plain_checkpoints_only() -> None:
    assert model_findings(setup("--quantization", "int8"), facts()) == []
    (message,) = errors(model_findings(setup("--quantization", "int8"), facts(quantization="gguf")))
    assert message == (
        "--quantization int8 is made of plain weights while they are loaded; this checkpoint is gguf: "
        "leave the flag out."
    )


def test_gguf_is_built() -> None:
    assert model_findings(setup("--quantization", "gguf", "--load-format", "gguf"), facts(quantization="gguf")) == []


def test_a_load_format_other_than_the_files_is_an_error() -> None:
    (message,) = errors(model_findings(setup("--load-format", "safetensors"), facts(quantization="gguf")))
    assert message == "--load-format safetensors: the model's weights are gguf. Leave the flag out, or use gguf."


def test_a_model_without_chat_template_is_announced(tmp_path: Path) -> None:
    assert "--chat-template FILE" in advice(model_findings(setup(), facts(template=False)))[0]
    words = ("--chat-template", "{{ messages }}")
    assert model_findings(setup(*words), facts(template=False)) == []
