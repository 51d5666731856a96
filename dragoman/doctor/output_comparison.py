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
from dragoman.decoding.padded_batch import pad_batch, pad_sources
from dragoman.doctor.check_result import Measurement
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.special_tokens import BOS, EOS, PAD, UNK

_FORBIDDEN = (PAD, BOS, UNK)  # pieces that no output may hold


class Agreement(NamedTuple):
    """How far one search agrees with another."""

    equal: int  # outputs that are the same, piece for piece
    outputs: int
    difference: float  # the largest one of a piece's log-probability, where both had written the same before
    score_gap: float  # the most that a piece was worse than the one it was taken for

    def to_measurement(self, tolerance: float) -> Measurement:
        """Put the worse of both errors beside its tolerance."""
        note = f"{self.equal} of {self.outputs} equal"
        if self.score_gap:
            note += (
                f", lead {self.score_gap:.1g}"
                if math.isfinite(self.score_gap)
                else "; one that cannot be"
            )
        error = (
            math.nan
            if math.isnan(self.difference) or math.isnan(self.score_gap)
            else max(self.difference, self.score_gap)
        )
        return Measurement(error, tolerance, note)


def compare_outputs(
    model: EncoderDecoder,
    sources: Sequence[Sequence[int]],
    expected: Sequence[Hypothesis],
    found: Sequence[Hypothesis],
) -> Agreement:
    """Compare outputs with those of the reference, `ours`, which must be greedy; `model` judges where they part."""
    equal, difference, score_gap = 0, [0.0], [0.0]
    for source, expected_one, found_one in zip(sources, expected, found, strict=True):
        expected_tokens, found_tokens = _output_tokens(expected_one), _output_tokens(found_one)
        shared = next(
            (
                at
                for at, pair in enumerate(zip(expected_tokens, found_tokens, strict=False))
                if pair[0] != pair[1]
            ),
            min(len(expected_tokens), len(found_tokens)),
        )
        difference += [
            abs(a - b)
            for a, b in zip(
                expected_one.log_probs[:shared], found_one.log_probs[:shared], strict=False
            )
        ]
        if expected_tokens == found_tokens:
            equal += 1
        elif (
            shared == min(len(expected_tokens), len(found_tokens))
            or found_tokens[shared] in _FORBIDDEN
        ):
            score_gap.append(math.inf)  # stopped without an end, or wrote what must not be
        else:
            log_probs = _next_log_probs(model, source, expected_tokens[:shared])
            score_gap.append(
                float(log_probs[expected_tokens[shared]] - log_probs[found_tokens[shared]])
            )
    return Agreement(equal, len(expected), _max_or_nan(difference), _max_or_nan(score_gap))


def _output_tokens(hypothesis: Hypothesis) -> list[int]:
    """Give the pieces of an output, and its end where it has one."""
    return [*hypothesis.tokens, EOS] if hypothesis.finished else hypothesis.tokens


@torch.inference_mode()
def _next_log_probs(
    model: EncoderDecoder, source: Sequence[int], written: Sequence[int]
) -> torch.Tensor:
    """Ask the model, without a cache, what should follow: (V,)."""
    device = next(model.parameters()).device
    tgt_in, _ = pad_batch([[BOS, *written]], device)
    hidden = model.decode(tgt_in, model.encode(*pad_sources([source], device)))
    return model.project(hidden[0, -1]).float().log_softmax(-1)


def _max_or_nan(values: Sequence[float]) -> float:
    """Find the largest number, which is NaN where one of them is."""
    return math.nan if any(map(math.isnan, values)) else max(values)
