"""The servers that are compared: Headrace in its forms and whichever peers are on this machine, each by its command.

Model files lie in one folder: `hf/` (a Hugging Face checkpoint in bfloat16) and `bf16.gguf`, `q8_0.gguf`,
`q4_0.gguf`, `q4_1.gguf` of the same model (without the last: the bundled model, which is it); what is missing is left
out of the comparison, and said.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.bench.servers import Server, free_port, started
from headrace.config.resolve import resolve_model
from headrace.planner.cpu import cpu_flags


@dataclass(frozen=True, slots=True)
class Room:
    """For the tokens of one load. A server gets that of the largest of its loads, so that none has memory of no use."""

    kv_cache_bytes: int
    """Of Headrace, whose streams share one cache; at 23,040 bytes a token of the model of the comparison."""
    stream_tokens: int
    """Of llama.cpp, where each of 32 streams has its own part, and its prompts must fit it."""


ROOM = {
    "W1": Room(203 << 20, 512),
    "W2": Room(203 << 20, 512),  # 9,216 tokens: 32 streams of up to 258, in blocks of 32
    "W3": Room(203 << 20, 2048),
    "W4": Room(240 << 20, 8192),  # 10,912 tokens: one of 6,002 and eight of up to 578, which are 10,880 in blocks
}


@dataclass(frozen=True, slots=True)
class Contestant:
    """`command` holds {port}; `scheme` is bf16, int8 or 4-bit: only those of one scheme are set against each other."""

    name: str
    scheme: str
    command: tuple[str, ...]
    model: str
    environment: Mapping[str, str] = field(default_factory=dict)
    bench: tuple[str, ...] = ()
    """Prints the decode rate without a server, as JSON: llama-bench."""
    is_server: bool = True
    """Else `command` is run once for a {load} and {seed}, and prints its figures as JSON."""


def contestants(
    models: Path, threads: int, loads: Iterable[str], vllm: str | None, llama: str | None
) -> tuple[list[Contestant], list[str]]:
    """What can run here, and a line for each that cannot, its name first. `loads` decide how much room for tokens the
    servers are given; `vllm`, `llama`: a program and a folder of programs, or None for those on PATH."""
    rooms = [ROOM[load] for load in loads]
    kv_cache_bytes = max(room.kv_cache_bytes for room in rooms)
    context = 32 * max(room.stream_tokens for room in rooms)
    found: list[Contestant] = []
    missing: list[str] = []
    serve = (sys.executable, "-m", "headrace", "serve")
    ours = ("--host", "127.0.0.1", "--port", "{port}", "--threads", str(threads), "--served-model-name", "m",
            "--kv-cache-memory-bytes", str(kv_cache_bytes))  # fmt: skip

    def add(contestant: Contestant, *needs: Path) -> None:
        absent = [str(path) for path in needs if not path.exists()]
        if absent:
            missing.append(f"{contestant.name}: there is no {', '.join(absent)}")
        else:
            found.append(contestant)

    hf = models / "hf"
    add(Contestant("headrace bf16", "bf16", (*serve, str(hf), "--dtype", "bfloat16", *ours), "m"), hf)
    add(Contestant("headrace int8", "int8", (*serve, str(hf), "--quantization", "int8", *ours), "m"), hf)
    for file in ("q8_0", "q4_0", "q4_1"):
        path = models / f"{file}.gguf"
        if file == "q4_1" and not path.exists():
            path = resolve_model(None)
        scheme = "int8" if file == "q8_0" else "4-bit"
        add(Contestant(f"headrace {file}", scheme, (*serve, str(path), *ours), "m"), path)
    server = shutil.which("llama-server", path=llama)
    bench = shutil.which("llama-bench", path=llama)
    if server is None:
        missing.append(f"llama.cpp: llama-server is not {f'in {llama}' if llama else 'on PATH'}")
    else:
        for file in ("bf16", "q8_0", "q4_0", "q4_1"):
            path = models / f"{file}.gguf"
            command = (server, "-m", str(path), "--host", "127.0.0.1", "--port", "{port}", "-t", str(threads),
                       "-np", "32", "-c", str(context), "--no-kv-unified", "--alias", "m")  # fmt: skip
            rate: tuple[str, ...] = ()
            if bench is not None:
                rate = (bench, "-m", str(path), "-t", str(threads), "-p", "0", "-n", "128", "-r", "3", "-o", "json")
            scheme = {"bf16": "bf16", "q8_0": "int8"}.get(file, "4-bit")
            add(Contestant(f"llama.cpp {file}", scheme, command, "m", bench=rate), path)
    program = shutil.which(vllm or "vllm")
    if program is None:
        missing.append(f"vLLM: {f'there is no program {vllm}' if vllm else 'vllm is not on PATH'}")
    else:
        # Without AVX-512 its products know no bfloat16, and it would end while it starts.
        dtype = "bfloat16" if "avx512f" in cpu_flags() else "float32"
        serving = (program, "serve", str(hf), "--served-model-name", "m", "--host", "127.0.0.1", "--port", "{port}",
                   "--dtype", dtype, "--max-model-len", "8192", "--max-num-seqs", "32")  # fmt: skip
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(threads),
        }
        add(Contestant(f"vLLM {'bf16' if dtype == 'bfloat16' else dtype}", "bf16", serving, "m", environment), hf)
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        missing.append("transformers: it and torch are not installed beside Headrace")
    else:
        generate = (sys.executable, "-m", "headrace.bench.generate", "--model", str(hf), "--load", "{load}",
                    "--seed", "{seed}", "--threads", str(threads))  # fmt: skip
        add(Contestant("transformers bf16", "bf16", generate, "m", is_server=False), hf)
    return found, missing


@contextlib.contextmanager
def running(contestant: Contestant) -> Iterator[Server]:
    """The server, ready. Raises BenchError with the end of its output if it does not start."""
    port = free_port()
    command = [part.replace("{port}", str(port)) for part in contestant.command]
    with started(command, port, environment=contestant.environment) as server:
        yield server
