"""What a model did with one text: its pieces, its choices, and where every attention looked."""

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
    """One translation, opened up.

    A row of `attentions[path][head]` says where one position looked: in `encoder.*` source pieces at source pieces, in
    `decoder.*.self` target pieces at those before them, in `decoder.*.cross` target pieces at source pieces. Each row
    sums to 1, or to less where an alignment's definition says so (local_p, monotonic). A target position is the piece that is
    being chosen there; the last one chooses the end.
    """

    text: str
    translation: str
    score: float
    src_tokens: list[str]  # S of them, the end `</s>` last
    tgt_tokens: list[str]  # T of them, the end `</s>` last where it was reached
    log_probs: list[float]  # of each target piece
    attentions: Mapping[str, AttentionWeights] = field(
        default_factory=dict
    )  # path -> (H, T or S, S or T)

    def __repr__(self) -> str:
        """Write both texts and what is inside in one short line."""
        texts = " -> ".join(
            repr(text) if len(text) <= 60 else f"{text[:59]!r}…"
            for text in (self.text, self.translation)
        )
        counts = f"{len(self.src_tokens)} source and {len(self.tgt_tokens)} target tokens, {len(self.attentions)} attentions"
        return f"Explanation({texts}, score={self.score:.4f}, {counts})"

    @property
    def alignment(self) -> AttentionWeights | None:
        """Cross-attention weights averaged over layers and heads: (T, S); None if the decoder has no cross-attention."""
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
        """Turn everything into plain values; weights are rounded to five decimals."""
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
        """Write everything as one JSON object, text in its own script."""
        return json.dumps(self.to_dict(), ensure_ascii=False)


def is_cross_attention(path: str) -> bool:
    """Say whether an attention's path is that of one from the target to the source."""
    return path.startswith("decoder.") and not path.endswith(".self")


def check_labels(
    weights: AttentionWeights | None, src_tokens: Sequence[str], tgt_tokens: Sequence[str]
) -> None:
    """Refuse a picture whose labels would stand beside the wrong rows or columns."""
    if weights is None:
        raise DataError(
            "an attention map must be drawn from attention weights",
            found="None, the alignment of a model without cross-attention",
            fix="draw one of the explanation's attentions instead, if it has any",
        )
    if weights.shape != (len(tgt_tokens), len(src_tokens)):
        raise DataError(
            "an attention map must have a row for each target piece and a column for each source piece",
            found=f"shape {weights.shape} for {len(tgt_tokens)} target and {len(src_tokens)} source tokens",
            fix="pass one head or the mean of several, with the pieces that belong to it",
        )


def _round_weights(weights: AttentionWeights) -> list[Any]:
    rounded: list[Any] = np.round(weights.astype(np.float64), 5).tolist()
    return rounded
