"""Every command works with file names that are not UTF-8."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from dragoman.cli.app import main
from dragoman.storage.atomic_and_safe_file_io import native_path
from dragoman.storage.manifest import canonical_json, read_json

ODD = os.fsdecode(b"caf\xe9-\xff")


@pytest.fixture
def folder(tmp_path: Path, bundle: Path, corpus: Path) -> Path:
    """Write a directory with a model and texts whose names are not UTF-8."""
    directory = tmp_path / ODD
    try:
        directory.mkdir()
    except (OSError, UnicodeError):
        pytest.skip("this file system takes UTF-8 names alone")
    shutil.copytree(bundle, directory / f"m{ODD}")
    for side in ("de", "en"):
        shutil.copy(corpus / f"dev.{side}", directory / f"{ODD}.{side}")
    return directory


COMMANDS = [
    "translate -m MODEL Hallo",
    "translate -m MODEL --json Hallo",
    "translate -m MODEL --input SRC --output OUT",
    "translate -m MODEL --shortlist SRC TGT Hallo",
    "score -m MODEL --src SRC --tgt TGT",
    "evaluate MODEL --src SRC --ref TGT --hyp OUT",
    "evaluate MODEL --src SRC --ref TGT --json",
    "compare MODEL TGT --src SRC --ref TGT",
    "compare SRC TGT --ref TGT --json",
    "info MODEL",
    "info MODEL --json",
    "info MODEL --card",
    "verify MODEL",
    "verify MODEL --json",
    "data check --src SRC --tgt TGT",
    "data check --src SRC --tgt TGT --json",
    "export MODEL --to ctranslate2",
    "export MODEL --to huggingface -o OUT",
]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_take_names_that_are_not_utf_8(
    line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "ctranslate2" in line:
        pytest.importorskip("ctranslate2")
    if "huggingface" in line:
        pytest.importorskip("transformers")
    names = {"MODEL": f"m{ODD}", "SRC": f"{ODD}.de", "TGT": f"{ODD}.en", "OUT": f"out{ODD}"}
    words = [str(folder / names[word]) if word in names else word for word in line.split()]
    code = main(words)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    captured.out.encode()  # what is shown is text
    captured.err.encode()
    if "OUT" in line:
        assert (folder / names["OUT"]).exists()
    if line.endswith("--json") and line.split()[0] in ("info", "evaluate"):
        assert json.loads(captured.out)["model"] == str(folder / names["MODEL"]), (
            "JSON has the name itself"
        )


@pytest.mark.parametrize(
    "line",
    [
        "translate -m MODEL x",
        "evaluate MODEL --src SRC --ref TGT",
        "verify MODEL",
        "train --src SRC --tgt TGT -o OUT",
    ],
)
def test_errors_show_such_names(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tmp_path / ODD) if word.isupper() else word for word in line.split()]
    assert main(words) == 2
    err = capsys.readouterr().err
    err.encode()
    assert "caf\\udce9-\\udcff" in err
    assert len(err.splitlines()) == 1


def test_training_in_such_a_directory_continues_from_its_checkpoints(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [
        "text.tokenizer=characters",
        "model.width=16",
        "model.heads=2",
        "model.ffn_width=32",
        "model.encoder=[transformer*1]",
    ]
    settings += [
        "model.decoder=[transformer*1]",
        "train.batch_tokens=200",
        "train.validate_every=2",
        f"data.cache_dir={folder / 'cache'}",
    ]
    out = folder / f"run{ODD}"
    words = [
        "train",
        "--src",
        str(folder / f"{ODD}.de"),
        "--tgt",
        str(folder / f"{ODD}.en"),
        "--recipe",
        "tiny",
        "-o",
        str(out),
    ]
    for setting in settings:
        words += ["--set", setting]
    assert main([*words, "--set", "train.steps=2"]) == 0, capsys.readouterr().err
    assert main(["train", "--resume", "-o", str(out), "--set", "train.steps=4"]) == 0, (
        capsys.readouterr().err
    )
    assert json.loads((out / "training" / "status.json").read_text())["step"] == 4
    assert main(["average", str(out), "-o", str(folder / f"avg{ODD}"), "--last", "1"]) == 0, (
        capsys.readouterr().err
    )
    assert main(["translate", "-m", str(out), "Hallo"]) == 0


def test_json_keeps_names(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(canonical_json({"file": ODD, "text": "Grüße \U0001f600"}))
    assert read_json(path) == {"file": ODD, "text": "Grüße \U0001f600"}
    assert "Grüße \U0001f600".encode() in path.read_bytes()


def test_libraries_that_want_utf_8_get_it(folder: Path, tmp_path: Path) -> None:
    with native_path(folder / f"{ODD}.de") as name:
        name.encode()
        assert Path(name).read_bytes() == (folder / f"{ODD}.de").read_bytes()
    assert not os.path.lexists(name)
    with native_path(tmp_path) as name:
        assert name == str(tmp_path)
