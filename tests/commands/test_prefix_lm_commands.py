"""A prefix LM by commands: train, resume, translate, explain, verify, export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import dragoman
from dragoman.cli.app import main

WORDS = ["eins", "zwei", "drei", "vier", "acht"]


@pytest.fixture(scope="module")
def prefix_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A miniature of dong2019 that was stopped and resumed."""
    folder = tmp_path_factory.mktemp("prefix")
    source = [f"{one} {two}" for one in WORDS for two in WORDS] * 8
    for name, lines in (("src", source), ("tgt", [line.upper() for line in source])):
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    command = ["train", "--recipe", "dong2019", "--mini", "--out", str(folder / "model")]
    command += ["--set", "train.checkpoint_every=20", "--set", "train.validate_every=20"]
    files = ["--src", str(folder / "src"), "--tgt", str(folder / "tgt")]
    assert main([*command, *files, "--set", "train.steps=20"]) == 0
    assert main([*command, *files, "--set", "train.steps=60", "--resume"]) == 0
    return folder / "model"


def translate(model: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    texts = ["eins zwei", "drei", "vier acht eins zwei"]
    assert main(["translate", "-m", str(model), *options, *texts]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    "options", [["--beam", "1"], ["--beam", "4"], ["--sample", "--seed", "3"]], ids=str
)
def test_every_search_runs_and_batches_change_nothing(
    options: list[str], prefix_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = translate(prefix_model, capsys, *options)
    assert len(found) == 3
    assert translate(prefix_model, capsys, *options, "--batch-size", "1") == found


def test_it_is_explained_and_verified(
    prefix_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = json.loads(translate(prefix_model, capsys, "--json")[0])
    assert first["alignment"] is not None
    explanation = dragoman.Translator.load(prefix_model).explain("eins zwei")
    assert {"encoder.0.self", "decoder.0.cross", "decoder.1.self"} <= set(explanation.attentions)
    assert main(["verify", str(prefix_model)]) == 0
    assert main(["info", str(prefix_model)]) == 0
    assert "prefix_lm" in (prefix_model / "config.json").read_text(encoding="utf-8")


def test_exports_are_rejected_by_name(
    prefix_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(prefix_model, tmp_path / "model")
    assert main(["export", str(copy), "--to", "huggingface", "--out", str(tmp_path / "x")]) == 2
    assert "found model.architecture=prefix_lm" in capsys.readouterr().err
