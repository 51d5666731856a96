"""The configuration rejects invalid settings with a reason, and survives a round trip."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from dragoman.config import (
    Config,
    apply_overrides,
    config_digest,
    from_dict,
    list_settings,
    read_config,
    read_yaml,
    to_dict,
)
from dragoman.config.root_config import SECTIONS, TASK_STACKS
from dragoman.errors import ConfigError


def error_message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        apply_overrides(Config(), overrides)
    return str(caught.value)


def write(folder: Path, text: str) -> Path:
    file = folder / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_is_explained_and_its_default_is_in_range(section):
    values = getattr(Config(), section)
    for each in list_settings(type(values)):
        assert each.setting.doc.endswith((".", "...")), each.name
        assert each.setting.problem(each.name, each.default) is None


def test_defaults_of_common_settings():
    """The names in the documentation are an interface."""
    config = apply_overrides(
        Config(),
        [
            "model.width=256", "model.heads=4", "model.ffn_width=512", "model.dropout=0.2",
            "train.steps=10", "train.batch_tokens=100", "train.learning_rate=1e-3", "train.seed=7",
            "train.checkpoint_every=5", "train.validate_every=5", "text.vocab_size=1000",
        ],
    )  # fmt: skip
    assert (config.model.width, config.train.learning_rate, config.text.vocab_size) == (
        256,
        1e-3,
        1000,
    )


def test_unknown_setting_suggests_the_nearest():
    """Other toolkits report 'Extra inputs are not permitted' (eole-nlp/eole#81)."""
    found = error_message("model.widht=256")
    assert found == "there is no setting model.widht; did you mean model.width?"


def test_setting_in_the_wrong_section_suggests_the_right_one():
    """A key at the wrong level names where it belongs (eole-nlp/eole#126)."""
    assert "did you mean train.learning_rate?" in error_message("model.learning_rate=1")
    assert "did you mean model.width?" in error_message("width.x=1").replace(
        "'width'", ""
    ) or "model.width" in error_message("width.x=1")


def test_all_problems_are_reported_together():
    text = error_message("model.widht=256", "train.steps=soon", "text.vocab_size=[1]", "nonsense")
    assert text.startswith("4 problems in the configuration:")
    assert all(
        part in text for part in ("model.widht", "train.steps", "'soon'", "[1]", "'nonsense'")
    )


def test_heads_must_divide_the_width():
    assert (
        error_message("model.heads=7")
        == "model.heads must divide model.width; found 7 and 512; try model.heads=4 or 8"
    )


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("train.steps=0", "found 0"),
        ("model.dropout=1.5", "found 1.5"),
        ("train.learning_rate=.inf", "found inf"),
        ("train.learning_rate=true", "found true"),
        ("model.dropout=false", "found false"),
        ("text.tokenizer=syllables", "found 'syllables'"),
        ("text.vocab_size=100", "found 100"),
        ("model.width=true", "found true"),
        ("data.src=a.de", "found only a.de"),
        ("data.src=[a.de, b.de]", "found only a.de, b.de"),
        ("data.valid_tgt=a.en", "found only a.en"),
        ("train.average_checkpoints=9", "found train.average_checkpoints=9"),
    ],
)
def test_out_of_range_values_are_shown(override, found):
    assert found in error_message(override)


def test_pairs_and_src_tgt_exclude_each_other():
    assert "found all.tsv and a.de" in error_message(
        "data.pairs=all.tsv", "data.src=a.de", "data.tgt=a.en"
    )
    assert "found all.tsv and a.de" in error_message(
        "data.valid_pairs=all.tsv", "data.valid_src=a.de", "data.valid_tgt=a.en"
    )


@pytest.mark.parametrize("prefix", ["", "valid_"])
@pytest.mark.parametrize("names", [("pairs",), ("src", "tgt")])
def test_files_of_sentence_pairs_are_for_translation(prefix, names):
    config = Config(task="classify").replace(data={prefix + name: "a.txt" for name in names})
    assert config.problems() == [
        f"data.{prefix}{names[0]} is for translation; found task classify; "
        "name the files by data.train and data.valid (--train, --valid)"
    ]


def test_bpe_dropout_needs_bpe():
    assert "found text.tokenizer=unigram" in error_message(
        "text.tokenizer=unigram", "text.bpe_dropout=0.1"
    )


def test_sinusoidal_positions_need_an_even_width():
    assert "found 15" in error_message("model.width=15", "model.heads=1")


def test_later_sources_win(tmp_path):
    file = write(tmp_path, "recipe: tiny\nmodel:\n  width: 64\n  heads: 2\ntrain:\n  seed: 3\n")
    config = read_config(file=file, overrides=["train.seed=4"])
    assert (config.recipe, config.model.width, config.train.seed) == ("tiny", 64, 4)


def test_unknown_recipe_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean tiny?"):
        read_config(recipe="tinny")


def test_numbers_as_yaml_writes_them(tmp_path):
    text = (
        "train: {learning_rate: 5e-4, steps: 2000.0, clip: 1}\nmodel: {encoder: transformer*2, "
        "decoder: [self, transformer]}\n"
    )
    config = read_config(file=write(tmp_path, text))
    assert (config.train.learning_rate, config.train.steps, config.train.max_grad_norm) == (
        5e-4,
        2000,
        1.0,
    )
    assert (config.model.encoder, config.model.decoder) == (
        ("transformer*2",),
        ("transformer", "transformer"),
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("model: {width: 1, width: 2}", "'width' appears twice"),
        ("a: &x [1]\nb: *x", "alias *x"),
        ("model: !!python/object/apply:os.system ['true']", "python/object"),
        ("model: [", "correct that line"),
        ("- a list", "found list"),
        ("1: x", "key 1 is not text"),
        ("model: 7", "found 7"),
    ],
)
def test_yaml_that_is_not_plain_settings_is_rejected(tmp_path, text, found):
    with pytest.raises(ConfigError) as caught:
        read_config(file=write(tmp_path, text))
    assert found in str(caught.value)


def test_a_missing_or_huge_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"missing.yaml"):
        read_yaml(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="1048577 bytes"):
        read_yaml(write(tmp_path, "x" * ((1 << 20) + 1)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ["a pipe", "a folder", "a device"])
def test_a_pipe_or_device_is_rejected_without_blocking(tmp_path, what):
    path = tmp_path / "config.yaml"
    {
        "a pipe": os.mkfifo,
        "a folder": os.mkdir,
        "a device": lambda link: os.symlink("/dev/zero", link),
    }[what](path)
    with pytest.raises(ConfigError, match=f"found {path}: neither a file nor a link to one"):
        read_yaml(path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("2001-99-99", "found '2001-99-99'"),
        ("0b_", "found '0b_'"),
        ("9" * 5000, "found '9999"),
        ("0x" + "f" * 5000, "found '0xff"),
        ("[" * 100_000, "found '[[["),
        ("[" * 40 + "]" * 40, "found '[[["),
        ("!!int x", "found '!!int x'"),
        ("&a [*a]", "found '&a [*a]'"),
        ("1:30", "found '1:30'"),
        ('"\\U00110000"', "found '\"\\\\U00110000\"'"),
        ("{<<: 1}", "found {'<<': 1}"),
    ],
)
def test_an_override_that_is_no_plain_value_is_quoted(value, message):
    with pytest.raises(ConfigError) as caught:
        read_config(overrides=[f"model.width={value}"])
    assert f"model.width must be an integer, 1 to 65,536; {message}" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_text_with_a_nul_or_half_a_character_is_rejected():
    for value in ("a\0b", "\ud800"):
        with pytest.raises(ConfigError, match=r"data\.src must be text or a list of text; found"):
            from_dict({"data": {"src": value, "tgt": "x"}})
    assert from_dict({"data": {"src": "caf\udce9", "tgt": "x"}}).data.src == "caf\udce9", (
        "a byte of a file name"
    )


def test_a_number_that_no_float_holds_is_rejected():
    with pytest.raises(ConfigError, match=r"model.dropout must be a number.*; found 1000"):
        from_dict({"model": {"dropout": 10**400}})


def test_three_thousand_unknown_names_are_counted(tmp_path):
    text = "model:\n" + "".join(f"  unknown{number}: 1\n" for number in range(3_000))
    with pytest.raises(ConfigError) as caught:
        read_config(file=write(tmp_path, text))
    assert "there is no setting model.unknown19; " in str(caught.value)
    assert "there are 2,980 more unknown settings in model; is it the right file?" in str(
        caught.value
    )
    with pytest.raises(ConfigError, match="there are 2,980 more unknown sections"):
        read_config(file=write(tmp_path, text.replace("model:\n", "").replace("  ", "")))


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ([], None),
        ({}, None),
        (["tiny"], "found ['tiny']"),
        (7, "found 7"),
        ({"a": 1}, "found {'a': 1}"),
    ],
)
def test_a_recipe_is_a_name(recipe, message):
    if message is None:
        assert from_dict({"recipe": recipe}).recipe == ""
    else:
        with pytest.raises(ConfigError) as caught:
            from_dict({"recipe": recipe})
        assert f"recipe must be a name; {message}" in str(caught.value)


def test_an_empty_file_changes_nothing(tmp_path):
    assert read_config(file=write(tmp_path, "")) == Config()


def test_json_round_trip_is_exact():
    config = Config().replace(
        model={"encoder": ("transformer*2", "transformer"), "dropout": 0.3},
        train={"learning_rate": 3e-4},
    )
    again = from_dict(json.loads(json.dumps(to_dict(config))))
    assert again == config
    assert config_digest(again) == config_digest(config) != config_digest(Config())


def test_from_dict_is_as_strict_as_a_file():
    values = to_dict(Config())
    values["model"]["surprise"] = 1
    with pytest.raises(ConfigError, match=r"model.surprise"):
        from_dict(values)


def test_the_tree_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().model.width = 3  # type: ignore[misc]


def test_problems_of_all_kinds_are_reported_together():
    text = error_message(
        "train.stepz=3", "width", "text.tokenizer=foo", "train.learning_rate=-1", "model.heads=many"
    )
    for words in (
        "found 'width'",
        "no setting train.stepz; did you mean train.steps?",
        "found 'foo'",
        "found -1",
        "found 'many'",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "train.steps=1.5",
            "train.steps must be an integer, at least 1; found 1.5; for example 100000",
        ),
        ("train.steps=null", "found nothing; for example 100000"),
        ("text.byte_fallback=maybe", "must be true or false; found 'maybe'; for example true"),
        (
            "data.src={a: 1}",
            "data.src must be text or a list of text; found {'a': 1}; write a path, or several as "
            "[one, two]",
        ),
        (
            "text.shared_vocab=false",
            "model.tie_embeddings=all needs one vocabulary for both sides; found "
            "text.shared_vocab=false; set model.tie_embeddings=target",
        ),
    ],
)
def test_a_wrong_value_is_quoted_as_yaml(override, words):
    assert words in error_message(override)


def test_learned_positions_must_hold_the_longest_sentence():
    text = error_message("model.positions=learned", "model.max_positions=64")
    assert "found 200 and 64; set data.max_length=63" in text
    read_config(
        overrides=["model.positions=learned", "model.max_positions=64", "data.max_length=63"]
    )


def test_numbers_and_paths_are_converted(tmp_path):
    assert read_config(overrides=["train.steps=1e5"]).train.steps == 100_000
    assert from_dict({"data": {"src": tmp_path / "a.de", "tgt": "b.en"}}).data.src == str(
        tmp_path / "a.de"
    )
    assert read_config(overrides="model.width=256").model.width == 256


def test_replacing_a_setting_that_does_not_exist():
    with pytest.raises(ConfigError, match=r"setting model.widht; did you mean model.width\?"):
        Config().replace(model={"widht": 3})
    with pytest.raises(
        ConfigError, match="there is no section 'modle' in the configuration; did you mean model"
    ):
        Config().replace(modle={"width": 3})


SWITCHES = [
    (section, each.name, word)
    for section in SECTIONS
    for each in list_settings(type(getattr(Config(), section)))
    for word in each.setting.choices
    if word in ("on", "off")
]


@pytest.mark.parametrize(("section", "name", "word"), SWITCHES)
def test_on_and_off_are_words_where_they_are_choices(tmp_path, section, name, word):
    """YAML takes them for true and false."""
    base = Config(task=section) if section in TASK_STACKS else Config()
    given = (
        read_config(overrides=[f"{section}.{name}={word}"], base=base),
        read_config(file=write(tmp_path, f"{section}: {{{name}: {word}}}"), base=base),
    )
    assert [getattr(getattr(each, section), name) for each in given] == [word, word]


def test_elsewhere_on_is_true():
    assert "found true" in error_message("train.steps=on")
    assert "found true" in error_message("train.cuda_graphs=on")  # auto or off


@pytest.mark.parametrize("prefix", ["", "valid_"])
def test_each_source_file_needs_its_target_file(prefix):
    found = error_message(f"data.{prefix}src=[a.de, b.de]", f"data.{prefix}tgt=a.en")
    assert (
        f"data.{prefix}src and data.{prefix}tgt must name equally many files; found 2 (a.de, "
        "b.de) and 1 (a.en)" in found
    )
    assert f"pass one --{prefix.replace('_', '-')}tgt for each" in found
    assert "found an empty name in ['a.de', '']" in error_message(
        f"data.{prefix}src=[a.de, '']", f"data.{prefix}tgt=[a.en, b.en]"
    )


def test_a_list_of_one_file_is_the_file():
    assert read_config(overrides=["data.pairs=[a.tsv]"]).data.pairs == "a.tsv"
    several = read_config(overrides=["data.pairs=[a.tsv, 'b (1.tsv', 2.tsv]"])
    assert several.data.pairs == ("a.tsv", "b (1.tsv", "2.tsv")
    assert from_dict(to_dict(several)) == several


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("train.lr=3", "train.learning_rate"), ("train.batch_size=9", "train.batch_tokens"),
        ("train.num_epochs=2", "train.epochs"), ("model.d_model=8", "model.width"),
        ("model.hidden_size=8", "model.width"), ("model.num_layers=2", "model.encoder"),
        ("model.nhead=2", "model.heads"), ("model.vocab_size=9", "text.vocab_size"),
        ("train.dropout=0.1", "model.dropout"), ("decode.beam_size=3", "decode.beam"),
        ("train.grad_clip=1", "train.max_grad_norm"), ("train.max_steps=5", "train.steps"),
        ("train.LR=3", "train.learning_rate"), ("model.ffn-dim=9", "model.ffn_width"),
        ("model.layers=2", "model.encoder or model.decoder?"), ("lr=3", "train.learning_rate?"),
        ("max-tokens=3", "train.batch_tokens?"), ("model.dropuot=0", "model.dropout?"),
    ],
)  # fmt: skip
def test_names_of_other_toolkits_are_suggested(written, meant):
    name = written.partition("=")[0]
    found = error_message(written)
    problem = f"there is no setting {name}" if "." in name else f"found {written!r}"
    assert f"{problem}; did you mean {meant}" in found


def test_names_of_other_toolkits_are_suggested_without_a_section(tmp_path):
    (tmp_path / "run.yaml").write_text("lr: 3\n")
    with pytest.raises(
        ConfigError, match=r"there is no section 'lr' .*did you mean train\.learning_rate\?"
    ):
        read_config(file=tmp_path / "run.yaml")
    with pytest.raises(
        ConfigError, match=r"there is no setting train\.lr; did you mean train\.learning_rate\?"
    ):
        Config().replace(train={"lr": 3})
