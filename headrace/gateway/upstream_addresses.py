"""Where an upstream may be: its name's addresses, of which only those it may use are ever connected to.

Upstreams from the console reach public addresses only; a cloud's metadata is for nobody. The address that was checked
is the one that is connected to, so a name that changes its mind in between gains nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket

CACHE_S = 30.0
MAX_NAMES = 100

METADATA = frozenset(
    map(ipaddress.ip_address, ("169.254.169.254", "169.254.170.2", "100.100.100.200", "fd00:ec2::254", "192.0.0.192"))
)
"""Where clouds hand out credentials: refused for every upstream, whoever registered it."""

IPV4_PREFIXES = frozenset(
    ipaddress.ip_address(text).packed[:12]
    for text in ("::ffff:0:0", "::", "64:ff9b::")  # mapped, compatible, NAT64
)
LOCAL_NAT64 = ipaddress.ip_network("64:ff9b:1::/48")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class BlockedAddress(OSError):
    """The upstream's name leads to an address that it may not use."""


def embedded(ip: ipaddress.IPv6Address) -> Address:
    """The IPv4 address that an IPv6 address stands for, where it is of a kind that does."""
    if ip.packed[:12] in IPV4_PREFIXES and not (ip.is_loopback or ip.is_unspecified):
        return ipaddress.IPv4Address(ip.packed[12:])
    return ip.sixtofour or ip


def refusal(address: str, *, trusted: bool) -> str | None:
    """Why an upstream must not connect to this address, None where it may."""
    ip: Address = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        ip = embedded(ip)
    if ip in METADATA:
        return f"{ip} is a cloud's metadata address"
    if not trusted and (not ip.is_global or ip.is_multicast or ip in LOCAL_NAT64):
        return f"{ip} is not a public address; name the upstream in the configuration file to allow it"
    return None


class Resolver:
    """Names to addresses, remembered for a while."""

    def __init__(self, trusted: bool) -> None:
        self._trusted = trusted
        self._known: dict[str, tuple[float, tuple[str, ...]]] = {}

    async def addresses(self, host: str) -> tuple[str, ...]:
        """At least one. Raises BlockedAddress when any of them is refused, OSError for a name that is not known."""
        loop = asyncio.get_running_loop()
        known = self._known.get(host)
        if known is not None and loop.time() < known[0]:
            return known[1]
        if _is_address(host):
            found: tuple[str, ...] = (host,)
        else:
            answers = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found = tuple(dict.fromkeys(str(answer[4][0]) for answer in answers))
        for address in found:
            reason = refusal(address, trusted=self._trusted)
            if reason is not None:
                raise BlockedAddress(reason if address == host else f"{host} leads to {reason}")
        if len(self._known) >= MAX_NAMES:
            self._known.clear()
        self._known[host] = (loop.time() + CACHE_S, found)
        return found


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
