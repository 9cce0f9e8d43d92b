"""The worked example of docs/embeddings.md: a chat model and an embedding model behind one address and one key."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import openai
import pytest

from tests.batch_files import asking, read_lines
from tests.documents import blocks
from tests.gateway.test_up import Up, started
from tests.serving import free_port

PAGE = [block for block in blocks() if block.page == "docs/embeddings.md"]


def block(language: str, holding: str) -> str:
    (text,) = [b.text for b in PAGE if b.language == language and holding in b.text]
    return text


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Base URL and key."""
    folder, port = tmp_path_factory.mktemp("rag"), free_port()
    text = block("toml", "engine.vectors").replace("port = 8080", f"port = {port}")
    for name in ("chat", "vectors"):
        small = "kv_cache_memory_bytes = 67108864\nmax_model_len = 1024\n" if name == "chat" else ""
        text = text.replace(f"[engine.{name}]\n", f"[engine.{name}]\nport = {free_port()}\n{small}")
    (folder / "rag.toml").write_text(text)
    up: Up
    with started(folder, "--config", str(folder / "rag.toml")) as up:
        assert "vectors: the mean of all rows, length 1" in up.log
        (key,) = set(re.findall(r"sk-hr-\w+", up.log))
        yield f"http://127.0.0.1:{port}/v1", key
        assert up.end(signal.SIGINT, within_s=3.5) == 0


def test_the_page_s_commands_give_what_it_says(gateway: tuple[str, str]) -> None:
    url, key = gateway
    for language, holding, said in (("python", "embeddings.create", "2 vectors of 384"), ("bash", "rerank", "mill")):
        text = block(language, holding).replace("YOUR_KEY", key).replace("http://127.0.0.1:8080/v1", url)
        command = [sys.executable, "-c", text] if language == "python" else ["bash", "-euo", "pipefail", "-c", text]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        assert said in shown
        if language == "bash":
            (best,) = json.loads(shown)["results"]
            assert best["index"] == 1


def test_one_key_opens_both_models_and_each_does_what_it_is_for(gateway: tuple[str, str]) -> None:
    url, key = gateway
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["smollm2-135m-instruct", "all-minilm-l6-v2"]
        messages = [{"role": "user", "content": "Say hello."}]
        chat = client.chat.completions.create(
            model="smollm2-135m-instruct",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=4,
        )
        assert chat.choices[0].message.content
        vectors = client.embeddings.create(model="all-minilm-l6-v2", input=["a mill", "a mill"])
        assert vectors.data[0].embedding == vectors.data[1].embedding
        assert vectors.usage.prompt_tokens == 8
        with pytest.raises(openai.BadRequestError, match="no text: ask /v1/embeddings") as caught:
            client.chat.completions.create(model="all-minilm-l6-v2", messages=messages)  # type: ignore[arg-type]
        assert caught.value.code == "unsupported_by_model"
        with pytest.raises(openai.BadRequestError, match="--runner pooling"):
            client.embeddings.create(model="smollm2-135m-instruct", input="a mill")


def test_a_batch_for_either_model_is_answered_by_that_one(gateway: tuple[str, str]) -> None:
    url, key = gateway
    asked = {
        "/v1/embeddings": {"model": "all-minilm-l6-v2", "input": "a mill"},
        "/v1/completions": {"model": "smollm2-135m-instruct", "prompt": "a mill", "max_tokens": 2},
    }
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        for endpoint, body in asked.items():
            lines = "".join(asking(f"{i}", endpoint, **body) + "\n" for i in range(3))
            file = client.files.create(file=("in.jsonl", lines.encode()), purpose="batch")
            batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")  # type: ignore[call-overload]
            deadline = time.monotonic() + 30
            while batch.status not in ("completed", "failed"):
                assert time.monotonic() < deadline, batch
                time.sleep(0.05)
                batch = client.batches.retrieve(batch.id)
            assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 3, 0)
            assert len(read_lines(client.files.content(batch.output_file_id).text)) == 3


def test_without_the_key_neither_answers(gateway: tuple[str, str]) -> None:
    with openai.OpenAI(base_url=gateway[0], api_key="sk-hr-wrong", max_retries=0) as client:
        for model in ("all-minilm-l6-v2", "smollm2-135m-instruct"):
            with pytest.raises(openai.AuthenticationError):
                client.embeddings.create(model=model, input="a mill")
