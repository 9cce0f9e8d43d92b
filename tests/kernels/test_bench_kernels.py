"""`make bench-kernels` measures what it says and writes it down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.bench import kernels as bench


def test_every_form_is_measured_at_every_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "kernels.json"
    bench.main(
        ["--threads=1", "--shapes=64x48,32x16", "--rows=1,9", "--seconds=0.005", "--no-torch", f"--json={report}"]
    )
    found = json.loads(report.read_text())
    assert found["machine"]["read_gb_s"] > 0 and found["machine"]["gflop_s"] > 0
    measured = {(p["form"], p["inputs"], p["outputs"], p["rows"]) for p in found["products"]}
    assert measured == {
        (form, *shape, rows) for form in bench.FORMS for shape in ((64, 48), (32, 16)) for rows in (1, 9)
    }
    for p in found["products"]:
        assert p["gflop_s"] == pytest.approx(2 * p["inputs"] * p["outputs"] * p["rows"] / p["us"] / 1e3)
        assert p["torch_us"] is None
    assert "Q4_1" in capsys.readouterr().out


def test_torch_stands_beside_the_forms_it_has_a_product_for(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    report = tmp_path / "kernels.json"
    bench.main(["--threads=1", "--shapes=1024x2048", "--rows=8", "--seconds=0.005", f"--json={report}"])
    beside = [p for p in json.loads(report.read_text())["products"] if p["torch_us"]]
    assert {p["form"] for p in beside} == {"float32", "bfloat16", "Q8_0"}
    assert min(p["torch_us"] / p["us"] for p in beside) > 0.1, "ten times as fast is no product of these numbers"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes=64"], "'64' is not INPUTSxOUTPUTS"),
        (["--shapes=65x3"], "a multiple of 32 inputs"),
        (["--forms=int5"], "--forms int5: there are float32, bfloat16, Q8_0"),
        (["--rows=many"], "--rows: 'many' is not a whole number"),
        (["--rows=1,0"], "--rows: '0' is not"),
        (["--rows="], "--rows: '' is not"),
        (["--threads=-3"], "--threads: '-3' is not"),
        (["--seconds=0"], "--seconds: '0' is not a time"),
        (["--seconds=nan"], "--seconds: 'nan' is not a time"),
        (["--json=/nowhere/k.json"], "no file can be written at /nowhere/k.json"),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert message in capsys.readouterr().err
