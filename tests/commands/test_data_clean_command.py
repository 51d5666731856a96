"""`dragoman data clean`: the corpus without what the checks found, and nothing else changed."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest

from dragoman.cli.app import main

SOURCES = [f"Der Hund Nummer {n} läuft heute durch den tiefen Schnee." for n in range(300)]
TARGETS = [f"Dog number {n} runs through the deep snow today." for n in range(300)]
FAULTS = {
    5: ("", "Nothing."),
    10: (SOURCES[8], TARGETS[8]),
    20: (SOURCES[20], "Dog."),
    30: (TARGETS[30], TARGETS[30]),
    40: ("Ja , ja .", "Yes"),
}
CODES = {"empty": 1, "duplicate": 1, "length-ratio": 1, "copy": 1, "tokenised": 1}


def faulty() -> list[tuple[str, str]]:
    """Return the pairs of a corpus with one fault of each kind."""
    return [FAULTS.get(n, pair) for n, pair in enumerate(zip(SOURCES, TARGETS, strict=True))]


def sound(*kept: int) -> list[tuple[str, str]]:
    """Return what cleaning leaves of it."""
    return [pair for n, pair in enumerate(faulty()) if n not in FAULTS or n in kept]


def write(folder: Path, pairs: list[tuple[str, str]]) -> list[str]:
    """Write two files and return the options for them and for the outputs."""
    for column, name in enumerate(("a.de", "a.en")):
        (folder / name).write_text("".join(f"{pair[column]}\n" for pair in pairs), encoding="utf-8")
    names = {"--src": "a.de", "--tgt": "a.en", "--out-src": "clean.de", "--out-tgt": "clean.en"}
    return [part for flag, name in names.items() for part in (flag, str(folder / name))]


def read(folder: Path, *names: str) -> list[tuple[str, ...]]:
    return list(
        zip(*((folder / name).read_text("utf-8").split("\n")[:-1] for name in names), strict=True)
    )


def test_two_files_without_their_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = write(tmp_path, faulty())
    before = [(tmp_path / name).read_bytes() for name in ("a.de", "a.en")]
    assert main(["data", "clean", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["read"], found["kept"], found["removed"], found["remaining"]) == (
        300,
        295,
        CODES,
        [],
    )
    assert read(tmp_path, "clean.de", "clean.en") == sound()
    assert [(tmp_path / name).read_bytes() for name in ("a.de", "a.en")] == before
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "a.de",
        "a.en",
        "clean.de",
        "clean.en",
    ]
    assert (
        main(
            [
                "data",
                "check",
                "--src",
                str(tmp_path / "clean.de"),
                "--tgt",
                str(tmp_path / "clean.en"),
                "--strict",
            ]
        )
        == 0
    )


def test_the_summary_without_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "clean", *write(tmp_path, faulty())]) == 0
    out = capsys.readouterr().out
    assert "300 pairs read, 5 removed, 295 written to" in out
    assert "duplicate" in out


def test_a_finding_can_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["data", "clean", *write(tmp_path, faulty()), "--keep", "copy", "--keep", "duplicate"])
        == 0
    )
    assert read(tmp_path, "clean.de", "clean.en") == sound(10, 30)
    assert main(["data", "clean", *write(tmp_path, faulty()), "--keep", "copies"]) == 2
    assert (
        "--keep must name a finding that can be kept; found 'copies'; did you mean copy"
        in capsys.readouterr().err
    )


def test_the_cleaned_corpus_is_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Length ratios are relative to the corpus: cleaning repeats until no outlier is left."""
    pairs = [(f"{n} " + "wort " * 8, f"{n} " + "word " * 8) for n in range(60)]
    pairs += [(f"{n} " + "wort " * 8, f"{n} " + "word " * (30 + n)) for n in range(60, 100)]
    options = write(tmp_path, pairs)
    assert main(["data", "clean", *options]) == 0
    capsys.readouterr()
    assert (
        main(
            [
                "data",
                "check",
                "--src",
                str(tmp_path / "clean.de"),
                "--tgt",
                str(tmp_path / "clean.en"),
                "--json",
            ]
        )
        == 0
    )
    counts = {
        each["code"]: each["count"] for each in json.loads(capsys.readouterr().out)["findings"]
    }
    assert counts["length-ratio"] == 0


def test_bad_bytes_leakage_and_compression(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = list(zip(SOURCES, TARGETS, strict=True))
    options = write(tmp_path, pairs)
    lines = (tmp_path / "a.de").read_bytes().split(b"\n")
    lines[3], lines[7] = b"caf\xe9", b"x" * 70_000
    (tmp_path / "a.de.gz").write_bytes(gzip.compress(b"\r\n".join(lines)))
    (tmp_path / "t.de").write_text(SOURCES[11] + "\n", "utf-8")
    (tmp_path / "t.en").write_text(TARGETS[11] + "\n", "utf-8")
    options[1], options[5] = str(tmp_path / "a.de.gz"), str(tmp_path / "clean.de.gz")
    test = ["--test-src", str(tmp_path / "t.de"), "--test-tgt", str(tmp_path / "t.en")]
    assert main(["data", "clean", *options, *test, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] == {
        "invalid": 1,
        "overlong": 1,
        "leak": 1,
    }
    kept = gzip.decompress((tmp_path / "clean.de.gz").read_bytes()).decode().split("\n")[:-1]
    assert kept == [text for n, text in enumerate(SOURCES) if n not in (3, 7, 11)]
    assert (tmp_path / "clean.en").read_text("utf-8").split("\n")[:-1] == [
        text for n, text in enumerate(TARGETS) if n not in (3, 7, 11)
    ]


def test_rows_keep_all_their_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{n}\t{t}\t{s}\n" for n, (s, t) in enumerate(faulty())]
    rows.insert(100, "too few columns\n")
    (tmp_path / "a.tsv").write_text("".join(["id\ten\tde\n", *rows]), "utf-8")
    fields = ["--src-lang", "de", "--tgt-lang", "en"]
    files = ["--pairs", str(tmp_path / "a.tsv"), "--out-pairs", str(tmp_path / "b.tsv.xz")]
    assert main(["data", "clean", *files, *fields, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["removed"] == {"broken": 1, **CODES}
    assert found["columns"]["header"] == ["id", "en", "de"]
    assert main(["data", "check", "--pairs", str(tmp_path / "b.tsv.xz"), *fields, "--strict"]) == 0
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps({"de": s, "en": t, "n": n}) + "\n" for n, (s, t) in enumerate(faulty()))
    )
    assert (
        main(
            [
                "data",
                "clean",
                "--pairs",
                str(tmp_path / "b.jsonl"),
                "--out-pairs",
                str(tmp_path / "c.jsonl"),
                *fields,
            ]
        )
        == 0
    )
    kept = [json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    assert [(each["de"], each["en"]) for each in kept] == sound()
    assert kept[-1]["n"] == 299


def test_csv_keeps_delimiters_quotes_and_line_breaks(tmp_path: Path) -> None:
    pairs = [
        (f'{s}; "so" heißt es', f"{t}\nIn two lines; yes, two.")
        for s, t in zip(SOURCES, TARGETS, strict=True)
    ]
    with (tmp_path / "a.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=";").writerows(
            [("source", "target"), *pairs[:50], ("", "empty"), *pairs[50:], pairs[3]]
        )
    assert (
        main(
            [
                "data",
                "clean",
                "--pairs",
                str(tmp_path / "a.csv"),
                "--out-pairs",
                str(tmp_path / "b.csv"),
            ]
        )
        == 0
    )
    with (tmp_path / "b.csv").open(encoding="utf-8", newline="") as file:
        assert list(csv.reader(file, delimiter=";")) == [["source", "target"], *map(list, pairs)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--out-src": "a.de"}, "--out-src must not be a file that the command reads; found a.de"),
        (
            {"--test-src": "test.de", "--test-tgt": "test.en", "--out-src": "test.de"},
            "--out-src must not be a file that the command reads; found test.de",
        ),
        (
            {"--out-tgt": "clean.de"},
            "each output must have its own file; found clean.de twice",
        ),
        ({"--out-tgt": "no/clean.en"}, "--out-tgt must be in an existing directory; found no"),
        (
            {"--out-tgt": ""},
            "cleaning --src and --tgt needs --out-src and --out-tgt; found --out-src",
        ),
        ({"--tgt": "short.en"}, "must have equally many lines; found 300 and 1"),
        (
            {"--src": "empty", "--tgt": "empty"},
            "cleaning must leave some pairs; found no line at all",
        ),
        (
            {"--src": "blank", "--tgt": "blank"},
            "cleaning must leave some pairs; found all 3 removed",
        ),
        (
            {"--src": "", "--tgt": "", "--pairs": "p.tsv"},
            "cleaning --pairs needs --out-pairs; found --out-src, --out-tgt",
        ),
        (
            {
                "--src": "",
                "--tgt": "",
                "--out-src": "",
                "--out-tgt": "",
                "--pairs": "p.tsv",
                "--out-pairs": "p.csv",
            },
            "--out-pairs must have the format of --pairs; found p.csv for p.tsv",
        ),
    ],
)
def test_a_corpus_that_cannot_be_cleaned_writes_nothing(
    changes: dict[str, str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, faulty())
    Path("short.en").write_text("one\n")
    Path("test.de").write_text(f"{SOURCES[0]}\n", encoding="utf-8")
    Path("test.en").write_text(f"{TARGETS[0]}\n", encoding="utf-8")
    Path("empty").touch()
    Path("blank").write_text("\n\n\n")
    Path("p.tsv").write_text("a\tb\n")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    options = {
        "--src": "a.de",
        "--tgt": "a.en",
        "--out-src": "clean.de",
        "--out-tgt": "clean.en",
    } | changes
    assert (
        main(
            [
                "data",
                "clean",
                *(part for flag, name in options.items() if name for part in (flag, name)),
            ]
        )
        == 2
    )
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_misaligned_files_are_warned_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = [f"Satz {n} " + "wort " * (n * 7 % 23 + 3) for n in range(1000)]
    targets = [f"Sentence {n} " + "word " * (n * 7 % 23 + 3) for n in range(1000)]
    targets.insert(500, targets[0] + " again")
    options = write(tmp_path, list(zip(sources, targets[:1000], strict=True)))
    assert main(["data", "clean", *options, "--keep", "length-ratio"]) == 0
    assert "warning: misaligned lines near line" in capsys.readouterr().err
