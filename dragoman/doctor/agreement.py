"""Do two searches say the same? Where they part, was it a toss-up?

A comparison of outputs alone cannot tell rounding from a mistake: where two pieces are as good as equal, either may be
chosen, and all that follows differs. So outputs are compared up to the first place where they differ, and there the model itself says
how much worse the other piece was. That lead counts as an error like a difference of log-probabilities does, in the same unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.packing import pack, pack_sources
from dragoman.doctor.finding import Measured
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.specials import BOS, EOS, PAD, UNK

_NEVER = (PAD, BOS, UNK)  # pieces that no output may hold


class Agreement(NamedTuple):
    """How far one search agrees with another."""

    equal: int  # outputs that are the same, piece for piece
    outputs: int
    difference: float  # the largest one of a piece's log-probability, where both had written the same before
    lead: float  # the most that a piece was worse than the one it was taken for

    def measured(self, tolerance: float) -> Measured:
        """Put the worse of both errors beside its tolerance."""
        note = f"{self.equal} of {self.outputs} equal"
        if self.lead:
            note += f", lead {self.lead:.1g}" if math.isfinite(self.lead) else "; one that cannot be"
        error = math.nan if math.isnan(self.difference) or math.isnan(self.lead) else max(self.difference, self.lead)
        return Measured(error, tolerance, note)


def agree(model: EncoderDecoder, sources: Sequence[Sequence[int]], ours: Sequence[Hypothesis], theirs: Sequence[Hypothesis]) -> Agreement:
    """Compare outputs with those of the reference, `ours`, which must be greedy; `model` judges where they part."""
    equal, difference, lead = 0, [0.0], [0.0]
    for source, our, their in zip(sources, ours, theirs, strict=True):
        mine, other = _written(our), _written(their)
        shared = next((at for at, pair in enumerate(zip(mine, other, strict=False)) if pair[0] != pair[1]), min(len(mine), len(other)))
        difference += [abs(a - b) for a, b in zip(our.log_probs[:shared], their.log_probs[:shared], strict=False)]
        if mine == other:
            equal += 1
        elif shared == min(len(mine), len(other)) or other[shared] in _NEVER:
            lead.append(math.inf)  # stopped without an end, or wrote what must not be
        else:
            log_probs = _next_log_probs(model, source, mine[:shared])
            lead.append(float(log_probs[mine[shared]] - log_probs[other[shared]]))
    return Agreement(equal, len(ours), _largest(difference), _largest(lead))


def _written(hypothesis: Hypothesis) -> list[int]:
    """Give the pieces of an output, and its end where it has one."""
    return [*hypothesis.tokens, EOS] if hypothesis.finished else hypothesis.tokens


@torch.inference_mode()
def _next_log_probs(model: EncoderDecoder, source: Sequence[int], written: Sequence[int]) -> torch.Tensor:
    """Ask the model, without a cache, what should follow: (V,)."""
    device = next(model.parameters()).device
    tgt_in, _ = pack([[BOS, *written]], device)
    hidden = model.decode(tgt_in, model.encode(*pack_sources([source], device)))
    return model.project(hidden[0, -1]).float().log_softmax(-1)


def _largest(values: Sequence[float]) -> float:
    """Find the largest number, which is NaN where one of them is."""
    return math.nan if any(map(math.isnan, values)) else max(values)
