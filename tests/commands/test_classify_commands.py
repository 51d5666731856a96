"""Classification from the command line: train, resume, predict, evaluate and verify a
classifier.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dragoman.cli.app import main
from tests.classify_kit import make_fields


def write_jsonl(path: Path, count: int, *, seed: int, several: bool = False) -> str:
    lines = [json.dumps(each) for each in make_fields(count, seed=seed, several=several)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def train(folder: Path, recipe: str, *more: str, several: bool = False) -> Path:
    """Train the miniature of a recipe on generated texts."""
    out = folder / recipe
    command = ["train", "--task", "classify", "--recipe", recipe, "--mini"]
    command += ["--train", write_jsonl(folder / "train.jsonl", 200, seed=0, several=several)]
    command += ["--valid", write_jsonl(folder / "valid.jsonl", 60, seed=1, several=several)]
    settings = ["train.device=cpu", "train.threads=1", "train.steps=40", *more]
    command += [part for each in settings for part in ("--set", each)]
    assert main([*command, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def han(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small hierarchical classifier."""
    return train(
        tmp_path_factory.mktemp("han"), "yang2016", "classify.ngrams=2", "train.checkpoint_every=20"
    )


def test_a_classifier_is_trained_verified_and_predicts(
    han: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(han)]) == 0
    capsys.readouterr()
    text = "The match was very old. It was some goal."
    assert main(["predict", "-m", str(han), "--json", text]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["label"] == "sport"
    assert found["probability"] > 0.5
    assert main(["predict", "-m", str(han), "--explain", text]) == 0
    assert "goal" in capsys.readouterr().out


def test_a_text_without_words_does_not_end_the_explanations(
    han: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["predict", "-m", str(han), "--explain", "--json"]
    assert main([*command, "a goal", " ", "a match"]) == 0
    output = capsys.readouterr()
    rows = [json.loads(line) for line in output.out.splitlines()]
    assert [(row["line"], "label" in row) for row in rows] == [(1, True), (2, False), (3, True)]
    assert "line 2 is not explained: a text to explain must hold words" in output.err
    assert main([*command, ""]) == 2


def test_a_classifier_is_evaluated(
    han: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    test = write_jsonl(tmp_path / "test.jsonl", 80, seed=2)
    capsys.readouterr()
    assert main(["evaluate", str(han), "--test", test, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    scores = json.dumps(found)
    assert "accuracy" in scores
    assert "classes:2|exact" in scores
    assert [row["label"] for row in found["table"]] == ["money", "sport"]
    assert sum(row["support"] for row in found["table"]) == 80
    assert main(["evaluate", str(han), "--test", test]) == 0
    shown = capsys.readouterr().out
    assert "precision" in shown
    assert "sport" in shown
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"text": "a goal", "label": "sport"}\n{"text": "rain", "label": "weather"}\n')
    assert main(["evaluate", str(han), "--test", str(wrong)]) == 2
    message = capsys.readouterr().err
    assert "line 2" in message
    assert "weather" in message


def test_a_resumed_run_ends_as_if_it_had_not_stopped(han: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(han, again)
    (again / "manifest.json").unlink()  # written last: without it there is no model yet
    removed = list((again / "training").rglob("step-00000040"))
    assert removed
    for each in removed:
        shutil.rmtree(each)
    assert main(["train", "--resume", "--out", str(again)]) == 0
    weights = "weights.safetensors"
    assert (again / weights).read_bytes() == (han / weights).read_bytes()


def test_several_labels_get_tuned_thresholds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["classify.tune_threshold=labels", "classify.ngrams=2"]
    out = train(tmp_path, "mullenbach2018", *settings, several=True)
    capsys.readouterr()
    texts = ["a goal of the team", "the bank and some goal", "very new today"]
    assert main(["predict", "-m", str(out), "--json", *texts]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(isinstance(each["labels"], list) for each in found)
    assert "sport" in found[0]["labels"]
    test, hyp = write_jsonl(tmp_path / "test.jsonl", 9, seed=2, several=True), tmp_path / "hyp.tsv"
    options = ["--hyp", str(hyp), "--set", "classify.threshold=0"]
    assert main(["evaluate", str(out), "--test", test, *options]) == 0
    predicted = [line.split("\t")[0] for line in hyp.read_text().splitlines()]
    assert {frozenset(names.split(",")) for names in predicted} == {frozenset({"money", "sport"})}
