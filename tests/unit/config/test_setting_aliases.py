"""Models and configuration files written before the renames still work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dragoman import Translator, read_config
from dragoman.config.loader import load_yaml, overridden_settings, to_dict
from dragoman.config.root_config import SECTIONS, Config
from dragoman.config.setting_aliases import (
    RENAMED_BLOCKS,
    RENAMED_OPTIONS,
    RENAMED_SETTINGS,
    RENAMED_VALUES,
    rename_block,
    rename_old_settings,
)
from dragoman.errors import ConfigError
from dragoman.registry import catalogue

STORED = Path(__file__).resolve().parents[2] / "fixtures" / "before_renames"
EXPECTED = json.loads((STORED / "expected.json").read_text(encoding="utf-8"))
LINES = (STORED / "input.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", EXPECTED)
def test_a_stored_model_gives_the_same_output(name: str) -> None:
    found = list(Translator.load(STORED / name, device="cpu").stream(LINES))
    assert [each.text for each in found] == [case["text"] for case in EXPECTED[name]]
    assert [each.score for each in found] == pytest.approx(
        [case["score"] for case in EXPECTED[name]], abs=1e-4
    )


@pytest.mark.parametrize("name", EXPECTED)
def test_a_stored_configuration_file_is_read(name: str) -> None:
    written = load_yaml((STORED / f"{name}.yaml").read_text(encoding="utf-8"))
    config = to_dict(read_config(file=STORED / f"{name}.yaml"))
    stored = to_dict(Translator.load(STORED / name, device="cpu").config)
    renamed = rename_old_settings(written, [])
    assert {len(renamed[section]) for section in written} == {
        len(found) for found in written.values()
    }
    for section, values in renamed.items():
        for setting in values:
            assert config[section][setting] == stored[section][setting], f"{section}.{setting}"


def test_every_new_name_exists() -> None:
    for old, new in RENAMED_SETTINGS.items():
        section, name = old.split(".")
        assert section in SECTIONS
        assert new in Config.setting_names(section)
        assert name not in Config.setting_names(section)
    assert set(RENAMED_BLOCKS.values()) <= set(catalogue("block"))
    for path, values in RENAMED_VALUES.items():
        for value in values.values():
            read_config(recipe="tiny", overrides=[f"{path}={value}"])


@pytest.mark.parametrize("old", RENAMED_SETTINGS)
def test_override_by_an_old_name_suggests_the_new_one(old: str) -> None:
    section = old.partition(".")[0]
    expected = f"there is no setting {old}; it is now {section}.{RENAMED_SETTINGS[old]}"
    with pytest.raises(ConfigError) as caught:
        read_config(recipe="tiny", overrides=[f"{old}=1"])
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.encoder=[self*2]", "found 'self' in 'self*2'; did you mean transformer?"),
        ("model.decoder=[attend]", "did you mean cross_attention?"),
        ("model.residual=pre", "found 'pre'; it is now pre_norm"),
        ("model.decoder=[lstm(attention=dot, query=after)]", "it is now decoder"),
        ("model.decoder=[lstm(attention=dot, decoder=after)]", "it is now luong"),
        ("model.encoder=[conv(kernel=3)]", "it is now kernel_size"),
    ],
)
def test_old_blocks_options_and_values_suggest_the_new_ones(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(recipe="tiny", overrides=[override])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self*6", "transformer*6"),
        (" self ( window = 4 ) * 2", " transformer ( window = 4 ) * 2"),
        ("feedforward_dropout=0.0)", "ffn_dropout=0.0)"),
        ("feedforward(feedforward=24)", "ffn(ffn_width=24)"),
        ("lstm(attention=reinforced, query=below)", "lstm(attention=reinforce, decoder=gnmt)"),
        ("transformer(heads=2)", "transformer(heads=2)"),
        ("self" + "(" * 2000, "self" + "(" * 2000),
        ("?", "?"),
    ],
)
def test_block_texts_are_renamed(old: str, new: str) -> None:
    assert rename_block(old) == new


def test_a_setting_by_both_names_is_rejected() -> None:
    problems: list[str] = []
    rename_old_settings({"train": {"clip": 1, "max_grad_norm": 2}}, problems)
    assert problems == [
        "train.max_grad_norm must be given once; found it and its old name train.clip; remove the "
        "old one"
    ]


def test_old_names_in_a_file_count_as_given(tmp_path: Path) -> None:
    """A time budget leaves settings alone that a file gives."""
    file = tmp_path / "run.yaml"
    file.write_text("recipe: tiny\ntrain:\n  warmup: 7\n  ema: 0.9\nmodel:\n  width: 64\n")
    assert overridden_settings(file, ["train.steps=3"]) == {
        "train.warmup_steps",
        "train.ema_decay",
        "train.steps",
        "model.width",
    }


def test_no_option_is_renamed_to_one_that_means_something_else() -> None:
    assert not set(RENAMED_OPTIONS) & set(RENAMED_OPTIONS.values())
