"""The comparison of servers: medians of rounds, ratios to our best, and what is left out is named."""

from __future__ import annotations

import io
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from headrace.bench.compare import changes, main, measure, medians, offline_figures, tables
from headrace.bench.contestants import ROOM, Contestant, contestants
from headrace.bench.load import WORDS, Request, random_requests
from headrace.bench.workloads import REQUESTS
from headrace.engine.admission import SchedulerSettings
from headrace.engine.plan import Sampled, StepResult
from headrace.engine.scheduler import Scheduler
from headrace.protocol.ipc import AddRequest, SamplingParams
from tests.tiny_models import tiny_llama


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
    found = medians([*ENTRIES, entry("headrace bf16", 3, math.nan)])
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


def contestants_of(folder: Path, *loads: str) -> tuple[list[Contestant], list[str]]:
    return contestants(folder, 2, loads or ("W1",), str(folder / "no-vllm"), str(folder))


def test_what_is_not_there_is_left_out_and_named(tmp_path: Path) -> None:
    (tmp_path / "q4_1.gguf").touch()
    found, missing = contestants_of(tmp_path)
    assert [contestant.name for contestant in found] == ["headrace q4_1"]
    assert f"llama.cpp: llama-server is not in {tmp_path}" in missing
    assert f"vLLM: there is no program {tmp_path}/no-vllm" in missing
    assert any(line.startswith("headrace bf16: there is no") for line in missing)
    assert any(line.startswith("transformers bf16: there is no") for line in missing)


def test_without_a_folder_of_models_the_bundled_one_is_measured(tmp_path: Path) -> None:
    found, _ = contestants_of(tmp_path / "none")
    (ours,) = found
    assert ours.name == "headrace q4_1" and any(word.endswith(".gguf") for word in ours.command)


def test_every_server_has_room_for_its_loads_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "q4_1.gguf").touch()
    llama = tmp_path / "llama-server"
    llama.write_text("#!/bin/sh\n")
    llama.chmod(0o755)

    def given(name: str, flag: str, *loads: str) -> int:
        (command,) = (c.command for c in contestants_of(tmp_path, *loads)[0] if c.name == name)
        return int(command[command.index(flag) + 1])

    sizes = {load: given("headrace q4_1", "--kv-cache-memory-bytes", load) >> 20 for load in ROOM}
    assert sizes == {"W1": 203, "W2": 203, "W3": 203, "W4": 240}
    assert given("headrace q4_1", "--kv-cache-memory-bytes", "W2", "W4", "W1") == 240 << 20
    assert given("llama.cpp q4_1", "-c", "W1", "W2") == 32 * 512
    assert given("llama.cpp q4_1", "-c", "W1", "W3") == 32 * 2048
    assert given("llama.cpp q4_1", "-c", "W1", "W2", "W3", "W4") == 32 * 8192


def scheduler_of(load: str) -> Scheduler:
    """As a server under this load has it, of a model with 23,040 bytes of keys and values a token."""
    num_blocks = ROOM[load].kv_cache_bytes // (23_040 * 32)
    return Scheduler(
        SchedulerSettings(
            max_num_seqs=256, max_num_batched_tokens=256, max_model_len=8192, num_blocks=num_blocks, block_size=32
        )
    )


def served(scheduler: Scheduler, requests: list[tuple[list[int], int]], streams: int) -> tuple[int, int]:
    """Answer prompts with so many tokens, `streams` at a time, in steps as long as a slow CPU's: how many sequences
    were preempted, and the most that ran side by side."""
    waiting = [
        AddRequest(request_id=str(i), token_ids=ids, params=SamplingParams(max_tokens=tokens), arrival_s=0.0)
        for i, (ids, tokens) in enumerate(requests)
    ]
    for message in waiting[:streams]:
        assert scheduler.add(message) is None
    sent, preempted, most = min(streams, len(waiting)), 0, 0
    while (plan := scheduler.schedule()) is not None:
        sampled = tuple(Sampled(step.seq_id, (1,)) for step in plan.steps if step.samples)
        most = max(most, len(plan.steps))
        seconds = 0.02 + 0.003 * sum(step.num_tokens for step in plan.steps)
        for output in scheduler.update(plan, StepResult(plan.step, seconds, sampled, (), (), 0.0, 0.0)):
            preempted += output.finish_reason is not None and output.num_preemptions > 0
            if output.finish_reason is not None and sent < len(waiting):
                assert scheduler.add(waiting[sent]) is None
                sent += 1
    assert sent == len(waiting) and not scheduler.has_work
    return preempted, most


def token_ids(request: Request) -> list[int]:
    """As many as the tokenizer makes: one a word, and up to two more for the first, before which is no blank."""
    return [1, 2, *(10 + WORDS.index(word) for word in request.prompt.split(" "))]


@pytest.mark.parametrize("load", ["W1", "W2", "W3"])
def test_no_stream_of_a_load_is_preempted_for_want_of_room(load: str) -> None:
    requests, streams = REQUESTS[load](7)
    asked = [(token_ids(request), request.max_tokens) for request in requests]
    assert served(scheduler_of(load), asked, streams) == (0, streams)


def test_a_long_prompt_beside_the_streams_preempts_none() -> None:
    streams = [(token_ids(request), request.max_tokens) for request in random_requests(8, 64, 512, seed=8)]
    assert served(scheduler_of("W4"), [*streams, ([5] * 6002, 2)], 9) == (0, 9)


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


def answering_once(folder: Path, then: str = "") -> tuple[str, ...]:
    """A server of OpenAI's completions that gives each request two tokens, and `then` does what the test needs."""
    program = folder / f"server{len(list(folder.iterdir()))}.py"
    program.write_text(
        """
import http.server, json, sys, threading
count = 0

class Answers(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        global count
        count += 1
        THEN
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        for line in ({"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]},
                     {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}):
            self.wfile.write(b"data: " + json.dumps(line).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
""".replace("THEN", then or "pass")
    )
    return (sys.executable, str(program), "{port}")


def test_a_peer_that_fails_costs_nobody_elses_figures(tmp_path: Path) -> None:
    ends = answering_once(tmp_path, "if count > 12: import os; os._exit(3)")
    chosen = [
        Contestant("headrace x", "bf16", answering_once(tmp_path), "m"),
        Contestant("peer a", "bf16", ends, "m"),
        Contestant("peer b", "bf16", (sys.executable, "-c", "raise SystemExit('no such flag')"), "m"),
        Contestant("peer c", "bf16", (str(tmp_path / "missing"),), "m"),
    ]
    out = io.StringIO()
    entries = list(measure(chosen, ["W1"], 2, Console(file=out, width=400)))
    places = [(entry["server"], entry["load"], entry["round"]) for entry in entries]
    assert places == [
        ("headrace x", "start", 0), ("peer a", "start", 0), ("headrace x", "W1", 0), ("peer a", "W1", 0),
        ("headrace x", "W1", 1),
    ]  # fmt: skip
    ours = [entry["figures"] for entry in entries if entry["server"] == "headrace x"]
    assert ours[1]["errors"] == ours[2]["errors"] == 0 and ours[2]["output tok/s"] > 0
    assert ours[0]["idle PSS MiB"] > 1 and ours[1]["PSS MiB"] > 1
    assert entries[3]["figures"]["errors"] == 4 and "PSS MiB" not in entries[3]["figures"]
    said = out.getvalue()
    assert "peer a has ended with 3" in said and "no such flag" in said and f"{tmp_path}/missing did not start" in said


def test_the_memory_of_a_load_is_that_of_all_processes_while_it_runs(tmp_path: Path) -> None:
    """A child takes 64 MiB before the last request, and is gone with its answer."""
    child = "held = b'x' * (64 << 20); print(flush=True); input()"
    then = f"""import subprocess
        if count % 8 == 7:
            self.server.child = subprocess.Popen([sys.executable, "-c", {child!r}], stdin=-1, stdout=-1)
            self.server.child.stdout.readline()
        if count % 8 == 0:
            __import__("time").sleep(0.5)
            self.server.child.kill()
            self.server.child.wait()"""
    command = answering_once(tmp_path, then)
    entries = list(measure([Contestant("peer", "bf16", command, "m")], ["W1"], 1, Console(file=io.StringIO())))
    start, load = (entry["figures"] for entry in entries)
    assert load["PSS MiB"] > start["idle PSS MiB"] + 60


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What it says on stderr when it refuses its arguments, in one line."""
    with pytest.raises(SystemExit) as refused:
        main([str(argument) for argument in arguments])
    assert refused.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_what_cannot_be_measured_is_said_before_anything_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"products": []}')
    assert "--workloads 'W1,W9': there are W1, W2, W3, W4" in run(capsys, "--workloads", "W1,W9")
    assert "--workloads ''" in run(capsys, "--workloads", "")
    assert "--rounds 0: it must be at least 1" in run(capsys, "--rounds", 0)
    assert f"--models {tmp_path}/m: there is no such folder" in run(capsys, "--models", tmp_path / "m")
    assert "there is no llama-server in it" in run(capsys, "--llama-cpp", tmp_path)
    assert f"--vllm {tmp_path}/vllm: there is no such program" in run(capsys, "--vllm", tmp_path / "vllm")
    assert "no file can be written there" in run(capsys, "--json", tmp_path / "no" / "now.json")
    assert f"{tmp_path}/none cannot be read: No such file" in run(capsys, "--base", tmp_path / "none")
    assert f"{other} was not written by --json of this program" in run(capsys, "--base", other)
    said = run(capsys, "--models", tmp_path, "--only", "headrace,ollama")
    assert "--only ollama: no server's name has that; there are headrace q4_1" in said
    assert "there is nothing to compare" in run(capsys, "--models", tmp_path, "--only", "headrace bf16")


def test_a_comparison_that_is_ended_keeps_its_figures_and_leaves_no_server(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf", max_positions=2048)
    file = tmp_path / "now.json"
    flags = ["--only", "headrace bf16", "--workloads", "W1", "--rounds", "1000", "--threads", "1", "--json", str(file)]
    command = [sys.executable, "-m", "headrace.bench.compare", "--models", str(tmp_path), *flags]
    with psutil.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        while not (file.exists() and '"W1"' in file.read_text()) and program.poll() is None:
            time.sleep(0.1)
        servers = program.children(recursive=True)
        program.send_signal(signal.SIGTERM)
        said, _ = program.communicate(timeout=60)
    assert program.returncode == 130, said
    assert "interrupted" in said and "start, bf16" in said and "W1, bf16" in said
    assert servers and not any(server.is_running() for server in servers)
    entries = json.loads(file.read_text())["entries"]
    assert [entry["load"] for entry in entries[:2]] == ["start", "W1"]
    assert all(entry["figures"]["errors"] == 0 and entry["figures"]["PSS MiB"] > 30 for entry in entries[1:])
