"""The example store: ragged sequences, padding, selection and digests."""

from __future__ import annotations

import numpy as np
import pytest

from dragoman.data.in_memory_examples import InMemoryExamples


def small_store() -> InMemoryExamples:
    return InMemoryExamples(
        sequences={"words": [[1, 2, 3], [4], [], [5, 6]]},
        values={"label": np.array([0, 1, 1, 0])},
        skipped={"empty": 2},
    )


def test_sequences_are_padded_and_cut():
    store = small_store()
    assert len(store) == 4
    assert store.lengths("words").tolist() == [3, 1, 0, 2]
    rows = store.padded("words", np.array([3, 0, 2]), 2, padding=9)
    assert rows.tolist() == [[5, 6], [1, 2], [9, 9]]
    assert rows.dtype == np.int64
    assert store.sequence("words", 1).tolist() == [4]


def test_selected_examples_keep_their_fields():
    part = small_store().select([3, 1])
    assert part.sequence("words", 0).tolist() == [5, 6]
    assert part.values["label"].tolist() == [0, 1]


def test_the_digest_covers_every_field():
    first = small_store().digest
    assert first == small_store().digest
    moved = InMemoryExamples(
        sequences={"words": [[1, 2], [3, 4], [], [5, 6]]}, values={"label": np.array([0, 1, 1, 0])}
    )
    relabelled = InMemoryExamples(
        sequences={"words": [[1, 2, 3], [4], [], [5, 6]]}, values={"label": np.array([0, 1, 1, 1])}
    )
    labels = np.array([0, 1, 1, 0])
    others = [
        InMemoryExamples(sequences={"words": words}, values={"label": values})
        for words, values in (
            ([[1, 2, 3], [4], [], [5, 7]], labels),
            ([[1, 2, 3], [4], [], [5, 6]], labels.astype(np.int32)),
            ([[1, 2, 3], [4], [], [5, 6]], labels[:, None]),
        )
    ]
    digests = {first, moved.digest, relabelled.digest, *(each.digest for each in others)}
    assert len(digests) == 6


def test_an_empty_store_pads_to_nothing():
    store = InMemoryExamples(sequences={"words": []})
    assert len(store) == 0
    assert store.padded("words", np.zeros(0, np.int64), 3).shape == (0, 3)


def test_fields_of_different_sizes_are_a_programming_error():
    with pytest.raises(AssertionError, match="one row per example"):
        InMemoryExamples(sequences={"words": [[1]]}, values={"label": [0, 1]})
