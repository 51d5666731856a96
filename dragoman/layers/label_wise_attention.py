"""Label-wise attention of classifiers: one query, one vector and one logit per label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dragoman.attention.attention_pooling import Pooled
from dragoman.attention.attention_weight_hooks import AttentionRecord, RecordableAttention
from dragoman.ops import masked_softmax


class NameMatches(NamedTuple):
    """Where texts have the words of the labels' names."""

    positions: Tensor  # (B, C, S) True at a word of the label's name
    whole: Tensor  # (B, C) True if the text has all words of the name


class LabelNames(nn.Module):
    """The words of each label's name, to be found in texts.

    A label with few examples is known by its name: a text about copra names it. A label without
    words, such as an abbreviation that no text has, is never found.
    """

    words: Tensor

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """Store the word ids of each label's name, padded by -1."""
        super().__init__()
        longest = max(1, *map(len, words))
        padded = [[*each, *[-1] * (longest - len(each))] for each in words]
        # Computed from the vocabulary, so not part of the weights.
        self.register_buffer("words", torch.tensor(padded, device="cpu"), persistent=False)

    def forward(self, tokens: Tensor) -> NameMatches:
        """Find the names in tokens (B, S)."""
        equal = tokens[:, None, None] == self.words.unsqueeze(-1)  # (B, C, W, S)
        is_word = self.words >= 0  # (C, W)
        whole = (equal.any(dim=3) | ~is_word).all(dim=2) & is_word.any(dim=1)
        return NameMatches(equal.any(dim=2), whole)


class LabelAttention(RecordableAttention):
    r"""Attention pooling with one trained query per label.

    .. math:: \alpha_l = \mathrm{softmax}(u_l^\top H), \quad v_l = H \alpha_l^\top

    Mullenbach et al. (2018), section 2.2. With a `score_width` the keys are tanh(W h), as in Hu et
    al. (2018) and Vu et al. (2020). With `names`, a trained number is added to the scores of words
    that occur in the label's name: a simple form of the compatibility of words and labels of Wang
    et al. (2018), "Joint embedding of words and labels".
    """

    def __init__(
        self, width: int, *, labels: int, score_width: int = 0, names: bool = False
    ) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, score_width, bias=False) if score_width else None
        self.queries = nn.Linear(score_width or width, labels, bias=False)  # u, one row per label
        self.name_score = nn.Parameter(torch.ones(1)) if names else None

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, matches: NameMatches | None = None
    ) -> Pooled:
        """Pool (B, S, D) with a mask (B, S) to one vector per label, (B, C, D)."""
        keys = x if self.hidden is None else torch.tanh(self.hidden(x))
        scores = self.queries(keys).transpose(1, 2)  # (B, C, S)
        if self.name_score is not None and matches is not None:
            scores = scores + self.name_score.to(scores.dtype) * matches.positions
        weights = masked_softmax(scores, None if mask is None else mask.unsqueeze(1))
        weights = self.apply_edits(weights.unsqueeze(1)).squeeze(1)
        vectors = weights @ x
        self.emit_record(
            AttentionRecord(weights.unsqueeze(1), x.unsqueeze(1), vectors.unsqueeze(1))
        )
        return Pooled(vectors, weights)


class LabelOutput(nn.Module):
    r"""A logit for each label from the label's own vector: :math:`\beta_l^\top v_l + b_l`.

    With `names`, a text that has the label's name adds :math:`\gamma - \delta b_l`, with two
    numbers that all labels share: the bias b holds how rare a label is, and its name, found in the
    text, outweighs that.
    """

    def __init__(self, width: int, labels: int, *, names: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(labels, width))  # beta
        self.bias = nn.Parameter(torch.zeros(labels))
        self.name_weights = (
            nn.Parameter(torch.tensor([0.0, 0.5])) if names else None
        )  # gamma, delta
        nn.init.xavier_uniform_(self.weight)

    def forward(self, vectors: Tensor, matches: NameMatches | None = None) -> Tensor:
        """Return logits (B, C) of vectors (B, C, D)."""
        logits = (vectors * self.weight).sum(dim=-1) + self.bias
        if self.name_weights is None or matches is None:
            return logits
        constant, bias_weight = self.name_weights
        return logits + matches.whole * (constant - bias_weight * self.bias)
