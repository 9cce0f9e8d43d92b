"""The examples that `headrace up` shows, pasted as they are against a running server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from headrace.cli.startup import base_url, example_lines
from headrace.config.settings import ServerSettings
from tests.serving import MODEL_NAME, Server


def shown_examples(server: Server) -> list[str]:
    settings = ServerSettings(served_model_names=(MODEL_NAME,), model_path=MODEL_NAME, port=server.port)
    return example_lines(settings, base_url(settings))


def test_the_curl_example_gives_an_answer(server: Server) -> None:
    (line,) = (line for line in shown_examples(server) if line.startswith("curl "))
    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    assert '"choices"' in result.stdout and '"content":' in result.stdout


def test_the_python_example_gives_an_answer(server: Server, tmp_path: Path) -> None:
    lines = shown_examples(server)
    script = tmp_path / "example.py"
    script.write_text("\n".join(lines[lines.index("from openai import OpenAI") :]))
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
