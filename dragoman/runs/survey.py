"""A quick look at a corpus: how large it is, before anything is chosen for it."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from dragoman.data.corpus import Corpus
from dragoman.errors import DataError

MOST_PAIRS = 200_000  # read at most; the rest is estimated from the share of the files that this was
TOKENS_A_WORD = 1.25  # on the vocabularies that fitting.py chooses
BYTES_A_WORD = 6  # a word and its space in UTF-8, near enough for any script: this only sizes a vocabulary


class Survey(NamedTuple):
    """How much text there is, both sides together; estimates where the corpus is long."""

    pairs: int
    words: int
    exact: bool
    tokens: int = 0  # both sides with their ends, on a vocabulary of the fitted size; 0 where nobody counted


def survey(corpus: Corpus, most: int = MOST_PAIRS) -> Survey:
    """Count pairs and words, reading no more than `most` pairs."""
    pairs = size = words = 0
    share, exact = 1.0, True
    for pair in itertools.islice(corpus.pairs(), most + 1):
        if pairs == most:
            share, exact = min(1.0, max(corpus.share_read(), 1e-9)), False
            break
        pairs += 1
        size += len(pair.src.encode()) + len(pair.tgt.encode())
        words += len(pair.src.split()) + len(pair.tgt.split())
    if not size:
        found = f"{pairs} pairs, all of them empty" if pairs else "no pairs"
        raise DataError(f"{' and '.join(map(str, corpus.files))} must hold text", found=found, fix="give files with sentences in them")
    # Words of one letter are tokens too, and so is every sentence's end: in short lines these are most of the text.
    tokens = max(TOKENS_A_WORD * size / BYTES_A_WORD, words) + 2 * pairs
    return Survey(int(pairs / share), int(size / BYTES_A_WORD / share), exact=exact, tokens=int(tokens / share))
