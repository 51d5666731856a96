from __future__ import annotations

import json
import random

from dragoman.training.divergence import IN_A_ROW, SPIKE_HORIZON, DivergenceWatch


def test_ten_in_a_row_are_too_many_and_nine_are_not() -> None:
    watch = DivergenceWatch()
    assert [watch.skip(update) for update in range(1, IN_A_ROW)] == [False] * (IN_A_ROW - 1)
    watch.accept(1.0)
    assert [watch.skip(100)] == [False]
    watch = DivergenceWatch()
    assert [watch.skip(update) for update in range(1, IN_A_ROW + 1)][-1]


def test_more_than_one_in_a_hundred_of_the_last_thousand_are_too_many() -> None:
    watch = DivergenceWatch()
    outcomes = []
    for update in range(1, 2000):
        if update % 95 == 0:
            outcomes.append(watch.skip(update))
        else:
            watch.accept(1.0)
    assert outcomes.index(True) == 10  # the eleventh within a thousand
    calm = DivergenceWatch()
    for update in range(1, 5000):
        if update % 101:
            calm.accept(1.0)
        else:
            assert not calm.skip(update), update
    assert len(calm.recent) <= 10


def test_a_rollback_passes_over_what_was_skipped_and_is_the_one_chance() -> None:
    watch = DivergenceWatch()
    published = watch.export_state()
    for update in range(100, 110):
        watch.skip(update)
    again = watch.roll_back(published)
    assert again.excluded == set(range(100, 110))
    assert again.rolled_back
    assert not watch.rolled_back
    assert again.row == 0
    assert again.skipped == 0


def test_the_state_is_json_and_comes_back() -> None:
    watch = DivergenceWatch()
    for update in range(1, 30):
        watch.accept(3.0 / update) if update % 7 else watch.skip(update)
    again = DivergenceWatch(json.loads(json.dumps(watch.export_state())))
    assert again.export_state() == watch.export_state()
    assert again.accept(0.5) == watch.accept(0.5)
    assert again.export_state() == watch.export_state()


def test_a_spike_stands_six_deviations_out() -> None:
    generator = random.Random(0)
    watch = DivergenceWatch()
    assert not any(watch.accept(generator.gauss(3.0, 0.1)) for _ in range(2 * SPIKE_HORIZON))
    assert not watch.accept(3.4)
    assert watch.accept(4.0)
    assert watch.suspect


def test_the_first_updates_of_a_run_are_no_spikes() -> None:
    watch = DivergenceWatch()
    assert not any(watch.accept(loss) for loss in [9.0, 8.0, 30.0, 7.0])
