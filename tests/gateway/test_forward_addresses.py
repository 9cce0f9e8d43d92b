"""Upstreams from the console connect only to public addresses, and nobody connects to a cloud's metadata."""

from __future__ import annotations

import asyncio

import pytest

from headrace.gateway.snapshot import Upstream
from headrace.gateway.upstream_addresses import refusal
from headrace.gateway.upstream_client import UpstreamClient
from headrace.gateway.upstream_errors import UpstreamFailure
from tests.gateway.fake_upstream import FakeUpstream


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.1.1", "0.0.0.0", "100.64.0.1", "::1", "fe80::1",
        "fc00::1", "::ffff:10.0.0.1", "::ffff:127.0.0.1", "2002:7f00:1::", "224.0.0.1", "fe80::1%eth0", "::",
        "64:ff9b::10.0.0.1", "64:ff9b:1::8.8.8.8", "::10.0.0.1", "2001:0:1::1",
    ],
)  # fmt: skip
def test_private_addresses_are_for_upstreams_of_the_file(address: str) -> None:
    assert refusal(address, trusted=False) is not None
    assert refusal(address, trusted=True) is None


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254", "::ffff:169.254.169.254", "64:ff9b::169.254.169.254", "::169.254.169.254",
        "2002:a9fe:a9fe::1",
        "fd00:ec2::254", "100.100.100.200",
    ],
)  # fmt: skip
def test_metadata_is_for_nobody(address: str) -> None:
    assert refusal(address, trusted=False) is not None
    assert refusal(address, trusted=True) is not None


@pytest.mark.parametrize("address", ["1.1.1.1", "8.8.8.8", "2606:4700:4700::1111", "64:ff9b::8.8.8.8"])
def test_public_addresses_are_for_all(address: str) -> None:
    assert refusal(address, trusted=False) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "127.1", "[::1]", "[::ffff:127.0.0.1]"])
def test_no_spelling_of_this_machine_is_reached(host: str) -> None:
    with FakeUpstream() as fake:
        url = f"http://{host}:{fake.port}/v1"
        upstream = Upstream(name="console", base_url=url, trusted=False)

        async def ask() -> None:
            client = UpstreamClient(upstream)
            try:
                await client.send("GET", upstream.url("/models"), {}, None)
            finally:
                await client.close()

        with pytest.raises(UpstreamFailure) as failure:
            asyncio.run(ask())
        assert failure.value.error.code in ("upstream_address_refused", "upstream_unreachable")
        assert fake.num_connections == 0


def test_a_redirect_is_not_followed() -> None:
    from tests.gateway.replies import Reply

    with FakeUpstream(Reply(status=307, headers=(("location", "http://169.254.169.254/"),))) as fake:
        upstream = Upstream(name="u", base_url=fake.url)

        async def ask() -> int:
            client = UpstreamClient(upstream)
            try:
                return (await client.send("GET", upstream.url("/models"), {}, None)).status
            finally:
                await client.close()

        assert asyncio.run(ask()) == 307
        assert len(fake.requests) == 1
