"""Taggers from the command line: train, resume, predict, load, and mistakes in the files."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

import dragoman
from dragoman.cli.app import main
from dragoman.inference.predictors.tagger import Tagger
from tests.tagging_kit import make_records

SMALL = (
    *("--mini", "--set", "train.batch_tokens=128", "--set", "train.threads=1"),
    *("--set", "train.validate_every=40", "--set", "train.checkpoint_every=40"),
)


def write_conll(path: Path, count: int, seed: int) -> Path:
    """Write sentences in three columns: token, part of speech and entity tag."""
    lines: list[str] = []
    for record in make_records(count, seed):
        columns = (record.fields[name] for name in ("tokens", "pos", "tags"))
        lines += [" ".join(row) for row in zip(*columns, strict=True)]
        lines.append("")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a tagger in two parts: 40 steps, then resumed to 120."""
    folder = tmp_path_factory.mktemp("tagging")
    train = write_conll(folder / "train.conll", 120, seed=1)
    valid = write_conll(folder / "valid.conll", 30, seed=2)
    write_conll(folder / "test.conll", 30, seed=3)
    command = ["train", "--task", "tag", "--train", str(train), "--valid", str(valid), *SMALL]
    out = ["--out", str(folder / "model")]
    assert main([*command, "--set", "train.steps=40", *out]) == 0
    assert main([*command, "--set", "train.steps=120", "--resume", *out]) == 0
    return folder


def test_a_resumed_run_has_learned(folder: Path) -> None:
    card = (folder / "model" / "card.md").read_text(encoding="utf-8")
    assert "rules:conlleval" in card
    tagger = dragoman.load(folder / "model", device="cpu")
    assert isinstance(tagger, Tagger)
    (found,) = tagger.predict(["Anna Meier walks in Bonn West."])
    assert found.tags == ("B-PER", "I-PER", "O", "O", "B-LOC", "I-LOC", "O")


@pytest.mark.parametrize(("name", "found"), [("a.txt", "ends in .txt"), ("a", "without an end")])
def test_the_name_of_a_file_must_end_in_its_format(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, found: str
) -> None:
    path = tmp_path / name
    path.write_bytes((folder / "test.conll").read_bytes())
    assert main(["evaluate", str(folder / "model"), "--test", str(path)]) == 2
    assert f"{found}; rename it to end in .conll, .conllu or .jsonl" in capsys.readouterr().err


def test_texts_are_tagged_in_order(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(folder / "model")
    assert main(["predict", "-m", model, "--device", "cpu", "Emil sees", "in Celle"]) == 0
    assert capsys.readouterr().out == "Emil/B-PER sees/O\nin/O Celle/B-LOC\n"


@pytest.mark.parametrize("source", [[], ["--input", "PIPE"]])
def test_a_line_of_an_open_pipe_is_tagged_before_the_next_is_written(
    folder: Path, tmp_path: Path, source: list[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    given = [str(pipe) if each == "PIPE" else each for each in source]
    command = [sys.executable, "-m", "dragoman", "predict", "-m", str(folder / "model"), *given]
    with subprocess.Popen(
        [*command, "--device", "cpu"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with open(pipe, "w", encoding="utf-8") if source else process.stdin as text:
            for line, tagged in (("Emil sees", "Emil/B-PER sees/O"), ("Emil", "Emil/B-PER")):
                text.write(f"{line}\n")
                text.flush()
                assert select.select([process.stdout], [], [], 60)[0], "it waits for more lines"
                assert process.stdout.readline() == f"{tagged}\n"
    assert process.returncode == 0


def test_several_labels_are_for_models_with_labels(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", "-m", str(folder / "model"), "--top", "5", "Emil sees"]) == 2
    found = "choose among labels or tokens; found a model of the task tag; leave it out"
    assert found in capsys.readouterr().err


def test_conll_files_are_tagged_by_their_tokens(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, test = str(folder / "model"), str(folder / "test.conll")
    assert main(["predict", "-m", model, "--device", "cpu", "--json", "--input", test]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    records = make_records(30, seed=3)
    assert [row["tokens"] for row in rows] == [record.fields["tokens"] for record in records]
    right = [
        tag == other
        for row, record in zip(rows, records, strict=True)
        for tag, other in zip(row["tags"], record.fields["tags"], strict=True)
    ]
    assert sum(right) / len(right) > 0.9


def test_a_test_file_is_scored(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, test = str(folder / "model"), str(folder / "test.conll")
    assert main(["evaluate", model, "--test", test, "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["examples"] == 30
    assert found["scores"]["f1"]["score"] > 0.9
    assert "rules:conlleval" in found["scores"]["f1"]["signature"]
    assert set(found["scores"]) == {"accuracy", "precision", "recall", "f1"}


def test_a_bad_line_is_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.conll"
    path.write_text("Anna X B-PER\nsees O\n\n", encoding="utf-8")
    out = tmp_path / "model"
    assert main(["train", "--task", "tag", "--train", str(path), *SMALL, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert "bad.conll line 2 must have 3 columns" in error
    assert "found 2" in error
    assert not (out / "weights.safetensors").exists()
