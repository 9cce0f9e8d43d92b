"""The guides' launch commands, served: a small random Qwen2 stands for the model, one card for eight, a free port
for 8000.

Two of the six need an AWQ checkpoint, which is not read yet; a third has `--quantization awq` for a plain one.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import openai
import pytest

pytest.importorskip("transformers")

from tests.serving import HEADRACE, running_server
from tests.small_models import write_random_model
from tests.unit.test_flags import seed_words


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("guides"), "qwen2", max_position_embeddings=32768)


def words(name: str, model: Path, tmp_path: Path) -> list[str]:
    """What the shell hands to the server, the address left out."""
    written = seed_words(name, tmp_path)
    changed = {"--model": str(model), "--tensor-parallel-size": "1"}
    for flag, value in changed.items():
        if flag in written:
            written[written.index(flag) + 1] = value
    for flag in ("--host", "--port"):
        if flag in written:
            at = written.index(flag)
            del written[at : at + 2]
    return written


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a073.sh", "Uvicorn running on"),
        ("a074.sh", "Swap space  1.00 GiB of host memory"),
        ("a075.sh", "at most 2 requests"),
    ],
)
def test_a_guide_s_command_serves(name: str, says: str, model: Path, tmp_path: Path) -> None:
    with running_server(tmp_path / "server.log", words(name, model, tmp_path)) as up:
        client = openai.OpenAI(base_url=up.base_url, api_key="EMPTY", max_retries=0)
        (served,) = client.models.list().data
        assert served.id == ("Qwen2.5-72B-Instruct" if name != "a073.sh" else str(model))
        assert served.max_model_len == 32768
        ask = {
            "model": served.id,
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 8,
            "temperature": 0,
        }
        answer = client.chat.completions.create(**ask, extra_body={"ignore_eos": True})
        assert answer.usage.completion_tokens == 8
        pieces = list(client.chat.completions.create(**ask, extra_body={"ignore_eos": True}, stream=True))
        assert "".join(p.choices[0].delta.content or "" for p in pieces) == answer.choices[0].message.content
        assert says in up.log()


def test_the_command_with_awq_for_a_plain_checkpoint_is_refused_with_both_facts(model: Path, tmp_path: Path) -> None:
    given = words("a070.sh", model, tmp_path)
    result = subprocess.run([str(HEADRACE), "serve", *given], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 2
    assert "--quantization awq: the checkpoint is plain" in result.stderr
    assert "Leave the flag out, or serve the AWQ version" in result.stderr
