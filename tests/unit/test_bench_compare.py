"""The comparison of servers: medians of rounds, ratios to our best, and what is left out is named."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console

from headrace.bench.compare import changes, medians, offline_figures, tables
from headrace.bench.contestants import Contestant, contestants


def entry(server: str, number: int, rate: float, load: str = "W1") -> dict:
    return {"server": server, "scheme": "bf16", "load": load, "round": number, "figures": {"output tok/s": rate}}


ENTRIES = [
    *(entry("headrace bf16", i, rate) for i, rate in enumerate((50.0, 60.0, 10.0))),
    *(entry("llama.cpp bf16", i, rate) for i, rate in enumerate((20.0, 30.0, 25.0))),
]


def shown(table: object) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(table)
    return out.getvalue()


def test_a_figure_is_the_median_of_its_rounds() -> None:
    found = medians(ENTRIES)
    assert found[("bf16", "headrace bf16", "W1")] == {"output tok/s": 50.0}
    assert found[("bf16", "llama.cpp bf16", "W1")] == {"output tok/s": 25.0}


def test_a_peer_shows_how_many_times_better_headrace_is() -> None:
    (table,) = tables(ENTRIES)
    ours, theirs = (
        line for line in shown(table).splitlines() if "bf16" in line and "tok/s" not in line and "," not in line
    )
    assert "2.00 x" in theirs and " x" not in ours


def test_of_a_gap_the_smaller_is_better() -> None:
    gaps = [("headrace bf16", 100.0), ("vLLM bf16", 400.0)]
    (table,) = tables([{**entry(server, 0, 0.0, "W4"), "figures": {"worst gap ms": gap}} for server, gap in gaps])
    assert "4.00 x" in shown(table)


def test_a_base_shows_what_changed_of_ours_only() -> None:
    text = shown(changes(ENTRIES, [entry("headrace bf16", 0, 75.0), entry("llama.cpp bf16", 0, 1.0)]))
    assert "1.50" in text and "llama.cpp" not in text


def test_what_is_not_there_is_left_out_and_named(tmp_path: Path) -> None:
    (tmp_path / "q4_1.gguf").touch()
    found, missing = contestants(tmp_path, 2, str(tmp_path / "no-vllm"), str(tmp_path))
    assert [contestant.name for contestant in found] == ["headrace q4_1"]
    assert any(line.startswith("llama.cpp: llama-server") for line in missing)
    assert any(line.startswith("vLLM: vllm") for line in missing)
    assert any(line.startswith("headrace bf16: there is no") for line in missing)
    assert any(line.startswith("transformers bf16: there is no") for line in missing)


def test_without_a_folder_of_models_the_bundled_one_is_measured(tmp_path: Path) -> None:
    found, _ = contestants(tmp_path / "none", 2, str(tmp_path / "no-vllm"), str(tmp_path))
    (ours,) = found
    assert ours.name == "headrace q4_1" and any(word.endswith(".gguf") for word in ours.command)


def test_what_has_no_server_prints_its_figures_or_counts_as_failed() -> None:
    says = "import sys, json; print(json.dumps({'output tok/s': len(sys.argv[1]) + int(sys.argv[2]), 'errors': 0}))"
    batch = Contestant(
        "transformers bf16", "bf16", (sys.executable, "-c", says, "{load}", "{seed}"), "m", is_server=False
    )
    assert offline_figures(batch, "W2", 7) == {"output tok/s": 9.0, "errors": 0.0}
    broken = Contestant(
        "transformers bf16", "bf16", (sys.executable, "-c", "raise SystemExit(1)"), "m", is_server=False
    )
    assert offline_figures(broken, "W2", 7) == {"errors": 1}
