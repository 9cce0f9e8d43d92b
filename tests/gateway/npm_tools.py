"""npm command line tools for tests: installed into a folder, run with a home directory of their own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

INSTALL_TIMEOUT_S = 170
RUN_TIMEOUT_S = 100


def npm_install(folder: Path, *packages: str) -> Path:
    """Install packages; the folder of their programs."""
    command = ["npm", "install", "--no-audit", "--no-fund", "--silent", *packages]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    assert result.returncode == 0, f"npm install failed\n{result.stdout}\n{result.stderr}"
    return folder / "node_modules" / ".bin"


def run_tool(command: Sequence[str], home: Path, work: Path, environment: Mapping[str, str]) -> str:
    """Standard output of a tool that ends well. Nothing of this machine's settings reaches it but the PATH."""
    clean = {"PATH": os.environ["PATH"], "HOME": str(home), "NO_PROXY": "*", **environment}
    result = subprocess.run(
        command,
        cwd=work,
        env=clean,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, f"{command[0]} ended with {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout
