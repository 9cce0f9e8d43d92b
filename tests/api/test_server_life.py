"""`headrace serve` from start to end: what the log says when, and how it goes away."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from tests.serving import HEADRACE, free_port
from tests.tiny_models import tiny_llama

KV_CACHE = ["--kv-cache-memory-bytes", str(8 << 20)]
SLOW_START = [*KV_CACHE, "--kernels", "reference"]
"""torch takes a second or two, long enough to be seen loading."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"), max_positions=2048)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    for process in Running.started:
        with contextlib.suppress(psutil.NoSuchProcess):
            for part in (*process.children(recursive=True), process):
                part.kill()
    Running.started.clear()


class Running:
    started: ClassVar[list[psutil.Popen]] = []

    def __init__(self, model: Path, log: Path, port: int | None = None, flags: list[str] = KV_CACHE) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        argv = [str(HEADRACE), "serve", str(model), "--served-model-name", "tiny", "--port", str(self.port), *flags]
        self.process = psutil.Popen(argv, stdin=subprocess.DEVNULL, stdout=log.open("wb"), stderr=subprocess.STDOUT)
        self.started.append(self.process)

    def log(self) -> str:
        return self._log.read_text()

    def health(self) -> tuple[int, dict] | None:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=2) as answer:
                return answer.status, {}
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())
        except OSError:
            return None

    def wait_until(self, status: int) -> dict:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            seen = self.health()
            if seen is not None and seen[0] == status:
                return seen[1]
            time.sleep(0.02)
        raise AssertionError(f"/health never was {status}:\n{self.log()}")

    def stream(self, max_tokens: int) -> list[bytes]:
        """Starts a stream in a thread; returns the list that its lines go to."""
        lines: list[bytes] = []
        body = {"model": "tiny", "prompt": "water", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )

        def read() -> None:
            with urllib.request.urlopen(request, timeout=60) as answer:
                lines.extend(answer)

        self.reader = threading.Thread(target=read, daemon=True)
        self.reader.start()
        deadline = time.monotonic() + 20
        while not lines and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lines
        return lines

    def end(self, number: signal.Signals, within_s: float) -> int:
        processes = [self.process, *self.process.children(recursive=True)]
        sent = time.monotonic()
        self.process.send_signal(number)
        status = self.process.wait(within_s)
        assert time.monotonic() - sent < within_s
        _, left = psutil.wait_procs(processes, timeout=1)
        assert not left, f"left running: {left}"
        return status


def test_it_says_503_until_the_log_says_complete_and_drains_on_sigterm(model, tmp_path):
    server = Running(model, tmp_path / "log", flags=SLOW_START)
    loading = server.wait_until(503)
    assert loading["error"]["code"] == "engine_loading"
    assert "Application startup complete" not in server.log()
    server.wait_until(200)
    time.sleep(0.2)
    log = server.log()
    for line in (
        "Loading model weights",
        "GPU memory utilization: 0.90",
        "KV cache size: ",
        "Application startup complete.",
        f"Uvicorn running on {server.url} (Press CTRL+C to quit)",
    ):
        assert line in log, line

    second = Running(model, tmp_path / "second", port=server.port)
    assert second.process.wait(20) == 1
    (line,) = [line for line in second.log().splitlines() if line.startswith("headrace: ")]
    assert f"Port {server.port} on 127.0.0.1 is in use. Use --port " in line
    suggested = int(line.split("--port ")[1].split(",")[0])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", suggested))

    lines = server.stream(max_tokens=300)
    assert server.end(signal.SIGTERM, within_s=15) == 0
    server.reader.join(5)
    assert lines[-2].strip() == b"data: [DONE]" or b"data: [DONE]\n" in lines
    assert "Traceback" not in server.log()


def test_a_killed_core_breaks_streams_visibly_and_comes_back_and_ctrl_c_ends_it_all(model, tmp_path):
    server = Running(model, tmp_path / "log")
    server.wait_until(200)
    lines = server.stream(max_tokens=1900)
    (core,) = server.process.children()
    core.kill()
    assert server.wait_until(503)["error"]["code"] == "engine_restarting"
    server.reader.join(5)
    assert any(b'"engine_restarting"' in line for line in lines) and b"data: [DONE]\n" not in lines
    server.wait_until(200)
    assert server.process.children() != [core]

    lines = server.stream(max_tokens=1900)
    assert server.end(signal.SIGINT, within_s=2.0) == 0
    server.reader.join(5)
    assert any(b'"error"' in line for line in lines) and b"data: [DONE]\n" not in lines
    assert "Traceback" not in server.log()


def test_ctrl_c_while_loading_leaves_nothing(model, tmp_path):
    server = Running(model, tmp_path / "log", flags=SLOW_START)
    server.wait_until(503)
    assert server.end(signal.SIGINT, within_s=2.0) == 0


def test_a_start_that_cannot_work_exits_1_with_one_line_of_advice(model, tmp_path):
    flags = ["--kv-cache-memory-bytes", "50000", "--max-model-len", "2048"]
    server = Running(model, tmp_path / "log", flags=flags)
    assert server.process.wait(60) == 1
    (line,) = [line for line in server.log().splitlines() if line.startswith("headrace: ")]
    assert "To serve at least one request" in line and "--kv-cache-memory-bytes" in line
    assert "Traceback" not in server.log()


def test_it_serves_https_by_itself(model, tmp_path):
    tls = Path(__file__).parents[1] / "data" / "tls"
    flags = [*KV_CACHE, "--ssl-certfile", str(tls / "certificate.pem"), "--ssl-keyfile", str(tls / "key.pem")]
    server = Running(model, tmp_path / "log", flags=flags)
    trusted = ssl.create_default_context(cafile=tls / "certificate.pem")
    url = f"https://127.0.0.1:{server.port}"
    deadline = time.monotonic() + 60
    while f"Uvicorn running on {url}" not in server.log():
        assert time.monotonic() < deadline and server.process.poll() is None, server.log()
        time.sleep(0.05)
    with urllib.request.urlopen(url + "/health", timeout=5, context=trusted) as answer:
        assert answer.status == 200
    assert server.end(signal.SIGINT, within_s=2.0) == 0
    assert "Traceback" not in server.log()


def test_a_model_given_by_a_relative_path_answers_to_the_full_one(model, tmp_path):
    server = Running(Path(os.path.relpath(model)), tmp_path / "log")
    server.wait_until(200)
    for name in ("tiny", os.path.relpath(model), str(model), model.name):
        body = json.dumps({"model": name, "prompt": "water", "max_tokens": 1}).encode()
        with urllib.request.urlopen(server.url + "/v1/completions", body, timeout=20) as answer:
            assert answer.status == 200
    assert server.end(signal.SIGTERM, within_s=5) == 0
