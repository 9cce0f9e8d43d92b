"""Batch files for tests: lines that ask, and the answers to them read back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def asking(custom_id: str, url: str = "/v1/completions", **body: object) -> str:
    """A line of an input file; without a body, ten greedy tokens after the custom_id."""
    fields = body or {"prompt": custom_id, "max_tokens": 10, "temperature": 0}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": fields})


def write_lines(path: Path, lines: Iterable[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def read_lines(text: str) -> list[dict[str, Any]]:
    assert not text or text.endswith("\n"), text[-300:]
    return [json.loads(line) for line in text.splitlines()]
