"""The server that tests share: one `headrace serve` of the bundled model for the whole run, in float32."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest

from tests.serving import Server, running_server

# As the core process starts: OpenMP threads that spin while they wait take the processor from everything beside them.
# torch reads this once, when it is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

SERVER_FLAGS = ("--dtype", "float32", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(256 << 20))
"""256 MiB holds 5,825 tokens of the bundled model in float32."""

LOG_TAIL_LINES = 60


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The shared server. A test may not stop it, fill it or change its state for others."""
    place = tmp_path_factory.mktemp("server")
    with running_server(place / "server.log", (*SERVER_FLAGS, "--batch-dir", str(place / "batches"))) as running:
        yield running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test that used a server shows the tail of the server's log."""
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, Server) and value.log_path.exists():
                lines = value.log().splitlines()[-LOG_TAIL_LINES:]
                report.sections.append((f"log of the server at {value.url}", "\n".join(lines)))
    return report
