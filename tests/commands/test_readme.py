"""The README is run: its commands in order on a small corpus, its Python, its links, its table."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from dragoman.cli.app import app, main

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICK = "--recipe tiny --set train.steps=4 --set train.warmup_steps=1 --set model.width=16 --set model.ffn_width=32 --set text.vocab_size=340"
QUICK += " --set train.checkpoint_every=2 --set train.validate_every=2 --set data.cache_dir=cache --set train.threads=1"
Typed = Callable[[str | bytes], None]


def blocks(language: str) -> list[str]:
    """Find the fenced blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    """Find the README's `dragoman` commands, in order."""
    return [
        line
        for block in blocks("sh")
        for line in block.splitlines()
        if line.startswith("dragoman ")
    ]


def test_it_can_be_acted_on_in_a_minute() -> None:
    assert len(README.splitlines()) <= 150
    assert (
        README.index("make demo")
        < README.index("from dragoman import Translator")
        < README.index("dragoman train")
    )


def test_the_commands_and_the_python_run(
    corpus: Path,
    tmp_path: Path,
    typed: Typed,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The quickstart's result is a test (OpenNMT-py#2602, eole#81); the three-line API comes with it."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.de", "train.en", "dev.de", "dev.en"):
        for copy in (name, name.replace("dev", "test")):
            (tmp_path / copy).write_text(
                (corpus / name).read_text(encoding="utf-8"), encoding="utf-8"
            )
    (tmp_path / "in.txt").write_text("Guten Morgen.\n\nZwei Männer reden.\n", encoding="utf-8")
    seen = []
    for command in commands():
        words, _, outlet = command.partition(" > ")
        words, _, inlet = words.partition(" < ")
        arguments = shlex.split(words.replace("--budget 10m", QUICK))[1:]
        if inlet:
            typed((tmp_path / inlet.strip()).read_bytes())
        assert main(arguments) == 0, f"{command}\n{capsys.readouterr().err}"
        out = capsys.readouterr().out
        if outlet:
            assert len(out.split("\n")) - 1 == 3, "lines in, lines out"
        seen.append(arguments[0])
    assert seen == ["train", "translate", "translate", "evaluate"]
    (python,) = blocks("python")
    exec(compile(python, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("['")
    assert len(python.strip().splitlines()) == 4, "three lines, and an empty one"


def test_the_table_names_every_command() -> None:
    table = set(re.findall(r"^\| `dragoman (\w+)", README, flags=re.MULTILINE))
    registered = {
        command.name or getattr(command.callback, "__name__", "")
        for command in app.registered_commands
    }
    groups = {
        group.typer_instance.info.name for group in app.registered_groups if group.typer_instance
    }
    assert table == registered | groups


def test_the_make_targets_are_there() -> None:
    targets = re.findall(
        r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    for target in re.findall(r"^    make (\w+)", README, flags=re.MULTILINE):
        assert target in targets


def test_the_extras_are_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    for named in re.findall(r"`\[(\w+)\]`", README):
        assert named in extras


@pytest.mark.parametrize(
    "page",
    sorted(
        [
            ROOT / "README.md",
            ROOT / "CONTRIBUTING.md",
            ROOT / "CHANGELOG.md",
            *(ROOT / "docs").glob("*.md"),
        ]
    ),
)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")))
def test_files_that_pages_name_are_there(page: Path) -> None:
    """A page that names a module which moved sends its reader astray."""
    for name in re.findall(
        r"`((?:dragoman|tests|tools|bench)/[\w./]+\.\w+)`", page.read_text(encoding="utf-8")
    ):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
