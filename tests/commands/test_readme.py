"""The pages are run: README and tutorial on a small corpus; the FAQ's commands are parsed; links
are followed.
"""

from __future__ import annotations

import itertools
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from dragoman.cli.app import app, main
from dragoman.config import read_config
from dragoman.recipes.catalogue import recipes_of

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README, README_ZH, TUTORIAL, FAQ = (
    ROOT / "README.md",
    ROOT / "README.zh.md",
    DOCS / "tutorial.md",
    DOCS / "faq.md",
)
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
REPOSITORY = "https://github.com/dragoman-nmt/dragoman/blob/main/"
PICTURES = "https://raw.githubusercontent.com/dragoman-nmt/dragoman/main/"
QUICK = (
    "--recipe tiny --set train.steps=4 --set train.warmup_steps=1 --set model.width=16 --set "
    "model.ffn_width=32"
)
QUICK += (
    " --set text.vocab_size=340 --set train.checkpoint_every=2 --set train.validate_every=2 "
    "--set data.cache_dir=cache"
)
QUICK += " --set train.threads=1"
Typed = Callable[[str | bytes], None]


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(
        rf"^ *```{language}\n(.*?)^ *```$", read(page), flags=re.DOTALL | re.MULTILINE
    )


def commands(page: Path) -> list[str]:
    """Return the `dragoman` commands of a page in order, continued lines joined."""
    lines = [
        line.strip()
        for block in blocks(page, "sh")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    return [re.sub(r"\s+", " ", line) for line in lines if re.match(r"dragoman |torchrun ", line)]


def shown(page: Path) -> list[str]:
    """Return the lines of progress and results that a page shows, with the numbers masked."""
    lines = [line for block in blocks(page, "text") for line in block.splitlines()]
    return [
        line for line in lines if re.match(r"(training|model|validation|parity|metric)\b", line)
    ]


def mask(text: str) -> str:
    """Replace numbers, which differ from run to run, and what depends on them."""
    text = re.sub(r" · best so far|about \d.*(?= at )", "", text)
    return re.sub(r" *[\d.,+-]*\d(e-\d+)?", "#", re.sub(" +", " ", text))


def headings(page: Path) -> list[int]:
    """Return the level of each heading, in order."""
    text = re.sub(r"^ *```.*?^ *```$", "", read(page), flags=re.DOTALL | re.MULTILINE)
    return [len(marks) for marks in re.findall(r"^(#+) ", text, flags=re.MULTILINE)]


def table(page: Path, columns: int) -> list[list[str]]:
    """Return the rows of the tables with so many columns, separators left out."""
    rows = [
        line.strip().strip("|").split("|")
        for line in read(page).splitlines()
        if line.startswith("|")
    ]
    return [
        [cell.strip() for cell in row]
        for row in rows
        if len(row) == columns and not set("".join(row)) <= set(" -:")
    ]


def parse(arguments: list[str]) -> None:
    """Parse a command line as `dragoman` would; raise on an unknown command or option."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "resolve_command") and arguments:
        context = command.make_context("dragoman", arguments, resilient_parsing=True)
        name = arguments[0]
        _, command, arguments = command.resolve_command(context, arguments)
        assert command is not None, f"no command {name}"
    # Parsing alone: defaults, such as the built-in model, need not exist.
    command.make_parser(command.context_class(command)).parse_args(args=arguments)


@pytest.mark.parametrize("page", [README, TUTORIAL])
def test_the_commands_and_the_python_run(
    page: Path,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Quickstarts that no longer run are a common complaint (OpenNMT-py#2602, eole#81)."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.de", "train.en", "dev.de", "dev.en"):
        for copy in (name, name.replace("dev", "test")):
            (tmp_path / copy).write_text(
                (corpus / name).read_text(encoding="utf-8"), encoding="utf-8"
            )
    seen, printed = [], ""
    for command in commands(page):
        arguments = shlex.split(re.sub(r"--budget \w+", QUICK, command))[1:]
        code = main(arguments)
        output = "\n".join(capsys.readouterr())
        assert code == 0, f"{command}\n{output}"
        seen.append(arguments[0])
        printed += output
    assert {"train", "translate", "export"} <= set(seen)
    for line in shown(page):
        assert mask(line) in mask(printed), f"{page.name} shows a line that is not printed: {line}"
    names: dict[str, Any] = {}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), names)
    assert capsys.readouterr().out.startswith("['")


@pytest.mark.parametrize("page", [README, TUTORIAL, FAQ])
def test_the_commands_parse(page: Path) -> None:
    found = commands(page)
    assert found
    for command in found:
        arguments = shlex.split(
            command.partition("-m dragoman ")[2]
            if command.startswith("torchrun")
            else command.partition(" ")[2]
        )
        parse(arguments)
        changed = [value for option, value in itertools.pairwise(arguments) if option == "--set"]
        read_config(overrides=changed)


def test_both_languages_have_the_same_structure_and_commands() -> None:
    """Both READMEs have the same sections, commands, outputs, numbers and links."""
    assert headings(README) == headings(README_ZH)
    for language in ("sh", "text", "python"):
        assert blocks(README, language) == blocks(README_ZH, language)
    for columns in (2, 4, 7):
        english, chinese = table(README, columns), table(README_ZH, columns)
        assert len(english) == len(chinese)
        for ours, theirs in zip(english, chinese, strict=True):
            assert re.findall(
                r"`dragoman \w+`|`python [^`]+`|`[a-z]+20\w+\*?`", " ".join(ours)
            ) == re.findall(r"`dragoman \w+`|`python [^`]+`|`[a-z]+20\w+\*?`", " ".join(theirs))
            assert re.fullmatch(r"[\d.,–* ]*", ours[-1]) is None or ours[-1] == theirs[-1]
    speed = [[row[1:] for row in table(page, 7)] for page in (README, README_ZH)]
    assert speed[0] == speed[1]


def test_the_speed_values_are_those_of_the_benchmarks() -> None:
    measured = set(re.findall(r"[\d,.]*\d", read(DOCS / "benchmarks.md")))
    rows = [row for row in table(README, 7) if re.search("[¹²³⁴⁵⁶]", row[0])]
    assert len(rows) == 8
    for row in rows:
        for figure in re.findall(r"[\d,.]*\d", " ".join(row[1:])):
            assert figure in measured, f"{row[0]}: {figure} is not in docs/benchmarks.md"


def test_the_tables_name_every_command_and_recipe() -> None:
    named = {name for row in table(README, 2) for name in re.findall(r"`dragoman (\w+)`", row[0])}
    registered = {
        command.name or getattr(command.callback, "__name__", "")
        for command in app.registered_commands
    }
    groups = {
        group.typer_instance.info.name for group in app.registered_groups if group.typer_instance
    }
    assert named == registered | groups
    patterns = [name for row in table(README, 4) for name in re.findall(r"`([a-z]\w+\*?)`", row[1])]
    for pattern in patterns:
        assert any(
            re.fullmatch(pattern.replace("*", r"\w+"), name) for name in recipes_of("translate")
        ), pattern
    for name in recipes_of("translate"):
        assert any(re.fullmatch(pattern.replace("*", r"\w+"), name) for pattern in patterns), name
    assert f"**{len(recipes_of('translate'))} recipes" in read(README)
    assert f"**{len(recipes_of('translate'))} 个配方" in read(README_ZH)
    tutorial = read(ROOT / "docs" / "tutorial.md")
    assert f"{len(recipes_of('translate'))} recipes for translation" in tutorial


def test_the_benchmarks_and_make_targets_are_there() -> None:
    scripts = re.findall(r"`python (bench/\w+\.py)", read(README))
    assert scripts
    for script in scripts:
        assert (ROOT / script).is_file(), script
    targets = re.findall(r"^(\w[\w-]*):", read(ROOT / "Makefile"), flags=re.MULTILINE)
    for page in (README, README_ZH, ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"(?:`|^ *)make ([a-z-]+)", read(page), flags=re.MULTILINE):
            assert target in targets, f"{page.name} names make {target}"


def test_the_extras_and_addresses_are_those_of_the_package() -> None:
    project = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]
    for page in (README, README_ZH, FAQ):
        for named in re.findall(r"`\[(\w+)\]`|dragoman\[(\w+)\]", read(page)):
            assert "".join(named) in project["optional-dependencies"], named
    assert REPOSITORY.startswith(project["urls"]["Source"])
    assert project["urls"]["Documentation"] == yaml.safe_load(read(ROOT / "mkdocs.yml"))["site_url"]
    assert project["urls"]["Source"] in read(ROOT / "CITATION.cff")


def test_the_site_shows_every_page() -> None:
    """`make docs` fails on a page that the navigation lacks; this finds it sooner."""

    def listed(nav: Any) -> Iterator[str]:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from [entry] if isinstance(entry, str) else listed(entry)

    navigation = list(listed(yaml.safe_load(read(ROOT / "mkdocs.yml"))["nav"]))
    assert sorted(navigation) == sorted(
        page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+?)(?:#[^)]*)?\)", read(page)):
        if link.startswith((REPOSITORY, PICTURES)):
            assert (ROOT / link.removeprefix(REPOSITORY).removeprefix(PICTURES)).exists(), (
                f"{page.name} links to {link}"
            )
        elif "://" not in link:
            assert page.parent == DOCS or page not in (README, README_ZH), (
                f"{page.name} links to {link}, which a package index cannot find"
            )
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_pages_name_are_there(page: Path) -> None:
    """A page that names a module which moved sends its reader astray."""
    for name in re.findall(r"`((?:dragoman|tests|tools|bench)/[\w./]+\.\w+)`", read(page)):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
