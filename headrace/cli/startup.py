"""What a person reads when the server starts: sizes with their numbers, and how to use what is running.

Every function here turns values into lines, so that `--dry-run` and a real start say the same. The lines about the
KV cache keep the wording that log scrapers and guides look for.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TextIO

from headrace.config.rules import listens_beyond_loopback
from headrace.config.settings import EngineSettings, ServerSettings
from headrace.protocol.ipc import EngineInfo

GIB = 1 << 30


def base_url(server: ServerSettings, port: int | None = None) -> str:
    """Where a client on this machine reaches the API. An address that means "all" is shown as the loopback."""
    scheme = "https" if server.ssl_certfile else "http"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(server.host, server.host)
    host = f"[{host}]" if ":" in host else host
    return f"{scheme}://{host}:{server.port if port is None else port}{server.root_path}/v1"


def table_rows(info: EngineInfo) -> list[tuple[str, str]]:
    """The start-up block's rows, label and text."""
    threads = f"{info.threads} thread{'s' if info.threads != 1 else ''}"
    machine = ", ".join(part for part in (info.instruction_set, threads if info.device == "cpu" else "") if part)
    rows = [
        ("Model", f"{info.model} ({info.family})"),
        ("Weights", f"{info.weight_bytes / GIB:.2f} GiB, computed in {info.dtype}"),
        ("Device", f"{info.device}: {machine}" if machine else info.device),
        ("Kernels", info.kernels),
        *cache_rows(info),
    ]
    step = f"at most {info.max_num_seqs:,} requests and {info.max_num_batched_tokens:,} tokens"
    if info.gives == "text":
        rows.append(("A step", f"{step}; target {info.step_time_target_s * 1000:g} ms while answers stream"))
    else:
        rows += [("A step", step), ("Gives", info.gives), ("A text", f"at most {info.max_model_len:,} tokens")]
    if info.phase_seconds:
        phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in info.phase_seconds.items())
        rows.append(("Started in", f"{sum(info.phase_seconds.values()):.1f} s: {phases}"))
    return rows


def cache_rows(info: EngineInfo) -> list[tuple[str, str]]:
    """The KV cache and the tier behind it; an encoder has none."""
    if not info.num_blocks:
        return []
    size = f"{info.kv_cache_bytes / GIB:.2f} GiB in {info.kv_cache_dtype}"
    return [("KV cache", f"{size}: {info.num_blocks:,} blocks of {info.block_size} tokens"), *swap_rows(info)]


def swap_rows(info: EngineInfo) -> list[tuple[str, str]]:
    """What the tier in host memory holds, if there is one."""
    if not info.num_host_blocks:
        return []
    size = info.num_host_blocks * info.kv_cache_bytes / info.num_blocks / GIB
    tokens = info.kv_cache_tokens * info.num_host_blocks // info.num_blocks
    return [("Swap space", f"{size:.2f} GiB of host memory: {info.num_host_blocks:,} blocks, {tokens:,} tokens more")]


def log_lines(info: EngineInfo, engine: EngineSettings) -> list[str]:
    """The lines that guides tell people to look for, with the real numbers."""
    if not info.num_blocks:
        return []
    share = engine.gpu_memory_utilization
    return [
        f"GPU memory utilization: {share:.2f}" if share >= 0.01 else f"GPU memory utilization: {share:g}",
        f"Available KV cache memory: {info.kv_cache_bytes / GIB:.2f} GiB",
        f"KV cache size: {info.num_blocks} blocks",
        f"GPU KV cache size: {info.kv_cache_tokens:,} tokens",
        f"Maximum concurrency for {info.max_model_len:,} tokens per request: {info.max_concurrency:.2f}x",
    ]


def block_lines(info: EngineInfo, engine: EngineSettings) -> list[str]:
    """The whole start-up block as plain lines."""
    rows = table_rows(info)
    width = max(len(label) for label, _ in rows)
    lines = [f"{label:<{width}}  {text}" for label, text in rows]
    return [*lines, *log_lines(info, engine), *(f"Note: {note}" for note in info.notes)]


def access_lines(server: ServerSettings, url: str) -> list[str]:
    """Where to reach the server and under which model names."""
    lines = [f"Base URL: {url}", f"Model: {', '.join(server.served_model_names)}"]
    if server.api_keys:
        lines.append("Key: clients send one of those given with --api-key")
    elif listens_beyond_loopback(server.host):
        lines.append(f"Key: none, and {server.host} lets other machines in; set --api-key to close the door")
    else:
        lines.append("Key: none needed; clients that insist on one may send any")
    return lines


def example_lines(server: ServerSettings, url: str, key: str | None = None) -> list[str]:
    """A curl and a Python example that work when pasted, with `key` if there is one to show.

    Where keys are wanted and none is known here, the reader puts theirs in place.
    """
    name = server.served_model_names[0]
    key = key or ("YOUR_KEY" if server.api_keys else None)
    header = f" -H 'Authorization: Bearer {key}'" if key is not None else ""
    question = "What turns a water wheel?"
    body = {"model": name, "messages": [{"role": "user", "content": question}], "max_tokens": 40}
    quoted = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    return [
        "Try it with curl:",
        "",
        f"curl {url}/chat/completions -H 'Content-Type: application/json'{header} -d '{quoted}'",
        "",
        "or with Python (pip install openai):",
        "",
        "from openai import OpenAI",
        f"client = OpenAI(base_url={json.dumps(url)}, api_key={json.dumps(key or 'unused')})",
        f'messages = [{{"role": "user", "content": "{question}"}}]',
        f"answer = client.chat.completions.create(model={json.dumps(name)}, messages=messages, max_tokens=40)",
        "print(answer.choices[0].message.content)",
        "",
    ]


def vector_example_lines(server: ServerSettings, url: str, key: str | None = None) -> list[str]:
    """The same for a model that gives vectors."""
    name = server.served_model_names[0]
    key = key or ("YOUR_KEY" if server.api_keys else None)
    header = f" -H 'Authorization: Bearer {key}'" if key is not None else ""
    quoted = json.dumps({"model": name, "input": ["water wheel", "mill"]}, ensure_ascii=False).replace("'", "'\\''")
    return [
        "Try it with curl:",
        "",
        f"curl {url}/embeddings -H 'Content-Type: application/json'{header} -d '{quoted}'",
        "",
    ]


def room_line(info: EngineInfo) -> str:
    """How much fits."""
    if not info.num_blocks:
        return f"{info.gives}, of texts of at most {info.max_model_len:,} tokens"
    return (
        f"{info.kv_cache_tokens:,} tokens of KV cache, {info.max_concurrency:.1f} requests of "
        f"{info.max_model_len:,} tokens at once"
    )


def print_block(info: EngineInfo, engine: EngineSettings, out: TextIO | None = None) -> None:
    """The block as a table on a terminal, as plain lines anywhere else."""
    stream = out if out is not None else sys.stdout
    if not stream.isatty():
        print_lines(block_lines(info, engine), stream)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in table_rows(info):
        table.add_row(label, Text(text))
    console = Console(file=stream, highlight=False)
    console.print(table)
    for line in log_lines(info, engine):
        console.print(Text(line))
    for note in info.notes:
        console.print(Text(f"Note: {note}", style="yellow"))


def print_lines(lines: Sequence[str], out: TextIO | None = None) -> None:
    print("\n".join(lines), file=out if out is not None else sys.stdout, flush=True)
