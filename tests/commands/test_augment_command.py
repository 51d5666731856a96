"""`dragoman augment`: pairs from text, and invalid arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dragoman.cli.app import main
from dragoman.inference import Translator, back_translation_and_distillation

OTHER_MODEL = Path(__file__).parents[1] / "fixtures" / "before_renames" / "transformer"
LINES = ["Guten Morgen.", "", "Zwei Männer reden.", "Das ist ein Haus."]


@pytest.fixture
def mono(tmp_path: Path) -> Path:
    path = tmp_path / "mono.txt"
    path.write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    return path


def augment(bundle: Path, mono: Path, *more: str) -> int:
    outputs = ["--output-src", str(mono.with_name("s")), "--output-tgt", str(mono.with_name("t"))]
    options = ["--method", "back-translation", "--max-ratio", "0", *more]
    return main(["augment", "-m", str(bundle), "--input", str(mono), *outputs, *options])


@pytest.mark.parametrize("search", [[], ["--beam", "2"], ["--sample", "--seed", "3"]])
def test_pairs_are_written(
    search: list[str], bundle: Path, mono: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert augment(bundle, mono, "--tag", "--json", *search) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["lines"], found["pairs"], found["dropped"]["empty"]) == (4, 3, 1)
    source, target = (
        mono.with_name(name).read_text(encoding="utf-8").split("\n")[:-1] for name in ("s", "t")
    )
    assert target == [line for line in LINES if line]
    assert all(line.startswith("<BT> ") for line in source)
    if "--sample" not in search:
        assert main(["translate", "-m", str(bundle), *search, target[0]]) == 0
        assert capsys.readouterr().out == source[0].removeprefix("<BT> ") + "\n"
    assert augment(bundle, mono, *search) == 2, "the outputs exist"
    assert "add --overwrite" in capsys.readouterr().err
    assert augment(bundle, mono, "--overwrite", *search) == 0
    assert "3 pairs of 4 lines; dropped 1 empty" in capsys.readouterr().err


def test_samples_are_drawn_with_the_given_seed_by_default_1(
    bundle: Path, mono: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = []

    def translate(_: Translator, texts: list[str], **options: object) -> list[str]:
        seeds.append(options["seed"])
        return ["x"] * len(texts)

    monkeypatch.setattr(Translator, "translate", translate)
    for given in ([], ["--seed", "1"], ["--seed", "3"]):
        assert augment(bundle, mono, "--sample", "--overwrite", *given) == 0
    assert seeds == [back_translation_and_distillation.block_seed(seed, 0) for seed in (1, 1, 3)]


@pytest.mark.parametrize(("more", "how"), [([], "again"), (["--overwrite"], "without --overwrite")])
def test_an_interruption_reports_how_to_resume(
    more: list[str],
    how: str,
    bundle: Path,
    mono: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(back_translation_and_distillation, "BLOCK_LINES", 2)
    blocks = []

    def interrupted(texts: list[str], **_: object) -> list[str]:
        blocks.append(texts)
        if len(blocks) == 2:
            raise KeyboardInterrupt
        return ["x"] * len(texts)

    with monkeypatch.context() as patched:
        patched.setattr(Translator, "translate", lambda _, texts, **options: interrupted(texts))
        assert augment(bundle, mono, *more) == 75
    err = capsys.readouterr().err
    assert f"stopped after 2 lines; run the same command {how} to resume" in err
    assert not mono.with_name("s").exists()
    assert augment(bundle, mono) == 0
    assert "continuing after 2 lines" in capsys.readouterr().err
    assert mono.with_name("s").read_text(encoding="utf-8").splitlines()[0] == "x"


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (
            [],
            [
                ["--beam", "2"],
                ["--sample"],
                ["--max-ratio", "3"],
                ["--keep-copies"],
                ["--tag"],
                ["--method", "forward-translation"],
                ["--from", "de"],
                ["--to", "en"],
                ["--engine", "native"],
                ["--precision", "int8"],
                ["--input", "other.txt"],
            ],
        ),
        (["--sample"], [["--temperature", "0.5"], ["--top-k", "4"], ["--seed", "4"]]),
    ],
)
def test_an_unfinished_augmentation_is_not_continued_with_another_option(
    options: list[str],
    changes: list[list[str]],
    bundle: Path,
    mono: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One output has one search and one filter; the batch size changes nothing."""
    monkeypatch.chdir(mono.parent)
    Path("other.txt").write_text("Gute Nacht.\n", encoding="utf-8")
    monkeypatch.setattr(back_translation_and_distillation, "BLOCK_LINES", 2)
    calls = 0

    def interrupt_second(_: Translator, texts: list[str], **__: object) -> list[str]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return ["x"] * len(texts)

    monkeypatch.setattr(Translator, "translate", interrupt_second)
    assert augment(bundle, mono, *options) == 75
    capsys.readouterr()
    for change in changes:
        assert augment(bundle, mono, *options, *change) == 2, change
        assert "s.progress.json of another" in capsys.readouterr().err, change
    assert augment(OTHER_MODEL, mono, *options) == 2
    assert "s.progress.json of another" in capsys.readouterr().err
    assert augment(bundle, mono, *options, "--batch-size", "1") == 0
    assert "continuing after 2 lines" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "magic"], "found 'magic'"),
        (["--method", "distil"], "found 'distil'; did you mean distillation?"),
        (["--seed", "3"], "--seed needs --sample"),
        (["--sample", "--beam", "4"], "found both, with --beam 4"),
        (["--method", "distillation", "--sample"], "found --sample"),
        (["--method", "distillation", "--tag"], "found --tag"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str],
    words: str,
    bundle: Path,
    mono: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert augment(bundle, mono, *arguments) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


def test_a_pipe_cannot_be_continued_from(
    bundle: Path, mono: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert augment(bundle, mono, "--input", "/dev/null") == 2
    assert "found /dev/null" in capsys.readouterr().err


def test_an_empty_input_is_an_error_and_writes_nothing(
    bundle: Path, mono: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mono.write_text("")
    assert augment(bundle, mono) == 2
    assert "mono.txt must hold lines to translate; found no line at all" in capsys.readouterr().err
    assert [path.name for path in mono.parent.iterdir()] == ["mono.txt"]


def test_outputs_of_a_running_command_are_left_alone(
    bundle: Path,
    mono: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes = []

    def start_another(_: Translator, texts: list[str], **__: object) -> list[str]:
        if not codes:
            codes.append(None)  # the second one must not come here
            codes.append(augment(bundle, mono, "--overwrite"))
            codes.append(augment(bundle, mono, "--output-src", str(mono.with_name("u"))))
        return ["x"] * len(texts)

    monkeypatch.setattr(Translator, "translate", start_another)
    assert augment(bundle, mono) == 0
    assert codes == [None, 73, 73]
    err = capsys.readouterr().err.splitlines()
    assert "only one process may write" in err[0]
    assert err[-1].endswith("3 pairs of 4 lines; dropped 1 empty")
    assert sorted(path.name for path in mono.parent.iterdir()) == ["mono.txt", "s", "t"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"request": "a", "counts": {"pairs": 1}}'])
def test_damaged_progress_is_an_error_unless_it_is_overwritten(
    content: str, bundle: Path, mono: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mono.with_name("s.progress.json").write_text(content)
    assert augment(bundle, mono) == 65
    err = capsys.readouterr().err
    assert "s.progress.json must be as it was written" in err
    assert "start again with --overwrite" in err
    assert len(err.splitlines()) == 1
    assert augment(bundle, mono, "--overwrite") == 0
