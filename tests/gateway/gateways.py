"""Running gateways for tests: `running_gateway` is a real process over a config file and a data directory of its own.

with running_gateway(folder, providers(fake=upstream)) as gateway:
    httpx.post(gateway.url + "/v1/chat/completions", headers=gateway.auth, json=...)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from headrace.gateway import key_secrets
from headrace.gateway.keys import KeyRequest, KeyStore
from headrace.gateway.storage.database import open_database, prepare_data_dir
from tests.gateway.fake_upstream import FakeUpstream
from tests.serving import HEADRACE, free_port, health_status

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0
UPSTREAM_KEY = "upstream-key-7f3c9a1e5b"
"""What the gateway sends to fake upstreams."""


@dataclass(frozen=True)
class Gateway:
    """A running gateway and a key for it."""

    url: str
    key: str
    data_dir: Path
    config: Path
    process: psutil.Popen
    log_path: Path

    @property
    def auth(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def new_key(self, name: str, **rights: Any) -> str:
        """Another key, seen by the gateway within a second."""
        return make_key(self.data_dir, name, **rights)


def make_key(data_dir: Path, name: str, **rights: Any) -> str:
    """The secret of a new key; `rights` are fields of KeyRequest."""
    prepared = prepare_data_dir(data_dir)
    database = open_database(None, prepared)
    try:
        store = KeyStore(database, key_secrets.load_pepper(prepared))
        return store.create(KeyRequest(name=name, **rights))[1]
    finally:
        database.close()


def providers(*, routing: Mapping[str, Any] | None = None, **upstreams: FakeUpstream | Mapping[str, Any]) -> str:
    """A providers/routing JSON as the seeds have it. A fake upstream serves the models `fake` and `NAME-model`."""
    entries = {}
    for name, upstream in upstreams.items():
        if isinstance(upstream, FakeUpstream):
            entries[name] = provider(upstream.url, name)
        else:
            entries[name] = dict(upstream)
    return json.dumps({"providers": entries, "routing": {"default": next(iter(entries)), **(routing or {})}}, indent=2)


def provider(url: str, name: str = "fake", **more: Any) -> dict[str, Any]:
    return {"base_url": url + "/v1", "api_key": UPSTREAM_KEY, "models": ["fake", f"{name}-model"], **more}


@contextmanager
def running_gateway(
    folder: Path,
    config: str,
    *,
    suffix: str = ".json",
    environment: Mapping[str, str] | None = None,
    clean_exit: bool = True,
) -> Iterator[Gateway]:
    """Start `headrace gateway` over the text `config`, yield it once it is healthy, end it with SIGTERM."""
    port = free_port()
    data_dir = folder / "data"
    config_path = folder / f"gateway{suffix}"
    config_path.write_text(config)
    log_path = folder / "gateway.log"
    key = make_key(data_dir, "test")
    argv = [str(HEADRACE), "gateway", "--config", str(config_path), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--data-dir", str(data_dir)]
    with log_path.open("wb") as log:
        process = psutil.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
    gateway = Gateway(
        url=f"http://127.0.0.1:{port}",
        key=key,
        data_dir=data_dir,
        config=config_path,
        process=process,
        log_path=log_path,
    )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while health_status(gateway.url) != 200:
            assert process.poll() is None, f"exited {process.returncode} while starting: {argv}\n{gateway.log()}"
            assert time.monotonic() < deadline, f"not healthy after {START_TIMEOUT_S} s: {argv}\n{gateway.log()}"
            time.sleep(0.05)
        yield gateway
        if clean_exit:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            status = process.wait(STOP_TIMEOUT_S)
            assert status == 0, f"SIGTERM ended it with status {status}\n{gateway.log()[-6000:]}"
            assert "Traceback" not in gateway.log(), gateway.log()[-6000:]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(5)
