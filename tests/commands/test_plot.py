"""`dragoman plot` as a user runs it: six figures, several models, and invalid arguments."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from dragoman.cli.app import main
from tests.classifier_kit import reviews, write_classifier

ROWS = [("Guten Morgen.", "Good morning."), ("Ein Haus.", "A house."), ("Zwei", "Two")] * 9


def write_log(model: Path, steps: int = 40) -> None:
    """Write a training log beside a model."""
    (model / "training").mkdir(exist_ok=True)
    with open(model / "training" / "log.jsonl", "w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            nll = 2 + 3 * math.exp(-step / 9)
            record = {"step": step, "lr": 1e-3, "nll": nll, "grad_norm": 1.0, "tokens": 9}
            file.write(json.dumps(record | {"seconds": 0.1}) + "\n")
            if step % 10 == 0:
                valid = {"event": "validation", "step": step, "loss": nll, "bleu": step / 2}
                file.write(json.dumps(valid) + "\n")


@pytest.fixture(scope="module")
def model(bundle, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plotted") / "model"
    shutil.copytree(bundle, path)
    write_log(path)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("test")
    for column, name in enumerate(("src", "ref")):
        text = "".join(f"{row[column]}\n" for row in ROWS)
        (folder / name).write_text(text, encoding="utf-8")
    return ["--test", str(folder / "src"), "--ref", str(folder / "ref")]


def test_all_figures_of_one_model(model, files, tmp_path, capsys) -> None:
    out = tmp_path / "figures"
    assert main(["plot", str(model), "--out", str(out), "--format", "svg", *files]) == 0
    captured = capsys.readouterr()
    names = ["curves", "positions", "length", "entropy", "calibration", "distribution"]
    assert captured.out.splitlines() == [str(out / f"{name}.svg") for name in names]
    texts = {name: (out / f"{name}.svg").read_text(encoding="utf-8") for name in names}
    assert "best 20.0 at step 40" in texts["curves"]
    assert "Sinusoidal positions" in texts["positions"]
    assert "source length in words" in texts["length"]
    assert "Encoder self-attention" in texts["entropy"]
    assert "ECE" in texts["calibration"]
    assert "target, label smoothing" in texts["distribution"]
    assert "expected calibration error" in captured.err


def test_curves_of_a_run_and_of_several_models(model, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_log(run, 30)
    (run / "training" / "status.json").write_text("{}", encoding="utf-8")
    file = tmp_path / "both.pdf"
    arguments = ["plot", str(model), str(run), "--what", "curves", "--out", str(file)]
    assert main([*arguments, "--label", "一", "--label", "two"]) == 0
    assert file.read_bytes().startswith(b"%PDF")
    capsys.readouterr()
    assert main(["plot", str(run), "--what", "entropy", "--out", str(tmp_path / "e.png")]) == 2
    assert "the run has not written a model yet" in capsys.readouterr().err


def test_a_classifier_has_its_figures(tmp_path, capsys) -> None:
    model = write_classifier(tmp_path / "model")
    test = tmp_path / "test.jsonl"
    test.write_text("".join(json.dumps(dict(each.fields)) + "\n" for each in reviews(30, seed=4)))
    arguments = ["plot", str(model), "--out", str(tmp_path / "figures"), "--test", str(test)]
    assert main([*arguments, "--what", "calibration", "--what", "length"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [str(tmp_path / "figures" / "calibration.png")]
    assert "no figure of length: BLEU is of translation models" in captured.err
    assert "over 30 labels" in captured.err


def test_plots_that_need_data_report_it(model, tmp_path, capsys) -> None:
    for name in ("length", "calibration", "distribution"):
        assert main(["plot", str(model), "--what", name, "--out", str(tmp_path / "a.png")]) == 2
        assert "pass --test and --ref" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--what", "curve"], "--what must be curves, positions"),
        (["--format", "gif"], "--format must be png, svg or pdf; found 'gif'"),
        (["--out", "a.gif"], "--out must end in .png, .svg or .pdf; found a.gif"),
        (["--out", "a.png"], "--out must be a directory for several figures; found the file a.png"),
        (["--what", "curves", "--out", "a.png", "--format", "pdf"], "found pdf and a.png"),
        (["--out", "no/where/at"], "--out must be in an existing directory; found no no/where"),
        (["--what", "curves", "--out", "no/a.png"], "--out must be in an existing directory"),
        (["--label", "a", "--label", "b"], "--label must be given once for each model; found 2"),
        (["--test", "missing"], "missing"),
        (["--test", __file__], "--test and --ref belong together"),
    ],
)
def test_invalid_arguments_are_one_line(
    model, capsys, arguments, message, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plot", str(model), *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_damaged_model_is_reported_before_anything_is_written(model, tmp_path, capsys) -> None:
    damaged, out = tmp_path / "damaged", tmp_path / "figures"
    shutil.copytree(model, damaged)
    (damaged / "config.json").write_text("{")
    assert main(["plot", str(damaged), "--out", str(out)]) == 65
    assert "config.json must be as it was written" in capsys.readouterr().err
    assert not out.exists()


def test_a_reason_names_its_model_if_there_are_several(model, files, tmp_path, capsys) -> None:
    labels = write_classifier(tmp_path / "labels")
    command = ["plot", str(model), str(labels), "--out", str(tmp_path / "out"), *files]
    assert main([*command, "--what", "curves", "--what", "length"]) == 0
    assert "no figure of length: labels: BLEU is of translation" in capsys.readouterr().err


def test_an_empty_test_set_is_an_error(tmp_path, capsys) -> None:
    labels = write_classifier(tmp_path / "labels")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    command = ["plot", str(labels), "--what", "calibration", "--test", str(empty)]
    assert main([*command, "--out", str(tmp_path / "a.png")]) == 2
    assert "empty.jsonl must hold examples to score; found none" in capsys.readouterr().err
