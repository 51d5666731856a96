"""Settings chosen from the corpus, the machine and the time budget, and the notes about them."""

from pathlib import Path

import pytest

from dragoman.config import Config, read_config
from dragoman.data.parallel_corpus import ParallelFiles
from dragoman.runs import auto_config
from dragoman.runs.auto_config import (
    MAX_EPOCHS,
    MAX_R_DROP_EPOCHS,
    MIN_EPOCHS_FOR_R_DROP,
    MIN_SELECTION_SENTENCES,
    MODEL_SIZES,
    OVERFITTING_EPOCHS,
    R_DROP_WEIGHT,
    SELECTION_SENTENCES,
    TOKENS_PER_WORD,
    TRAINING_TIME_FRACTION,
    CorpusSize,
    ModelSize,
    apply_epochs,
    apply_step_count,
    choose_batch_tokens,
    choose_config,
    choose_dropout,
    choose_vocab_size,
    has_default_steps,
    limit_steps,
    max_epochs,
    measure_corpus,
    select_by_loss_of_few,
)

MULTI30K = CorpusSize(29_000, 650_000, exact=True)


def at(throughput: float):
    """Return a throughput function inversely proportional to the parameters."""
    first = MODEL_SIZES[0].num_parameters(6000)
    return lambda config: (
        throughput
        * first
        / ModelSize(
            config.model.width, int(config.model.encoder[0].partition("*")[2]), config.model.heads
        ).num_parameters(6000)
    )


def test_num_parameters_is_that_of_the_model():
    from dragoman.config import ModelConfig
    from dragoman.models.factory import build_model

    config = ModelConfig(
        width=128,
        heads=4,
        ffn_width=512,
        encoder=("transformer*2",),
        decoder=("transformer*2",),
        residual="pre_norm",
    )
    built = sum(
        p.numel()
        for p in build_model(config, src_vocab_size=4000, tgt_vocab_size=4000).parameters()
    )
    assert MODEL_SIZES[0].num_parameters(4000) == pytest.approx(built, rel=0.02)


def test_a_slow_machine_gets_a_small_model_and_a_fast_one_a_larger():
    """A corpus of ten thousand lines must not get 61 million weights, as eole's default does."""
    slow = choose_config(MULTI30K, seconds=600, measure=at(20_000)).config
    fast = choose_config(MULTI30K, seconds=240, measure=at(2_000_000)).config
    assert slow.model.width == 128
    assert fast.model.width == 256
    assert fast.model.dropout > slow.model.dropout


def test_small_data_never_gets_a_large_model():
    config = choose_config(CorpusSize(2000, 20_000, exact=True), seconds=0, measure=None).config
    assert config.model.width == MODEL_SIZES[0].width
    assert config.train.batch_tokens >= 800


def test_large_data_may_have_the_largest():
    config = choose_config(
        CorpusSize(4_000_000, 80_000_000, exact=False), seconds=0, measure=None
    ).config
    assert (config.model.width, config.text.vocab_size, config.train.batch_tokens) == (
        512,
        32_000,
        25_000,
    )


def test_a_model_may_have_as_many_parameters_per_word_as_are_allowed(monkeypatch):
    words = MULTI30K.words
    model_size = MODEL_SIZES[1]
    limit = model_size.num_parameters(choose_vocab_size(words)) / words
    for factor, expected in ((1.0, model_size), (1 - 1e-9, MODEL_SIZES[0])):
        monkeypatch.setattr(auto_config, "MAX_PARAMETERS_PER_WORD", factor * limit)
        assert choose_config(MULTI30K, seconds=0, measure=None).config.model.width == expected.width


def test_the_choice_is_a_configuration_that_can_be_run():
    for words in (1000, 100_000, 10_000_000):
        config = choose_config(
            CorpusSize(words // 20, words, exact=True), seconds=60, measure=at(10_000)
        ).config
        assert config.problems() == []
        assert config.recipe == "small"


def test_every_choice_has_its_reason():
    reasons = choose_config(MULTI30K, seconds=600, measure=at(20_000)).reasons
    text = "\n".join(reasons)
    assert all(
        word in text
        for word in (
            "29,000 sentence pairs",
            "vocabulary size",
            "width 128",
            "epochs",
            "learning rate",
            "dropout",
        )
    )


@pytest.mark.parametrize(
    ("keep", "most"), [((), MAX_R_DROP_EPOCHS), (["train.r_drop"], MAX_EPOCHS)]
)
def test_no_corpus_is_read_more_often_than_helps(keep, most):
    found = choose_config(
        CorpusSize(1000, 20_000, exact=True), seconds=3600, measure=at(1_000_000), keep=keep
    )
    assert found.epochs == most
    assert f"at most {most}" in "\n".join(found.reasons)


def test_time_for_many_epochs_is_spent_on_r_drop():
    def choose(epochs, keep=()):
        seconds = 300
        tokens = MULTI30K.words * TOKENS_PER_WORD
        throughput = epochs * tokens / seconds / TRAINING_TIME_FRACTION
        return choose_config(MULTI30K, seconds=seconds, measure=lambda _: throughput, keep=keep)

    assert choose(MIN_EPOCHS_FOR_R_DROP - 1).config.train.r_drop == 0
    found = choose(MIN_EPOCHS_FOR_R_DROP + 1)
    assert found.config.train.r_drop == R_DROP_WEIGHT
    assert found.epochs == pytest.approx((MIN_EPOCHS_FOR_R_DROP + 1) / 2)  # two passes
    assert "R-Drop 5: there is time for 81 epochs" in "\n".join(found.reasons)
    for name in ("train.r_drop", "train.simcut"):  # set explicitly
        chosen = choose(100, keep=[name])
        assert chosen.config.train.r_drop == 0
        assert chosen.epochs == MAX_EPOCHS


def test_checkpoints_of_many_epochs_on_a_gpu_are_selected_by_bleu():
    def choose(epochs, device="cuda", keep=()):
        seconds = 300
        tokens = MULTI30K.words * TOKENS_PER_WORD
        throughput = epochs * tokens / seconds / TRAINING_TIME_FRACTION
        found = choose_config(
            MULTI30K, seconds=seconds, measure=lambda _: throughput, device=device, keep=keep
        )
        explained = any(reason.startswith("checkpoint: ") for reason in found.reasons)
        assert not found.config.problems()
        assert explained == (found.config.train.best_metric == "bleu")
        return found.config.train

    for epochs in (OVERFITTING_EPOCHS + 1, 2 * OVERFITTING_EPOCHS + 10, 200):  # 200: R-Drop
        train = choose(epochs)
        assert (train.best_metric, train.validate_sentences) == ("bleu", SELECTION_SENTENCES)
    assert choose(OVERFITTING_EPOCHS - 1).best_metric == "loss"
    assert choose(200, device="cpu").best_metric == "loss"
    for name in ("train.best_metric", "train.validate_sentences"):  # set explicitly
        assert choose(200, keep=[name]).best_metric == "loss"


def test_few_validation_sentences_do_not_select_a_checkpoint_by_bleu():
    small = read_config(recipe="small")
    config = small.replace(train={"best_metric": "bleu", "validate_sentences": 1000, "steps": 7})
    assert select_by_loss_of_few(config, MIN_SELECTION_SENTENCES) == config
    found = select_by_loss_of_few(config, MIN_SELECTION_SENTENCES - 1)
    assert found == small.replace(train={"steps": 7})


def test_r_drop_needs_a_time_budget():
    assert choose_config(MULTI30K, seconds=0, measure=None).config.train.r_drop == 0


@pytest.mark.parametrize(
    ("words", "vocab_size"),
    [(100, 500), (650_000, 5500), (10_000_000, 22_000), (1_000_000_000, 32_000)],
)
def test_vocabularies_grow_with_the_root_of_the_text(words, vocab_size):
    assert choose_vocab_size(words) == vocab_size


def test_text_that_is_seen_often_is_dropped_more():
    assert [choose_dropout(epochs, 6_500_000, 650_000) for epochs in (5, 20, 40)] == [0.1, 0.2, 0.3]
    assert choose_dropout(18, 1_600_000, 650_000) == 0.1  # a small model has enough to do
    assert choose_dropout(40, 40_000_000, 50_000_000) == 0.1
    # R-Drop regularizes too.
    assert [
        choose_dropout(epochs, 24_000_000, 1_900_000, use_r_drop=True) for epochs in (30, 50, 90)
    ] == [0.1, 0.2, 0.3]
    # Epochs times parameters per word.
    assert [choose_dropout(1, each, 1) for each in (99, 100, 249, 250)] == [0.1, 0.2, 0.2, 0.3]


def test_short_runs_warm_up_and_average_briefly():
    config = apply_step_count(choose_config(MULTI30K, seconds=0, measure=None).config, 120)
    assert (config.train.steps, config.train.warmup_steps, config.train.validate_every) == (
        120,
        10,
        15,
    )
    assert 0.9 < config.train.ema_decay < 0.97


@pytest.mark.parametrize("steps", [100, 120, 222, 1007, 99_999])
def test_no_validation_falls_a_few_steps_before_the_last(steps):
    """Rounding down validated a run of 1,007 steps at 1,000 and 1,007."""
    config = apply_step_count(choose_config(MULTI30K, seconds=0, measure=None).config, steps).train
    left = steps % config.validate_every
    assert left == 0 or left >= config.validate_every / 4
    assert steps / config.validate_every <= 8


def test_explicit_settings_are_not_fitted():
    config = apply_step_count(
        choose_config(MULTI30K, seconds=0, measure=None).config.replace(
            train={"validate_every": 7}
        ),
        500,
        keep={"train.validate_every"},
    )
    assert (config.train.validate_every, config.train.steps) == (7, 500)


def test_a_survey_extrapolates_from_the_fraction_that_was_read(tmp_path: Path) -> None:
    """Both sides together have 8 words of 5 bytes and their spaces in a pair."""
    for side in ("src", "tgt"):
        (tmp_path / side).write_text("abcde abcde abcde abcd\n" * 20_000)
    corpus = ParallelFiles(tmp_path / "src", tmp_path / "tgt")
    whole = measure_corpus(corpus)
    assert whole == CorpusSize(20_000, 20_000 * 44 // 6, True, int(20_000 * (1.25 * 44 / 6 + 2)))
    sampled = measure_corpus(corpus, most=10_000)
    assert not sampled.exact
    assert measure_corpus(corpus, most=20_000) == whole
    for mine, exact in zip(sampled, whole, strict=True):
        assert isinstance(mine, bool) or mine == pytest.approx(exact, rel=0.2)


def test_lower_step_limit_sets_all_intervals_but_those_that_are_kept():
    config = Config().replace(
        train={"steps": 1000, "warmup_steps": 400, "checkpoint_every": 3, "validate_every": 500}
    )
    assert limit_steps(config, 1000) is config

    def limited(*keep: str) -> tuple[int, ...]:
        train = limit_steps(config, 100, validations=4, keep=keep).train
        return train.steps, train.warmup_steps, train.checkpoint_every, train.validate_every

    assert limited() == (100, 10, 25, 25)
    assert limited("train.validate_every") == (100, 10, 25, 500)
    assert limited("train.checkpoint_every", "train.warmup_steps") == (100, 400, 3, 25)


@pytest.mark.parametrize(
    ("epochs", "shown"), [(999.4, "999 epochs"), (1000.4, "over 1,000 epochs")]
)
def test_reason_of_r_drop_rounds_the_epochs(epochs, shown):
    assert f"there is time for {shown}" in auto_config._explain_r_drop(epochs)


@pytest.mark.parametrize(
    ("tokens", "device", "batch"),
    [
        (10_000, "cpu", 800),
        (1_800_000, "cpu", 5000),
        (800_000, "cuda", 5000),
        (10**9, "cpu", 25_000),
    ],
)
def test_batches_are_for_a_number_of_steps_per_epoch(tokens, device, batch):
    assert choose_batch_tokens(tokens, device) == batch


def test_limits_of_model_size_and_epochs():
    """The limits that docs and notes name."""
    assert (MAX_EPOCHS, MAX_R_DROP_EPOCHS, MIN_EPOCHS_FOR_R_DROP) == (60, 160, 80)
    assert TRAINING_TIME_FRACTION == 0.9
    found = choose_config(MULTI30K, seconds=0, measure=None)
    parameters = MODEL_SIZES[2].num_parameters(found.config.text.vocab_size)
    assert parameters < 15 * 650_000 < 1.4 * parameters
    assert found.config.model.width == MODEL_SIZES[2].width
    assert "the next would exceed 15 parameters per word" in "\n".join(found.reasons)
    assert found.config.train.learning_rate == pytest.approx(0.5 / found.config.model.width)


@pytest.mark.parametrize(("ratio", "layers"), [(0.99, 2), (1.01, 3)])
def test_a_larger_model_needs_five_tokens_per_parameter_or_fifteen_epochs(ratio, layers):
    large = CorpusSize(4_000_000, 80_000_000, exact=True)
    tokens = 5 * MODEL_SIZES[1].num_parameters(choose_vocab_size(large.words))
    seconds = 100
    throughput = ratio * tokens / seconds / TRAINING_TIME_FRACTION

    def measure(config: Config) -> float:
        return throughput if config.model.width <= MODEL_SIZES[1].width else 1.0

    config = choose_config(large, seconds=seconds, measure=measure).config
    assert config.model.encoder == (f"transformer*{layers}",)
    small = CorpusSize(9000, 200_000, exact=True)
    tokens = 15 * small.words * TOKENS_PER_WORD
    throughput = ratio * tokens / seconds / TRAINING_TIME_FRACTION
    allowed = [MODEL_SIZES[0], MODEL_SIZES[1]]
    found = auto_config._largest_within_time(
        allowed, small.words * TOKENS_PER_WORD, seconds, lambda size: throughput, 30_000
    )
    assert found.model_size.layers == layers


@pytest.mark.parametrize(
    ("steps", "warmup", "ema", "checkpoint", "validate"),
    [
        (100, 8, 0.95, 10, 13),
        (20, 1, 0.9, 10, 10),
        (1000, 83, 0.995, 63, 125),
        (100_000, 400, 0.9995, 6250, 12_500),
    ],
)
def test_schedules_follow_from_the_number_of_steps(steps, warmup, ema, checkpoint, validate):
    train = apply_step_count(Config(), steps).train
    assert (train.warmup_steps, train.ema_decay) == (warmup, pytest.approx(ema))
    assert (train.checkpoint_every, train.validate_every) == (checkpoint, validate)


@pytest.mark.parametrize(
    ("epochs", "steps", "interval"), [(3.0, 300, 30), (40.0, 4000, 100), (0.001, 1, 1)]
)
def test_epochs_are_validated_each_or_ten_times(epochs, steps, interval):
    config = Config().replace(
        train={
            "epochs": epochs,
            "warmup_steps": 400,
            "checkpoint_every": 5000,
            "validate_every": 5000,
        }
    )
    train = apply_epochs(config, 100).train
    assert (train.steps, train.warmup_steps) == (steps, min(400, steps // 10))
    assert (train.checkpoint_every, train.validate_every) == (interval, interval)


def test_steps_of_a_recipe_are_a_default_and_those_of_fine_tuning_are_the_settings():
    small = read_config(recipe="small")
    assert has_default_steps(small)
    assert not has_default_steps(small.replace(train={"steps": small.train.steps + 1}))
    assert not has_default_steps(small.replace(train={"epochs": 2.0}))
    tuned = small.replace(train={"init_from": "model", "steps": Config().train.steps})
    assert has_default_steps(tuned)
    assert max_epochs(small) == 60
    assert max_epochs(small.replace(train={"r_drop": 5.0})) == 160
    assert max_epochs(small.replace(train={"simcut": 3.0})) == 160
