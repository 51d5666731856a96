"""`dragoman settings`, and the page of the documentation made from the same rows."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from dragoman.cli.app import main
from dragoman.cli.settings_reference import format_value, list_all_settings
from dragoman.config import Config, apply_overrides, list_settings
from dragoman.config.root_config import SECTIONS

ROOT = Path(__file__).resolve().parents[2]
# The most used names; renaming one breaks command lines and files.
FIRST = (
    "model.width", "model.heads", "model.ffn_width", "model.dropout", "train.steps",
    "train.batch_tokens", "train.learning_rate",
    "train.seed", "train.checkpoint_every", "train.validate_every", "text.vocab_size",
)  # fmt: skip


def test_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings"]) == 0
    out = capsys.readouterr().out
    names = [
        f"{section}.{each.name}"
        for section in SECTIONS
        for each in list_settings(type(getattr(Config(), section)))
    ]
    assert all(name in out for name in names)
    assert set(FIRST) <= set(names)


def test_one_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "model"]) == 0
    out = capsys.readouterr().out
    assert "model.width" in out
    assert "train.steps" not in out


def test_one_setting_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "model.width", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["path"] == "model.width"
    assert row["default"] == "512"
    assert "an integer" in row["allowed"]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("modle", "model"),
        ("lr", "train.learning_rate"),
        ("train.lr", "train.learning_rate"),
        ("max-tokens", "train.batch_tokens"),
        ("beam", "decode.beam"),
        ("average", "train.average_checkpoints"),
        ("train.", "train"),
    ],
)
def test_unknown_name_suggests_the_nearest(
    written: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown key gets the nearest valid one (eole#81), or the one that it means elsewhere."""
    assert main(["settings", written]) == 2
    line = f"there is no setting or section {written!r}; did you mean {meant}?"
    assert line in capsys.readouterr().err


def test_every_default_can_be_typed_back() -> None:
    """What is shown as the default is accepted by --set, and changes nothing."""
    for row in list_all_settings():
        assert apply_overrides(Config(), [f"{row.path}={row.default}"]) == Config(), row.path


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (("transformer*2", "lstm"), "[transformer*2, lstm]"),
        (1e-9, "1e-09"),
        (3, "3"),
        ("bpe", "bpe"),
    ],
)
def test_values_are_shown_as_typed(value: object, text: str) -> None:
    assert format_value(value) == text


def test_the_page_of_the_documentation_is_current() -> None:
    spec = importlib.util.spec_from_file_location(
        "settings_page", ROOT / "tools" / "settings_page.py"
    )
    assert spec
    assert spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(), "run python tools/settings_page.py"
