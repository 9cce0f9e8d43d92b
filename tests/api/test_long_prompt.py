"""A long prompt may not stop the others: their worst gap is bounded by the step-time target."""

from __future__ import annotations

import json
import urllib.request

import pytest

from tests import stall


def step_time_target_s(url: str) -> float:
    with urllib.request.urlopen(url + "/v1/models") as response:
        return float(json.load(response)["data"][0]["metadata"]["step_time_target_s"])


@pytest.mark.timeout(400)
def test_a_long_prompt_does_not_stop_running_streams(server) -> None:
    measured = stall.measure(server.base_url, prompt_tokens=1500)
    target = step_time_target_s(server.url)
    print(f"step-time target {1000 * target:.0f} ms: {measured}")
    assert measured.worst_gap_s < 3 * target, str(measured)
