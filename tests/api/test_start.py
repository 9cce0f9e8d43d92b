"""From the command to the first answer: how long it takes and how much memory it holds."""

from __future__ import annotations

import time
from pathlib import Path

from tests.serving import running_server

START_LIMIT_S = 8.0
"""2 s are what a machine that does nothing else needs; this one may be busy."""
PSS_LIMIT_MB = 450
"""With the gateway, about 250 were measured; weights in their own bits are 97 of it."""
TRIES = 4
"""The machine may be busy with something else; what is promised is that it can be done."""


def one_start(folder: Path) -> tuple[float, float]:
    """Seconds to /health 200, and the proportional set size of all processes then, in MB of 10**6 bytes."""
    folder.mkdir()
    flags = ("--gateway-port", "0", "--data-dir", str(folder / "data"))
    started = time.monotonic()
    with running_server(folder / "server.log", flags, command=("up",)) as server:
        seconds = time.monotonic() - started
        processes = [server.process, *server.children()]
        pss_mb = sum(p.memory_full_info().pss for p in processes) / 1e6
    print(f"healthy after {seconds:.1f} s, {pss_mb:.0f} MB in {len(processes)} processes")
    return seconds, pss_mb


def test_up_is_healthy_within_8_seconds_and_450_megabytes(tmp_path: Path) -> None:
    starts = []
    for i in range(TRIES):
        starts.append(one_start(tmp_path / str(i)))
        if starts[-1][0] < START_LIMIT_S and starts[-1][1] < PSS_LIMIT_MB:
            return
    raise AssertionError(f"(seconds, MB) of each start: {starts}")
