"""`data check`: each fault is found, counted and placed, and a clean corpus is called clean."""

from __future__ import annotations

import itertools
import lzma
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman.data import line_shift_detection
from dragoman.data.corpus_checks import CorpusFinding, check_corpus, overlap_key
from dragoman.data.line_shift_detection import (
    LineFeatures,
    Misalignment,
    find_misalignment,
    line_features,
)
from dragoman.data.parallel_corpus import Corpus, ParallelFiles, TabularCorpus
from dragoman.errors import DataError
from dragoman.runtime.counter_rng import splitmix64_outputs

DATA = Path(
    os.environ.get("DRAGOMAN_DATA", Path(__file__).resolve().parents[4] / "shared" / "data")
)
needs_data = pytest.mark.skipif(
    not (DATA / "multi30k").is_dir(), reason=f"no corpora at {DATA} (set DRAGOMAN_DATA)"
)


def sentences(count: int) -> tuple[list[str], list[str]]:
    """Pairs of varied lengths, unlike one another."""
    import numpy as np

    sizes = (splitmix64_outputs(1, np.arange(count)) % np.uint64(15) + np.uint64(4)).tolist()
    src = [
        " ".join(f"wort{(i * 7 + k) % 991}" for k in range(size)) for i, size in enumerate(sizes)
    ]
    tgt = [
        " ".join(f"word{(i * 7 + k) % 991}" for k in range(size)) for i, size in enumerate(sizes)
    ]
    return src, tgt


def corpus_of(
    folder: Path, src: list[str], tgt: list[str], name: str = "x", **options: object
) -> ParallelFiles:
    (folder / f"{name}.de").write_text("".join(f"{line}\n" for line in src), encoding="utf-8")
    (folder / f"{name}.en").write_text("".join(f"{line}\n" for line in tgt), encoding="utf-8")
    return ParallelFiles(folder / f"{name}.de", folder / f"{name}.en", **options)  # type: ignore[arg-type]


def found(corpus: Corpus, held_out: Corpus | None = None) -> dict[str, CorpusFinding]:
    return {finding.check: finding for finding in check_corpus(corpus, held_out=held_out)}


def problems(corpus: Corpus, held_out: Corpus | None = None) -> dict[str, tuple[int, list[int]]]:
    return {
        name: (each.count, each.lines)
        for name, each in found(corpus, held_out).items()
        if not each.ok
    }


def test_a_clean_corpus_has_a_row_for_every_check_and_no_problem(tmp_path: Path) -> None:
    rows = check_corpus(corpus_of(tmp_path, *sentences(500)))
    assert [row.check for row in rows] == [
        "line counts",
        "misaligned lines",
        "invalid UTF-8 or NUL",
        "overlong lines",
        "empty lines",
        "duplicate pairs",
        "length ratio",
        "source equals target",
        "already tokenized text",
    ]
    assert all(row.ok and not row.lines and not row.advice for row in rows)


def test_empty_lines(tmp_path: Path) -> None:
    src, tgt = sentences(300)
    src[10], tgt[20], src[30], tgt[30] = "", "  ", "", ""
    assert problems(corpus_of(tmp_path, src, tgt)) == {"empty lines": (3, [11, 21, 31])}


def test_duplicates(tmp_path: Path) -> None:
    src, tgt = sentences(300)
    src[100], tgt[100] = src[3], tgt[3]
    src[200], tgt[200] = src[3] + " ", tgt[3]
    tgt[250] = tgt[3]
    assert problems(corpus_of(tmp_path, src, tgt)) == {"duplicate pairs": (2, [101, 201])}


def test_length_ratio(tmp_path: Path) -> None:
    src, tgt = sentences(300)
    tgt[50] = " ".join(["very long indeed"] * 30)
    src[60] = "x"
    tgt[70] = "y" * 19  # too short to be significant
    src[70] = "z"
    assert problems(corpus_of(tmp_path, src, tgt)) == {"length ratio": (2, [51, 61])}


@pytest.mark.parametrize(
    ("length", "is_found"), [(19, False), (20, True), (59, True)], ids=lambda value: f"{value}"
)
def test_a_ratio_counts_from_twenty_characters_on(
    tmp_path: Path, length: int, is_found: bool
) -> None:
    src, tgt = sentences(300)
    src[70], tgt[70] = "z", "y" * length
    assert ("length ratio" in problems(corpus_of(tmp_path, src, tgt))) == is_found


def test_a_ratio_is_odd_from_three_times_the_usual_on(tmp_path: Path) -> None:
    src = [f"{number:0100d}" for number in range(40)]
    tgt = [line[1:] + "x" for line in src]
    tgt[10], src[20] = "x" * 290, "y" * 290
    tgt[11], src[21] = "x" * 310, "y" * 310
    assert problems(corpus_of(tmp_path, src, tgt)) == {"length ratio": (2, [12, 22])}


def test_a_ratio_is_odd_from_six_deviations_on_where_ratios_vary(tmp_path: Path) -> None:
    """The median deviation is that of 1.284 times the length; 6 * 1.4826 are 9.2 times."""
    src = [f"{number:01000d}" for number in range(99)]
    tgt = ["x" * (1000, 1284, 779)[number % 3] for number in range(99)]
    src += ["a" * 1000, "b" * 1000]
    tgt += ["c" * 8000, "d" * 10_500]
    assert problems(corpus_of(tmp_path, src, tgt))["length ratio"] == (1, [101])


def test_scripts_of_different_density_are_no_outliers(tmp_path: Path) -> None:
    _, tgt = sentences(300)
    src = ["中" * (len(line) // 5) for line in tgt]
    assert "length ratio" not in problems(corpus_of(tmp_path, src, tgt))


def test_copies(tmp_path: Path) -> None:
    src, tgt = sentences(300)
    tgt[5] = src[5]
    src[6], tgt[6] = "1984", "1984"
    assert problems(corpus_of(tmp_path, src, tgt)) == {"source equals target": (1, [6])}


@pytest.mark.parametrize(
    "text",
    [
        "What 's your name ?",
        "Yes , of course .",
        "I do n't know",
        "ge@@ trennt",
        "rock @-@ solid",
        "it &apos;s here",
        "the end .",
    ],
)
def test_tokenised_text(tmp_path: Path, text: str) -> None:
    """A model that learns "What 's your name ?" writes it, too (mozilla/translations#53)."""
    src, tgt = sentences(300)
    tgt[40] = text + " " + tgt[40] if "." not in text else tgt[40] + text[-2:]
    assert problems(corpus_of(tmp_path, src, tgt))["already tokenized text"] == (1, [41])
    swapped = corpus_of(tmp_path, tgt, src, "swapped")
    assert problems(swapped)["already tokenized text"] == (1, [41])


@pytest.mark.parametrize(
    "text", ["Où ça ? Là !", "it's 3.5 p.m., isn't it?", "a . 5", "Rock 'n' roll"]
)
def test_ordinary_text_is_not_called_tokenised(tmp_path: Path, text: str) -> None:
    src, tgt = sentences(300)
    tgt[40] = f"{tgt[40]} {text}"
    if text != "a . 5":
        assert "already tokenized text" not in problems(corpus_of(tmp_path, src, tgt))


def test_bad_and_overlong_lines_are_counted_not_fatal(tmp_path: Path) -> None:
    src, tgt = sentences(300)
    tgt[12] = "y" * 5000
    corpus = corpus_of(tmp_path, src, tgt, max_line_bytes=2000)
    lines = corpus.src.read_bytes().split(b"\n")
    lines[7], lines[8] = b"caf\xe9", b"a\x00b"
    corpus.src.write_bytes(b"\n".join(lines))
    assert problems(corpus) == {"invalid UTF-8 or NUL": (2, [8, 9]), "overlong lines": (1, [13])}


def test_unequal_counts_and_the_line(tmp_path: Path) -> None:
    src, tgt = sentences(1000)
    del tgt[500]
    rows = found(corpus_of(tmp_path, src, tgt))
    assert (rows["line counts"].count, rows["line counts"].lines) == (1, [1000])
    assert "1000 and 999 lines" in rows["line counts"].advice
    misalignment = rows["misaligned lines"]
    assert misalignment.count == 1
    assert abs(misalignment.lines[0] - 501) <= 5
    assert "source seems to have 1 line too many" in misalignment.advice


@pytest.mark.parametrize("shift", [1, -1, 2, 3])
def test_misaligned_files_of_equal_length(tmp_path: Path, shift: int) -> None:
    """Misaligned pairs are reported (code-docstring-corpus#12, stefan-it/nmt-en-vi#6)."""
    src, tgt = sentences(1000)
    late, early = (tgt, src) if shift > 0 else (src, tgt)
    late[400:400] = ["an added line of some length"] * abs(shift)
    early += ["an added line at the end"] * abs(shift)
    misalignment = found(corpus_of(tmp_path, src, tgt))["misaligned lines"]
    assert abs(misalignment.lines[0] - 401) <= 8
    side = "target" if shift > 0 else "source"
    assert (
        f"the {side} seems to have {abs(shift)} line{'s' if abs(shift) > 1 else ''} too many"
        in misalignment.advice
    )


def test_a_misalignment_is_located_by_its_line_after_bad_lines(tmp_path: Path) -> None:
    src, tgt = sentences(1000)
    src[:100] = ["a line with a \0"] * 100
    del tgt[500]
    tgt.append("the last")
    [line] = found(corpus_of(tmp_path, src, tgt))["misaligned lines"].lines
    assert abs(line - 501) <= 5


@pytest.mark.parametrize("english", ["on day {0} it was {1}", "it was {1} on day {0}"])
def test_numbers_alone_show_a_misalignment(english: str) -> None:
    numbers = [(i * 37, i) for i in range(1000, 1600)]
    src = [f"am Tag {day} war es {price}" for day, price in numbers]
    tgt = [english.format(day, price) for day, price in numbers]
    del src[300]
    features = [[line_features(text) for text in side] for side in (src, tgt)]
    misalignment = find_misalignment(zip(itertools.count(1), *features, strict=False))
    assert misalignment is not None
    assert abs(misalignment.line - 301) <= 3


def test_short_and_uniform_files_have_no_finding() -> None:
    assert find_misalignment([]) is None
    same = (line_features("ein Wort"), line_features("one word"))
    assert find_misalignment((line, *same) for line in range(1000)) is None
    assert find_misalignment((line, *same) for line in range(10)) is None


def table(*lengths: float, numbers: tuple[int, ...] = ()) -> list[LineFeatures]:
    return [
        LineFeatures(length, number)
        for length, number in zip(lengths, [*numbers, *[0] * len(lengths)], strict=False)
    ]


@pytest.mark.parametrize(("gain", "shift"), [(0.299, 0), (0.301, 2)])
def test_another_shift_must_fit_clearly_better(
    monkeypatch: pytest.MonkeyPatch, gain: float, shift: int
) -> None:
    """By 0.3 of a correlation: sound corpora stay under 0.1."""
    rows = np.array(table(*range(60)))
    fits = iter([0.4, 0.1, 0.1, 0.4 + gain, 0.1, 0.1, 0.1])  # of the shifts 0, 1, -1, 2, -2, 3, -3
    compared: list[tuple[list[float], list[float]]] = []

    def fit(src: Any, tgt: Any) -> float:
        compared.append((src[:, 0].tolist(), tgt[:, 0].tolist()))
        return next(fits)

    monkeypatch.setattr(line_shift_detection, "_correlation", fit)
    assert line_shift_detection._best_shift(
        line_shift_detection._Window([*range(1, 61)], rows, rows)
    ) == (
        shift,
        pytest.approx(gain),
    )
    # All shifts are tried on the same lines: those whose adjacent lines are in the window.
    lines = np.arange(3, 57)
    assert compared == [(lines.tolist(), (lines + by).tolist()) for by in (0, 1, -1, 2, -2, 3, -3)]


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([(1, 0.44)], None),  # the only one, and not clear enough to be believed alone
        ([(1, 0.46)], Misalignment(7, 1)),
        ([(1, 0.31), (1, 0.31)], Misalignment(7, 1)),  # two in a row confirm each other
        ([(1, 0.31), (2, 0.31)], None),
        ([(1, 0.31), (0, 0.0), (1, 0.31)], None),
        ([(0, 0.0), (2, 0.46)], Misalignment(7, 2)),
        ([(2, 0.9), (0, 0.0)], None),  # the files are in step again
    ],
)
def test_a_misalignment_needs_a_second_window_or_a_clear_gain(
    monkeypatch: pytest.MonkeyPatch, windows: list[tuple[int, float]], expected: Misalignment | None
) -> None:
    found = iter(windows)
    monkeypatch.setattr(line_shift_detection, "_best_shift", lambda window: next(found))
    monkeypatch.setattr(
        line_shift_detection, "_locate", lambda before, window, shift: Misalignment(7, shift)
    )
    assert (
        find_misalignment(
            (line, line_features("a"), line_features("b"))
            for line in range(line_shift_detection._WINDOW * len(windows))
        )
        == expected
    )


def test_the_last_lines_count_if_they_are_a_quarter_of_a_window() -> None:
    pairs = [(line, line_features("a"), line_features("b")) for line in range(1, 1000)]
    whole, quarter = line_shift_detection._WINDOW, line_shift_detection._WINDOW // 4
    found = {
        count: [
            (each.lines[0], len(each.src)) for each in line_shift_detection._windows(pairs[:count])
        ]
        for count in (quarter - 1, quarter, whole)
    }
    assert found == {quarter - 1: [], quarter: [(1, quarter)], whole: [(1, whole)]}
    assert [
        (each.lines[0], len(each.tgt))
        for each in line_shift_detection._windows(pairs[: 2 * whole + quarter])
    ] == [
        (1, whole),
        (1 + whole, whole),
        (1 + 2 * whole, quarter),
    ]


def test_numbers_count_from_five_lines_on() -> None:
    """The score is the correlation of lengths plus the fraction of lines with equal numbers."""
    lengths = (3.0, 1.0, 2.0, 5.0, 4.0, 6.0)
    plain = np.array(table(*lengths))
    assert line_shift_detection._correlation(plain, plain) == pytest.approx(1.0)
    assert line_shift_detection._correlation(plain, -plain) == pytest.approx(-1.0)
    assert line_shift_detection._correlation(
        np.array(table(*lengths, numbers=(1, 2, 3, 4))), plain
    ) == pytest.approx(1.0)
    five = np.array(table(*lengths, numbers=(1, 2, 3, 4, 5)))
    assert line_shift_detection._correlation(five, plain) == pytest.approx(1.0)
    assert line_shift_detection._correlation(
        five, np.array(table(*lengths, numbers=(1, 2, 3, 9, 9)))
    ) == pytest.approx(1.6)
    assert line_shift_detection._correlation(
        five, np.array(table(*lengths, numbers=(1, 2, 3, 4, 0, 6)))
    ) == pytest.approx(1 + 4 / 6)


@pytest.mark.parametrize("line", [61, 201, 333])
@pytest.mark.parametrize("shift", [1, -2, 3])
def test_a_misalignment_is_located(line: int, shift: int) -> None:
    """With distinct lengths the line is exact where lines are missing, and near where they are
    added."""
    src, tgt = sentences(800)
    pairs = [[line_features(text) for text in side] for side in (src, tgt)]
    late = pairs[1] if shift > 0 else pairs[0]
    late[line - 1 : line - 1] = [LineFeatures(0.0, 1)] * abs(shift)
    misalignment = find_misalignment(zip(itertools.count(1), *pairs, strict=False))
    assert misalignment is not None
    assert misalignment.shift == shift
    assert line <= misalignment.line <= line + abs(shift)


def test_leakage_is_found_after_folding_case_punctuation_and_width(tmp_path: Path) -> None:
    src, tgt = sentences(300)
    src[5], tgt[5] = "Ein Hund — läuft!", "A dog runs."
    src[9], tgt[9] = "Ｅｉｎ hund läuft", "a DOG, runs"
    src[11], tgt[11] = "ein Hund läuft?", "something else entirely here"
    held_out = corpus_of(
        tmp_path,
        ["ein hund läuft", "...", "nie gesehen"],
        ["A dog runs", "!", "never seen"],
        name="test",
    )
    result = problems(corpus_of(tmp_path, src, tgt), held_out)
    assert result["held-out pairs in the corpus"] == (2, [6, 10])
    assert result["held-out sources in the corpus"] == (3, [6, 10, 12])


def test_every_translation_of_a_held_out_source_is_searched(tmp_path: Path) -> None:
    src, tgt = sentences(300)
    src[5], tgt[5] = "Ein Hund läuft.", "A dog runs."
    src[9], tgt[9] = "Ein Hund läuft.", "A dog is running."
    src[11], tgt[11] = "Ein Hund läuft.", "The dog walks."
    held_out = corpus_of(
        tmp_path, ["Ein Hund läuft."] * 2, ["A dog runs.", "A dog is running."], name="test"
    )
    result = problems(corpus_of(tmp_path, src, tgt), held_out)
    assert result["held-out pairs in the corpus"] == (2, [6, 10])
    assert result["held-out sources in the corpus"] == (3, [6, 10, 12])


def test_overlap_keys() -> None:
    assert (
        overlap_key("Ｅｉｎ Hund — läuft_2!") == overlap_key("EIN HUND LÄUFT 2") == "einhundläuft2"
    )
    assert overlap_key("¿...?") == ""
    assert overlap_key("Straße") == overlap_key("STRASSE")


def test_findings_have_the_lines_of_a_csv(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('src,tgt\n"a\nb",c\nsame,same\n,empty\n', encoding="utf-8")
    assert problems(TabularCorpus(path)) == {
        "source equals target": (1, [4]),
        "empty lines": (1, [5]),
    }


def test_progress_is_reported(tmp_path: Path) -> None:
    reported: list[int] = []
    check_corpus(corpus_of(tmp_path, ["a b"] * 25_000, ["c d"] * 25_000), progress=reported.append)
    assert reported == [10_000, 20_000, 25_000], "the last is the whole"


def test_an_empty_corpus_has_no_problem_of_its_own(tmp_path: Path) -> None:
    assert problems(corpus_of(tmp_path, [], [])) == {}


def test_an_unreadable_corpus_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.de.gz").write_bytes(b"\x1f\x8b broken")
    (tmp_path / "x.en").write_bytes(b"a\n")
    with pytest.raises(DataError, match=r"x\.de\.gz must be a valid gzip file"):
        check_corpus(ParallelFiles(tmp_path / "x.de.gz", tmp_path / "x.en"))


@needs_data
@pytest.mark.parametrize("name", ["multi30k", "tatoeba_ende"])
def test_published_corpora_are_aligned(tmp_path: Path, name: str) -> None:
    src, tgt = (
        lzma.decompress((DATA / name / f"train.{side}.xz").read_bytes())
        .decode()
        .split("\n")[:30_000]
        for side in ("de", "en")
    )
    rows = found(corpus_of(tmp_path, src, tgt))
    assert rows["misaligned lines"].ok
    assert rows["length ratio"].count < 30
    assert rows["already tokenized text"].count < 100
