"""Alignments: what to make of the scores. Some remember where they looked before."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dragoman.kernels import masked_softmax

AlignmentState = dict[str, Tensor]  # named tensors whose axis 0 is the row


class Alignment(nn.Module):
    """Turn scores into weights, one position after another or all at once."""

    sequential = True  # whether a position's weights depend on those before it

    def start(self, mask: Tensor) -> AlignmentState:
        """Begin a sentence whose keys may be attended to where `mask` (B, S) is True."""
        return {"mask": mask}

    def features(self, state: AlignmentState) -> Tensor | None:
        """Give the score terms (B, 1, S, A) to take in, where this alignment has any."""
        return None

    def step(self, scores: Tensor, state: AlignmentState) -> tuple[Tensor, AlignmentState]:
        """Weigh the keys for one position: scores (B, S) give weights (B, S)."""
        raise NotImplementedError

    def forward(self, scores: Tensor, mask: Tensor) -> Tensor:
        """Weigh the keys for every position: scores (B, T, S) and mask (B, S) give weights (B, T, S)."""
        state = self.start(mask)
        rows = []
        for position in scores.unbind(dim=1):
            weights, state = self.step(position, state)
            rows.append(weights)
        return torch.stack(rows, dim=1)


class Softmax(Alignment):
    r"""Spread each query's attention over all the keys that it may see.

    .. math:: \alpha_{ts} = \exp(e_{ts}) / \sum_{s'} \exp(e_{ts'})

    Bahdanau, Cho and Bengio (2015), equation 6; called global attention by Luong, Pham and Manning (2015).
    """

    sequential = False

    def step(self, scores: Tensor, state: AlignmentState) -> tuple[Tensor, AlignmentState]:
        """Weigh the keys for one position; nothing is remembered."""
        return masked_softmax(scores, state["mask"]), state

    def forward(self, scores: Tensor, mask: Tensor) -> Tensor:
        """Weigh the keys for every position at once; `mask` is (B, S), or broadcastable to the scores."""
        return masked_softmax(scores, mask.unsqueeze(1) if mask.dim() == 2 else mask)
