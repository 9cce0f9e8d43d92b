"""A port for a server that a benchmark starts."""

from __future__ import annotations

import socket


def free_port() -> int:
    """One that nobody listened on a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
