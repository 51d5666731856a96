"""Corpus cleaning: exactly the lines with findings are missing from what is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from dragoman.data.corpus_cleaner import CleaningResult, clean_corpus
from dragoman.data.parallel_corpus import ParallelFiles, TabularCorpus
from dragoman.errors import ConfigError, DataError

SOURCES = [f"der Hund Nummer {name}" for name in ("eins", "zwei", "drei", "vier", "acht")]
TARGETS = [f"the dog of number {name}" for name in ("one", "two", "six", "nine", "ten")]
PAIRS = list(zip(SOURCES, TARGETS, strict=True))
EMPTY = ("", "nothing")


def parallel_files(folder: Path, name: str, pairs: list[tuple[str, str]]) -> ParallelFiles:
    paths = [folder / f"{name}.de", folder / f"{name}.en"]
    for path, lines in zip(paths, zip(*pairs, strict=True), strict=True):
        path.write_text("".join(f"{line}\n" for line in lines))
    return ParallelFiles(*paths)


def clean_pairs(
    folder: Path, pairs: list[tuple[str, str]], **options: object
) -> tuple[CleaningResult, list[tuple[str, str]]]:
    outputs = [folder / "clean.de", folder / "clean.en"]
    result = clean_corpus(parallel_files(folder, "raw", pairs), outputs, **options)  # type: ignore[arg-type]
    columns = [path.read_text().splitlines() for path in outputs]
    return result, list(zip(*columns, strict=True))


@pytest.mark.parametrize(
    "lines", [[1], [6], [1, 2], [3, 4, 5], [6, 7], [1, 3, 5, 7], [1, 2, 4, 8, 9]]
)
def test_removed_lines_are_not_written(tmp_path: Path, lines: list[int]) -> None:
    kept = iter(PAIRS)
    pairs = [EMPTY if line in lines else next(kept) for line in range(1, 6 + len(lines))]
    result, written = clean_pairs(tmp_path, pairs)
    assert written == PAIRS
    assert (result.read, result.kept, result.reasons) == (len(pairs), 5, {"empty": len(lines)})


def test_a_removed_line_after_undecodable_ones_is_not_written(tmp_path: Path) -> None:
    rows = [f"{src}\t{tgt}".encode() for src, tgt in PAIRS]
    bad = [b"caf\xe9\tcoffee", b"th\xe9\ttea"]
    lines = [rows[0], *bad, b"\tnothing", rows[1], bad[0], *rows[2:], bad[1]]
    (tmp_path / "raw.tsv").write_bytes(b"\n".join([b"src\ttgt", *lines]) + b"\n")
    result = clean_corpus(TabularCorpus(tmp_path / "raw.tsv"), [tmp_path / "clean.tsv"])
    written = (tmp_path / "clean.tsv").read_bytes().splitlines()
    assert written == [b"src\ttgt", *rows]
    assert (result.read, result.kept, result.reasons) == (10, 5, {"invalid": 4, "empty": 1})


def test_kept_findings_are_written_and_the_others_are_not(tmp_path: Path) -> None:
    pairs = [*PAIRS, PAIRS[0], EMPTY]
    result, written = clean_pairs(tmp_path, pairs, keep=["duplicate"])
    assert written == [*PAIRS, PAIRS[0]]
    assert result.reasons == {"empty": 1}


def test_pairs_of_the_test_set_are_removed(tmp_path: Path) -> None:
    held_out = parallel_files(tmp_path, "test", PAIRS[1:3])
    result, written = clean_pairs(tmp_path, PAIRS, held_out=held_out)
    assert written == [PAIRS[0], *PAIRS[3:]]
    assert result.reasons == {"leak": 2}


def test_nothing_is_written_if_no_pair_would_be_left(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must leave some pairs; found all 2 removed"):
        clean_pairs(tmp_path, [EMPTY, EMPTY])
    assert not (tmp_path / "clean.de").exists()
    _, written = clean_pairs(tmp_path, [EMPTY, PAIRS[0]])
    assert written == [PAIRS[0]]


def test_no_input_is_overwritten(tmp_path: Path) -> None:
    corpus = parallel_files(tmp_path, "raw", [*PAIRS, EMPTY])
    held_out = parallel_files(tmp_path, "test", PAIRS[:1])
    other = tmp_path / "clean.en"
    for output in (corpus.src, corpus.tgt, held_out.src, held_out.tgt, other):
        before = output.read_bytes() if output.exists() else b""
        with pytest.raises(ConfigError, match=output.name):
            clean_corpus(corpus, [output, other], held_out=held_out)
        assert (output.read_bytes() if output.exists() else b"") == before
