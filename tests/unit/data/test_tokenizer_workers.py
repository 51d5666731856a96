"""Preparing by several processes: the same bytes as by one, no hang, and flat memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from store_kit import ENGLISH, GERMAN, prepare_store, write_long_corpus

from dragoman.config.root_config import TextConfig
from dragoman.data import token_store_builder
from dragoman.data.compressed_input_streams import file_sha256
from dragoman.data.parallel_corpus import Corpus, SentencePair
from dragoman.data.token_store_builder import BuildProgress
from dragoman.data.tokenizer_workers import TextBlock, encode_blocks, encode_texts
from dragoman.errors import DiskError
from dragoman.text.sentencepiece_tokenizer import Tokenizers, train_tokenizers


@pytest.fixture(scope="module")
def tokenizers() -> Tokenizers:
    return train_tokenizers(
        GERMAN * 20, ENGLISH * 20, TextConfig(vocab_size=330, character_coverage=1.0)
    )


def test_many_workers_return_the_same_as_one(
    tmp_path: Path, tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_store_builder, "BLOCK_PAIRS", 100)
    corpus = write_long_corpus(tmp_path, 1234)
    one = prepare_store(corpus, tokenizers, tmp_path / "one", workers=1)
    three = prepare_store(corpus, tokenizers, tmp_path / "three", workers=3)
    hashes = [
        {path.name: file_sha256(path) for path in store.folder.iterdir()} for store in (one, three)
    ]
    assert hashes[0] == hashes[1]
    assert len(one) == 1234


def test_workers_do_not_run_the_callers_script_again(tmp_path: Path) -> None:
    """A script without a main guard must not start itself in every worker."""
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import sys
print("started", flush=True)
from pathlib import Path
from dragoman.config.root_config import DataConfig, TextConfig
from dragoman.data.parallel_corpus import ParallelFiles
from dragoman.data.token_store import TokenStore
from dragoman.text.sentencepiece_tokenizer import train_tokenizers
here = Path({str(tmp_path)!r})
corpus = ParallelFiles(here / "x.de", here / "x.en")
config = TextConfig(vocab_size=330, character_coverage=1.0)
made = train_tokenizers(corpus.src_texts(), corpus.tgt_texts(), config)
print(len(TokenStore.prepare(corpus, made, folder=here / "cache", data=DataConfig(), workers=2)))
"""
    )
    write_long_corpus(tmp_path, 50)
    root = Path(__file__).resolve().parents[3]
    run = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=True,
    )
    assert run.stdout.split() == ["started", "50"]


def test_a_worker_that_dies_is_an_error_not_a_hang(
    tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dragoman.data import tokenizer_workers

    real = tokenizer_workers._TokenizerWorker.send

    def send_and_kill(self: tokenizer_workers._TokenizerWorker, block: TextBlock) -> None:
        real(self, block)
        self._process.kill()
        self._process.wait()

    monkeypatch.setattr(tokenizer_workers._TokenizerWorker, "send", send_and_kill)
    blocks = [TextBlock([1], ["Ein Hund"] * 1, ["a dog"]) for _ in range(4)]
    with pytest.raises(DiskError, match="must not be killed; found one that ended with signal 9"):
        list(encode_blocks(blocks, tokenizers, 2))


def test_encoding_keeps_any_text_through_the_pipes(tokenizers: Tokenizers) -> None:
    texts = ["", "a\nb", "日本\u2028x", "🙂", "x" * 3000]
    blocks = [TextBlock(list(range(5)), texts, texts[::-1])] * 3
    for block, src, tgt in encode_blocks(blocks, tokenizers, 2):
        assert src.ids.tolist() == encode_texts(tokenizers.src, block.src).ids.tolist()
        assert tgt.lengths.tolist() == [
            len(row) for row in tokenizers.tgt.encode_batch(texts[::-1])
        ]


def test_progress_is_reported(
    tmp_path: Path, tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preparing shows how far it is (fairseq#2603)."""
    monkeypatch.setattr(token_store_builder, "BLOCK_PAIRS", 100)
    reports: list[BuildProgress] = []
    prepare_store(
        write_long_corpus(tmp_path, 450),
        tokenizers,
        tmp_path / "cache",
        progress=reports.append,
        workers=1,
    )
    assert [each.pairs for each in reports][-1] == 450
    assert len(reports) == 5
    assert reports[-1].fraction == 1.0
    assert all(each.seconds >= 0 for each in reports)


def test_memory_stays_flat_while_preparing(
    tmp_path: Path, tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten times the corpus must not take ten times the memory (fairseq#2588, #2589)."""
    import tracemalloc

    class Endless(Corpus):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.count = count

        @property
        def files(self) -> list[Path]:
            return []

        def layout(self) -> dict[str, object]:
            return {"count": self.count}

        def records(self):
            for number in range(1, self.count + 1):
                yield SentencePair(number, "ein Hund " * 5, "a dog " * 5)

    monkeypatch.setattr(token_store_builder, "BLOCK_PAIRS", 500)
    peaks = []
    for count in (1000, 8000):
        tracemalloc.start()
        prepare_store(Endless(count), tokenizers, tmp_path / "cache", workers=1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0] + 2_000_000
