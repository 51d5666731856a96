"""`dragoman data check`: the table of findings, and errors for unreadable files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dragoman.cli.app import main

SOURCES = [f"Der Hund Nummer {n} läuft heute durch den tiefen Schnee." for n in range(300)]
TARGETS = [f"Dog number {n} runs through the deep snow today." for n in range(300)]


def write(folder: Path, sources: list[str], targets: list[str], name: str = "train") -> list[str]:
    """Write two files; return the options that name them."""
    for lines, ending in ((sources, "de"), (targets, "en")):
        (folder / f"{name}.{ending}").write_text(
            "".join(f"{line}\n" for line in lines), encoding="utf-8"
        )
    prefix = "--test-" if name == "test" else "--"
    return [f"{prefix}src", str(folder / f"{name}.de"), f"{prefix}tgt", str(folder / f"{name}.en")]


def check(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, tuple[int, list[int]]]:
    """Run the check; return its findings by name."""
    assert main(["data", "check", *options, "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    return {each["check"]: (each["count"], each["lines"]) for each in findings}


def test_a_clean_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", *write(tmp_path, SOURCES, TARGETS)]) == 0
    out = capsys.readouterr().out
    assert "no problems found" in out
    assert "duplicate pairs" in out, "a check that found nothing is listed too"


def test_everything_is_found_with_its_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blank lines, tokenized text, shifted pairs (nmt-en-vi#6, mozilla/translations#53)."""
    sources, targets = list(SOURCES), list(TARGETS)
    targets[4] = ""
    sources[9], targets[9] = sources[8], targets[8]
    targets[19] = "Dog."
    sources[29] = targets[29]
    found = check(capsys, *write(tmp_path, sources, targets))
    assert found["empty lines"] == (1, [5])
    assert found["duplicate pairs"] == (1, [10])
    assert found["length ratio"] == (1, [20])
    assert found["source equals target"] == (1, [30])


def test_unequal_files_are_reported_with_the_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Line counts that disagree (OpenNMT-py#2488, code-docstring-corpus#12)."""
    assert main(["data", "check", *write(tmp_path, SOURCES, TARGETS[:-3])]) == 0
    out = capsys.readouterr().out
    assert "the files have 300 and 297 lines" in out


def test_leakage_between_train_and_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = write(tmp_path, SOURCES, TARGETS) + write(
        tmp_path, [SOURCES[6], "Neu."], [TARGETS[6].upper(), "New."], name="test"
    )
    found = check(capsys, *options)
    assert found["held-out pairs in the corpus"] == (1, [7])


def test_wrong_bytes_are_counted_not_fatal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = write(tmp_path, SOURCES, TARGETS)
    path = tmp_path / "train.de"
    path.write_bytes(path.read_bytes().replace("läuft".encode(), "läuft".encode("latin1"), 1))
    assert check(capsys, *options)["invalid UTF-8 or NUL"] == (1, [1])


def test_a_file_of_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text(
        "".join(f"{s}\t{t}\n" for s, t in zip(SOURCES, TARGETS, strict=True)), encoding="utf-8"
    )
    assert check(capsys, "--pairs", str(path))["duplicate pairs"] == (0, [])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "found neither --src and --tgt nor --pairs"),
        (["--src", "a.de"], "found only a.de"),
        (["--src", "a.de", "--tgt", "a.en", "--pairs", "p.tsv"], "found p.tsv and a.de"),
        (["--src", "a.de", "--tgt", "a.en"], "a.de"),
        (["--pairs", "p.txt"], "found p.txt"),
    ],
)
def test_an_error_of_a_check_is_one_line(
    options: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", "check", *options]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


def test_empty_files_are_not_called_clean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.de", "a.en"):
        (tmp_path / name).touch()
    assert (
        main(["data", "check", "--src", str(tmp_path / "a.de"), "--tgt", str(tmp_path / "a.en")])
        == 2
    )
    assert "must hold text to check; found no line at all" in capsys.readouterr().err


def test_rows_that_are_broken_are_not_called_bad_utf8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text("eins\tone\nzwei\ndrei\tthree\n", encoding="utf-8")
    assert main(["data", "check", "--pairs", str(path)]) == 0
    out = capsys.readouterr().out
    (row,) = [line for line in out.splitlines() if line.startswith("broken rows")]
    assert row.split()[2:4] == ["1", "2"], "one, in line 2"
    assert "3 pairs: 1 check found something" in out


def test_json_has_all_lines_and_a_table_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = write(tmp_path, SOURCES, [*TARGETS[:-20], *[""] * 20])
    assert check(capsys, *options)["empty lines"] == (20, list(range(281, 301)))
    assert main(["data", "check", *options]) == 0
    (row,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("empty lines")
    ]
    assert "281, 282, 283, 284, 285, …" in row


def test_strict_exits_with_1_on_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = write(tmp_path, SOURCES, TARGETS)
    assert main(["data", "check", *options, "--strict"]) == 0
    options = write(tmp_path, SOURCES, ["", *TARGETS[1:]])
    for more in ([], ["--json"]):
        assert main(["data", "check", *options, "--strict", *more]) == 1
        captured = capsys.readouterr()
        assert "empty lines" in captured.out, "the findings are written all the same"
        assert captured.err == ""


@pytest.mark.parametrize(
    ("name", "first", "row", "options", "columns"),
    [
        (
            "a.tsv",
            "id\tenglisch\tdeutsch\n",
            "{n}\t{t}\t{s}\n",
            ["--src-field", "deutsch", "--tgt-field", "englisch"],
            ("deutsch", "englisch"),
        ),
        (
            "a.tsv",
            "id\ten\tde\n",
            "{n}\t{t}\t{s}\n",
            ["--src-lang", "de", "--tgt-lang", "en"],
            ("de", "en"),
        ),
        ("a.csv", "", '{n},"{t}","{s}"\n', ["--src-field", "3", "--tgt-field", "2"], (3, 2)),
        (
            "a.jsonl",
            "",
            '{{"x": "{s}", "y": "{t}"}}\n',
            ["--src-field", "x", "--tgt-field", "y"],
            ("x", "y"),
        ),
    ],
)
def test_columns_are_named_and_reported(
    name: str,
    first: str,
    row: str,
    options: list[str],
    columns: tuple[object, object],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = [
        row.format(n=n, s=s, t=t) for n, (s, t) in enumerate(zip(SOURCES, TARGETS, strict=True))
    ]
    path = tmp_path / name
    path.write_text(first + "".join([*lines, lines[3]]), encoding="utf-8")
    assert main(["data", "check", "--pairs", str(path), *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["columns"]["src"], found["columns"]["tgt"]) == columns
    assert found["columns"]["header"] == (first.strip().split("\t") if first else None)
    assert found["pairs"] == 301
    assert [each["code"] for each in found["findings"] if each["count"]] == ["duplicate"]
    assert main(["data", "check", "--pairs", str(path), *options]) == 0
    err = capsys.readouterr().err
    assert f"source from column {columns[0]}, target from column {columns[1]}" in err
    assert ("the first row is a header: id" in err) == bool(first)


def test_a_column_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.tsv").write_text("id\ten\tde\n1\ta\tb\n")
    assert (
        main(
            [
                "data",
                "check",
                "--pairs",
                str(tmp_path / "a.tsv"),
                "--src-field",
                "fr",
                "--tgt-field",
                "en",
            ]
        )
        == 2
    )
    assert "must be called fr; found id, en, de" in capsys.readouterr().err


# Labelled files


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    rows = [
        {"text": "A good film.", "label": "pos"},
        {"text": "A bad one.", "label": "neg"},
        {"text": "a GOOD film", "label": "pos"},
        {"text": "A bad one", "label": "pos"},
        {"text": "So", "label": "neg"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_labelled_files_are_checked(labelled, tmp_path, capsys) -> None:
    valid = tmp_path / "valid.jsonl"
    valid.write_text('{"text": "so!", "label": "neg"}\n')
    arguments = ["data", "check", "--task", "classify", str(labelled), "--valid", str(valid)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert re.search(r"pos +3 +0\.600 +█{20}", out)
    assert re.search(r"duplicate texts +1 +3 ", out)
    assert re.search(r"texts with two labels +1 +4 ", out)
    assert re.search(r"texts of the held-out file +1 +5 ", out)
    assert "5 texts of 2.6 words on average: 3 checks found something" in out
    assert main([*arguments, "--strict"]) == 1
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["labels"] == {"pos": 3, "neg": 2}
    assert {row["code"]: row["lines"] for row in found["findings"] if row["count"]} == {
        "duplicate": [3],
        "contradiction": [4],
        "leak": [5],
    }


def test_mistakes_with_labelled_files(labelled, tmp_path, capsys) -> None:
    for arguments, found in (
        (["--task", "classify"], "found no FILE"),
        (["--task", "classify", str(labelled), "--src", "a"], "found --src"),
        (["--task", "dance", str(labelled)], "found --task 'dance' and"),
        ([str(labelled)], "use --pairs FILE, or --src FILE"),
        (["--task", "classify", str(tmp_path / "none.jsonl")], "none.jsonl"),
        (["--task", "classify", str(labelled), "--label-field", "lable"], "did you mean label?"),
    ):
        assert main(["data", "check", *arguments]) == 2, arguments
        assert found in capsys.readouterr().err
    empty = tmp_path / "empty.csv"
    empty.write_text("")
    assert main(["data", "check", "--task", "classify", str(empty)]) == 2
    assert "empty.csv must hold examples to check; found none" in capsys.readouterr().err
