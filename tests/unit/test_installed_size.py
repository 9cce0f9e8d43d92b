"""What serving a model on a CPU puts on the disk, the model not counted: the packages that `headrace[engine]` names and
all that they need, without bytecode. docs/performance.md has the table."""

from __future__ import annotations

import platform
import re
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
MB = 10**6


def needed(name: str, *, without: str = "") -> dict[str, Distribution]:
    """The packages that `name`, a requirement, asks for, and theirs, by name; those only `without` needs left out."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(name)]
    while waiting:
        wanted = waiting.pop()
        key = canonicalize_name(wanted.name)
        if key == without or (key in found and not wanted.extras):
            continue
        found[key] = distribution(wanted.name)
        for text in found[key].requires or ():
            inner = Requirement(text)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)):
                waiting.append(inner)
    return found


def num_bytes(packages: dict[str, Distribution]) -> int:
    """Of the packages' files and of Headrace's own, which is installed where it lies."""
    files = {Path(str(f.locate())) for name, d in packages.items() if name != "headrace" for f in d.files or ()}
    files |= set((ROOT / "headrace").rglob("*"))
    return sum(file.stat().st_size for file in files if file.suffix != ".pyc" and file.is_file())


def test_an_engine_needs_no_torch_and_nothing_of_the_gateways_and_less_than_135_mb() -> None:
    packages = needed("headrace[engine]")
    assert {"headrace", "numpy", "tokenizers", "llguidance", "jinja2", "uvicorn", "h11", "hf-xet"} <= packages.keys()
    assert not packages.keys() & {"torch", "transformers", "aiohttp", "sqlalchemy", "alembic", "psutil", "pydantic"}
    assert num_bytes(packages) < 135 * MB


def test_without_the_hubs_client_it_takes_less_than_120_mb() -> None:
    """tokenizers names it and loads it for names of the hub only, as Headrace does."""
    packages = needed("headrace[engine]", without="huggingface-hub")
    assert "tokenizers" in packages and "hf-xet" not in packages
    assert num_bytes(packages) < 120 * MB


def test_the_command_line_and_the_gateway_need_no_arrays() -> None:
    assert not needed("headrace[gateway]").keys() & {"numpy", "tokenizers", "huggingface-hub", "torch"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the table is of x86-64")
def test_the_table_says_what_is_installed() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([\d.]+) \|$", (ROOT / "docs/performance.md").read_text(), re.MULTILINE)
    start = next(i for i, (name, _) in enumerate(rows) if name.startswith("numpy"))
    end = next(i for i, (name, _) in enumerate(rows) if name == "together")
    total = float(rows[end][1])
    assert sum(float(size) for _, size in rows[start:end]) == pytest.approx(total, abs=0.1)
    assert num_bytes(needed("headrace[engine]")) / MB == pytest.approx(total, abs=5)
