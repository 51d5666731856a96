"""One translation with its tokens, log-probabilities and attention weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dragoman.errors import DataError

AttentionWeights = NDArray[np.float32]

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """One translation with the attention weights of every layer and head.

    A row of `attentions[path][head]` is the attention distribution of one query position:
    `encoder.*` is self-attention of the source, `decoder.*.self` of the target, `decoder.*.cross`
    is cross-attention from target to source. A row sums to 1, or to less for alignments that are
    not normalized (local_p, monotonic); a prefix LM divides one row between `decoder.*.cross` and
    `decoder.*.self`. A target position is the token predicted there; the last one predicts the end
    of sentence.
    """

    text: str
    translation: str
    score: float
    src_tokens: list[str]  # S tokens, `</s>` last
    tgt_tokens: list[str]  # T tokens, `</s>` last if it was reached
    log_probs: list[float]  # of each target token
    # path -> (H, T or S, S or T)
    attentions: Mapping[str, AttentionWeights] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return both texts, the score and the numbers of tokens and attention layers."""
        texts = " -> ".join(
            repr(text) if len(text) <= 60 else f"{text[:59]!r}…"
            for text in (self.text, self.translation)
        )
        counts = (
            f"{len(self.src_tokens)} source and {len(self.tgt_tokens)} target tokens, "
            f"{len(self.attentions)} attentions"
        )
        return f"Explanation({texts}, score={self.score:.4f}, {counts})"

    @property
    def alignment(self) -> AttentionWeights | None:
        """Cross-attention weights averaged over layers and heads: (T, S); None without any."""
        cross_attentions = [
            weights.mean(axis=0)
            for path, weights in self.attentions.items()
            if is_cross_attention(path)
        ]
        if not cross_attentions:
            return None
        mean: AttentionWeights = np.mean(np.stack(cross_attentions), axis=0, dtype=np.float32)
        return mean

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values; weights are rounded to five decimals."""
        return {
            "format": FORMAT_VERSION,
            "text": self.text,
            "translation": self.translation,
            "score": round(self.score, 6),
            "src_tokens": self.src_tokens,
            "tgt_tokens": self.tgt_tokens,
            "log_probs": [round(each, 6) for each in self.log_probs],
            "alignment": None if self.alignment is None else _round_weights(self.alignment),
            "attentions": {
                path: _round_weights(weights) for path, weights in self.attentions.items()
            },
        }

    def to_json(self) -> str:
        """Return everything as one JSON object; non-ASCII text is not escaped."""
        return json.dumps(self.to_dict(), ensure_ascii=False)


def is_cross_attention(path: str) -> bool:
    """Whether a path is that of a cross-attention layer."""
    return path.startswith("decoder.") and not path.endswith(".self")


def check_labels(
    weights: AttentionWeights | None, src_tokens: Sequence[str], tgt_tokens: Sequence[str]
) -> None:
    """Raise DataError unless the weights have a row per target and a column per source token."""
    if weights is None:
        raise DataError(
            "an attention map must be drawn from attention weights",
            found="None, the alignment of a model without cross-attention",
            fix="draw one of the explanation's attentions instead, if it has any",
        )
    if weights.shape != (len(tgt_tokens), len(src_tokens)):
        raise DataError(
            "an attention map must have a row per target token and a column per source token",
            found=f"shape {weights.shape} for {len(tgt_tokens)} target and {len(src_tokens)} "
            "source tokens",
            fix="pass one head or the mean of several, with its tokens",
        )


def _round_weights(weights: AttentionWeights) -> list[Any]:
    rounded: list[Any] = np.round(weights.astype(np.float64), 5).tolist()
    return rounded
