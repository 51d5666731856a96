"""The token store: the corpus's token ids, built once, reused, and always verified."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from store_kit import ENGLISH, GERMAN, prepare_store, write_corpus

from dragoman.config.root_config import DataConfig, TextConfig
from dragoman.data.parallel_corpus import Corpus, ParallelFiles, TabularCorpus
from dragoman.data.token_store import prepared_data_directory, store_key
from dragoman.data.token_store_builder import StoreReport
from dragoman.errors import DataError
from dragoman.text.sentencepiece_tokenizer import Tokenizers, train_tokenizers
from dragoman.text.special_tokens import PAD


@pytest.fixture(scope="module")
def tokenizers() -> Tokenizers:
    return train_tokenizers(
        GERMAN * 20, ENGLISH * 20, TextConfig(vocab_size=330, character_coverage=1.0)
    )


def test_the_store_holds_the_corpus(tmp_path: Path, tokenizers: Tokenizers) -> None:
    store = prepare_store(write_corpus(tmp_path, GERMAN, ENGLISH), tokenizers, tmp_path / "cache")
    assert len(store) == 3
    for index in range(3):
        src, tgt = store.pair(index)
        assert src.tolist() == tokenizers.src.encode(GERMAN[index])
        assert tokenizers.tgt.decode(tgt.tolist()) == ENGLISH[index]
        assert (store.src_lengths[index], store.tgt_lengths[index]) == (len(src), len(tgt))
    assert store.line_numbers.tolist() == [1, 2, 3]
    assert src.dtype == np.uint16
    assert store.report == StoreReport(
        read=3,
        pairs=3,
        src_tokens=int(store.src_lengths.sum()),
        tgt_tokens=int(store.tgt_lengths.sum()),
    )
    store.verify()


def test_pairs_outside_are_rejected(tmp_path: Path, tokenizers: Tokenizers) -> None:
    store = prepare_store(write_corpus(tmp_path, GERMAN, ENGLISH), tokenizers, tmp_path / "cache")
    for index in (-1, 3):
        with pytest.raises(IndexError, match=f"pairs 0 to 2; found {index}"):
            store.pair(index)
        with pytest.raises(
            IndexError, match=f"pairs 0 to 2; found {min(index, 1)} to {max(index, 1)}"
        ):
            store.padded_ids("src", np.array([1, index]), 99)


def test_several_pairs_are_fetched_as_the_rows_of_a_table(
    tmp_path: Path, tokenizers: Tokenizers
) -> None:
    store = prepare_store(write_corpus(tmp_path, GERMAN, ENGLISH), tokenizers, tmp_path / "cache")
    wanted = np.array([2, 0, 2])
    width = int(store.tgt_lengths.max()) + 2
    rows = store.padded_ids("tgt", wanted, width)
    assert rows.shape == (3, width)
    for row, index in zip(rows, wanted, strict=True):
        ids = store.pair(int(index))[1].tolist()
        assert row.tolist() == ids + [PAD] * (width - len(ids))
    assert store.padded_ids("src", np.zeros(0, np.int64), 4).shape == (0, 4)


def test_a_second_run_reads_nothing(
    tmp_path: Path, tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No half hour of loading at each start (fairseq#1267, #2829)."""
    corpus = write_corpus(tmp_path, GERMAN, ENGLISH)
    first = prepare_store(corpus, tokenizers, tmp_path / "cache")
    monkeypatch.setattr(
        ParallelFiles, "records", lambda self: pytest.fail("the corpus was read again")
    )
    second = prepare_store(corpus, tokenizers, tmp_path / "cache")
    assert second.digest == first.digest
    assert second.pair(1)[0].tolist() == first.pair(1)[0].tolist()
    assert second.report == first.report


def test_everything_that_decides_the_contents_is_in_the_key(
    tmp_path: Path, tokenizers: Tokenizers
) -> None:
    other = train_tokenizers(
        GERMAN * 20, ENGLISH * 20, TextConfig(vocab_size=320, character_coverage=1.0)
    )
    reversed_text = [line[::-1] for line in GERMAN]
    same_size = train_tokenizers(
        reversed_text * 20, ENGLISH * 20, TextConfig(vocab_size=330, character_coverage=1.0)
    )
    assert [len(each) for each in same_size] == [len(each) for each in tokenizers]
    corpus = write_corpus(tmp_path, GERMAN, ENGLISH)
    lenient = ParallelFiles(*corpus.files, on_bad_line="skip")
    shorter = ParallelFiles(*corpus.files, max_line_bytes=100)
    data = DataConfig()

    def key(corpus: Corpus, digests: list[str], tokenizers: Tokenizers, data: DataConfig) -> str:
        return store_key(corpus, digests, tokenizers, data)

    keys = [
        key(corpus, ["a", "b"], tokenizers, data),
        key(corpus, ["b", "a"], tokenizers, data),
        key(corpus, ["a", "b"], other, data),
        key(corpus, ["a", "b"], same_size, data),
        key(corpus, ["a", "b"], Tokenizers(tokenizers.src, other.tgt), data),
        key(corpus, ["a", "b"], tokenizers, DataConfig(max_length=100)),
        key(lenient, ["a", "b"], tokenizers, data),
        key(shorter, ["a", "b"], tokenizers, data),
        key(TabularCorpus(tmp_path / "x.tsv"), ["a", "b"], tokenizers, data),
    ]
    assert len(set(keys)) == len(keys)
    assert (
        key(corpus, ["a", "b"], tokenizers, DataConfig(src="elsewhere", cache_dir="x")) == keys[0]
    )


def test_an_edit_that_keeps_size_and_time_is_noticed(
    tmp_path: Path, tokenizers: Tokenizers
) -> None:
    corpus = write_corpus(tmp_path, GERMAN, ENGLISH)
    first = prepare_store(corpus, tokenizers, tmp_path / "cache")
    stat = corpus.src.stat()
    corpus.src.write_text(
        corpus.src.read_text(encoding="utf-8").replace("Hund", "Huhn"), encoding="utf-8"
    )
    os.utime(corpus.src, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    second = prepare_store(corpus, tokenizers, tmp_path / "cache")
    assert second.digest != first.digest
    assert "Huhn" in tokenizers.src.decode(second.pair(0)[0].tolist())


def test_skipped_pairs_are_counted_and_reported(tmp_path: Path, tokenizers: Tokenizers) -> None:
    """Long and empty pairs are skipped with a report (OpenNMT-py#1161)."""
    src = [GERMAN[0], "", "x" * 300, GERMAN[1], "  ", GERMAN[2]]
    tgt = [ENGLISH[0], "empty", "too long", ENGLISH[1], "blank", "y" * 5000]
    corpus = write_corpus(tmp_path, src, tgt, max_line_bytes=4000)
    store = prepare_store(corpus, tokenizers, tmp_path / "cache", max_length=60)
    assert store.line_numbers.tolist() == [1, 4]
    assert store.report.skipped == {
        "with an empty side": 2,
        "with an overlong line": 1,
        "over 60 tokens": 1,
    }
    assert store.report.lines == {
        "with an empty side": [2, 5],
        "with an overlong line": [6],
        "over 60 tokens": [3],
    }
    summary = store.report.summary()
    assert "2 of 6 pairs kept; skipped: " in summary
    assert "2 with an empty side (lines 2, 5)" in summary
    assert "1 over 60 tokens (line 3)" in summary


@pytest.mark.parametrize("side", ["src", "tgt"])
def test_a_pair_may_have_as_many_tokens_as_the_limit_and_no_more(
    tmp_path: Path, tokenizers: Tokenizers, side: str
) -> None:
    long, short = GERMAN[0], "ab"
    corpus = write_corpus(tmp_path, *([long, short], [short, short])[:: 1 if side == "src" else -1])
    count = len(getattr(tokenizers, side).encode(long))
    assert len(tokenizers.src.encode(short)) < count - 1
    assert prepare_store(
        corpus, tokenizers, tmp_path / "cache", max_length=count
    ).line_numbers.tolist() == [1, 2]
    assert prepare_store(
        corpus, tokenizers, tmp_path / "cache", max_length=count - 1
    ).line_numbers.tolist() == [2]


def test_bad_lines_stop_or_are_counted(tmp_path: Path, tokenizers: Tokenizers) -> None:
    corpus = write_corpus(tmp_path, GERMAN, ENGLISH)
    corpus.src.write_bytes(b"gut\n\xff\xfe bad\nauch\n")
    with pytest.raises(DataError, match=r"x\.de line 2 must be UTF-8"):
        prepare_store(corpus, tokenizers, tmp_path / "cache")
    corpus.on_bad_line = "skip"
    store = prepare_store(corpus, tokenizers, tmp_path / "cache")
    assert store.line_numbers.tolist() == [1, 3]
    assert store.report.skipped == {"with a bad line": 1}


def test_many_named_lines_are_shortened() -> None:
    report = StoreReport(read=9, pairs=0)
    for number in range(1, 10):
        report.record_skipped("odd", number)
    assert report.summary() == "0 of 9 pairs kept; skipped: 9 odd (lines 1, 2, 3, 4, 5 …)"
    assert StoreReport(src_tokens=60, tgt_tokens=40, unknown=3).unknown_fraction() == 0.03
    assert StoreReport().unknown_fraction() == 0


def test_a_corpus_without_a_usable_pair_is_an_error(tmp_path: Path, tokenizers: Tokenizers) -> None:
    with pytest.raises(
        DataError,
        match=r"a usable sentence pair; found 0 of 2 pairs kept; skipped: 2 with an empty "
        r"side",
    ):
        prepare_store(write_corpus(tmp_path, ["", "a"], ["b", ""]), tokenizers, tmp_path / "cache")
    with pytest.raises(DataError, match="found 0 of 0 pairs kept"):
        prepare_store(write_corpus(tmp_path, [], []), tokenizers, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_unknown_tokens_are_counted(tmp_path: Path) -> None:
    """A vocabulary that does not fit shows before training (OpenNMT-py#2602)."""
    made = train_tokenizers(
        GERMAN * 9,
        ENGLISH * 9,
        TextConfig(vocab_size=90, byte_fallback=False, character_coverage=1.0),
    )
    store = prepare_store(write_corpus(tmp_path, ["日 本"], ["x y"]), made, tmp_path / "cache")
    assert store.report.unknown == 4
    assert store.report.unknown_fraction() > 0.3


def test_separate_vocabularies_are_kept_apart(tmp_path: Path) -> None:
    made = train_tokenizers(
        GERMAN * 20,
        ENGLISH * 20,
        TextConfig(vocab_size=310, character_coverage=1.0, shared_vocab=False),
    )
    store = prepare_store(write_corpus(tmp_path, GERMAN, ENGLISH), made, tmp_path / "cache")
    assert store.pair(0)[1].tolist() == made.tgt.encode(ENGLISH[0])
    assert made.tgt.encode(ENGLISH[0]) != made.src.encode(ENGLISH[0])


def test_wide_ids_where_the_vocabulary_is_large(tmp_path: Path, tokenizers: Tokenizers) -> None:
    class Large(type(tokenizers.src)):  # type: ignore[misc]
        def __len__(self) -> int:
            return 70_000

    large = Large(tokenizers.src.model, algorithm="bpe", normalization="nfc")
    store = prepare_store(
        write_corpus(tmp_path, GERMAN, ENGLISH), Tokenizers(large, large), tmp_path / "cache"
    )
    assert store.pair(0)[0].dtype == np.uint32
    assert store.pair(0)[0].tolist() == tokenizers.src.encode(GERMAN[0])


def test_data_is_read_and_prepared_without_torch() -> None:
    """Inspecting a corpus must not import torch."""
    code = (
        "import sys, dragoman.data.token_store, dragoman.data.batch_plan, "
        "dragoman.data.corpus_checks; print('torch' in sys.modules)"
    )
    root = str(Path(__file__).resolve().parents[3])
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
        check=True,
    )
    assert run.stdout.strip() == "False"


def test_directory_of_tokenized_data(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepared_data_directory(DataConfig(cache_dir="/there")) == Path("/there")
    monkeypatch.setenv("DRAGOMAN_CACHE", "/mine")
    assert prepared_data_directory(DataConfig()) == Path("/mine")
    monkeypatch.delenv("DRAGOMAN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert prepared_data_directory(DataConfig()) == Path("/xdg/dragoman")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert prepared_data_directory(DataConfig()) == Path.home() / ".cache" / "dragoman"
