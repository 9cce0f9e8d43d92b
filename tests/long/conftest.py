"""Options of the long tests: `make test-long ARGS="-k soak --soak-minutes 5"`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-minutes", type=float, default=40.0, help="length of the soak (default: 40)")
