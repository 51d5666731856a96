"""Commands on a classifier: predict, evaluate, info, verify, and what it cannot do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dragoman.cli.app import main
from tests.classifier_kit import reviews, write_classifier


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("models") / "han", hierarchical=True)


@pytest.fixture(scope="module")
def test_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "test.jsonl"
    path.write_text("".join(json.dumps(dict(each.fields)) + "\n" for each in reviews(60, seed=4)))
    return path


def test_predict(model, test_file, tmp_path, capsys):
    assert main(["predict", "-m", str(model), "The film was wonderful.", "Dull!"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [(label, text) for label, _, text in lines] == [
        ("positive", "The film was wonderful."),
        ("negative", "Dull!"),
    ]
    assert all(0.5 < float(probability) <= 1 for _, probability, _ in lines)
    assert main(["predict", "-m", str(model), "-i", str(test_file), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == 60
    assert [each["line"] for each in found] == list(range(1, 61))
    for each in found:
        assert sum(each["probabilities"].values()) == pytest.approx(1, abs=1e-4)
        assert each["labels"] == [each["label"]]


def test_explain_shows_both_levels(model, tmp_path, capsys):
    text = "It was a story. The film is awful, and it was the film."
    assert main(["predict", "-m", str(model), "--explain", text]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\d\.\d{3}  \+0\.\d{3}  2\. The film is awful", out)
    assert re.search(r"\d\.\d{3}  \+0\.\d{3}  █{10}  awful  \(sentence 2\)", out)
    page = tmp_path / "page.html"
    assert main(["predict", "-m", str(model), "--html", str(page), text]) == 0
    assert page.read_text().count('<div class="sentence"') == 2


def test_evaluate_prints_the_tasks_metrics(model, test_file, tmp_path, capsys):
    hyp = tmp_path / "predictions.tsv"
    arguments = ["evaluate", str(model), "--test", str(test_file), "--device", "cpu"]
    assert main([*arguments, "--hyp", str(hyp)]) == 0
    out = capsys.readouterr().out
    table = {line.split()[0]: float(line.split()[1]) for line in out.splitlines()[1:5]}
    predicted = [line.split("\t")[0] for line in hyp.read_text().splitlines()]
    expected = [each.text("label") for each in reviews(60, seed=4)]
    right = sum(a == b for a, b in zip(predicted, expected, strict=True)) / 60
    assert table["accuracy"] == pytest.approx(right, abs=1e-3)
    assert "classes:3|exact|dragoman:" in out
    assert re.search(r"60 examples in \d+\.\d s", out)
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["scores"]["accuracy"]["score"] == pytest.approx(right)
    assert found["examples"] == 60
    assert found["loss"] > 0


def test_predictions_of_an_evaluation_use_its_settings(model, tmp_path, capsys):
    path, hyp = tmp_path / "test.jsonl", tmp_path / "predictions.tsv"
    record = {"text": "Dull!", "summary": "The film was wonderful.", "label": "positive"}
    path.write_text(f"{json.dumps(record)}\n{{\n")
    options = ["--set", "data.on_bad_line=skip", "--set", "data.text_field=summary"]
    arguments = ["evaluate", str(model), "--test", str(path), "--hyp", str(hyp), *options, "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["scores"]["accuracy"]["score"] == 1
    [line] = hyp.read_text().splitlines()
    assert line.startswith("positive\t")
    assert line.endswith("\tThe film was wonderful.")


def test_info_and_verify(model, capsys):
    assert main(["info", str(model)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"task +classify, run by dragoman predict", out)
    assert re.search(r"text +22 words, 3 labels", out)
    assert "classify.hierarchical  true" in out
    assert "Engines" not in out
    assert main(["info", str(model), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["task"] == "classify"
    assert found["engines"] == []
    assert main(["info", str(model), "--card"]) == 0
    assert "pipeline_tag: text-classification" in capsys.readouterr().out
    assert main(["verify", str(model)]) == 0
    assert "all checksums match" in capsys.readouterr().out


def test_doctor(model, test_file, capsys):
    assert main(["doctor", str(model)]) == 0
    assert "6 checks passed" in capsys.readouterr().out
    assert main(["doctor", str(model), "--src", str(test_file)]) == 2
    err = capsys.readouterr().err
    assert "--src is for translators; found it for a model of the task classify" in err


# Mistakes


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ([], "the task classify is evaluated on labelled files; found none; pass --test FILE"),
        (
            ["--src", "a", "--ref", "b"],
            "--src is for translators; found it for a model of the task classify",
        ),
        (["--test", "FILE", "--beam", "2"], "--beam is for translators"),
        (["--test", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--hyp", "h"], "--hyp writes the predictions of --test; found no --test"),
        (["--test", "FILE", "--lowercase"], "--lowercase is for translators; found it for a model"),
        (["--test", "FILE", "--length-penalty", "0"], "--length-penalty is for translators; found"),
        (["--test", "FILE", "--tgt-lang", "de"], "--tgt-lang is for translators; found it for a"),
        (["--test", "FILE", "--hyp", "FILE"], "--hyp"),
        (
            ["--test", "FILE", "--set", "model.width=3"],
            "must change a setting of classify or data in an evaluation; found 'model.width=3'",
        ),
    ],
)
def test_mistakes_of_evaluate(model, test_file, capsys, options, found):
    given = [str(test_file) if each == "FILE" else each for each in options]
    assert main(["evaluate", str(model), *given]) == 2
    assert found in capsys.readouterr().err
    assert len(test_file.read_text().splitlines()) == 60


def test_a_label_that_training_did_not_have_names_its_line(model, tmp_path, capsys):
    path = tmp_path / "test.csv"
    path.write_text("text,label\ngood film,positive\nbad film,horrible\n")
    assert main(["evaluate", str(model), "--test", str(path)]) == 2
    err = capsys.readouterr().err
    assert "test.csv line 3 must have a label of the training data; found 'horrible'" in err


def test_an_empty_test_file(model, tmp_path, capsys):
    path = tmp_path / "test.jsonl"
    path.write_text("")
    assert main(["evaluate", str(model), "--test", str(path)]) == 2
    assert "test.jsonl must hold examples to score; found none" in capsys.readouterr().err


def test_a_translator_needs_source_and_references(bundle, test_file, capsys):
    for options, found in (
        ([], "found no --src and --ref"),
        (["--src", str(test_file)], "found no --ref"),
        (["--test", str(test_file), "--src", "a", "--ref", "b"], "found --test"),
    ):
        assert main(["evaluate", str(bundle), *options]) == 2
        assert f"a translator is evaluated on --src and --ref; {found}" in capsys.readouterr().err
