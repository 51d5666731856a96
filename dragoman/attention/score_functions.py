"""Attention score functions: dot product, general, additive and others.

To add one, write a subclass of `Score` here and name it in `attention/catalogue.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.errors import DragomanError

MASKED_SCORE = -1e4  # its softmax is zero; finite in every dtype


class Score(nn.Module):
    """Base of score functions of a query and a key; an axis of heads may precede the positions."""

    fused = False  # whether `ops.attend` computes this score
    accepts_features = False  # whether an alignment can add features inside it
    is_positional = (
        False  # whether it depends on a key's position: keys cannot be scored one by one
    )

    def __init__(self, *, query_width: int, key_width: int, score_width: int) -> None:
        super().__init__()
        self.query_width, self.key_width, self.score_width = query_width, key_width, score_width

    def prepare(self, key: Tensor) -> Tensor:
        """Project the keys (B, S, D), once per sentence."""
        return key

    def forward(self, query: Tensor, prepared: Tensor, features: Tensor | None = None) -> Tensor:
        """Return the scores (B, T, S) of queries (B, T, D) and prepared keys.

        `features` (B, T, S, A) are added by an alignment inside a score that accepts them.
        """
        raise NotImplementedError

    def reject_features(self, features: Tensor | None) -> None:
        """Raise DragomanError if features are given: this score has no hidden layer."""
        if features is not None:
            raise DragomanError(
                "only additive scores take the features of an alignment",
                found=f"{type(self).__name__} and features of shape {tuple(features.shape)}",
                fix="use score additive or normed_additive with this alignment",
            )


class DotScore(Score):
    r"""Dot product, without parameters.

    .. math:: e_{ts} = q_t^\top k_s

    Luong, Pham and Manning (2015), section 3.1, "dot".
    """

    def __init__(self, *, query_width: int, key_width: int, score_width: int = 0) -> None:
        super().__init__(query_width=query_width, key_width=key_width, score_width=score_width)
        if query_width != key_width:
            raise DragomanError(
                "a dot product needs queries and keys of equal width",
                found=f"{query_width} and {key_width}",
                fix="project one of them, or use another score",
            )

    def forward(self, query: Tensor, prepared: Tensor, features: Tensor | None = None) -> Tensor:
        """Return the scores (B, T, S) of (B, T, D) and (B, S, D)."""
        self.reject_features(features)
        return query @ prepared.transpose(-1, -2)


class ScaledDotScore(DotScore):
    r"""Dot product divided by the square root of the width.

    .. math:: e_{ts} = q_t^\top k_s / \sqrt{d}

    Vaswani et al. (2017), equation 1.
    """

    fused = True

    def __init__(self, *, query_width: int, key_width: int, score_width: int = 0) -> None:
        super().__init__(query_width=query_width, key_width=key_width, score_width=score_width)
        self.scale = float(query_width**-0.5)

    def forward(self, query: Tensor, prepared: Tensor, features: Tensor | None = None) -> Tensor:
        """Return the scores (B, T, S) of (B, T, D) and (B, S, D)."""
        return super().forward(query * self.scale, prepared, features)


class LearnedScaleDotScore(DotScore):
    r"""Dot product times a trained scale, which starts at 1.

    .. math:: e_{ts} = g\, q_t^\top k_s

    The "scaled Luong" attention of the TensorFlow NMT tutorial (Luong, Brevdo and Zhao, 2017).
    """

    def __init__(self, *, query_width: int, key_width: int, score_width: int = 0) -> None:
        super().__init__(query_width=query_width, key_width=key_width, score_width=score_width)
        self.scale = nn.Parameter(torch.ones(()))  # g

    def forward(self, query: Tensor, prepared: Tensor, features: Tensor | None = None) -> Tensor:
        """Return the scores (B, T, S) of (B, T, D) and (B, S, D)."""
        return super().forward(query * self.scale, prepared, features)


class CosineScore(DotScore):
    r"""Cosine similarity of query and key, times a trained scale.

    .. math:: e_{ts} = \beta\, \frac{q_t^\top k_s}{\lVert q_t \rVert\, \lVert k_s \rVert}

    Graves, Wayne and Danihelka (2014), equations 5 and 6; here beta is one parameter, not one per
    step. It must grow, as with beta = 1 a softmax over twenty keys gives none more than a third, so
    its logarithm is trained. It starts at 1: from 10, early attention is so peaked that it seldom
    recovers.
    """

    def __init__(self, *, query_width: int, key_width: int, score_width: int = 0) -> None:
        super().__init__(query_width=query_width, key_width=key_width, score_width=score_width)
        self.log_strength = nn.Parameter(torch.zeros(()))  # log beta

    def prepare(self, key: Tensor) -> Tensor:
        """Normalize every key to length 1; zeros stay zeros."""
        return F.normalize(key, dim=-1)

    def forward(self, query: Tensor, prepared: Tensor, features: Tensor | None = None) -> Tensor:
        """Return the scores (B, T, S) of (B, T, D) and (B, S, D)."""
        return super().forward(
            F.normalize(query, dim=-1) * self.log_strength.exp(), prepared, features
        )


class GeneralScore(Score):
    r"""Bilinear score with a trained matrix; query and key may differ in width.

    .. math:: e_{ts} = q_t^\top W k_s

    Luong, Pham and Manning (2015), section 3.1, "general".
    """

    def __init__(self, *, query_width: int, key_width: int, score_width: int = 0) -> None:
        super().__init__(query_width=query_width, key_width=key_width, score_width=score_width)
        self.key_proj = nn.Linear(key_width, query_width, bias=False)  # W

    def prepare(self, key: Tensor) -> Tensor:
        """Project the keys to the query's width, once per sentence."""
        return self.key_proj(key)

    def forward(self, query: Tensor, prepared: Tensor, features: Tensor | None = None) -> Tensor:
        """Return the scores (B, T, S) of (B, T, D) and projected keys (B, S, D)."""
        self.reject_features(features)
        return query @ prepared.transpose(-1, -2)


class LocationScore(Score):
    r"""Location-based score: it depends on the query and the key's position only.

    .. math:: e_{t} = W q_t

    Luong, Pham and Manning (2015), section 3.1, "location". W has a row for each of `max_positions`
    positions. As in the paper's footnote, a short sentence uses the first rows, and tokens of a
    long one past the last row are ignored.
    """

    is_positional = True

    def __init__(
        self, *, query_width: int, key_width: int, score_width: int = 0, max_positions: int = 256
    ) -> None:
        super().__init__(query_width=query_width, key_width=key_width, score_width=score_width)
        self.position_proj = nn.Linear(query_width, max_positions, bias=False)  # W

    def forward(self, query: Tensor, prepared: Tensor, features: Tensor | None = None) -> Tensor:
        """Return the scores (B, T, S) of (B, T, D); only the number of keys matters."""
        self.reject_features(features)
        keys = prepared.size(-2)
        scores = F.linear(query, self.position_proj.weight[:keys])
        return F.pad(scores, (0, keys - scores.size(-1)), value=MASKED_SCORE)


class FixedScore(Score):
    r"""Fixed weights, trained as those of a linear layer over the positions are.

    .. math:: e_{ts} = w_s

    No attention: the weights are parameters, not a function of query and keys. It is what attention
    is compared with. At first all are equal, which is the mean of the values. Tokens past
    `max_positions` are ignored.
    """

    is_positional = True

    def __init__(
        self, *, query_width: int, key_width: int, score_width: int = 0, max_positions: int = 256
    ) -> None:
        super().__init__(query_width=query_width, key_width=key_width, score_width=score_width)
        self.weight = nn.Parameter(torch.zeros(max_positions))  # w

    def forward(self, query: Tensor, prepared: Tensor, features: Tensor | None = None) -> Tensor:
        """Return the scores (B, T, S) of (B, T, D); only the number of keys matters."""
        self.reject_features(features)
        keys = prepared.size(-2)
        scores = self.weight[:keys].to(query.dtype)
        scores = F.pad(scores, (0, keys - scores.size(-1)), value=MASKED_SCORE)
        return scores.expand(*query.shape[:-1], keys)


class AdditiveScore(Score):
    r"""Additive score: a one-layer network compares each query with each key.

    .. math:: e_{ts} = v^\top \tanh(W q_t + U k_s + f_{ts})

    Bahdanau, Cho and Bengio (2015), appendix A.1.2; called "concat" by Luong. The f are features of
    an alignment, if any.
    """

    accepts_features = True

    def __init__(self, *, query_width: int, key_width: int, score_width: int) -> None:
        super().__init__(query_width=query_width, key_width=key_width, score_width=score_width)
        self.query_proj = nn.Linear(query_width, score_width, bias=False)  # W
        self.key_proj = nn.Linear(key_width, score_width, bias=False)  # U
        self.energy = nn.Linear(score_width, 1, bias=False)  # v

    def prepare(self, key: Tensor) -> Tensor:
        """Project the keys, once per sentence: (B, S, D) to (B, S, A)."""
        return self.key_proj(key)

    def hidden(self, query: Tensor, prepared: Tensor, features: Tensor | None) -> Tensor:
        """Return the hidden layer of every pair: (B, T, S, A)."""
        pairs = self.query_proj(query).unsqueeze(-2) + prepared.unsqueeze(-3)
        return torch.tanh(pairs if features is None else pairs + features)

    def forward(self, query: Tensor, prepared: Tensor, features: Tensor | None = None) -> Tensor:
        """Return the scores (B, T, S) of (B, T, D) and (B, S, A)."""
        return self.energy(self.hidden(query, prepared, features)).squeeze(-1)


class NormedAdditiveScore(AdditiveScore):
    r"""Additive score with a bias and weight normalization of v.

    .. math:: e_{ts} = g \frac{v^\top}{\lVert v \rVert} \tanh(W q_t + U k_s + b + f_{ts})

    "Normed Bahdanau": the weight normalization of Salimans and Kingma (2016), as used by Raffel et
    al. (2017).
    """

    def __init__(self, *, query_width: int, key_width: int, score_width: int) -> None:
        super().__init__(query_width=query_width, key_width=key_width, score_width=score_width)
        self.bias = nn.Parameter(torch.zeros(score_width))  # b
        self.gain = nn.Parameter(torch.tensor(float(score_width**-0.5)))  # g

    def prepare(self, key: Tensor) -> Tensor:
        """Project the keys and add the bias, once per sentence: (B, S, D) to (B, S, A)."""
        return self.key_proj(key) + self.bias

    def forward(self, query: Tensor, prepared: Tensor, features: Tensor | None = None) -> Tensor:
        """Return the scores (B, T, S) of (B, T, D) and (B, S, A)."""
        # One kernel each for forward and backward pass instead of twenty: RNN decoders run this at
        # every position.
        weight = torch._weight_norm(self.energy.weight, self.gain.view(1, 1), 0)  # (1, A)
        return F.linear(self.hidden(query, prepared, features), weight).squeeze(-1)
