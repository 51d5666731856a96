"""A linear classifier over a bag of n-grams: NB-SVM's features, tf-idf."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman import ops

PADDING = 0  # the id of padding among n-grams


class NgramBag(nn.Module):
    r"""A linear classifier of n-grams, each weighted by a fixed factor per class.

    .. math:: z_c = b_c + \sum_{i \in d} x_i\, r_{ic}\, w_{ic}

    With the naive-Bayes log-count ratios r and x = 1 these are the features of Wang and Manning
    (2012), section 2.3; with r = 1 and tf-idf values x it is a linear tf-idf classifier. Feature 0
    is padding. The sum is multiplied by `scale`: it needs large weights, which Adam reaches sooner
    so.
    """

    ratios: Tensor

    def __init__(
        self, features: int, labels: int, *, dropout: float = 0.0, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.dropout, self.scale = dropout, scale
        self.weight = nn.Parameter(torch.zeros(features, labels))
        self.bias = nn.Parameter(torch.zeros(labels))
        ratios = torch.ones(features, labels)
        ratios[PADDING : PADDING + 1] = 0.0  # a table may be empty
        self.register_buffer("ratios", ratios)

    def forward(self, features: Tensor, values: Tensor | None = None) -> Tensor:
        """Return logits (B, C) of feature ids (B, K) with their values (B, K), by default 1."""
        real = (features != PADDING).float()
        amounts = ops.dropout(
            real if values is None else values * real, self.dropout, training=self.training
        )
        rows = F.embedding(features, self.weight * self.ratios)  # (B, K, C)
        return (amounts.unsqueeze(2) * rows).sum(dim=1) * self.scale + self.bias
