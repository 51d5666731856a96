"""Scores: how well a query fits a key."""

from __future__ import annotations

from torch import Tensor, nn

from dragoman.errors import DragomanError


class Score(nn.Module):
    """How well each query fits each key; works alike with an axis of heads before the positions."""

    fused = False  # whether `kernels.attend` computes this very score

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


class ScaledDotScore(Score):
    r"""The dot product, divided so that it does not grow with the width.

    .. math:: e_{ts} = q_t^\top k_s / \sqrt{d}

    Vaswani et al. (2017), equation 1.
    """

    fused = True

    def __init__(self, *, query_width: int, key_width: int, score_width: int = 0) -> None:
        super().__init__(query_width=query_width, key_width=key_width, score_width=score_width)
        if query_width != key_width:
            raise DragomanError(
                "a dot product needs queries and keys of one width",
                found=f"{query_width} and {key_width}",
                fix="project one of them, or use another score",
            )
        self.scale = float(query_width**-0.5)

    def forward(self, query: Tensor, prepared: Tensor, features: Tensor | None = None) -> Tensor:
        """Score every pair: (B, T, D) and (B, S, D) give (B, T, S)."""
        assert features is None, "a dot product has no room for features"
        return (query * self.scale) @ prepared.transpose(-1, -2)
