"""Order of a language model's training segments, a pure function of (seed, epoch).

The text is one stream of tokens. For a model that carries states from one segment to the next, it
is cut into parallel rows, and segment k + 1 of a row follows its segment k. For other models the
segments are shuffled. Every epoch rotates the stream by a random offset, so that rows and segments
begin elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dragoman.data.batch_plan import Cursor
from dragoman.errors import DataError
from dragoman.runtime.counter_rng import derive_key, permutation


class SegmentSpans(NamedTuple):
    """Where the segments of a batch are in the stream."""

    starts: NDArray[np.int64]  # (B,) positions of the first tokens, before wrapping around
    length: int
    streams: NDArray[np.int64]  # (B,) rows whose states they continue
    segments: NDArray[np.int64]  # (B,) index of the segment in its row


class SegmentPlan:
    """Assigns the segments of a stream of tokens to batches.

    An example's number is the epoch times the examples of an epoch, plus its index in the epoch.
    """

    def __init__(
        self, tokens: int, *, segment: int, batch_tokens: int, seed: int, carried: bool
    ) -> None:
        if tokens < 2:
            raise DataError(
                "a language model needs at least 2 tokens of text",
                found=str(tokens),
                fix="check the training file",
            )
        self.tokens, self.seed, self.carried = tokens, seed, carried
        self.segment = min(segment, tokens)
        self.rows = max(1, min(batch_tokens, tokens) // self.segment)
        self._permuted: tuple[int, NDArray[np.int64]] | None = None
        if carried:
            self.row_length = tokens // self.rows
            self._batches = -(-self.row_length // self.segment)
            self._per_epoch = self._batches * self.rows
        else:
            self.row_length = self.segment
            self._per_epoch = tokens // self.segment
            self._batches = -(-self._per_epoch // self.rows)

    @property
    def examples(self) -> int:
        """The number of segments per epoch."""
        return self._per_epoch

    def batches(self, epoch: int) -> int:
        """Return the number of micro-batches of an epoch."""
        return self._batches

    def batch(self, cursor: Cursor) -> NDArray[np.int64]:
        """Return the numbers of one micro-batch's segments."""
        first = cursor.batch * self.rows
        last = min(first + self.rows, self._per_epoch)
        return cursor.epoch * self._per_epoch + np.arange(first, last, dtype=np.int64)

    def padding_fraction(self, epoch: int) -> float:
        """Return 0: segments are not padded."""
        return 0.0

    def locate(self, examples: NDArray[np.int64]) -> SegmentSpans:
        """Return where the segments of one batch are in the stream."""
        epoch, index = int(examples[0]) // self._per_epoch, examples % self._per_epoch
        offset = derive_key(self.seed, "offset", epoch) % self.tokens
        if not self.carried:
            starts = offset + self._order(epoch)[index] * self.segment
            zeros = np.zeros_like(index)
            return SegmentSpans(starts, self.segment, zeros, zeros)
        segments, streams = np.divmod(index, self.rows)
        within = segments * self.segment
        length = min(self.segment, self.row_length - int(within[0]))
        return SegmentSpans(offset + streams * self.row_length + within, length, streams, segments)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """Return an epoch's permutation of the segments."""
        if self._permuted is None or self._permuted[0] != epoch:
            key = derive_key(self.seed, "segments", epoch)
            self._permuted = epoch, permutation(key, self._per_epoch)
        return self._permuted[1]
