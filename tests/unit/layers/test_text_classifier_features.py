"""Word embeddings, filters and n-gram weights against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dragoman.layers.text_classifier_features import (
    FilterBank,
    NgramBag,
    OneHotFilterBank,
    WordEmbedding,
)


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


def test_ngram_dropout_drops_single_ngrams_of_a_text_in_training() -> None:
    torch.manual_seed(0)
    bag = NgramBag(1001, 1, dropout=0.5)
    torch.nn.init.ones_(bag.weight)
    features = torch.arange(1, 1001).unsqueeze(0)
    with torch.no_grad():
        logits = [bag(features).item() for _ in range(2)]
        assert all(900 < logit < 1100 for logit in logits)  # about 500 are left, each doubled
        assert logits[0] != logits[1]
        assert bag.eval()(features).item() == 1000


@pytest.mark.parametrize("length", [1, 3, 5])
def test_filters_see_every_window_that_holds_a_word(length: int) -> None:
    torch.manual_seed(0)
    bank = FilterBank(4, widths=(1, 3), filters=2).double()
    x = torch.randn(1, 5, 4, dtype=torch.float64)
    mask = torch.arange(5).unsqueeze(0) < length
    expected = []
    for width, convolution in zip((1, 3), bank.convolutions, strict=True):
        zeros = torch.zeros(width - 1, 4, dtype=torch.float64)
        extended = torch.cat([zeros, x[0, :length], zeros])
        responses = torch.stack(
            [
                (convolution.weight * extended[at : at + width].T).sum(dim=(1, 2))
                + convolution.bias
                for at in range(length + width - 1)
            ]
        )
        expected.append(responses.max(dim=0).values.relu())
    torch.testing.assert_close(bank(x, mask)[0], torch.cat(expected))


def test_one_hot_filters_equal_convolutions_of_one_hot_vectors() -> None:
    torch.manual_seed(0)
    bank = OneHotFilterBank(7, widths=(2, 3), filters=2).double()
    tokens = torch.tensor([[4, 5, 6, 4], [6, 4, 5, 5]])
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    one_hot = torch.nn.functional.one_hot(tokens, 7).double() * mask.unsqueeze(2)
    plain = FilterBank(7, widths=(2, 3), filters=2).double()
    with torch.no_grad():
        for width, table, bias, convolution in zip(
            (2, 3), bank.tables, bank.biases, plain.convolutions, strict=True
        ):
            bias.normal_()
            convolution.weight.copy_(table.view(7, width, 2).permute(2, 0, 1))
            convolution.bias.copy_(bias)
    torch.testing.assert_close(bank(tokens, mask), plain(one_hot, mask))
    bank(tokens, mask).sum().backward()
    assert not bank.tables[0].grad[0].any()  # padding


def test_windows_of_padding_alone_are_not_pooled() -> None:
    """Their response is the bias, here more than that of any window with a word."""
    bank = FilterBank(2, widths=(1, 3), filters=1)
    one_hot = OneHotFilterBank(7, widths=(1, 3), filters=1)
    with torch.no_grad():
        for convolution in bank.convolutions:
            convolution.weight.fill_(-0.1)
            convolution.bias.fill_(1.0)
        for table, bias in zip(one_hot.tables, one_hot.biases, strict=True):
            table[1:].fill_(-0.1)
            bias.fill_(1.0)
    x, tokens = torch.ones(1, 5, 2), torch.full((1, 5), 4)
    mask = torch.arange(5).unsqueeze(0) < 2
    torch.testing.assert_close(bank(x, mask), bank(x[:, :2], None))
    torch.testing.assert_close(one_hot(tokens, mask), one_hot(tokens[:, :2], None))
    torch.testing.assert_close(one_hot(tokens, mask), torch.full((1, 2), 0.9))


def test_ngram_logits_are_weighted_sums() -> None:
    torch.manual_seed(0)
    bag = NgramBag(6, 2)
    with torch.no_grad():
        bag.weight.normal_()
        bag.ratios[1:].normal_()
    ids = torch.tensor([[1, 4, 0], [5, 0, 0]])
    values = torch.tensor([[0.5, 2.0, 9.0], [3.0, 9.0, 9.0]])
    expected = torch.stack(
        [
            0.5 * bag.weight[1] * bag.ratios[1] + 2 * bag.weight[4] * bag.ratios[4],
            3 * bag.weight[5] * bag.ratios[5],
        ]
    )
    torch.testing.assert_close(bag(ids, values), expected)
    plain = (bag.weight * bag.ratios)[torch.tensor([1, 4])].sum(dim=0)
    torch.testing.assert_close(bag(ids)[0], plain)


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


def test_one_hot_weights_start_as_small_as_the_papers() -> None:
    torch.manual_seed(0)
    (table,) = OneHotFilterBank(500, widths=(3,), filters=4).tables
    assert table[1:].std().item() == pytest.approx(0.01, rel=0.05)
    assert not table[0].any()
