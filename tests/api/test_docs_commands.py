"""The commands of README and docs, run as a reader would: pasted into a shell that has .venv active."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import pytest

from tests.documents import Block, runnable
from tests.serving import MODEL_NAME, Server
from tests.small_models import bundled_gguf, write_random_model

BIN = Path(sys.executable).parent
ASKING = runnable("run")


def run(block: Block, text: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-c", text] if block.language == "python" else ["bash", "-euo", "pipefail", "-c", text]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=150, check=False)


def output(block: Block, result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, f"{block.place} ended with {result.returncode}\n{result.stdout}\n{result.stderr}"
    assert result.stdout.strip()
    return result.stdout


@pytest.fixture(scope="module")
def results(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[Block, subprocess.CompletedProcess[str]]:
    """All commands that ask the server, run at the same time: steps of a batch cost no more than steps alone."""
    cwd = tmp_path_factory.mktemp("reader")
    at_server = [b.text.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}") for b in ASKING]
    with ThreadPoolExecutor(len(ASKING)) as pool:
        return dict(zip(ASKING, pool.map(run, ASKING, at_server, repeat(cwd)), strict=True))


@pytest.mark.parametrize("block", ASKING, ids=lambda block: block.place)
def test_a_command_of_the_pages_gives_an_answer(
    block: Block, results: dict[Block, subprocess.CompletedProcess[str]]
) -> None:
    printed = output(block, results[block])
    assert '"error":{' not in printed
    if MODEL_NAME in block.text and block.language == "bash":
        assert '"choices"' in printed


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the pages call /models."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "SmolLM2-135M-Instruct.Q4_1.gguf").symlink_to(bundled_gguf())
    write_random_model(folder / "Qwen2.5-0.5B-Instruct", "qwen2")
    return folder


@pytest.mark.parametrize("block", runnable("run: dry"), ids=lambda block: block.place)
def test_a_serve_command_of_the_pages_is_accepted(block: Block, models: Path, tmp_path: Path) -> None:
    lines = block.text.replace("\\\n", " ").replace("/models/", f"{models}/").splitlines()
    for line in lines:
        assert "dry run" in output(block, run(block, line + " --dry-run", tmp_path))
