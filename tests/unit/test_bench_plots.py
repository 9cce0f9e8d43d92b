"""The figures of the benchmarks: every value and name is in the picture, and bars are as long as their values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from headrace.bench.plots import main

SVG = "{http://www.w3.org/2000/svg}"


def of_servers(file: Path, *entries: tuple[str, str, str, int, dict[str, float]]) -> Path:
    names = ("server", "scheme", "load", "round", "figures")
    written = {
        "date": "2026-11-30",
        "machine": {"cpu": "A <CPU>"},
        "entries": [dict(zip(names, entry, strict=True)) for entry in entries],
    }
    file.write_text(json.dumps(written))
    return file


def of_gateways(file: Path, **cpu_us: float) -> Path:
    added = {f"added {share} ms, {number}": 2.5 for share in ("p50", "p99") for number in (1, 16)}
    file.write_text(json.dumps({name: {**added, "CPU us/request": value} for name, value in cpu_us.items()}))
    return file


def drawn(out: Path, name: str) -> tuple[list[str], list[tuple[str, float]]]:
    """Texts in their order, and (ours or other, length) of each bar."""
    root = ElementTree.fromstring((out / f"{name}.svg").read_text(encoding="utf-8"))
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    bars = [(element.attrib["class"], float(element.attrib["width"])) for element in root.iter(f"{SVG}rect")]
    assert bars[0][0] == "card", "a picture brings its own background"
    return texts, bars[1:]


@pytest.fixture
def servers(tmp_path: Path) -> Path:
    def load(rate: float, errors: int = 0) -> dict[str, float]:
        return {"output tok/s": rate, "errors": errors, "PSS MiB": 10 * rate}

    return of_servers(
        tmp_path / "a.json",
        ("llama.cpp bf16", "bf16", "start", 0, {"start s": 12.25, "idle PSS MiB": 6071.4}),
        ("headrace bf16", "bf16", "start", 0, {"start s": 2.3, "idle PSS MiB": 359.0}),
        *(("headrace bf16", "bf16", "W2", i, load(rate)) for i, rate in enumerate((200.0, 180.0, 190.0))),
        ("llama.cpp bf16", "bf16", "W2", 0, load(95.0, errors=22)),
        ("headrace q4_1", "4-bit", "W2", 0, load(274.0)),
        ("llama.cpp q4_1", "4-bit", "W2", 0, {"errors": 128}),
    )


def test_a_bar_is_the_median_of_a_servers_rounds_beside_those_of_the_same_weights(
    servers: Path, tmp_path: Path
) -> None:
    assert main([str(servers), "--out", str(tmp_path / "new" / "out")]) == 0
    texts, bars = drawn(tmp_path / "new" / "out", "bench-loads")
    assert texts == [
        "Headrace and its peers under the same loads",
        *("W2: 32 streams", "tok/s, more is better"),
        *("16-bit weights", "Headrace bf16", "190", "llama.cpp bf16", "95.0 *"),
        *("4-bit weights", "Headrace Q4_1", "274", "llama.cpp Q4_1", "failed *"),
        "* llama.cpp bf16 under W2: 22 requests failed.",
        "* llama.cpp Q4_1 under W2: 128 requests failed.",
        "A <CPU>, 2026-11-30. Medians of 3 rounds.",
    ]
    assert [of for of, _ in bars] == ["ours", "other", "ours"]
    ours, theirs, few_bits = (length for _, length in bars)
    assert ours / theirs == pytest.approx(2.0, rel=0.01) and few_bits / ours == pytest.approx(274 / 190, rel=0.01)


def test_memory_and_start_are_a_picture_and_several_files_one_comparison(servers: Path, tmp_path: Path) -> None:
    more = of_servers(tmp_path / "b.json", ("vLLM bf16", "bf16", "start", 0, {"start s": 42.0, "idle PSS MiB": 3071.0}))
    main([str(servers), str(more), "--out", str(tmp_path)])
    texts, _ = drawn(tmp_path, "bench-memory")
    place = texts.index("Headrace bf16")
    assert texts[place : place + 12] == [
        *("Headrace bf16", "359", "1,900", "2.30"),
        *("llama.cpp bf16", "6,071", "950 *", "12.2"),
        *("vLLM bf16", "3,071", "not measured", "42.0"),
    ]


def test_a_gateway_has_what_it_adds_and_the_direct_call_is_the_measure(tmp_path: Path) -> None:
    file = of_gateways(tmp_path / "g.json", direct=0.0, floor=580.6, ours=800.0, portkey=1600.0)
    main([str(file), "--out", str(tmp_path)])
    texts, bars = drawn(tmp_path, "bench-gateway")
    rows = [texts[at : at + 6] for at in (texts.index(name) for name in ("Headrace", "its stack alone", "portkey"))]
    assert [row[1:] for row in rows] == [["2.50"] * 4 + [cpu] for cpu in ("800", "581", "1,600")]
    assert bars[14][1] / bars[4][1] == pytest.approx(2.0, rel=0.01) and "direct" not in texts
    assert {path.name for path in tmp_path.glob("*.svg")} == {"bench-gateway.svg"}


def test_the_same_files_give_the_same_bytes(servers: Path, tmp_path: Path) -> None:
    for out in ("one", "two"):
        main([str(servers), "--out", str(tmp_path / out)])
    first, second = ([path.read_bytes() for path in sorted((tmp_path / out).iterdir())] for out in ("one", "two"))
    assert len(first) == 2 and first == second


def test_what_cannot_be_drawn_is_named(servers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(text: Any, *more: str) -> str:
        (tmp_path / "odd.json").write_text(text if isinstance(text, str) else json.dumps(text))
        with pytest.raises(SystemExit) as ended:
            main([str(tmp_path / "odd.json"), *more])
        assert ended.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    neither = "odd.json is of neither bench.compare --json nor bench.gateway --json"
    for text in ("", "[]", {"machine": {}, "products": []}, {"ours": {}}, {"entries": [{"server": "x"}]}):
        assert neither in refused(text)
    assert "there is no figure in these files" in refused({"entries": [], "date": "", "machine": {"cpu": ""}})
    assert f"{tmp_path}/none cannot be read: No such file" in refused(servers.read_text(), str(tmp_path / "none"))
    assert "--out" in refused(servers.read_text(), "--out", str(servers))
