"""`--seed`: the seeds of requests that bring none repeat from start to start."""

from __future__ import annotations

from tests.scripted_engine import ScriptedEngine, make_app, saying


def fresh_seeds(seed: int | None) -> list[int]:
    app = make_app(ScriptedEngine(saying("hello")), seed=seed)
    return [app.serving.fresh_seed() for _ in range(3)]


def test_the_same_server_seed_gives_the_same_request_seeds() -> None:
    assert fresh_seeds(7) == fresh_seeds(7)
    assert fresh_seeds(7) != fresh_seeds(8)
    assert len(set(fresh_seeds(7))) == 3


def test_without_a_server_seed_every_start_draws_others() -> None:
    assert fresh_seeds(None) != fresh_seeds(None)
