from __future__ import annotations

import json
import random

import numpy as np
import pytest

from dragoman.data.batch_plan import Cursor
from dragoman.registry import catalogue
from dragoman.tasks.bert_and_xlnet_language_modeling import MaskedLanguageTask
from dragoman.tasks.non_translation_task import load_task
from dragoman.training.data_loader import GlobalBatch
from dragoman.training.train_step import StepMetrics, StepRequests
from dragoman.training.trainer_state import (
    LOWER_IS_BETTER,
    MAX_CONSECUTIVE_SKIPS,
    SKIP_WINDOW,
    SPIKE_SIGMAS,
    SPIKE_WINDOW,
    DivergenceDetector,
    TrainerState,
    invalid_state_fields,
)


def test_best_metrics_have_the_direction_of_their_task() -> None:
    kinds = [MaskedLanguageTask, *(load_task(name) for name in catalogue("task"))]
    directions = {name: higher for kind in kinds for name, higher in kind.metrics.items()}
    assert {name for name, higher in directions.items() if not higher} <= LOWER_IS_BETTER
    assert not {name for name, higher in directions.items() if higher} & LOWER_IS_BETTER


@pytest.mark.parametrize(
    ("by", "first", "second", "better"),
    [
        ("accuracy", {"accuracy": 0.5, "loss": 1.0}, {"accuracy": 0.6, "loss": 2.0}, True),
        ("accuracy", {"accuracy": 0.5, "loss": 1.0}, {"accuracy": 0.5, "loss": 0.9}, True),
        ("accuracy", {"accuracy": 0.5, "loss": 1.0}, {"accuracy": 0.5, "loss": 1.0}, False),
        ("accuracy", {"accuracy": 0.5, "loss": 1.0}, {"accuracy": 0.4, "loss": 0.1}, False),
        ("perplexity", {"perplexity": 3.0, "loss": 1.0}, {"perplexity": 3.0, "loss": 0.9}, True),
        ("accuracy", {"accuracy": 0.5}, {"accuracy": 0.5}, False),
    ],
)
def test_of_equal_metrics_the_lower_loss_is_better(
    by: str, first: dict[str, float], second: dict[str, float], better: bool
) -> None:
    state = TrainerState(max_steps=10)
    assert state.record_validation(1, first, by)
    assert state.record_validation(2, second, by) == better
    assert state.best["step"] == (2 if better else 1)
    assert state.validations_since_best == (0 if better else 1)


def test_ten_bad_steps_in_a_row_are_divergence_and_nine_are_not() -> None:
    watch = DivergenceDetector()
    assert [watch.record_skip(update) for update in range(1, MAX_CONSECUTIVE_SKIPS)] == [False] * (
        MAX_CONSECUTIVE_SKIPS - 1
    )
    watch.record_loss(1.0)
    assert [watch.record_skip(100)] == [False]
    watch = DivergenceDetector()
    assert [watch.record_skip(update) for update in range(1, MAX_CONSECUTIVE_SKIPS + 1)][-1]


def test_more_than_one_percent_bad_steps_of_the_last_thousand_are_divergence() -> None:
    watch = DivergenceDetector()
    outcomes = []
    for update in range(1, 2000):
        if update % 95 == 0:
            outcomes.append(watch.record_skip(update))
        else:
            watch.record_loss(1.0)
    assert outcomes.index(True) == 10  # the eleventh within a thousand
    calm = DivergenceDetector()
    for update in range(1, 5000):
        if update % 101:
            calm.record_loss(1.0)
        else:
            assert not calm.record_skip(update), update
    assert len(calm.recent_skips) <= 10


def test_rollback_excludes_skipped_steps_and_happens_once() -> None:
    watch = DivergenceDetector()
    published = watch.state_dict()
    for update in range(100, 110):
        watch.record_skip(update)
    again = watch.roll_back(published)
    assert again.excluded_steps == set(range(100, 110))
    assert again.rolled_back
    assert not watch.rolled_back
    assert again.consecutive_skips == 0
    assert again.total_skips == 0


def test_the_state_survives_a_round_trip_through_json() -> None:
    watch = DivergenceDetector()
    for update in range(1, 30):
        watch.record_loss(3.0 / update) if update % 7 else watch.record_skip(update)
    again = DivergenceDetector(json.loads(json.dumps(watch.state_dict())))
    assert again.state_dict() == watch.state_dict()
    assert again.record_loss(0.5) == watch.record_loss(0.5)
    assert again.state_dict() == watch.state_dict()


def test_spike_is_six_standard_deviations_high() -> None:
    generator = random.Random(0)
    watch = DivergenceDetector()
    assert not any(watch.record_loss(generator.gauss(3.0, 0.1)) for _ in range(2 * SPIKE_WINDOW))
    assert not watch.record_loss(3.4)
    assert not watch.suspect
    assert watch.record_loss(4.0)
    assert not watch.record_loss(3.0)
    assert watch.suspect, "until the next checkpoint"


def test_spikes_are_measured_by_recent_losses() -> None:
    """The high and unsteady losses of the first steps do not hide a spike late in the run."""
    generator = random.Random(0)
    watch = DivergenceDetector()
    for _ in range(SPIKE_WINDOW):
        watch.record_loss(generator.gauss(10.0, 2.0))
    assert not any(watch.record_loss(generator.gauss(3.0, 0.1)) for _ in range(10 * SPIKE_WINDOW))
    assert watch.record_loss(5.0)


def test_the_first_steps_of_a_run_are_no_spikes() -> None:
    watch = DivergenceDetector()
    assert not any(watch.record_loss(loss) for loss in [9.0, 8.0, 30.0, 7.0])


def test_limits_of_divergence_and_of_spikes() -> None:
    assert (MAX_CONSECUTIVE_SKIPS, SKIP_WINDOW) == (10, 1000)
    assert (SPIKE_SIGMAS, SPIKE_WINDOW) == (6.0, 500)


@pytest.mark.parametrize(("last", "diverged"), [(1000, True), (1001, False)])
def test_a_bad_step_counts_for_a_thousand_steps(last: int, diverged: bool) -> None:
    """Eleven bad steps of steps 1 to 1,000 are too many; the first is not among 2 to 1,001."""
    watch = DivergenceDetector()
    for update in (1, *range(100, 1000, 100)):
        assert not watch.record_skip(update)
        watch.record_loss(1.0)
    assert watch.record_skip(last) is diverged


def steady_detector(steps: int) -> DivergenceDetector:
    """Return a detector after losses of 2 and 4 in turn: a mean of 3, a deviation of 1."""
    watch = DivergenceDetector()
    for update in range(steps):
        assert not watch.record_loss(2.0 + 2.0 * (update % 2))
    return watch


@pytest.mark.parametrize(("loss", "spike"), [(3 + 5.9, False), (3 + 6.1, True), (3 - 20.0, False)])
def test_spikes_begin_at_six_standard_deviations(loss: float, spike: bool) -> None:
    assert steady_detector(SPIKE_WINDOW).record_loss(loss) is spike


def test_spikes_are_counted_from_the_step_after_the_window_on() -> None:
    assert not steady_detector(SPIKE_WINDOW - 1).record_loss(50.0)
    assert steady_detector(SPIKE_WINDOW).record_loss(50.0)


def test_rollback_to_a_checkpoint_with_skips_starts_counting_anew() -> None:
    watch = DivergenceDetector()
    for update in range(1, 8):
        watch.record_skip(update)
    saved = watch.state_dict()
    for update in range(8, 11):
        watch.record_skip(update)
    again = watch.roll_back(saved)
    assert again.total_skips == 7
    assert again.excluded_steps == set(range(1, 11))
    outcomes = [again.record_skip(update) for update in range(11, 11 + MAX_CONSECUTIVE_SKIPS)]
    assert outcomes == [False] * (MAX_CONSECUTIVE_SKIPS - 1) + [True]


@pytest.mark.parametrize(
    ("by", "values", "best"),
    [
        ("loss", [3.0, 2.0, 2.0, 2.5], 2),
        ("bleu", [20.0, 30.0, 30.0, 25.0], 2),
        ("accuracy", [0.9, 0.5, 0.9, 0.9], 1),
    ],
)
def test_a_plateau_counts_for_patience_and_keeps_the_first_best(
    by: str, values: list[float], best: int
) -> None:
    state = TrainerState(max_steps=100)
    better = [
        state.record_validation(step, {by: value}, by) for step, value in enumerate(values, start=1)
    ]
    assert [step for step, each in enumerate(better, start=1) if each][-1] == best
    assert state.best == {by: values[best - 1], "step": best}
    assert state.validations_since_best == len(values) - best


def test_a_validation_without_the_metric_of_the_best_counts_for_patience() -> None:
    state = TrainerState(max_steps=100)
    assert state.record_validation(1, {"loss": 2.0, "bleu": 5.0}, "bleu")
    assert not state.record_validation(2, {"loss": 1.0, "bleu": float("nan")}, "bleu")
    assert state.metrics == {"loss": 1.0}
    assert state.validated_step == 2
    assert state.best == {"loss": 2.0, "bleu": 5.0, "step": 1}
    assert state.validations_since_best == 1


@pytest.mark.parametrize(
    ("target", "step", "reached"),
    [(1.0, 4, True), (0.9, 4, True), (1.0, 5, False), (0.0, 4, False)],
)
def test_a_target_is_reached_at_exactly_its_fraction_and_at_its_step(
    target: float, step: int, reached: bool
) -> None:
    state = TrainerState(max_steps=100, step=4)
    state.record_validation(4, {"exact": 1.0}, "loss")
    state.step = step
    assert state.has_reached(target) is reached


def test_fields_of_a_wrong_type_are_named() -> None:
    state = json.loads(json.dumps(TrainerState(max_steps=5).state_dict()))
    assert list(invalid_state_fields(state)) == []
    divergence = state["divergence"]
    for name, value, wrong in (
        ("step", "4", "step"),
        ("best", [], "best"),
        ("divergence", {**divergence, "excluded_steps": 3}, "divergence.excluded_steps"),
        ("divergence", {**divergence, "rolled_back": "no"}, "divergence.rolled_back"),
        ("divergence", {**divergence, "total_skips": 0.5}, "divergence.total_skips"),
    ):
        assert [found for found, _ in invalid_state_fields({**state, name: value})] == [wrong]
    del state["max_steps"]
    assert list(invalid_state_fields(state)) == [("max_steps", "missing")]


def test_steps_count_examples_tokens_and_changes_of_the_weights() -> None:
    """An excluded step is passed over; a step that is not finite leaves the weights as they are."""
    state = TrainerState(max_steps=100)
    state.divergence.excluded_steps.add(2)
    examples = [np.array([4, 7, 1]), np.array([0, 2])]
    metrics = StepMetrics(2.0, 1.5, 9, 0.3, True, 30, 40, StepRequests())
    first, excluded, bad = (
        state.advance(GlobalBatch(step, [], examples, Cursor(0, step)), 0.1 * step, each)
        for step, each in (
            (1, metrics),
            (2, metrics._replace(is_finite=False, tokens=0, padded_tokens=0)),
            (3, metrics._replace(is_finite=False)),
        )
    )
    assert first == {
        "step": 1,
        "lr": 0.1,
        "loss": 2.0,
        "nll": 1.5,
        "grad_norm": 0.3,
        "tokens": 30,
        "padding": 0.25,
    }
    assert excluded == {"step": 2, "lr": 0.2, "excluded": True}
    assert (bad["skipped"], bad["examples"]) == (True, [4, 7, 1, 0, 2])
    assert (state.examples_seen, state.tokens_seen, state.applied_steps) == (15, 60, 1)
    assert (state.divergence.total_skips, state.divergence.seen) == (1, 1)
