"""From the command to the first answer: how long it takes and how much memory it holds."""

from __future__ import annotations

import time
from pathlib import Path

from tests.serving import running_server

START_LIMIT_S = 8.0
PSS_LIMIT_MB = 900


def test_up_is_healthy_within_8_seconds_and_900_megabytes(tmp_path: Path) -> None:
    started = time.monotonic()
    with running_server(
        tmp_path / "server.log", command=("up", "--gateway-port", "0", "--data-dir", str(tmp_path / "data"))
    ) as server:
        seconds = time.monotonic() - started
        processes = [server.process, *server.children()]
        pss_mb = sum(p.memory_full_info().pss for p in processes) / 1e6
        print(f"healthy after {seconds:.1f} s, {pss_mb:.0f} MB in {len(processes)} processes")
        assert seconds < START_LIMIT_S
        assert pss_mb < PSS_LIMIT_MB
