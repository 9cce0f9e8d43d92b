"""`make bench-step` measures what it says and writes it down."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.bench import step as bench
from tests.tiny_models import tiny_llama


def test_every_sampling_is_measured_at_every_number_of_rows(tmp_path: Path) -> None:
    """In a process of its own: the clock stands in front of the library from its making on."""
    report = tmp_path / "step.json"
    command = [sys.executable, "-m", "headrace.bench.step", f"--model={tiny_llama(tmp_path)}", f"--json={report}"]
    done = subprocess.run(
        [*command, "--sampling=greedy,top_p,penalties", "--rows=1,3", "--steps=5"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(report.read_text())["steps"]
    assert [(f["sampling"], f["rows"]) for f in figures] == [(s, n) for s in bench.SAMPLING for n in (1, 3)]
    for figure in figures:
        assert all(0 < figure[part] < 1e6 for part in ("step_us", "loop_us", "forward_us"))
        assert (figure["library_us"] > 0) == (figure["sampling"] == "penalties"), "else one call does it all"
    assert "penalties" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sampling=beam"], "--sampling beam: there are greedy, top_p, penalties"),
        (["--model=/nowhere"], "The model /nowhere does not exist."),
        (["--json=/"], "no file can be written at /"),
        (["--rows=many"], "--rows: 'many' is not"),
        (["--rows=0"], "--rows: '0' is not a whole number of one at least"),
        (["--steps=1"], "--steps 1: two at least"),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert message in capsys.readouterr().err
