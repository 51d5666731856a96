"""A translation, with everything that a person may want to know about how it came out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MOST_CELLS = 1 << 22  # of the alignment of a line that was translated in parts, most of which are zero


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """One line's translation."""

    text: str
    score: float = 0.0  # log-probability under the length penalty; closer to 0 is likelier
    pieces: list[str] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # one a piece, and one for the end where it was reached
    src_pieces: list[str] = field(default_factory=list)  # with `</s>`, the end that the model also looks at
    # (T, S): cross-attention weights averaged over layers and heads; a row sums to 1. None unless asked for, and where a model has none.
    alignment: NDArray[np.float32] | None = None
    alternatives: Sequence[Translation] = ()  # the n best, this one first; they have no alternatives of their own
    notes: Sequence[str] = ()  # whatever was out of the ordinary: split, stopped, tried again

    def __repr__(self) -> str:
        """Write the text and the score in one short line; numbers of tokens instead of the tokens."""
        counts = [f"{len(self.alternatives)} alternatives"] * (len(self.alternatives) > 1) + [f"notes={list(self.notes)}"] * bool(
            self.notes
        )
        return f"Translation({', '.join([shortened(self.text), f'score={self.score:.4f}', f'{len(self.pieces)} tokens', *counts])})"


def shortened(text: str, longest: int = 60) -> str:
    """Return a text as Python writes it, cut where it is long."""
    return repr(text) if len(text) <= longest else f"{text[: longest - 1]!r}…"


def joined(parts: Sequence[Translation], gaps: Sequence[str], notes: Sequence[str]) -> Translation:
    """Put the translations of a line's parts together: texts with the gaps between them, scores added."""
    text = "".join(part.text + gap for part, gap in zip(parts, [*gaps, ""], strict=True))
    ranks = min((len(part.alternatives) for part in parts), default=0)
    blocks = [part.alignment for part in parts if part.alignment is not None]
    rows, columns = sum(block.shape[0] for block in blocks), sum(block.shape[1] for block in blocks)
    if rows * columns > MOST_CELLS:
        blocks = []
        notes = [*notes, f"its alignment is left out: {rows:,} by {columns:,} are more than {MOST_CELLS:,} numbers"]
    return Translation(
        text=text,
        score=sum(part.score for part in parts),
        pieces=[piece for part in parts for piece in part.pieces],
        log_probs=[number for part in parts for number in part.log_probs],
        src_pieces=[piece for part in parts for piece in part.src_pieces],
        alignment=_diagonal(blocks),
        alternatives=[joined([part.alternatives[rank] for part in parts], gaps, ()) for rank in range(ranks)],
        notes=[*notes, *_counted([note for part in parts for note in part.notes])],
    )


def _counted(notes: Sequence[str]) -> list[str]:
    """Say once what holds for several parts."""
    return [note if times == 1 else f"{note} ({times} parts)" for note, times in Counter(notes).items()]


def _diagonal(blocks: Sequence[NDArray[np.float32]]) -> NDArray[np.float32] | None:
    """Put alignments of parts along a diagonal: no part looked at another."""
    if not blocks:
        return None
    whole = np.zeros((sum(b.shape[0] for b in blocks), sum(b.shape[1] for b in blocks)), dtype=np.float32)
    row = column = 0
    for block in blocks:
        whole[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + block.shape[0], column + block.shape[1]
    return whole
