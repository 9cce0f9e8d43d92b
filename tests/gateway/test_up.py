"""`headrace up`: engines and gateway from one command, ended by one signal, with nothing left running."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import psutil
import pytest

from headrace.config.gateway_defaults import HOST as GATEWAY_HOST
from headrace.config.gateway_defaults import PORT as GATEWAY_PORT
from headrace.gateway.snapshot import Listen
from tests.batch_files import asking, read_lines
from tests.serving import HEADRACE, _limit_memory, free_port
from tests.tiny_models import tiny_llama


class Up:
    """A running `headrace up`; `log` is what it has said so far."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.path = folder / "up.log"
        self.process = psutil.Popen(
            [str(HEADRACE), "up", *words],
            stdin=subprocess.DEVNULL,
            stdout=self.path.open("wb"),
            stderr=subprocess.STDOUT,
            preexec_fn=_limit_memory,
            cwd=folder,
        )

    @property
    def log(self) -> str:
        return self.path.read_text()

    def wait(self, text: str, timeout_s: float = 60) -> str:
        deadline = time.monotonic() + timeout_s
        while text not in self.log:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)
        return self.log

    def end(self, number: signal.Signals, within_s: float) -> int:
        children = self.process.children(recursive=True)
        started = time.monotonic()
        self.process.send_signal(number)
        status = self.process.wait(20)
        _, left = psutil.wait_procs(children, timeout=2)
        assert not left, f"left running: {left}"
        assert time.monotonic() - started < within_s, self.log
        assert "Traceback" not in self.log, self.log
        return status


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@contextmanager
def started(folder: Path, *words: str) -> Iterator[Up]:
    up = Up(folder, *words, "--data-dir", str(folder / "data"))
    try:
        up.wait("Ctrl-C ends it.")
        yield up
    finally:
        if up.process.poll() is None:
            up.process.kill()


def test_one_command_serves_a_model_behind_a_key_and_ctrl_c_ends_everything(tmp_path: Path, model: Path) -> None:
    engine, gateway = free_port(), free_port()
    words = (str(model), "--served-model-name", "tiny", "--port", str(engine), "--gateway-port", str(gateway))
    with started(tmp_path, *words) as up:
        base_url = f"http://127.0.0.1:{gateway}/v1"
        assert f"Base URL       {base_url}" in up.log
        (key,) = set(re.findall(r"sk-hr-\w+", up.log))
        with openai.OpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
            assert [m.id for m in client.models.list()] == ["tiny"]
            answer = client.completions.create(model="tiny", prompt="ab", max_tokens=3, temperature=0)
            assert answer.usage is not None
            assert answer.usage.completion_tokens <= 3
        with (
            openai.OpenAI(base_url=base_url, api_key="sk-hr-wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()
        assert up.end(signal.SIGINT, within_s=3.5) == 0

    with started(tmp_path, *words) as again:
        assert key not in again.log, "a key is shown once"
        assert key[:10] in again.log
        (curl,) = re.findall(r"^curl .*$", again.log, re.MULTILINE)
        shown = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True, timeout=60).stdout
        assert json.loads(shown)["choices"], "the example works when pasted, at the engine's own address"
        assert again.end(signal.SIGTERM, within_s=6) == 0


def test_a_file_describes_two_engines_and_the_gateway(tmp_path: Path, model: Path) -> None:
    first, second, gateway = free_port(), free_port(), free_port()
    (tmp_path / "headrace.toml").write_text(
        f"""
[server]
port = {gateway}

[engine.small]
model = "{model}"
served_model_name = "small"
port = {first}

[engine.other]
model = "{model}"
served_model_name = "other"
api_key = "sk-engine-secret"
port = {second}
"""
    )
    with started(tmp_path, "--config", str(tmp_path / "headrace.toml")) as up:
        (key,) = set(re.findall(r"sk-hr-\w+", up.log))
        assert "sk-engine-secret" not in up.log
        with openai.OpenAI(base_url=f"http://127.0.0.1:{gateway}/v1", api_key=key, max_retries=0) as client:
            assert {m.id for m in client.models.list()} == {"small", "other"}
            for name in ("small", "other"):
                raw = client.completions.with_raw_response.create(model=name, prompt="ab", max_tokens=2)
                assert raw.headers["x-gateway-upstream"] == name
        assert up.end(signal.SIGINT, within_s=3.5) == 0


def test_a_batch_goes_through_the_gateway_to_the_engine_and_back(tmp_path: Path, model: Path) -> None:
    gateway = free_port()
    words = (str(model), "--served-model-name", "tiny", "--port", "0", "--gateway-port", str(gateway))
    with started(tmp_path, *words) as up:
        (key,) = set(re.findall(r"sk-hr-\w+", up.log))
        base_url = f"http://127.0.0.1:{gateway}/v1"
        with openai.OpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
            lines = "".join(asking(f"r{i}") + "\n" for i in range(20))
            file = client.files.create(file=("in.jsonl", lines.encode()), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"for": "us"}
            )
            deadline = time.monotonic() + 60
            while batch.status != "completed":
                assert time.monotonic() < deadline and batch.status in ("validating", "in_progress", "finalizing")
                time.sleep(0.1)
                batch = client.batches.retrieve(batch.id)
            assert batch.input_file_id == file.id and batch.output_file_id and batch.error_file_id is None
            found = read_lines(client.files.content(batch.output_file_id).text)
            assert sorted(line["custom_id"] for line in found) == sorted(f"r{i}" for i in range(20))
            assert [each.id for each in client.batches.list()] == [batch.id]
            assert {each.id for each in client.files.list()} >= {file.id}
            assert client.files.delete(file.id).deleted
            with pytest.raises(openai.ConflictError):
                client.batches.cancel(batch.id)
        assert (tmp_path / "data" / "engine" / "engine" / "batches").is_dir(), "with whatever else `up` keeps"
        assert up.end(signal.SIGINT, within_s=3.5) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gateway-prot", "1"], "--gateway-port"),
        (["--gateway-port", "seventy"], "gateway-port"),
        (["--max-model-len", "banana"], "max-model-len"),
        (["/no/such/model"], "/no/such/model"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(tmp_path: Path, words: list[str], said: str) -> None:
    result = subprocess.run(
        [str(HEADRACE), "up", *words, "--data-dir", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("file", [False, True])
def test_a_gateway_that_cannot_listen_is_said_before_anything_is_loaded(
    tmp_path: Path, model: Path, file: bool
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        same = free_port()
        cases = [
            (free_port(), "127.0.0.1", port, f"Port {port} on 127.0.0.1 is in use. Use --gateway-port "),
            (same, "127.0.0.1", same, f"Port {same} is the engine's and the gateway's: use --gateway-port "),
            (same, "0.0.0.0", same, f"Port {same} is the engine's and the gateway's: use --gateway-port "),
            (same, "no.such.invalid", 0, "The host 'no.such.invalid' is not known"),
        ]
        for engine, host, gateway, said in cases[: 2 if file else 4]:
            if file:
                (tmp_path / "headrace.toml").write_text(
                    f'[server]\nhost = "{host}"\nport = {gateway}\n[engine.one]\nmodel = "{model}"\nport = {engine}\n'
                )
                words = ["--config", str(tmp_path / "headrace.toml")]
            else:
                words = [str(model), "--port", str(engine), "--gateway-host", host, "--gateway-port", str(gateway)]
            result = subprocess.run(
                [str(HEADRACE), "up", *words, "--data-dir", str(tmp_path / "data")],
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert result.returncode == 1
            assert result.stderr.startswith(f"headrace up: {said}"), result.stderr
            assert len(result.stderr.splitlines()) == 1, "nothing was loaded"
            assert not (tmp_path / "data").exists()


def test_the_gateway_s_usual_address_is_the_one_its_settings_have() -> None:
    assert (Listen().host, Listen().port) == (GATEWAY_HOST, GATEWAY_PORT)
