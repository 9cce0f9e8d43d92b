"""The worked example of docs/tuning.md: two pools behind one name, and every request in the pool that the page says."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import openai
import pytest

from tests.documents import blocks
from tests.gateway.test_up import started
from tests.serving import free_port
from tests.tiny_models import tiny_llama

(POOLS,) = [block.text for block in blocks() if block.page == "docs/tuning.md" and block.language == "toml"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"), max_positions=8192)


def test_short_and_long_requests_of_one_model_name_go_to_pools_of_their_own(tmp_path: Path, model: Path) -> None:
    gateway = free_port()
    text = POOLS.replace("port = 8080", f"port = {gateway}").replace("/models/Qwen2.5-0.5B-Instruct", str(model))
    for name in ("short", "long"):
        text = re.sub(
            rf"(\[engine\.{name}\][^\n]*\n)", rf"\1port = {free_port()}\nkv_cache_memory_bytes = 8388608\n", text
        )
    (tmp_path / "pools.toml").write_text(text)
    with started(tmp_path, "--config", str(tmp_path / "pools.toml")) as up:
        (key,) = set(re.findall(r"sk-hr-\w+", up.log))
        with openai.OpenAI(base_url=f"http://127.0.0.1:{gateway}/v1", api_key=key, max_retries=0) as client:

            def pool(prompt: str, **more: object) -> str:
                raw = client.completions.with_raw_response.create(
                    model="qwen", prompt=prompt, temperature=0, extra_body={"stop_token_ids": list(range(256))}, **more
                )
                return raw.headers["x-gateway-upstream"]

            assert pool("ab", max_tokens=100) == "short"
            assert pool("ab", max_tokens=3000) == "long"
            assert pool("word " * 1200, max_tokens=1500) == "long"
            assert pool("ab") == "short"
        assert up.end(signal.SIGINT, within_s=3.5) == 0
