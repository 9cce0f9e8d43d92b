"""Compiles the CPU kernels into one shared library: `python csrc/build.py OUTPUT`, or from setup.py;
with --sanitized, the program that drives them under sanitizers.

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
    "-std=c++17 -O2 -fPIC -fvisibility=hidden -fno-math-errno -fno-trapping-math -ffp-contract=off "
    "-Wall -Wextra -Werror -pthread"
).split()
AVX2 = "-mavx2 -mfma -mf16c".split()
AVX512 = [*AVX2, *"-mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512".split()]
# GCC 12 takes the unset operands of its own AVX-512 functions for mistakes.
AVX512 += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
VARIANT_FLAGS = {
    "variant_avx2.cpp": AVX2,
    "variant_avx512.cpp": AVX512,
    "variant_avx512_bf16.cpp": [*AVX512, "-mavx512vnni", "-mavx512bf16"],
}
# Mappings are replaced by memory that is guarded, see tests/sanitized.cpp.
SANITIZED = (
    "-O0 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer "
    "-Dmmap=guarded_mmap -Dmunmap=guarded_munmap"
).split()


class BuildError(Exception):
    """There is no compiler, or it refused."""


def compiler() -> list[str]:
    """The C++ compiler's command: $CXX, else what Python was built with, else g++, c++ or clang++."""
    for command in (os.environ.get("CXX"), "g++", "c++", "clang++", sysconfig.get_config_var("CXX")):
        if command and shutil.which(shlex.split(command)[0]):
            return shlex.split(command)
    raise BuildError("no C++ compiler is found (g++, c++, clang++): Debian, Ubuntu: apt-get install g++")


def build(output: Path, work: Path) -> None:
    """Write the library to `output`, object files under `work`. Raises BuildError with the compiler's words."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    sources = [s for s in sorted(SOURCES.glob("*.cpp")) if x86 or s.name not in VARIANT_FLAGS]
    _link(output, _compiled(sources, work, VARIANT_FLAGS, []), ["-shared"])


def build_sanitized(output: Path, work: Path) -> None:
    """Write the program that looks for wrong accesses to memory to `output`, of the variants that this CPU runs."""
    cpu = Path("/proc/cpuinfo").read_text().replace("_", "")
    runs = {
        name: flags
        for name, flags in VARIANT_FLAGS.items()
        if all(flag[2:] in cpu for flag in flags if flag.startswith("-mavx"))
    }
    sources = [*sorted(SOURCES.glob("*.cpp")), SOURCES / "tests/sanitized.cpp"]
    _link(output, _compiled(sources, work, runs, SANITIZED), SANITIZED)


def _compiled(sources: list[Path], work: Path, variant_flags: dict[str, list[str]], flags: list[str]) -> list[Path]:
    """Object files of the sources, those that are newer than everything they may include as they are."""
    command = compiler()
    newest_header = max(path.stat().st_mtime for pattern in ("*.h", "*.inl", "*.py") for path in SOURCES.glob(pattern))
    work.mkdir(parents=True, exist_ok=True)

    def compiled(source: Path) -> Path:
        target = work / f"{source.stem}.o"
        if not target.exists() or target.stat().st_mtime < max(newest_header, source.stat().st_mtime):
            every = [*FLAGS, *flags, *variant_flags.get(source.name, ())]
            _run([*command, *every, "-c", str(source), "-o", str(target)])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(compiled, sources))


def _link(output: Path, objects: list[Path], flags: list[str]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    # A process may have the old file mapped: a new one takes its name, the old one is not written to.
    unfinished = output.with_name(output.name + ".new")
    _run([*compiler(), *flags, "-pthread", "-o", str(unfinished), *map(str, objects)])
    unfinished.replace(output)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    try:
        if arguments[:1] == ["--sanitized"]:
            build_sanitized(Path(arguments[1]), Path(arguments[1]).parent)
        else:
            target = arguments[0] if arguments else SOURCES.parent / "headrace/kernels/native/libheadrace.so"
            build(Path(target), SOURCES.parent / "build/csrc")
    except BuildError as error:
        sys.exit(str(error))
