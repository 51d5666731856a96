"""Search expressions: parsing, sampling and error messages."""

from __future__ import annotations

import pytest

from dragoman.config import Config, read_config
from dragoman.errors import ConfigError
from dragoman.tune.search_space import (
    SearchParameter,
    apply_values,
    current_value,
    parse_search,
)

BASE = read_config(recipe="small")


def problems(*expressions: str, config: Config = BASE) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_search(expressions, config)
    return caught.value.problems


def test_usual_settings_are_searched_around_the_base() -> None:
    size, dropout, rate, vocabulary = parse_search((), BASE)
    assert size == SearchParameter("size", ("128x2", "192x3", "256x4", "384x5"))
    assert dropout == SearchParameter("model.dropout", low=0.0, high=0.4)
    assert (rate.name, rate.log) == ("train.learning_rate", True)
    assert (rate.low, rate.high) == pytest.approx((5e-4, 8e-3))
    assert vocabulary == SearchParameter("text.vocab_size", ("4000", "8000", "16000"))
    assert [each.nearest(BASE) for each in (size, dropout, rate, vocabulary)] == [
        "256x4",
        0.2,
        2e-3,
        "8000",
    ]


@pytest.mark.parametrize(
    ("name", "low", "high", "log"),
    [
        ("model.dropout", 0.0, 0.4, False),
        ("train.label_smoothing", 0.0, 0.2, False),
        ("train.weight_decay", 1e-4, 0.1, True),
        ("text.bpe_dropout", 0.0, 0.2, False),
        ("train.word_dropout", 0.0, 0.2, False),
        ("train.r_drop", 0.0, 5.0, False),
        ("train.simcut", 0.0, 3.0, False),
    ],
)
def test_usual_ranges(name: str, low: float, high: float, log: bool) -> None:
    assert parse_search([name], BASE) == (SearchParameter(name, low=low, high=high, log=log),)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (400, ("400", "800")),  # 200 would be too few
        (600, ("300", "600", "1000")),
        (2000, ("1000", "2000", "4000")),
        (1950, ("1000", "1950", "4000")),
        (5500, ("3000", "5500", "11000")),
    ],
)
def test_usual_vocabularies_are_half_and_twice_the_base_rounded(
    size: int, expected: tuple[str, ...]
) -> None:
    (found,) = parse_search(["vocab_size"], BASE.replace(text={"vocab_size": size}))
    assert found.choices == expected


def test_usual_batches_are_half_and_twice_the_base() -> None:
    (found,) = parse_search(["batch_tokens"], BASE.replace(train={"batch_tokens": 6000}))
    assert found.choices == ("3000", "6000", "12000")


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ("128x2", ("128x2", "192x3")),
        ("192x3", ("128x2", "192x3", "256x4")),
        ("512x6", ("256x4", "384x5", "512x6")),
    ],
)
def test_usual_sizes_are_two_smaller_and_one_larger(base: str, expected: tuple[str, ...]) -> None:
    config = apply_values(BASE, {"size": base})
    (found,) = parse_search(["size"], config)
    assert found.choices == expected


@pytest.mark.parametrize(
    ("size", "heads"),
    [("64x2", 4), ("128x2", 4), ("192x3", 4), ("320x4", 5), ("384x5", 6), ("512x6", 8)],
)
def test_heads_of_other_widths_are_those_of_automatic_configuration(size: str, heads: int) -> None:
    assert apply_values(BASE, {"size": size}).model.heads == heads


def test_ffn_width_stays_the_same_multiple_of_the_width() -> None:
    base = BASE.replace(model={"ffn_width": 2 * BASE.model.width, "heads": 8})
    assert apply_values(base, {"size": "128x2"}).model.ffn_width == 256
    assert apply_values(base, {"size": "256x2"}).model.heads == 8, "the base's at its width"


@pytest.mark.parametrize(
    "name",
    [
        "train.seed", "train.device", "train.threads", "train.time_budget", "train.init_from",
        "train.best_metric", "train.target_exact", "train.extend_vocabulary",
        "train.validate_every", "train.validate_sentences", "train.checkpoint_every",
        "train.keep_checkpoints", "train.tensorboard", "train.deterministic",
        "train.final_checkpoint", "data.max_length", "decode.beam",
    ],
)  # fmt: skip
def test_settings_that_all_trials_share_are_not_searched(name: str) -> None:
    (problem,) = problems(f"{name}=1,2")
    assert f"found {name}, which all trials share" in problem


def test_a_range_has_a_lower_and_a_higher_end() -> None:
    (problem,) = problems("dropout=0.2..0.2")
    assert "needs a range from low to high" in problem


def test_at_most_a_hundred_choices() -> None:
    widths = ",".join(str(64 * number) for number in range(1, 102))
    assert len(parse_search([f"model.width={widths.rpartition(',')[0]}"], BASE)[0].choices) == 100
    assert "needs 1 to 100 values; found 101" in problems(f"model.width={widths}")[0]


def test_usual_settings_that_do_not_apply_are_left_out() -> None:
    config = read_config(recipe="tiny", overrides=["text.tokenizer=characters"])
    assert "text.vocab_size" not in {each.name for each in parse_search((), config)}
    mixed = BASE.replace(model={"encoder": ("transformer", "transformer")})
    assert "size" not in {each.name for each in parse_search((), mixed)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model.dropout=0.1..0.3", SearchParameter("model.dropout", low=0.1, high=0.3)),
        ("dropout=0..0.3", SearchParameter("model.dropout", low=0.0, high=0.3)),
        (
            "train.learning_rate=1e-4..1e-2:log",
            SearchParameter("train.learning_rate", low=1e-4, high=1e-2, log=True),
        ),
        (
            "vocab_size=1000..8000:log",
            SearchParameter("text.vocab_size", low=1000, high=8000, log=True, integer=True),
        ),
        ("optimizer=adam, adamw", SearchParameter("train.optimizer", ("adam", "adamw"))),
        ("size=64x1,256x4", SearchParameter("size", ("64x1", "256x4"))),
        ("shared_vocab", SearchParameter("text.shared_vocab", ("true", "false"))),
        (
            "model.encoder=[bilstm(layers=1, dropout=0.1)],[transformer*2]",
            SearchParameter(
                "model.encoder", ("[bilstm(layers=1, dropout=0.1)]", "[transformer*2]")
            ),
        ),
        ("model.qk_norm=none", SearchParameter("model.qk_norm", ("none",))),
    ],
)
def test_expressions(text: str, expected: SearchParameter) -> None:
    assert parse_search([text], BASE) == (expected,)


def test_values_are_applied_and_validated() -> None:
    config = apply_values(BASE, {"size": "192x3", "model.dropout": 0.25, "text.vocab_size": "4000"})
    assert config.model.encoder == config.model.decoder == ("transformer*3",)
    assert (config.model.width, config.model.heads, config.model.ffn_width) == (192, 4, 768)
    assert (config.model.dropout, config.text.vocab_size) == (0.25, 4000)
    assert config.train == BASE.train
    with pytest.raises(ConfigError, match=r"model\.heads"):
        apply_values(BASE, {"model.width": 130})


@pytest.mark.parametrize("width", [64, 96, 100, 128, 192, 250, 384, 512, 1022])
def test_every_size_has_heads_that_divide_it(width: int) -> None:
    config = apply_values(BASE, {"size": f"{width}x2"})
    assert config.model.width % config.model.heads == 0
    assert not config.problems()


def test_the_size_of_the_base_is_the_base() -> None:
    assert apply_values(BASE, {"size": "256x4"}) == BASE


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("model.dropuot=0..0.3", ("'model.dropuot'", "did you mean model.dropout?")),
        ("dropuot", ("'dropuot'", "did you mean dropout?")),
        ("lr=0.1..0.2", ("'lr'", "did you mean train.learning_rate?")),
        ("zzzzzz", ("'zzzzzz'", "for example size, model.dropout")),
        ("model.width", ("model.width needs values", "model.width=low..high")),
        ("model.dropout=0.3..0.1", ("model.dropout", "0.3..0.1", "exchange its ends")),
        ("model.dropout=0..2", ("model.dropout must be at most", "found 2")),
        ("model.dropout=a..b", ("two numbers", "'a..b'", "model.dropout=0..0.4")),
        ("model.width=1.5..3", ("two integers", "'1.5..3'")),
        ("model.width=1..2..3", ("two integers", "'1..2..3'")),
        ("learning_rate=0..0.1:log", ("above 0", "0..0.1:log", "leave out :log")),
        ("learning_rate=1e-3..inf", ("two numbers", "inf")),
        ("optimizer=adam..sgd", ("no range", "train.optimizer=one,two")),
        ("optimizer=adam,adamm", ("train.optimizer must be one of", "'adamm'", "did you mean")),
        ("optimizer=adam,adam", ("once", "adam twice")),
        ("optimizer=", ("needs 1 to 100 values", "found 0")),
        ("model.dropout=0.1,x", ("model.dropout", "a number", "'x'")),
        ("size=256", ("width x layers", "'256'")),
        ("size=1..2", ("size has no range", "size=128x2,256x4")),
        ("train.seed=1,2", ("train.seed, which all trials share", "--set train.seed")),
        ("data.src=a,b", ("data.src, which all trials share",)),
        ("dropout,model.dropout=0..0.1", ("'dropout,model.dropout'",)),
    ],
)  # fmt: skip
def test_wrong_expressions_name_the_setting_and_the_remedy(
    text: str, parts: tuple[str, ...]
) -> None:
    found = "; ".join(problems(text))
    assert found.startswith("--search")
    for part in parts:
        assert part in found


def test_all_problems_are_reported_together() -> None:
    assert len(problems("dropuot", "model.dropout=3..4", "size", "size=8x1")) == 4


def test_size_and_the_settings_it_implies_cannot_both_be_searched() -> None:
    assert "model.width" in problems("size", "model.width=128,256")[0]


def test_size_needs_equal_stacks() -> None:
    mixed = BASE.replace(model={"encoder": ("transformer", "transformer")})
    assert "search model.width instead" in problems("size", config=mixed)[0]
    assert "search model.width instead" in problems("size=8x1", config=mixed)[0]


def test_points_of_the_space() -> None:
    (dropout,) = parse_search(["dropout"], BASE)
    assert dropout.accepts(0.1)
    assert not dropout.accepts(0.5)
    assert not dropout.accepts("0.1")
    assert not dropout.accepts(True)
    (width,) = parse_search(["model.width=64..128"], BASE)
    assert width.accepts(100)
    assert not width.accepts(100.0)
    assert width.nearest(BASE) == 128


@pytest.mark.parametrize(
    ("stacks", "size"),
    [
        (("transformer*3", "transformer*3"), "256x3"),
        (("transformer*3", "transformer*2"), None),
        (("gru*2, transformer", "gru*2, transformer"), None),
    ],
)
def test_a_size_is_one_width_and_one_number_of_equal_blocks(
    stacks: tuple[str, str], size: str | None
) -> None:
    encoder, decoder = (stack.split(", ") for stack in stacks)
    config = BASE.replace(model={"encoder": tuple(encoder), "decoder": tuple(decoder)})
    assert current_value(config, "size") == size
