"""Corpora of the training benchmarks: Multi30k, or synthetic text with its lengths."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dragoman.config import DataConfig, TextConfig
from dragoman.data.batch_plan import BatchPlan, Cursor
from dragoman.data.bucket_shapes import BatchShape
from dragoman.data.collate import Batch, collate
from dragoman.data.parallel_corpus import ParallelFiles
from dragoman.data.token_store import TokenStore
from dragoman.text.sentencepiece_tokenizer import Tokenizers, train_tokenizers

# Lengths of Multi30k's German and English with a vocabulary of 8,000, EOS included: log-normal,
# means 15.9 and 15.4.
MEANS, DEVIATIONS, CORRELATION = (2.709, 2.687), (0.331, 0.297), 0.859
NUM_SPECIAL_TOKENS = 5  # PAD, BOS, EOS, UNK and the space
LETTERS = [
    chr(code)
    for first, last in ((0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0x3400, 0x4DB5))
    for code in range(first, last + 1)
]
WARMUP_BATCHES = 3  # batches of each shape before timing: on a GPU run, captured, replayed


class PreparedCorpus(NamedTuple):
    """Prepared sentence pairs and their tokenizers."""

    store: TokenStore
    tokenizers: Tokenizers
    src: list[str]
    tgt: list[str]


def synthetic_corpus(
    folder: Path, pairs: int, *, vocabulary: int, length_factor: float = 1.0
) -> PreparedCorpus:
    """Return a corpus in which every letter is a token; targets are sources in other letters."""
    random = np.random.default_rng(1)
    cross = CORRELATION * DEVIATIONS[0] * DEVIATIONS[1]
    logarithms = random.multivariate_normal(
        MEANS, [[DEVIATIONS[0] ** 2, cross], [cross, DEVIATIONS[1] ** 2]], pairs
    )
    # The leading space and EOS are not generated.
    lengths = np.clip(np.rint(length_factor * np.exp(logarithms)).astype(int) - 2, 1, 198)
    letters = np.array(LETTERS[: vocabulary - NUM_SPECIAL_TOKENS])
    weights = 1.0 / np.arange(3, len(letters) + 3)  # Zipf
    ids = random.choice(len(letters), int(lengths.max(axis=1).sum()), p=weights / weights.sum())
    other = random.permutation(len(letters))
    ends = np.cumsum(lengths.max(axis=1))
    rows = [ids[end - length : end] for end, length in zip(ends, lengths.max(axis=1), strict=True)]
    src = ["".join(letters[row[:length]]) for row, length in zip(rows, lengths[:, 0], strict=True)]
    tgt = [
        "".join(letters[other[row[:length]]])
        for row, length in zip(rows, lengths[:, 1], strict=True)
    ]
    alphabet = ["".join(letters[start : start + 1000]) for start in range(0, len(letters), 1000)]
    text = TextConfig(
        tokenizer="characters", vocab_size=vocabulary, character_coverage=1.0, byte_fallback=False
    )
    return _prepare_corpus(folder, src, tgt, train_tokenizers(alphabet, alphabet, text))


def multi30k_corpus(
    folder: Path, data: Path, *, vocabulary: int, pairs: int | None = None
) -> PreparedCorpus:
    """Return the German-English Multi30k corpus in a data directory."""
    files = ParallelFiles(data / "multi30k" / "train.de.xz", data / "multi30k" / "train.en.xz")
    read = [(pair.src, pair.tgt) for pair in files.pairs()][:pairs]
    src, tgt = [pair[0] for pair in read], [pair[1] for pair in read]
    return _prepare_corpus(
        folder, src, tgt, train_tokenizers(src, tgt, TextConfig(vocab_size=min(vocabulary, 8000)))
    )


def _prepare_corpus(
    folder: Path, src: list[str], tgt: list[str], tokenizers: Tokenizers
) -> PreparedCorpus:
    for name, texts in (("drawn.src", src), ("drawn.tgt", tgt)):
        (folder / name).write_text("\n".join(texts) + "\n", encoding="utf-8")
    corpus = ParallelFiles(folder / "drawn.src", folder / "drawn.tgt")
    return PreparedCorpus(
        TokenStore.prepare(corpus, tokenizers, folder=folder, data=DataConfig()),
        tokenizers,
        src,
        tgt,
    )


class BenchmarkPlan(BatchPlan):
    """Full batches of a plan: warm-up batches of each shape, then the same ones every round."""

    def __init__(
        self,
        store: TokenStore,
        *,
        batch_tokens: int,
        max_shapes: int,
        steps: int,
        rounds: int = 3,
        warmup_batches: int = WARMUP_BATCHES,
        seed: int = 1,
    ) -> None:
        super().__init__(
            store.src_lengths,
            store.tgt_lengths,
            batch_tokens=batch_tokens,
            seed=seed,
            max_shapes=max_shapes,
        )
        self.store, self.steps, self.rounds, self._each = store, steps, rounds, warmup_batches

    @cached_property
    def _full(self) -> list[NDArray[np.int64]]:
        """Return the full batches only, because partial ones have shapes of their own."""
        every = self.epoch(0)
        full = [batch for batch in every if len(batch) == self.shape(batch).rows(self.batch_tokens)]
        return full if 2 * len(full) > len(every) else every

    @cached_property
    def timed(self) -> list[NDArray[np.int64]]:
        """Return the batches of one round."""
        return [self._full[index % len(self._full)] for index in range(self.steps)]

    @cached_property
    def warmup_batches(self) -> list[NDArray[np.int64]]:
        """Return batches with every shape of a round."""
        by_shape: dict[BatchShape, NDArray[np.int64]] = {
            self.shape(batch): batch for batch in self.timed
        }
        return [batch for batch in by_shape.values() for _ in range(self._each)]

    @property
    def used(self) -> int:
        """Return the number of shapes in a round."""
        return len({self.shape(batch) for batch in self.timed})

    @cached_property
    def _order(self) -> list[NDArray[np.int64]]:
        return [*self.warmup_batches, *(batch for _ in range(self.rounds) for batch in self.timed)]

    def batches(self, epoch: int) -> int:
        """Return the number of batches."""
        return len(self._order)

    def batch(self, cursor: Cursor) -> NDArray[np.int64]:
        """Return one batch."""
        return self._order[cursor.batch]

    def collate(self, examples: NDArray[np.int64], seed: int = 0) -> Batch:
        """Return a padded batch, as in training."""
        return collate(self.store, examples, shapes=self.shapes)

    def padding(self) -> float:
        """Return the fraction of a round's padded tokens that are padding."""
        padded_tokens = sum(len(batch) * sum(self.shape(batch)) for batch in self.timed)
        return 1.0 - self.tokens() / padded_tokens

    def tokens(self) -> int:
        """Return the tokens of a round without padding, both sides, EOS included."""
        return sum(
            int(
                (
                    self.store.src_lengths[batch].astype(int) + self.store.tgt_lengths[batch] + 2
                ).sum()
            )
            for batch in self.timed
        )
