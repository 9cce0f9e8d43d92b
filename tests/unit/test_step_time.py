"""The step-time model learns a device's cost from few steps, follows changes and never promises too much."""

from __future__ import annotations

import random

import pytest

from headrace.engine.step_time import TILE_ROWS, StepLoad, StepTimeModel

A_S, B_S, C_S = 0.004, 0.0005, 2e-8


def truth(load: StepLoad, scale: float = 1.0) -> float:
    return scale * (A_S + B_S * load.padded_rows + C_S * load.pairs)


def decodes(count: int, context: int) -> StepLoad:
    load = StepLoad()
    for _ in range(count):
        load = load.plus(1, context)
    return load


def trained(noise: float = 0.0, scale: float = 1.0) -> StepTimeModel:
    chance, model = random.Random(0), StepTimeModel()
    for load in (decodes(8, 100), StepLoad().plus(64, 0), StepLoad().plus(256, 0), decodes(8, 900).plus(128, 4000)) * 5:
        model.observe(load, truth(load, scale) * (1 + noise * chance.uniform(-1, 1)))
    return model


def test_a_chunk_counts_its_pairs_with_all_earlier_tokens_and_itself() -> None:
    assert StepLoad().plus(3, 10) == StepLoad(3, 11 + 12 + 13)
    assert StepLoad(rows=33).padded_rows == 40


def test_it_knows_nothing_before_the_first_step_and_promises_nothing() -> None:
    model = StepTimeModel()
    assert model.predict_s(StepLoad(1, 1)) is None
    assert model.largest_chunk(StepLoad(1, 1), context=0, limit=512, target_s=10.0) == 0


def test_four_kinds_of_steps_are_enough_to_predict_others() -> None:
    model = trained()
    for load in (decodes(30, 2000), StepLoad().plus(512, 0), decodes(8, 500).plus(96, 3000)):
        assert model.predict_s(load) == pytest.approx(truth(load), rel=0.02)


def test_noise_of_a_tenth_is_smoothed() -> None:
    model = trained(noise=0.1)
    for load in (decodes(30, 2000), StepLoad().plus(512, 0), decodes(8, 500).plus(96, 3000)):
        assert model.predict_s(load) == pytest.approx(truth(load), rel=0.12)


def test_decodes_alone_make_it_expect_cost_in_proportion_to_rows() -> None:
    model = StepTimeModel()
    for _ in range(20):
        model.observe(decodes(8, 100), 0.1)
    assert model.predict_s(StepLoad(16, 800)) == pytest.approx(0.2, rel=0.02)


def test_many_decode_steps_do_not_wash_out_what_prefill_taught() -> None:
    model = trained()
    for step in range(3000):
        load = decodes(8, 100 + step)
        model.observe(load, truth(load))
    load = decodes(8, 3100).plus(256, 1000)
    assert model.predict_s(load) == pytest.approx(truth(load), rel=0.1)


def test_a_hiccup_moves_the_estimate_by_a_quarter_at_most() -> None:
    model = trained()
    load = decodes(8, 100)
    before = model.predict_s(load)
    assert before is not None
    model.observe(load, 100 * truth(load))
    after = model.predict_s(load)
    assert after is not None
    assert before <= after <= 1.3 * before


def test_a_device_that_becomes_three_times_slower_is_followed_within_ten_steps_of_a_kind() -> None:
    model = trained()
    loads = (decodes(8, 100), StepLoad().plus(64, 0), StepLoad().plus(256, 0), decodes(8, 900).plus(128, 4000))
    for load in loads * 10:
        model.observe(load, truth(load, scale=3))
    for load in loads:
        assert model.predict_s(load) == pytest.approx(truth(load, scale=3), rel=0.2)


def test_coefficients_are_never_negative() -> None:
    chance, model = random.Random(1), StepTimeModel()
    for _ in range(300):
        model.observe(StepLoad().plus(chance.randint(1, 600), chance.randint(0, 5000)), chance.uniform(0.001, 1.0))
        fit = model.coefficients
        assert fit is not None
        assert min(fit) >= 0
        assert max(fit) > 0


def test_the_largest_chunk_is_the_last_one_in_time() -> None:
    model = trained()
    load, target_s = decodes(8, 900), 0.12
    chunk = model.largest_chunk(load, context=4000, limit=1000, target_s=target_s)
    assert (8 + chunk) % TILE_ROWS == 0
    assert truth(load.plus(chunk, 4000)) < 1.05 * target_s
    assert truth(load.plus(chunk + 4 * TILE_ROWS, 4000)) > target_s
    assert truth(load.plus(chunk + TILE_ROWS, 4000)) > 0.95 * target_s
    assert model.largest_chunk(load, context=4000, limit=16, target_s=target_s) == 16


def test_chunks_at_most_double_what_has_been_tried() -> None:
    model = StepTimeModel()
    model.observe(decodes(8, 100), 0.001)
    assert model.largest_chunk(decodes(8, 100), context=0, limit=4096, target_s=10.0) == 2 * TILE_ROWS - 8


def test_steps_of_one_kind_are_enough_to_see_that_the_device_became_slower() -> None:
    model = trained()
    for load in (StepLoad().plus(256, 256), StepLoad().plus(256, 1000), decodes(8, 300), decodes(2, 4000)) * 5:
        model.observe(load, truth(load))
    for context in range(4000, 4240, 24):
        load = decodes(8, 900).plus(24, context)
        model.observe(load, truth(load, scale=2))
    load = decodes(8, 900).plus(40, 4240)
    assert model.predict_s(load) == pytest.approx(truth(load, scale=2), rel=0.2)
