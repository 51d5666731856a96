from __future__ import annotations

import json
import random

from dragoman.registry import catalogue
from dragoman.tasks.base import load_task
from dragoman.tasks.masked_language_model import MaskedLanguageTask
from dragoman.training.train_state import (
    LOWER_IS_BETTER,
    MAX_CONSECUTIVE_SKIPS,
    SPIKE_WINDOW,
    DivergenceDetector,
)


def test_best_metrics_have_the_direction_of_their_task() -> None:
    kinds = [MaskedLanguageTask, *(load_task(name) for name in catalogue("task"))]
    directions = {name: higher for kind in kinds for name, higher in kind.metrics.items()}
    assert {name for name, higher in directions.items() if not higher} <= LOWER_IS_BETTER
    assert not {name for name, higher in directions.items() if higher} & LOWER_IS_BETTER


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


def test_the_state_is_json_and_comes_back() -> None:
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
