"""Word embeddings against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dragoman.layers.multi_table_word_embedding import WordEmbedding


def test_tables_are_concatenated_and_projected() -> None:
    torch.manual_seed(0)
    embedding = WordEmbedding(9, 4, widths=(3, 2), frozen_widths=(2,), scale=2.0)
    tokens = torch.tensor([[4, 5, 0]])
    tables = [*embedding.tables, *embedding.frozen_tables]
    joined = torch.cat([table[tokens] for table in tables], dim=-1)
    assert embedding.projection is not None
    torch.testing.assert_close(embedding(tokens), 2 * joined @ embedding.projection.weight.T)
    assert [table.requires_grad for table in tables] == [True, True, False]
    assert WordEmbedding(9, 4, widths=(4,)).projection is None


def test_embedding_dropout_drops_all_occurrences_of_a_word() -> None:
    torch.manual_seed(0)
    embedding = WordEmbedding(50, 8, widths=(8,), embedding_dropout=0.5)
    tokens = torch.arange(50).repeat(3, 1)
    with torch.no_grad():
        found = embedding(tokens)
        plain = embedding.eval()(tokens)
    dropped = (found == 0).all(dim=-1)
    assert (dropped == dropped[:1]).all()
    assert 10 < int(dropped[0].sum()) < 40
    torch.testing.assert_close(found[~dropped], 2 * plain[~dropped])


def test_word_dropout_replaces_words_by_unknown() -> None:
    torch.manual_seed(0)
    embedding = WordEmbedding(50, 8, widths=(8,), word_dropout=0.5)
    tokens = torch.randint(4, 50, (20, 20))
    with torch.no_grad():
        found = embedding(tokens)
        unknown = (found == embedding.tables[0][3]).all(dim=-1)
        kept = (found == embedding.tables[0][tokens]).all(dim=-1)
    assert (unknown | kept).all()
    assert 0.4 < unknown.float().mean() < 0.6
    with torch.no_grad():
        assert torch.equal(embedding.eval()(tokens), embedding.tables[0][tokens])


def test_word_vectors_start_the_last_trained_tables_and_the_frozen_ones() -> None:
    torch.manual_seed(0)
    embedding = WordEmbedding(2000, 8, widths=(4, 3), frozen_widths=(2,))
    own = embedding.tables[0].clone()
    trained = np.full((2, 3), 7.0, dtype=np.float32)
    frozen = np.array([[5.0, -5.0], [15.0, -15.0]], dtype=np.float32)
    embedding.load_vectors([(np.array([4, 6]), trained), (np.array([5, 1999]), frozen)])
    assert torch.equal(embedding.tables[0], own)
    assert embedding.tables[1][[4, 6]].tolist() == trained.tolist()
    assert embedding.frozen_tables[0][[5, 1999]].tolist() == frozen.tolist()
    # words without a vector are drawn as widely as the vectors lie
    others = embedding.frozen_tables[0][6:1999]
    assert others.std().item() == pytest.approx(float(frozen.std()), rel=0.1)
