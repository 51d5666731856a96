from __future__ import annotations

import math
import subprocess
import sys

import pytest

from dragoman.config import TrainConfig
from dragoman.errors import ConfigError
from dragoman.training.optimizer_and_schedule_catalogue import OPTIMIZERS, SCHEDULES


def rate(name: str, update: int, width: int = 512, **settings: object) -> float:
    return SCHEDULES.load(name)(update, TrainConfig(**settings), width)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"noam"}))
@pytest.mark.parametrize("steps", [100, 9])  # of 9, the last quarter begins in the warm-up
def test_every_schedule_rises_in_a_straight_line_to_the_highest_rate(name: str, steps: int) -> None:
    settings = {"learning_rate": 0.8, "warmup_steps": 8, "steps": steps, "cooldown_fraction": 0.25}
    assert [rate(name, update, **settings) for update in (1, 2, 4, 7, 8)] == pytest.approx(
        [0.1, 0.2, 0.4, 0.7, 0.8]
    )


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_no_step_has_a_learning_rate_of_zero(name: str) -> None:
    for steps, warmup_steps in ((1, 0), (1, 4000), (10, 3), (10, 10), (10, 11), (7, 0)):
        rates = [
            rate(name, update, learning_rate=1.0, warmup_steps=warmup_steps, steps=steps)
            for update in range(1, steps + 1)
        ]
        assert all(0 < each <= 1 for each in rates), (steps, warmup_steps, rates)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_schedule_is_a_function_of_the_step(name: str) -> None:
    """A resumed run must find the same rate without a saved scheduler (joeynmt#172)."""
    forwards = [rate(name, update, steps=50, warmup_steps=10) for update in range(1, 51)]
    assert [
        rate(name, update, steps=50, warmup_steps=10) for update in range(50, 0, -1)
    ] == forwards[::-1]


def test_constant_schedule_is_constant_after_warm_up() -> None:
    assert rate("constant", 10_000, learning_rate=3e-4, warmup_steps=10) == 3e-4
    assert rate("constant", 1, learning_rate=3e-4, warmup_steps=0) == 3e-4


def test_noam_is_equation_3_of_the_paper() -> None:
    settings = {"learning_rate": 1.0, "warmup_steps": 4000, "width": 512}
    assert rate("noam", 1, **settings) == pytest.approx(512**-0.5 * 4000**-1.5)
    assert rate("noam", 4000, **settings) == pytest.approx(6.98771e-4, rel=1e-5)
    assert rate("noam", 100_000, **settings) == pytest.approx(512**-0.5 * 100_000**-0.5)
    assert rate("noam", 100_000, **{**settings, "learning_rate": 2.0}) == pytest.approx(
        2 * 512**-0.5 * 100_000**-0.5
    )
    assert rate("noam", 4, width=4, learning_rate=1.0, warmup_steps=0) == 0.25


def test_inverse_sqrt_by_hand() -> None:
    settings = {"learning_rate": 0.5, "warmup_steps": 100}
    assert rate("inverse_sqrt", 400, **settings) == pytest.approx(0.25)
    assert rate("inverse_sqrt", 10_000, **settings) == pytest.approx(0.05)
    assert rate("inverse_sqrt", 4, learning_rate=0.5, warmup_steps=0) == pytest.approx(0.25)


def test_cosine_by_hand() -> None:
    settings = {"learning_rate": 2.0, "warmup_steps": 0, "steps": 99}
    assert rate("cosine", 50, **settings) == pytest.approx(1.0)
    assert rate("cosine", 25, **settings) == pytest.approx(1 + math.cos(math.pi / 4))
    assert rate("cosine", 100, **settings) == pytest.approx(0.0)


def test_linear_by_hand() -> None:
    settings = {"learning_rate": 1.0, "warmup_steps": 10, "steps": 109}
    assert [
        rate("linear", update, **settings) for update in (10, 60, 109, 110, 500)
    ] == pytest.approx([1.0, 0.5, 0.01, 0.0, 0.0])


def test_wsd_schedule_is_constant_and_then_decays() -> None:
    settings = {"learning_rate": 1.0, "warmup_steps": 10, "steps": 99, "cooldown_fraction": 0.2}
    assert [rate("wsd", update, **settings) for update in (10, 50, 79)] == [1.0, 1.0, 1.0]
    assert [rate("wsd", update, **settings) for update in (80, 89, 99)] == pytest.approx(
        [20 / 21, 11 / 21, 1 / 21]
    )


@pytest.mark.parametrize(
    ("fraction", "rates"),  # at steps 50, 75, 76 and 100 of 100
    [(0.25, [1, 1, 25 / 26, 1 / 26]), (0.5, [1, 26 / 51, 25 / 51, 1 / 51]), (0.0, [1] * 4)],
)
def test_wsd_decays_over_the_last_cooldown_fraction_of_the_steps(
    fraction: float, rates: list[float]
) -> None:
    settings = {"learning_rate": 1.0, "warmup_steps": 0, "steps": 100}
    found = [
        rate("wsd", update, **settings, cooldown_fraction=fraction) for update in (50, 75, 76, 100)
    ]
    assert found == pytest.approx(rates)


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'cosin'.*cosine"):
        SCHEDULES["cosin"]
    with pytest.raises(ConfigError, match=r"'adammm'.*adam"):
        OPTIMIZERS["adammm"]


def test_listing_names_imports_no_torch() -> None:
    module = "dragoman.training.optimizer_and_schedule_catalogue"
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
