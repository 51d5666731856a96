"""`dragoman info` and `dragoman verify`: what a directory is, and whether it is whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dragoman.cli.app import main


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "copy"))


def flip(path: Path, place: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1 << (place % 8)
    path.write_bytes(data)


def test_info_says_what_a_model_is(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(bundle)]) == 0
    out = capsys.readouterr().out
    assert "de to en" in out
    assert "characters" in out
    assert "What differs from the recipe tiny" in out
    assert "model.width" in out
    assert "128" in out, "what the recipe has stands beside"
    assert "model.norm " not in out, "what is as in the recipe is not listed"


def test_info_as_json(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(bundle), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["changed"]["model.width"] == {"value": "16", "was": "128"}
    assert values["recipe"] == "tiny"


def test_the_card(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(bundle), "--card"]) == 0
    assert "# Translator from de to en" in capsys.readouterr().out


def test_a_directory_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert main(["info", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "notes.txt" in err
    assert len(err.splitlines()) == 1


def test_a_path_that_is_not_there_names_a_model_nearby(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(bundle.parent / "my-modle")]) == 2
    assert f"perhaps you mean {bundle}" in capsys.readouterr().err


def test_a_run_that_has_not_finished_says_where_it_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "status.json").write_text(json.dumps({"state": "running", "update": 1200}))
    assert main(["info", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "has not finished" in out
    assert "1200" in out
    assert main(["info", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finished"] is False


def test_a_whole_model_verifies(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(bundle)]) == 0
    assert "every byte is as it was written" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["weights.safetensors", "config.json", "golden.json", "card.md", "text/text.json", "text/shared.model", "manifest.json"]
)
def test_one_flipped_bit_is_found_and_the_file_named(copy: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flip(copy / name, 1001)
    assert main(["verify", str(copy)]) == 65
    captured = capsys.readouterr()
    assert name in captured.out
    assert name in captured.err
    assert main(["verify", str(copy), "--json"]) == 65
    report = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in report["files"] if not each["ok"]] == [name]


def test_a_missing_file_is_named(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "weights.safetensors").unlink()
    assert main(["verify", str(copy)]) == 65
    assert "weights.safetensors" in capsys.readouterr().err


def test_what_is_neither_model_nor_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert "found no manifest.json in it" in capsys.readouterr().err
