"""N-gram weights against plain loops."""

from __future__ import annotations

import torch

from dragoman.layers.ngram_linear_classifier import NgramBag


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
