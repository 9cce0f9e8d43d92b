"""`python -m headrace.bench.kernels`: every product with weights beside what the machine allows, and beside torch.

    roofline of a product = max(bytes of weights / DRAM read rate, floating operations / FMA rate)

Both rates are measured in the same run: the reading by a search for a byte that is not there, the arithmetic by
numpy's product of float32 matrices, which products of integers can pass. Weights are cold: products take turns over
more of them than a cache holds. A figure is the best of many, as another program can only slow one down.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import json
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from headrace.bench import arguments
from headrace.kernels.native.kernels import Matrix, NativeKernels, _rows_alone
from headrace.kernels.native.library import variants
from headrace.kernels.weight import Weight

SHAPES = "576x1536,1536x576,576x960,576x49152,3584x18944"
ROWS = "1,8,32,128,512"
COLD_BYTES = 96 << 20
MOST_COPIES = 48
TABLE_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Form:
    dtype: str
    """Of the kernels; decides how a weight is multiplied."""
    bits: int = 0
    offsets: bool = False
    """Beyond those of Q4_0, which are -8 times the scale."""


FORMS = {
    "float32": Form("float32"),
    "bfloat16": Form("bfloat16"),
    "Q8_0": Form("bfloat16", bits=8),
    "Q4_0": Form("bfloat16", bits=4),
    "Q4_1": Form("bfloat16", bits=4, offsets=True),
}


@dataclass(frozen=True, slots=True)
class Machine:
    threads: int
    variant: str
    read_gb_s: float
    gflop_s: float


@dataclass(frozen=True, slots=True)
class Figure:
    form: str
    inputs: int
    outputs: int
    rows: int
    us: float
    gflop_s: float
    gb_s: float
    of_roofline: float
    torch_us: float | None


def best_seconds(run: Callable[[], object], seconds: float) -> float:
    """The shortest of the runs that fit in `seconds`, three at least."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def read_rate(threads: int, seconds: float) -> float:
    """GB/s of all threads together; ctypes lets them run side by side."""
    memchr = ctypes.CDLL(None).memchr
    memchr.argtypes, memchr.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    size = 128 << 20
    parts = [np.full(size, 1, np.uint8) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        best = best_seconds(lambda: list(pool.map(lambda part: memchr(part.ctypes.data, 0, size), parts)), seconds)
    return threads * size / best / 1e9


def fma_rate(seconds: float) -> float:
    """GFLOP/s of numpy's BLAS on as many threads as it takes, which are all there are."""
    side = 768
    a, out = np.ones((side, side), np.float32), np.empty((side, side), np.float32)
    return 2 * side**3 / best_seconds(lambda: np.matmul(a, a, out), seconds) / 1e9


def weight(form: Form, inputs: int, outputs: int) -> Weight:
    random = np.random.default_rng(0)
    if not form.bits:
        return Weight((outputs, inputs), random.standard_normal((outputs, inputs), dtype=np.float32))
    scales = np.full((outputs, inputs // 32), 0.0078125, np.float32)
    packed = random.integers(0, 128, (outputs, inputs * form.bits // 8), dtype=np.uint8)
    values = packed if form.bits == 4 else packed.view(np.int8)
    offsets = scales * np.float32(-7 if form.offsets else -8) if form.bits == 4 else None
    return Weight((outputs, inputs), values, form.bits, 32, scales, offsets)


def copies_of(kernels: NativeKernels, form: Form, inputs: int, outputs: int) -> list[Matrix]:
    source = weight(form, inputs, outputs)
    first = kernels.prepare_weight(source)
    count = min(MOST_COPIES, COLD_BYTES // max(1, first.num_bytes) + 1)
    return [first, *(kernels.prepare_weight(source) for _ in range(count - 1))]


def product_seconds(kernels: NativeKernels, matrices: Sequence[Matrix], x: np.ndarray, seconds: float) -> float:
    """Of one product: one call runs one with each matrix, so that the call itself weighs little."""

    def forward(symbols: Sequence[Any]) -> Any:
        last = None
        for matrix in matrices:
            last = kernels.linear(symbols[0], matrix, None)
        return last

    program = kernels._record(forward, [x.shape[1]])
    batch = _rows_alone(len(x))
    return best_seconds(lambda: program(batch, None, [x]), seconds) / len(matrices)


def torch_seconds(form: str, inputs: int, outputs: int, x: np.ndarray, threads: int, seconds: float) -> float | None:
    """torch's linear over weights as cold as ours; of 8 bits the one that quantises its rows, weights of a scale an
    output. None for what torch has no plain product for, or without torch."""
    if form not in ("float32", "bfloat16", "Q8_0") or importlib.util.find_spec("torch") is None:
        return None
    torch = importlib.import_module("torch")
    torch.set_num_threads(threads)
    rows, weight = torch.from_numpy(x), torch.randn(outputs, inputs)
    bytes_of = {"float32": 4, "bfloat16": 2, "Q8_0": 1}[form]
    copies = min(MOST_COPIES, COLD_BYTES // (outputs * inputs * bytes_of) + 1)
    if form == "Q8_0":
        largest = weight.abs().amax(1)
        with warnings.catch_warnings(action="ignore"):  # it is to go some day
            codes = torch.quantize_per_channel(
                weight, largest / 127, torch.zeros(outputs, dtype=torch.long), 0, torch.qint8
            )
        weights = [torch.ops.quantized.linear_prepack(codes, None) for _ in range(copies)]
        product = torch.ops.quantized.linear_dynamic
    else:
        dtype = getattr(torch, form)
        rows, weight = rows.to(dtype), weight.to(dtype)
        weights = [weight.clone() for _ in range(copies)]
        product = torch.nn.functional.linear

    def run() -> None:
        for matrix in weights:
            product(rows, matrix)

    with torch.inference_mode():
        return best_seconds(run, seconds) / copies


def measure(
    machine: Machine, forms: Sequence[str], shapes: Sequence[tuple[int, int]], rows: Sequence[int], seconds: float,
    with_torch: bool, show: Callable[[Figure], None],
) -> list[Figure]:  # fmt: skip
    figures = []
    for name in forms:
        kernels = NativeKernels(FORMS[name].dtype, machine.threads, variant=machine.variant)
        for inputs, outputs in shapes:
            matrices = copies_of(kernels, FORMS[name], inputs, outputs)
            for count in rows:
                x = np.random.default_rng(1).standard_normal((count, inputs), dtype=np.float32)
                spent = product_seconds(kernels, matrices, x, seconds)
                flop, size = 2.0 * count * inputs * outputs, matrices[0].num_bytes
                least = max(size / machine.read_gb_s, flop / machine.gflop_s) / 1e9
                peer = torch_seconds(name, inputs, outputs, x, machine.threads, seconds) if with_torch else None
                figure = Figure(
                    name, inputs, outputs, count, us=spent * 1e6, gflop_s=flop / spent / 1e9, gb_s=size / spent / 1e9,
                    of_roofline=least / spent, torch_us=None if peer is None else peer * 1e6,
                )  # fmt: skip
                figures.append(figure)
                show(figure)
    return figures


def table(figures: Sequence[Figure]) -> Table:
    shown = Table("weights", "in x out", "rows", "us", "GFLOP/s", "GB/s", "of roofline", "torch us", "torch / ours")
    for column in shown.columns[2:]:
        column.justify = "right"
    for f in figures:
        peer = ("", "") if f.torch_us is None else (f"{f.torch_us:.0f}", f"{f.torch_us / f.us:.2f}")
        shown.add_row(
            f.form, f"{f.inputs} x {f.outputs}", str(f.rows), f"{f.us:.1f}", f"{f.gflop_s:.0f}", f"{f.gb_s:.1f}",
            f"{f.of_roofline:.0%}", *peer,
        )  # fmt: skip
    return shown


def _shape(text: str) -> tuple[int, int]:
    inputs, _, outputs = text.partition("x")
    if not (inputs.isdecimal() and outputs.isdecimal()) or int(inputs) % 32 or not int(inputs) * int(outputs):
        raise argparse.ArgumentTypeError(f"{text!r} is not INPUTSxOUTPUTS with a multiple of 32 inputs")
    return int(inputs), int(outputs)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="headrace.bench.kernels", description="Products beside the machine's limits.")
    parser.add_argument("--threads", type=arguments.count, default=2, help="(%(default)s)")
    parser.add_argument("--variant", choices=variants(), default=variants()[0], help="(%(default)s)")
    parser.add_argument("--forms", default=",".join(FORMS), help="with commas (%(default)s)")
    parser.add_argument("--shapes", default=SHAPES, help="inputs x outputs, with commas (%(default)s)")
    parser.add_argument("--rows", type=arguments.counts, default=ROWS, help="with commas (%(default)s)")
    parser.add_argument("--seconds", type=arguments.seconds, default=0.3, help="for each figure (%(default)s)")
    parser.add_argument("--no-torch", action="store_true", help="do not measure torch")
    parser.add_argument("--json", type=arguments.new_file, help="write the figures to this file")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    try:
        shapes = [_shape(text) for text in args.shapes.split(",")]
        forms = [next(name for name in FORMS if name == text) for text in args.forms.split(",")]
    except argparse.ArgumentTypeError as error:
        parser().error(str(error))
    except StopIteration:
        parser().error(f"--forms {args.forms}: there are {', '.join(FORMS)}")
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_WIDTH)
    machine = Machine(args.threads, args.variant, read_rate(args.threads, args.seconds), fma_rate(args.seconds))
    console.print(
        f"{machine.variant}, {machine.threads} threads: reads {machine.read_gb_s:.1f} GB/s, "
        f"float32 products of numpy's BLAS {machine.gflop_s:.0f} GFLOP/s",
        highlight=False,
    )
    with console.status("") as status:
        figures = measure(
            machine, forms, shapes, args.rows, args.seconds, not args.no_torch,
            lambda f: status.update(f"{f.form} {f.inputs} x {f.outputs}, {f.rows} rows: {f.us:.0f} us"),
        )  # fmt: skip
    console.print(table(figures))
    if args.json:
        entries = {"machine": asdict(machine), "products": [asdict(figure) for figure in figures]}
        args.json.write_text(json.dumps(entries, indent=1) + "\n")


if __name__ == "__main__":
    main()
