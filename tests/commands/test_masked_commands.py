"""`dragoman train --task language` with masks, and `dragoman predict` that fills them in."""

from __future__ import annotations

import contextlib
import io
import json
import random
from pathlib import Path

import pytest

import dragoman
from dragoman.cli.app import main
from dragoman.errors import ConfigError, DataError
from dragoman.inference.predictors.language_model import LanguageModel
from dragoman.inference.predictors.masked_language_model import MaskedLanguageModel

ANIMALS = {"cat": "milk", "dog": "bones", "cow": "grass", "bee": "honey"}


def write_text(path: Path, repeats: int) -> str:
    """Write sentences whose last word follows from the second."""
    lines = [f"the {animal} likes {food} ." for animal, food in ANIMALS.items()] * repeats
    random.Random(repeats).shuffle(lines)  # or a line would follow from the one before it
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


@pytest.fixture(scope="module", params=["devlin2019", "yang2019", "lan2020_lm"])
def masked_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A miniature of each recipe, trained on generated text."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    settings = [
        "text.tokenizer=words",
        "language.segment=12",
        "train.steps=300",
        "train.batch_tokens=384",
        "train.precision=float32",
        "model.dropout=0",
        "language.input_dropout=0",
    ]
    command = ["train", "--task", "language", "--recipe", request.param, "--mini"]
    command += ["--train", write_text(folder / "train.txt", 100)]
    command += ["--valid", write_text(folder / "valid.txt", 10)]
    command += [f"--set={each}" for each in settings]
    with contextlib.redirect_stderr(io.StringIO()) as err:
        assert main([*command, "--out", str(folder / "model")]) == 0
    assert f'try: dragoman predict -m {folder / "model"} "… <mask> …"' in err.getvalue()
    return folder / "model"


def test_predict_fills_in_learned_tokens(
    masked_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["predict", "-m", str(masked_model)]
    texts = [f"the {animal} likes <mask> ." for animal in ANIMALS]
    assert main([*command, *texts]) == 0
    filled = capsys.readouterr().out.splitlines()
    assert filled == [f"the {animal} likes {food} ." for animal, food in ANIMALS.items()]
    assert main([*command, "--top", "3", "the [MASK] likes honey ."]) == 0
    best, probability, *rest = capsys.readouterr().out.split()
    assert best == "bee"
    assert float(probability) > 0.5
    assert len(rest) == 4
    assert main([*command, "--json", "the cow likes <mask> .", "nothing here"]) == 0
    output = capsys.readouterr()
    found, without = map(json.loads, output.out.splitlines())
    assert found["masks"][0][0]["token"] == "grass"
    assert found["filled"] == "the cow likes grass ."
    assert (without["filled"], without["masks"]) == ("nothing here", [])
    assert "no <mask>" in without["notes"][0]


def test_evaluate_reports_the_objectives_metrics(
    masked_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    test = write_text(tmp_path / "test.txt", 5)
    assert main(["evaluate", str(masked_model), "--test", test, "--json"]) == 0
    shown = capsys.readouterr().out
    assert "pseudo_perplexity" in shown
    assert ("order_accuracy" in shown) == ("lan2020_lm" in str(masked_model))
    assert main(["info", str(masked_model)]) == 0
    assert "language, run by dragoman predict" in capsys.readouterr().out
    assert main(["verify", str(masked_model)]) == 0


def test_the_library_fills_in_and_scores(masked_model: Path) -> None:
    model = dragoman.load(masked_model)
    assert isinstance(model, MaskedLanguageModel)
    assert isinstance(LanguageModel.load(masked_model), MaskedLanguageModel)
    filled = model.fill_mask("the dog likes <mask> .", top=2)
    assert filled.text == "the dog likes bones ."
    assert [len(guesses) for guesses in filled.guesses] == [2]
    right, wrong = model.score(["the bee likes honey .", "the bee likes grass ."])
    assert right.log_prob > wrong.log_prob
    assert "1 masks" in repr(model.predict(["the <mask> likes milk ."])[0])
    with pytest.raises(DataError, match="must have a <mask>; found 'the dog'"):
        model.fill_mask("the dog")
    with pytest.raises(DataError, match="must be text; found int 3"):
        model.fill_mask(3)
    with pytest.raises(ConfigError, match="found 0"):
        model.fill_mask("<mask>", top=0)
    with pytest.raises(
        ConfigError, match=r"must be trained with language\.objective=causal; found"
    ):
        model.generate("the")


def test_generate_names_the_command_that_runs_it(
    masked_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "-m", str(masked_model), "--prompt", "the"]) == 2
    assert f"use `dragoman predict -m {masked_model}`" in capsys.readouterr().err
    assert "fill_mask(" in (masked_model / "card.md").read_text(encoding="utf-8")
