"""A thousand random schemas with random sampling: every answer is valid."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.schema_runs import SchemaEngine, check_random_schemas


@pytest.mark.timeout(1800)
def test_every_answer_to_a_thousand_random_schemas_is_valid(tmp_path: Path) -> None:
    engine = SchemaEngine(tmp_path)
    for first in range(0, 1000, 100):
        check_random_schemas(engine, range(first, first + 100))
