"""Self-attention with one head and any score, with nothing projected: a layer to put after somebody's own encoder."""

from __future__ import annotations

from torch import Tensor

from dragoman.attention import masks
from dragoman.attention.checks import check_mask, check_sequence
from dragoman.attention.mechanism import Attended
from dragoman.attention.recording import Note, Watched
from dragoman.attention.scores import Score
from dragoman.errors import DragomanError
from dragoman.kernels import masked_softmax, visibility


class SequenceSelfAttention(Watched):
    r"""Every position of a sequence becomes a weighted sum of those around it, by any score.

    .. math:: \alpha_t = \mathrm{softmax}_{|s - t| \le r}(e(x_t, x_s)), \quad y_t = \textstyle\sum_s \alpha_{ts} x_s

    With `NormedAdditiveScore` or `AdditiveScore` this is the additive, with `GeneralScore` the multiplicative attention of the Keras
    layer SeqSelfAttention. A `window` of r keeps each position to r neighbours on either side, which is that layer's
    attention_width=2r+1; 0 is no limit. It hides the others and saves no time. `overlap_penalty` regularises the weights.
    """

    def __init__(self, score: Score, *, window: int = 0) -> None:
        super().__init__()
        if not isinstance(score, Score):
            raise DragomanError("a score must be a Score", found=repr(score), fix="build one: AdditiveScore(query_width=..., ...)")
        if score.query_width != score.key_width:
            found = f"{score.query_width} and {score.key_width}"
            raise DragomanError("a sequence that asks itself needs one width for queries and keys", found=found, fix="make them equal")
        if window < 0:
            raise DragomanError("a window must be at least 0, which is no limit", found=f"window={window}", fix="raise it")
        self.score, self.window = score, window

    def forward(self, x: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Attended:
        """Attend from (B, T, D) to itself; `mask` is (B, T), or broadcastable to (B, T, T) with three axes."""
        check_sequence(x, self.score.query_width, "a sequence")
        rows, length = x.shape[:2]
        if mask is not None and mask.dim() == 2:  # of keys, for all that ask
            mask = mask.unsqueeze(1)
        check_mask(mask, rows, length, length)
        near = masks.local(length, radius=self.window, device=x.device) if self.window else None
        visible = visibility(length, length, masks.both(mask, near), causal, x.device)
        weights = masked_softmax(self.score(x, self.score.prepare(x)).unsqueeze(1), visible)
        weights = self.edited(weights)  # (B, 1, T, T): an axis for the one head
        context = weights @ x.unsqueeze(1)
        self.noted(Note(weights, x.unsqueeze(1), context))
        return Attended(context.squeeze(1), weights.squeeze(1))
