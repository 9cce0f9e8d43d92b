"""Compiles the CPU kernels into one shared library: `python csrc/build.py OUTPUT`, or from setup.py.

Every variant has its own flags and file, so the library runs on any CPU of its architecture and picks the best
variant when it is loaded. Files that are newer than nothing they include are not compiled again.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = (
    "-std=c++17 -O3 -fPIC -fvisibility=hidden -fno-math-errno -fno-trapping-math -ffp-contract=off "
    "-Wall -Wextra -Werror -pthread"
).split()
AVX2 = "-mavx2 -mfma -mf16c".split()
AVX512 = [*AVX2, *"-mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512".split()]
VARIANT_FLAGS = {
    "variant_avx2.cpp": AVX2,
    "variant_avx512.cpp": AVX512,
    "variant_avx512_bf16.cpp": [*AVX512, "-mavx512vnni", "-mavx512bf16"],
}


class BuildError(Exception):
    """There is no compiler, or it refused."""


def compiler() -> list[str]:
    """The C++ compiler's command: $CXX, else what Python was built with, else g++, c++ or clang++."""
    for command in (os.environ.get("CXX"), "g++", "c++", "clang++", sysconfig.get_config_var("CXX")):
        if command and shutil.which(shlex.split(command)[0]):
            return shlex.split(command)
    raise BuildError("no C++ compiler is found (g++, c++, clang++): Debian, Ubuntu: apt-get install g++")


def build(output: Path, work: Path, extra_flags: tuple[str, ...] = ()) -> None:
    """Write the library to `output`, object files under `work`. Raises BuildError with the compiler's words."""
    command = compiler()
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    sources = [s for s in sorted(SOURCES.glob("*.cpp")) if x86 or s.name not in VARIANT_FLAGS]
    newest_header = max(path.stat().st_mtime for pattern in ("*.h", "*.inl", "*.py") for path in SOURCES.glob(pattern))
    work.mkdir(parents=True, exist_ok=True)

    def compiled(source: Path) -> Path:
        target = work / f"{source.stem}.o"
        if not target.exists() or target.stat().st_mtime < max(newest_header, source.stat().st_mtime):
            flags = [*FLAGS, *extra_flags, *VARIANT_FLAGS.get(source.name, ())]
            _run([*command, *flags, "-c", str(source), "-o", str(target)])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = list(threads.map(compiled, sources))
    output.parent.mkdir(parents=True, exist_ok=True)
    # A process may have the old file mapped: a new one takes its name, the old one is not written to.
    unfinished = output.with_name(output.name + ".new")
    _run([*command, "-shared", "-pthread", *extra_flags, "-o", str(unfinished), *map(str, objects)])
    unfinished.replace(output)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCES.parent / "headrace/kernels/native/libheadrace.so"
    try:
        build(target, SOURCES.parent / "build/csrc")
    except BuildError as error:
        sys.exit(str(error))
