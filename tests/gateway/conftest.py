"""What most gateway tests need: a scripted upstream and a gateway over it. Tests with configurations of their own use
`threaded_gateway` or `running_gateway` (tests/gateway/gateways.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.gateways import Gateway, ThreadedGateway, provider, providers, running_gateway, threaded_gateway


@pytest.fixture(scope="module")
def _upstream() -> Iterator[FakeUpstream]:
    with FakeUpstream() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def _gateway(tmp_path_factory: pytest.TempPathFactory, _upstream: FakeUpstream) -> Iterator[ThreadedGateway]:
    config = providers(main=provider(_upstream.url, max_retries=0))
    with threaded_gateway(tmp_path_factory.mktemp("gateway"), config) as gateway:
        yield gateway


@pytest.fixture
def upstream(_upstream: FakeUpstream) -> FakeUpstream:
    """The upstream behind `gateway`; it serves the model `fake` and answers by itself until scripted."""
    _upstream.forget()
    return _upstream


@pytest.fixture
def gateway(_gateway: ThreadedGateway) -> ThreadedGateway:
    """A gateway in this process over `upstream`, one for all tests of a module."""
    _gateway.forget()
    return _gateway


@pytest.fixture
def start_gateway(tmp_path: Path) -> Iterator[Callable[..., Gateway]]:
    """Starts a gateway process over a configuration's text; it ends with the test."""
    with ExitStack() as stack:
        yield lambda config, **options: stack.enter_context(running_gateway(tmp_path, config, **options))
