"""A socket to listen on, as the engine's server and the gateway both want it."""

from __future__ import annotations

import contextlib
import socket

BACKLOG = 2048


class CannotListen(Exception):
    """The address is taken or not ours; the message names one that would work."""


def listen(host: str, port: int, usual_port: int, flags: str = "") -> socket.socket:
    """A listening socket whose connections send small pieces at once. Raises CannotListen.

    `usual_port` is advised where `port` needs special rights. `flags` is how those that set the address begin, as
    `--gateway-port` does with "gateway-".
    """
    here = f"Use --{flags}host 127.0.0.1."
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise CannotListen(f"The host {host!r} is not known: {error.strerror}. {here}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit this; asyncio leaves it off for a listener that it is handed, which costs 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except PermissionError:
        listener.close()
        raise CannotListen(f"Port {port} needs special rights. Use --{flags}port {usual_port}.") from None
    except OSError as error:
        listener.close()
        free = next_free_port(host, port)
        if free is None:
            raise CannotListen(f"Cannot listen on {host}:{port}: {error.strerror}. {here}") from None
        raise CannotListen(
            f"Port {port} on {host} is in use. Use --{flags}port {free}, or end what listens there."
        ) from None
    listener.setblocking(False)
    return listener


def next_free_port(host: str, port: int) -> int | None:
    """The first port after `port` that can be bound, None if none of the next hundred can."""
    for candidate in range(port + 1, min(port + 100, 65536)):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((host, candidate))
                return candidate
    return None
