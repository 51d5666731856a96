"""Scores: how well a query fits a key."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.errors import DragomanError

MASKED_SCORE = -1e4  # a score that no softmax gives a share to; finite in every floating type


class Score(nn.Module):
    """How well each query fits each key; works alike with an axis of heads before the positions."""

    fused = False  # whether `kernels.attend` computes this very score
    accepts_features = False  # whether there is a place inside it for an alignment's terms

    def __init__(self, *, query_width: int, key_width: int, score_width: int) -> None:
        super().__init__()
        self.query_width, self.key_width, self.score_width = query_width, key_width, score_width

    def prepare(self, key: Tensor) -> Tensor:
        """Do once a sentence what needs only the keys (B, S, D)."""
        return key

    def forward(self, query: Tensor, prepared: Tensor, features: Tensor | None = None) -> Tensor:
        """Score every pair: (B, T, D) and the prepared keys give (B, T, S).

        `features` (B, T, S, A) are terms that an alignment adds inside a score that has room for them.
        """
        raise NotImplementedError

    def reject_features(self, features: Tensor | None) -> None:
        """Say that there is no hidden layer in which features could be added."""
        if features is not None:
            raise DragomanError(
                "an alignment's features are terms inside an additive score's tanh, and this score has none",
                found=f"{type(self).__name__} and features of shape {tuple(features.shape)}",
                fix="use score additive or normed_additive with this alignment",
            )


class DotScore(Score):
    r"""The dot product as it is: no parameters, so query and key must speak one language.

    .. math:: e_{ts} = q_t^\top k_s

    Luong, Pham and Manning (2015), section 3.1, "dot".
    """

    def __init__(self, *, query_width: int, key_width: int, score_width: int = 0) -> None:
        super().__init__(query_width=query_width, key_width=key_width, score_width=score_width)
        if query_width != key_width:
            raise DragomanError(
                "a dot product needs queries and keys of one width",
                found=f"{query_width} and {key_width}",
                fix="project one of them, or use another score",
            )

    def forward(self, query: Tensor, prepared: Tensor, features: Tensor | None = None) -> Tensor:
        """Score every pair: (B, T, D) and (B, S, D) give (B, T, S)."""
        self.reject_features(features)
        return query @ prepared.transpose(-1, -2)


class ScaledDotScore(DotScore):
    r"""The dot product, divided so that it does not grow with the width.

    .. math:: e_{ts} = q_t^\top k_s / \sqrt{d}

    Vaswani et al. (2017), equation 1.
    """

    fused = True

    def __init__(self, *, query_width: int, key_width: int, score_width: int = 0) -> None:
        super().__init__(query_width=query_width, key_width=key_width, score_width=score_width)
        self.scale = float(query_width**-0.5)

    def forward(self, query: Tensor, prepared: Tensor, features: Tensor | None = None) -> Tensor:
        """Score every pair: (B, T, D) and (B, S, D) give (B, T, S)."""
        return super().forward(query * self.scale, prepared, features)


class LearnedScaleDotScore(DotScore):
    r"""The dot product times one trained number, which starts at 1.

    .. math:: e_{ts} = g\, q_t^\top k_s

    The "scaled Luong" attention of the TensorFlow NMT tutorial (Luong, Brevdo and Zhao, 2017).
    """

    def __init__(self, *, query_width: int, key_width: int, score_width: int = 0) -> None:
        super().__init__(query_width=query_width, key_width=key_width, score_width=score_width)
        self.scale = nn.Parameter(torch.ones(()))  # g

    def forward(self, query: Tensor, prepared: Tensor, features: Tensor | None = None) -> Tensor:
        """Score every pair: (B, T, D) and (B, S, D) give (B, T, S)."""
        return super().forward(query * self.scale, prepared, features)


class CosineScore(DotScore):
    r"""The cosine of the angle between query and key, times a trained strength: lengths do not count.

    .. math:: e_{ts} = \beta\, \frac{q_t^\top k_s}{\lVert q_t \rVert\, \lVert k_s \rVert}

    Graves, Wayne and Danihelka (2014), equations 5 and 6; here the strength is one number, not one a step. It has to
    grow, for from bare cosines a softmax over twenty keys can give none more than a third, so its logarithm is trained.
    It starts at 1: from 10 a wrong early choice is so sure of itself that it seldom learns better.
    """

    def __init__(self, *, query_width: int, key_width: int, score_width: int = 0) -> None:
        super().__init__(query_width=query_width, key_width=key_width, score_width=score_width)
        self.log_strength = nn.Parameter(torch.zeros(()))  # log beta

    def prepare(self, key: Tensor) -> Tensor:
        """Bring every key to length 1; one of zeros stays."""
        return F.normalize(key, dim=-1)

    def forward(self, query: Tensor, prepared: Tensor, features: Tensor | None = None) -> Tensor:
        """Score every pair: (B, T, D) and (B, S, D) give (B, T, S)."""
        return super().forward(
            F.normalize(query, dim=-1) * self.log_strength.exp(), prepared, features
        )


class GeneralScore(Score):
    r"""A trained matrix between query and key, which may differ in width.

    .. math:: e_{ts} = q_t^\top W k_s

    Luong, Pham and Manning (2015), section 3.1, "general".
    """

    def __init__(self, *, query_width: int, key_width: int, score_width: int = 0) -> None:
        super().__init__(query_width=query_width, key_width=key_width, score_width=score_width)
        self.key_proj = nn.Linear(key_width, query_width, bias=False)  # W

    def prepare(self, key: Tensor) -> Tensor:
        """Bring the keys to the query's width, once a sentence."""
        return self.key_proj(key)

    def forward(self, query: Tensor, prepared: Tensor, features: Tensor | None = None) -> Tensor:
        """Score every pair: (B, T, D) and the projected keys (B, S, D) give (B, T, S)."""
        self.reject_features(features)
        return query @ prepared.transpose(-1, -2)


class LocationScore(Score):
    r"""The query alone says which positions it wants, whatever stands there.

    .. math:: e_{t} = W q_t

    Luong, Pham and Manning (2015), section 3.1, "location". W has a row for each of `max_positions` places. As in the paper's
    footnote, a short sentence uses the first rows, and of a long one the words past the last row are ignored.
    """

    def __init__(
        self, *, query_width: int, key_width: int, score_width: int = 0, max_positions: int = 256
    ) -> None:
        super().__init__(query_width=query_width, key_width=key_width, score_width=score_width)
        self.places = nn.Linear(query_width, max_positions, bias=False)  # W

    def forward(self, query: Tensor, prepared: Tensor, features: Tensor | None = None) -> Tensor:
        """Score every place: of the keys (B, S, D) only the number counts; gives (B, T, S)."""
        self.reject_features(features)
        keys = prepared.size(-2)
        scores = F.linear(query, self.places.weight[:keys])
        return F.pad(scores, (0, keys - scores.size(-1)), value=MASKED_SCORE)


class AdditiveScore(Score):
    r"""A one-layer network compares each query with each key.

    .. math:: e_{ts} = v^\top \tanh(W q_t + U k_s + f_{ts})

    Bahdanau, Cho and Bengio (2015), appendix A.1.2; called "concat" by Luong. The f are an alignment's features, if any.
    """

    accepts_features = True

    def __init__(self, *, query_width: int, key_width: int, score_width: int) -> None:
        super().__init__(query_width=query_width, key_width=key_width, score_width=score_width)
        self.query_proj = nn.Linear(query_width, score_width, bias=False)  # W
        self.key_proj = nn.Linear(key_width, score_width, bias=False)  # U
        self.energy = nn.Linear(score_width, 1, bias=False)  # v

    def prepare(self, key: Tensor) -> Tensor:
        """Project the keys, once a sentence: (B, S, D) gives (B, S, A)."""
        return self.key_proj(key)

    def hidden(self, query: Tensor, prepared: Tensor, features: Tensor | None) -> Tensor:
        """Compare every pair in the hidden layer: (B, T, S, A)."""
        pairs = self.query_proj(query).unsqueeze(-2) + prepared.unsqueeze(-3)
        return torch.tanh(pairs if features is None else pairs + features)

    def forward(self, query: Tensor, prepared: Tensor, features: Tensor | None = None) -> Tensor:
        """Score every pair: (B, T, D) and (B, S, A) give (B, T, S)."""
        return self.energy(self.hidden(query, prepared, features)).squeeze(-1)


class NormedAdditiveScore(AdditiveScore):
    r"""The additive score with a bias, and with v's length trained apart from its direction.

    .. math:: e_{ts} = g \frac{v^\top}{\lVert v \rVert} \tanh(W q_t + U k_s + b + f_{ts})

    "Normed Bahdanau": the weight normalisation of Salimans and Kingma (2016) as Raffel et al. (2017) put it in.
    """

    def __init__(self, *, query_width: int, key_width: int, score_width: int) -> None:
        super().__init__(query_width=query_width, key_width=key_width, score_width=score_width)
        self.bias = nn.Parameter(torch.zeros(score_width))  # b
        self.gain = nn.Parameter(torch.tensor(float(score_width**-0.5)))  # g

    def prepare(self, key: Tensor) -> Tensor:
        """Project the keys and add the bias, once a sentence: (B, S, D) gives (B, S, A)."""
        return self.key_proj(key) + self.bias

    def forward(self, query: Tensor, prepared: Tensor, features: Tensor | None = None) -> Tensor:
        """Score every pair: (B, T, D) and (B, S, A) give (B, T, S)."""
        # One kernel each way, where written out they would be twenty small ones, and recurrent decoders come by at every position.
        weight = torch._weight_norm(self.energy.weight, self.gain.view(1, 1), 0)  # (1, A)
        return F.linear(self.hidden(query, prepared, features), weight).squeeze(-1)
