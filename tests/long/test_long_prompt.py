"""The full size of tests/api/test_long_prompt.py: 6,000 tokens, which take the reference kernels a minute."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import stall
from tests.api.test_long_prompt import step_time_target_s
from tests.serving import running_server

pytestmark = pytest.mark.timeout(1800)


def test_a_6000_token_prompt_does_not_stop_eight_streams(tmp_path: Path) -> None:
    with running_server(tmp_path / "server.log", ("--kv-cache-memory-bytes", "1G")) as server:
        measured = stall.measure(server.base_url, prompt_tokens=6000)
        target = step_time_target_s(server.url)
        print(f"step-time target {1000 * target:.0f} ms: {measured}")
        assert measured.worst_gap_s < 3 * target, str(measured)
