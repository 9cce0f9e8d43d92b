"""`python -m headrace.bench.plots now.json gateway.json --out docs/images`: figures of the benchmarks, as SVG.

    bench-loads.svg      each load's headline, a bar a server, grouped by kind of weight
    bench-memory.svg     memory at rest and under W2, and how long a start takes
    bench-gateway.svg    what each gateway adds to a request

Files are those of `--json` of bench.compare and bench.gateway, told apart by what is in them; several of a kind are one
set of rounds. A figure is one table whose cells are bars, each column on its own scale; the same files give the same
bytes. Every picture brings its background, light or dark as the reader's system is, so it reads on any page.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from headrace.bench.compare import medians
from headrace.bench.gateway import CONCURRENCY
from headrace.bench.servers import BenchError
from headrace.bench.workloads import HEADLINE

WIDTH, EDGE, NAMES, GAP, ROW, BAR, VALUE = 880, 24, 150, 26, 24, 14, 58
"""Pixels: the picture, its margin, the column of names, between columns, from row to row, a bar, a value behind it."""

STYLE = """
  .card { fill: #ffffff; stroke: #d1d9e0 } .text { fill: #1f2328 } .quiet { fill: #59636e }
  .ours { fill: #2f6fb7 } .other { fill: #b3bcc6 } .line { stroke: #d1d9e0 }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #3d444d } .text { fill: #f0f6fc } .quiet { fill: #9198a1 }
    .ours { fill: #58a0ec } .other { fill: #59616b } .line { stroke: #3d444d }
  }
"""

SCHEMES = {"bf16": "16-bit weights", "int8": "8-bit weights", "4-bit": "4-bit weights"}


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    unit: str
    """With what is better, for the reader."""


LOADS = {
    "W1": Column("W1: one stream", "tok/s, more is better"),
    "W2": Column("W2: 32 streams", "tok/s, more is better"),
    "W3": Column("W3: 16, one prefix", "tok/s, more is better"),
    "W4": Column("W4: a long prompt", "worst gap ms, less is better"),
}
"""The unit is that of the load's headline."""


@dataclass(frozen=True, slots=True)
class Row:
    group: str
    name: str
    ours: bool
    values: tuple[float | None, ...]
    """One a column; None: not measured."""
    marks: tuple[bool, ...] = ()
    """Of the columns whose load had requests that failed; empty: none had."""


@dataclass(frozen=True, slots=True)
class Plot:
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def svg(plot: Plot) -> str:
    """Groups in the order of their first rows."""
    wide = (WIDTH - 2 * EDGE - NAMES - GAP * (len(plot.columns) - 1)) / len(plot.columns)
    left = [EDGE + NAMES + i * (wide + GAP) for i in range(len(plot.columns))]
    most = [max([row.values[i] or 0 for row in plot.rows] + [1e-9]) for i in range(len(plot.columns))]
    body: list[str] = []

    def text(x: float, y: float, said: str, style: str = "text", extra: str = "") -> None:
        body.append(f'  <text x="{x:.1f}" y="{y:.1f}" class="{style}"{extra}>{escape(said)}</text>')

    bold, small = ' font-weight="600"', ' font-size="11.5"'
    text(EDGE, 38, plot.title, extra=' font-size="16" font-weight="600"')
    for column, x in zip(plot.columns, left, strict=True):
        text(x, 68, column.title, extra=bold)
        text(x, 84, column.unit, "quiet", small)
    y = 92.0
    for group in dict.fromkeys(row.group for row in plot.rows):
        if group:
            y += ROW
            text(EDGE, y, group, "quiet", bold)
        top = y + 8
        for row in plot.rows:
            if row.group != group:
                continue
            y += ROW
            text(EDGE, y, row.name, extra=bold if row.ours else "")
            for i, (x, value) in enumerate(zip(left, row.values, strict=True)):
                mark = " *" if any(row.marks) and row.marks[i] else ""
                if value is None:
                    text(x + 5, y, "failed *" if mark else "not measured", "quiet", small)
                    continue
                length = max(1.5, value / most[i] * (wide - VALUE))
                style = "ours" if row.ours else "other"
                shape = f'x="{x:.1f}" y="{y - BAR + 3:.1f}" width="{length:.1f}" height="{BAR}" rx="2"'
                body.append(f'  <rect {shape} class="{style}"/>')
                text(x + length + 5, y, shown(value) + mark, extra=bold if row.ours else "")
        body += [f'  <path d="M{x:.1f} {top:.1f}V{y + 6:.1f}" class="line"/>' for x in left]
        y += 6
    y += 8
    for note in plot.notes:
        y += 18
        text(EDGE, y, note, "quiet", small)
    height = round(y + 22)
    said = escape(f"{plot.title}: {'; '.join(f'{c.title}, {c.unit}' for c in plot.columns)}")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="t d" '
            f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13">',
            f'  <title id="t">{escape(plot.title)}</title>\n  <desc id="d">{said}</desc>\n  <style>{STYLE}  </style>',
            f'  <rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" class="card"/>',
            *body,
            "</svg>\n",
        ]
    )


def shown(value: float) -> str:
    """Three digits, or all before the point."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def plots(files: Sequence[Path]) -> dict[str, Plot]:
    """Names of files to what there is to draw. Raises BenchError for a file that no benchmark with plots wrote."""
    entries: list[dict[str, Any]] = []
    machines: dict[str, None] = {}
    gateways: dict[str, list[dict[str, float]]] = {}
    for file in files:
        try:
            found = json.loads(file.read_text())
            if "entries" in found:
                medians(found["entries"])
                entries += found["entries"]
                machines[f"{found['machine']['cpu']}, {found['date']}"] = None
            else:
                for name, figures in found.items():
                    gateways.setdefault(name, []).append({key: float(value) for key, value in figures.items()})
                    figures["CPU us/request"]
        except OSError as error:
            raise BenchError(f"{file} cannot be read: {error.strerror}") from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise BenchError(f"{file} is of neither bench.compare --json nor bench.gateway --json") from None
    made: dict[str, Plot] = {}
    if entries:
        rounds = max(entry["round"] for entry in entries) + 1
        source = f"{'; '.join(machines)}. {f'Medians of {rounds} rounds.' if rounds > 1 else 'One round.'}"
        made |= {"bench-loads": loads(entries, source), "bench-memory": memory(entries, source)}
    if gateways:
        made["bench-gateway"] = gateway(gateways)
    return {name: plot for name, plot in made.items() if plot.columns}


def loads(entries: Sequence[dict[str, Any]], source: str) -> Plot:
    cells = {(load, HEADLINE[load]): column for load, column in LOADS.items()}
    return _of_servers("Headrace and its peers under the same loads", cells, entries, (source,))


def memory(entries: Sequence[dict[str, Any]], source: str) -> Plot:
    cells = {
        ("start", "idle PSS MiB"): Column("Memory at rest", "MiB, less is better"),
        ("W2", "PSS MiB"): Column("Memory under W2", "MiB, less is better"),
        ("start", "start s"): Column("Start until ready", "s, less is better"),
    }
    note = "Memory is that of all processes of a server, what they share counted once (PSS)."
    return _of_servers("Memory and start of Headrace and its peers", cells, entries, (note, source))


def gateway(gateways: dict[str, list[dict[str, float]]]) -> Plot:
    """All but the direct call, which they are set against."""
    cells = {
        f"added {share} ms, {number}": Column(f"Added {share}", f"ms, {number} at a time")
        for number in (1, CONCURRENCY)
        for share in ("p50", "p99")
    } | {"CPU us/request": Column("CPU", "µs a request")}
    rows = []
    for name, figures in sorted(gateways.items(), key=lambda item: item[0] != "ours"):
        known = [[one[cell] for one in figures if cell in one] for cell in cells]
        values = tuple(statistics.median(each) if each else None for each in known)
        title = {"ours": "Headrace", "floor": "its stack alone"}.get(name, name)
        if name != "direct":
            rows.append(Row("", title, name == "ours", values))
    note = "Less is better. Added: how much longer a request through the gateway takes than one without it."
    return Plot("What a gateway adds to a request", tuple(cells.values()), tuple(rows), (note,))


def _of_servers(
    title: str, cells: Mapping[tuple[str, str], Column], entries: Sequence[dict[str, Any]], notes: Sequence[str]
) -> Plot:
    """`cells`: (load, figure) to its column. Columns that nobody has a figure for are left out; failed requests are
    marked, and counted in a note."""
    found = medians(entries)
    measured = [cell for cell in cells if any(cell[0] == load and cell[1] in f for (_, _, load), f in found.items())]
    rows, failed = [], []
    servers = dict.fromkeys((scheme, server) for scheme, server, _ in found)
    for scheme, server in sorted(
        servers, key=lambda one: (list(SCHEMES).index(one[0]), not one[1].startswith("headrace"))
    ):
        name = server.replace("headrace", "Headrace").replace(" q", " Q")
        of_loads = [found.get((scheme, server, load), {}) for load, _ in measured]
        values = tuple(figures.get(figure) for figures, (_, figure) in zip(of_loads, measured, strict=True))
        marks = tuple(figures.get("errors", 0) > 0 for figures in of_loads)
        if any(marks) or any(value is not None for value in values):
            rows.append(Row(SCHEMES[scheme], name, server.startswith("headrace"), values, marks))
        failed += [
            f"* {name} under {load}: {figures['errors']:.0f} requests failed."
            for figures, (load, _), mark in zip(of_loads, measured, marks, strict=True)
            if mark
        ]
    return Plot(title, tuple(cells[cell] for cell in measured), tuple(rows), (*failed, *notes))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace.bench.plots", description="Figures of the benchmarks, as SVG.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="of bench.compare or bench.gateway --json")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the pictures (%(default)s)")
    args = parser.parse_args(argv)
    try:
        made = plots(args.files)
        if not made:
            raise BenchError("there is no figure in these files")
        args.out.mkdir(parents=True, exist_ok=True)
        for name, plot in made.items():
            place = args.out / f"{name}.svg"
            place.write_text(svg(plot), encoding="utf-8")
            print(place)
    except BenchError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--out {args.out}: {error.strerror}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
