"""A PostgreSQL server of a test's own: a cluster in a temporary folder, reachable through a free port of the loopback.

PostgreSQL refuses to run as root; as root the cluster belongs to the user `postgres`, which Debian's package makes.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

OWNER = "postgres"
START_S = 60


@dataclass(frozen=True)
class Postgres:
    """A running server. `url` is that of its empty database."""

    binaries: Path
    folder: Path
    port: int

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://{OWNER}:secret-of-the-test@127.0.0.1:{self.port}/{database}"

    def create_database(self, name: str) -> str:
        command = [str(self.binaries / "createdb"), "-h", str(self.folder), "-p", str(self.port), "-U", OWNER, name]
        run_as_owner(command)
        return self.url(name)

    def stop(self) -> None:
        run_as_owner([str(self.binaries / "pg_ctl"), "-D", str(self.folder / "data"), "-m", "fast", "-w", "stop"])

    def start(self) -> None:
        settings = (
            f"-c listen_addresses=127.0.0.1 -c port={self.port} -c unix_socket_directories={self.folder} "
            "-c fsync=off -c shared_buffers=16MB"
        )
        data, log = str(self.folder / "data"), str(self.folder / "log")
        run_as_owner(
            [str(self.binaries / "pg_ctl"), "-D", data, "-l", log, "-o", settings, "-t", str(START_S), "-w", "start"]
        )


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    """A server for the time of the block. Fails with advice when PostgreSQL is not installed."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-postgres-"))
    postgres = Postgres(find_binaries(), folder, free_port())
    try:
        if os.geteuid() == 0:
            owner = pwd.getpwnam(OWNER)
            os.chown(folder, owner.pw_uid, owner.pw_gid)
        password = folder / "password"
        password.write_text("secret-of-the-test\n")
        password.chmod(0o644)
        run_as_owner(
            [
                *(str(postgres.binaries / "initdb"), "-D", str(folder / "data"), "-U", OWNER, "--no-sync"),
                *("--auth-host=scram-sha-256", "--auth-local=trust", f"--pwfile={password}", "-E", "UTF8"),
            ]
        )
        postgres.start()
        try:
            yield postgres
        finally:
            postgres.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def find_binaries() -> Path:
    """Debian keeps initdb and pg_ctl out of the PATH."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if versions:
        return versions[-1].parent
    found = shutil.which("initdb")
    assert found is not None, "tests/services needs PostgreSQL (Debian, Ubuntu: apt-get install postgresql)"
    return Path(found).resolve().parent


def run_as_owner(command: Sequence[str]) -> None:
    """Run a program of PostgreSQL as somebody who is not root. Its output is shown when it fails."""
    user = OWNER if os.geteuid() == 0 else None
    with tempfile.TemporaryFile() as output:
        # pg_ctl's server inherits the output: a pipe would be read until the server ends.
        status = subprocess.run(
            command, user=user, group=user, cwd="/", stdout=output, stderr=subprocess.STDOUT, timeout=120, check=False
        ).returncode
        output.seek(0)
        assert status == 0, output.read().decode()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(holds: Callable[[], bool], timeout_s: float) -> float:
    """Returns the seconds until `holds()`; fails when it does not in time."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < timeout_s
        time.sleep(0.01)
    return time.monotonic() - began
