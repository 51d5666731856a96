"""What is chosen for a corpus, a machine and a time, and what is said about it."""

import pytest

from dragoman.runs import fitting
from dragoman.runs.clock import Clock
from dragoman.runs.fitting import LADDER, MOST_PASSES, Rung, fit, fitting_dropout, fitting_vocabulary, paced
from dragoman.runs.survey import Survey

MULTI30K = Survey(29_000, 650_000, exact=True)


def at(pace: float):
    """A machine that trains the first rung at a pace, and larger ones as much slower as they are larger."""
    first = LADDER[0].weights(6000)
    return lambda config: pace * first / Rung(config.model.width, int(config.model.encoder[0][5:]), config.model.heads).weights(6000)


def test_weights_are_counted_as_the_model_has_them():
    from dragoman.config import ModelConfig
    from dragoman.models.build import build_model

    config = ModelConfig(width=128, heads=4, feedforward=512, encoder=("self*2",), decoder=("self*2",), residual="pre")
    built = sum(p.numel() for p in build_model(config, src_vocabulary=4000, tgt_vocabulary=4000).parameters())
    assert LADDER[0].weights(4000) == pytest.approx(built, rel=0.02)


def test_a_slow_machine_gets_a_small_model_and_a_fast_one_a_larger():
    """A corpus of ten thousand lines must not get 61 million weights, as eole's default does."""
    slow = fit(MULTI30K, seconds=600, measure=at(20_000)).config
    fast = fit(MULTI30K, seconds=240, measure=at(2_000_000)).config
    assert slow.model.width == 128
    assert fast.model.width == 256
    assert fast.model.dropout > slow.model.dropout


def test_small_data_never_gets_a_large_model():
    config = fit(Survey(2000, 20_000, exact=True), seconds=0, measure=None).config
    assert config.model.width == LADDER[0].width
    assert config.train.batch_tokens >= 800


def test_large_data_may_have_the_largest():
    config = fit(Survey(4_000_000, 80_000_000, exact=False), seconds=0, measure=None).config
    assert (config.model.width, config.text.vocabulary, config.train.batch_tokens) == (512, 32_000, 25_000)


def test_a_model_may_have_as_many_weights_a_word_as_are_allowed(monkeypatch):
    words = MULTI30K.words
    rung = LADDER[1]
    limit = rung.weights(fitting_vocabulary(words)) / words
    for factor, expected in ((1.0, rung), (1 - 1e-9, LADDER[0])):
        monkeypatch.setattr(fitting, "WEIGHTS_A_WORD", factor * limit)
        assert fit(MULTI30K, seconds=0, measure=None).config.model.width == expected.width


def test_the_choice_is_a_configuration_that_can_be_run():
    for words in (1000, 100_000, 10_000_000):
        config = fit(Survey(words // 20, words, exact=True), seconds=60, measure=at(10_000)).config
        assert config.problems() == []
        assert config.recipe == "small"


def test_every_choice_has_its_reason():
    reasons = fit(MULTI30K, seconds=600, measure=at(20_000)).reasons
    text = "\n".join(reasons)
    assert all(word in text for word in ("29,000 pairs", "vocabulary", "width 128", "epochs", "learning rate", "dropout"))


def test_no_corpus_is_read_more_often_than_helps():
    found = fit(Survey(1000, 20_000, exact=True), seconds=3600, measure=at(1_000_000))
    assert found.epochs == MOST_PASSES
    assert f"{MOST_PASSES} at most" in "\n".join(found.reasons)


@pytest.mark.parametrize(("words", "pieces"), [(100, 500), (650_000, 5500), (10_000_000, 22_000), (1_000_000_000, 32_000)])
def test_vocabularies_grow_with_the_root_of_the_text(words, pieces):
    assert fitting_vocabulary(words) == pieces


def test_text_that_is_seen_often_is_dropped_more():
    assert [fitting_dropout(passes, 6_500_000, 650_000) for passes in (5, 20, 40)] == [0.1, 0.2, 0.3]
    assert fitting_dropout(18, 1_600_000, 650_000) == 0.1  # a small model has enough to do
    assert fitting_dropout(40, 40_000_000, 50_000_000) == 0.1


def test_short_runs_warm_up_and_average_briefly():
    config = paced(fit(MULTI30K, seconds=0, measure=None).config, 120)
    assert (config.train.steps, config.train.warmup, config.train.validate_every) == (120, 10, 15)
    assert 0.9 < config.train.ema < 0.97


@pytest.mark.parametrize("updates", [100, 120, 222, 1007, 99_999])
def test_no_validation_falls_a_few_steps_before_the_last(updates):
    """Intervals were rounded down, so that a run of 1,007 steps was validated at 1,000 and 1,007."""
    config = paced(fit(MULTI30K, seconds=0, measure=None).config, updates).train
    left = updates % config.validate_every
    assert left == 0 or left >= config.validate_every / 4
    assert updates / config.validate_every <= 8


def test_what_a_person_set_is_not_fitted():
    config = paced(fit(MULTI30K, seconds=0, measure=None).config.replace(train={"validate_every": 7}), 500, keep={"train.validate_every"})
    assert (config.train.validate_every, config.train.steps) == (7, 500)


def test_a_budget_reckons_with_validations():
    """Announced 60 epochs and trained 34: validations and checkpoints were not counted."""
    plain, reckoned = (Clock(1000.0, now=Time()) for _ in range(2))
    most = plain.updates(0, 1.0, most=10_000)
    steps = reckoned.updates(0, 1.0, most=10_000, overhead=lambda steps: 8 * 30.0)
    assert steps == pytest.approx(most - 8 * 30 / 1.05, rel=0.02)
    assert Clock(1000.0, now=Time()).updates(0, 1.0, most=10_000, overhead=lambda steps: 5000.0) <= 10


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_budget_leaves_time_to_close():
    time = Time()
    clock = Clock(600.0, now=time)
    time.now += 400
    assert clock.elapsed() == 400
    assert 0 < clock.left() < 200


def test_three_hundredths_and_eight_seconds_are_kept_to_close_of_which_some_to_write():
    time = Time()
    clock = Clock(600.0, now=time)
    time.now += 400
    assert clock.closing() == pytest.approx(0.03 * 600 + 8)
    assert clock.left() == pytest.approx(200 - 26)
    assert clock.left_to_score() == pytest.approx(200 - 0.01 * 600 - 6)
    time.now += 500
    assert clock.left_to_score() == 0.0
    assert Clock(0.0).left_to_score() == float("inf")


def test_without_a_budget_there_is_always_time():
    assert Clock(0.0).left() == float("inf")
    assert not Clock(0.0).limited


def test_earlier_starts_count():
    time = Time()
    clock = Clock(600.0, now=time)
    clock.spend(550.0)
    assert clock.left() < 50


def test_updates_follow_the_measured_pace():
    time = Time()
    clock = Clock(1000.0, now=time)
    planned = clock.updates(0, 1.0, most=10_000)
    assert 850 < planned < 1000
    time.now += 200  # twice as slow as measured: 100 updates in 200 seconds
    again = clock.updates(100, 1.0, most=10_000)
    assert again == pytest.approx(100 + clock.left() / 2, abs=1)
    assert clock.updates(100, 1.0, most=120) == 120
