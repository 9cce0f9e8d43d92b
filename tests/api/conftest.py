"""An application over an engine that says what a test tells it to, one for each file of tests that asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scripted_engine import ScriptedEngine, listening, make_app


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def url(engine: ScriptedEngine) -> Iterator[str]:
    with listening(make_app(engine)) as address:
        yield address
