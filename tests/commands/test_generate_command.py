"""`dragoman train --task language` and `dragoman generate`, end to end."""

from __future__ import annotations

import io
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from language_kit import lines_of

import dragoman
from dragoman.cli.app import main

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A miniature of Transformer-XL, trained on generated text."""
    folder = tmp_path_factory.mktemp("language")
    (folder / "train.txt").write_text("".join(f"{line}\n" for line in lines_of(1000)))
    (folder / "valid.txt").write_text("".join(f"{line}\n" for line in lines_of(60, seed=1)))
    files = ["--train", str(folder / "train.txt"), "--valid", str(folder / "valid.txt")]
    settings = [f"--set={each}" for each in ("train.steps=60", "train.precision=float32")]
    command = ["train", "--task", "language", "--recipe", "dai2019_lm", "--mini", *settings]
    assert main([*command, *files, "--out", str(folder / "model")]) == 0
    return folder / "model"


def test_the_model_learned_the_text(language_model: Path) -> None:
    model = dragoman.load(language_model)
    likely, unlikely = model.score(["a b e f a b", "a h a h a h"])
    assert likely.log_prob > unlikely.log_prob + 3


def test_generate_prints_the_prompt_and_its_continuation(
    language_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "-m", str(language_model), "--prompt", "a b", "--max-tokens", "12"]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert first.startswith("a b")
    assert main([*command, "--seed", "1"]) == 0
    assert capsys.readouterr().out == first
    assert main([*command, "--n", "3", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == 3
    assert found[0]["prompt"] + found[0]["text"] + "\n" == first
    assert all(each["tokens"] == 12 and each["log_prob"] < 0 for each in found)
    assert main([*command, "--n", "2", "--temperature", "0"]) == 0
    both = capsys.readouterr().out.rstrip("\n")
    assert both[: len(both) // 2 - 1] == both[len(both) // 2 + 1 :]


def test_the_prompt_may_come_from_standard_input(language_model: Path, dragoman: Run) -> None:
    done = dragoman("generate", "-m", language_model, "--prompt", "-", input="b e\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("b e\n")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--top-p", "0"], "found 0.0"),
        (["--temperature", "nan"], "found 'nan'"),
        (["--max-tokens", "0"], "found '0'"),
        (["--n", "0"], "found '0'"),
        (["--regex", "a", "--regex", "b"], "--regex is given at most once here; leave out"),
        (["-m", "another"], "--model is given at most once here; leave out the others"),
    ],
)
def test_bad_values_are_one_line(
    language_model: Path, options: list[str], found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "-m", str(language_model), *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert found in lines[0]


def test_a_translation_model_cannot_generate(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "-m", str(bundle)]) == 2
    error = capsys.readouterr().err
    assert "needs a language model; found" in error
    assert "a model of the task translate; use `dragoman translate" in error


def test_generate_fulfils_constraints(
    language_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "-m", str(language_model), "--prompt", "a b", "--max-tokens", "12"]
    assert main([*command, "--regex", "(e|f)( [a-h]){3,5}", "--require", "g", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert re.fullmatch("(e|f)( [a-h]){3,5}", found["text"].removeprefix(" "))
    assert "g" in found["text"]
    assert found["constraints"] == ["require g", "regex (e|f)( [a-h]){3,5}"]
    assert main([*command, "--require", "x"]) == 2
    assert "must hold the characters" in capsys.readouterr().err
    assert main([*command, "--constraint", "miror"]) == 2
    assert "found 'miror'; did you mean mirror?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"caf\xe9\n", "line 1 of standard input must be UTF-8; found the byte 0xe9"),
        ("a text\n".encode("utf-16"), "standard input must be UTF-8; found UTF-16"),
        (b"a good\0film\n", "line 1 of standard input must be text; found a NUL byte"),
    ],
)
def test_a_prompt_that_is_no_text_is_an_error(
    data: bytes, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"task": "language"}')
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert main(["generate", "-m", str(tmp_path), "--prompt", "-"]) == 2
    assert found in capsys.readouterr().err
