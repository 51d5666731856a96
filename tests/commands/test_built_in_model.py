"""The built-in model: the default of every command, and the error without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dragoman
from dragoman.bundle import format as layout
from dragoman.cli import options
from dragoman.cli.app import main
from dragoman.errors import BundleError


@pytest.fixture
def box(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the built-in model by a small one."""
    monkeypatch.setattr(layout, "BOX", bundle)
    return bundle


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "some.de"
    path.write_text("Guten Morgen.\nDas ist ein Haus.\n", encoding="utf-8")
    return path


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([str(each) for each in arguments]) == 0
    return capsys.readouterr().out


def test_commands_use_it_where_no_model_is_named(
    box: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = ("-m", str(box))
    for command, where in (
        (("translate", "Guten Morgen."), named),
        (("score", "--src", str(texts), "--tgt", str(texts)), named),
        (("explain", "--json", "Guten Morgen."), named),
        (("info", "--json"), (str(box),)),
        (("verify",), (str(box),)),
    ):
        assert output(capsys, *command) == output(capsys, *command, *where), command
    found = json.loads(
        output(capsys, "evaluate", "--src", str(texts), "--ref", str(texts), "--json")
    )
    assert found["model"] == str(box)
    page = tmp_path / "page.html"
    output(capsys, "explore", "--html", str(page), "--text", "Guten Morgen.")
    assert "Guten Morgen." in page.read_text(encoding="utf-8")


def test_load_returns_it_by_default(box: Path) -> None:
    expected = dragoman.load(box, device="cpu").translate(["Guten Morgen."])
    assert dragoman.load(device="cpu").translate(["Guten Morgen."]) == expected
    assert dragoman.Translator.load(device="cpu").translate(["Guten Morgen."]) == expected


@pytest.mark.usefixtures("box")
def test_info_shows_its_card(capsys: pytest.CaptureFixture[str]) -> None:
    shown = output(capsys, "info")
    assert "parameters" in shown
    assert "## Licence" in shown
    assert "library_name" not in shown  # the front matter is for programs
    card = output(capsys, "info", "--card")
    assert card.startswith("---\nlibrary_name")


@pytest.mark.usefixtures("box")
def test_a_note_names_it_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["translate", "Guten Morgen."]) == 0
    assert "built-in" not in capsys.readouterr().err
    monkeypatch.setattr(options, "is_terminal", lambda _: True)
    assert main(["translate", "Guten Morgen."]) == 0
    note = "dragoman: using the built-in model, as no other is named; see `dragoman info`"
    assert capsys.readouterr().err.splitlines().count(note) == 1
    for quiet in ("--quiet", "-q"):
        assert main(["translate", "Guten Morgen.", quiet]) == 0
        assert capsys.readouterr().err == ""
    assert main(["translate", "Guten Morgen."]) == 0
    assert "built-in" in capsys.readouterr().err, "--quiet holds for one command"


@pytest.mark.usefixtures("box")
def test_quiet_keeps_warnings(
    texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "is_terminal", lambda _: True)
    assert main(["translate", "--quiet", str(texts)]) == 0
    [line] = capsys.readouterr().err.splitlines()
    assert "warning" in line
    assert "is a file name" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["translate", "Guten Morgen."],
        ["score", "--src", "a", "--tgt", "b"],
        ["explain", "Guten Morgen."],
        ["evaluate", "--src", "a", "--ref", "b"],
        ["explore"],
        ["explore", "--text", "Guten Morgen."],
        ["info"],
        ["verify"],
    ],
)
def test_an_installation_without_it_reports_what_to_do(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(layout, "BOX", tmp_path / "box")
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"found none in {tmp_path / 'box'}; name its directory, such as -m MODEL" in line
    assert "dragoman train" in line


def test_load_without_it_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "BOX", tmp_path / "box")
    for load in (dragoman.load, dragoman.Translator.load):
        with pytest.raises(BundleError, match="no built-in one; found none in"):
            load()


def test_help_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layout, "BOX", tmp_path / "box")
    for command in ("translate", "score", "explain", "evaluate", "info", "verify", "explore"):
        assert main([command, "--help"]) == 0
        assert "built-in" in capsys.readouterr().out


def test_other_commands_still_need_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["predict", "text"], ["generate", "text"], ["export"]):
        assert main(arguments) == 2
        assert "Missing" in capsys.readouterr().err
