"""Comparison of the outputs of two searches, tolerant of ties.

If two tokens have nearly the same probability, rounding may choose either, and all later tokens
differ. So outputs are compared up to the first difference. There, the log-probability gap between
the two tokens counts as the error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dragoman.data.inference_batches import pad_batch, pad_sources
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.doctor.check_result import Measurement
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.special_tokens import BOS, EOS, PAD, UNK

_FORBIDDEN = (PAD, BOS, UNK)  # tokens that no output may contain


class Agreement(NamedTuple):
    """How closely the outputs of two searches agree."""

    equal: int  # identical outputs
    outputs: int
    difference: float  # largest difference of a token's log-probability, given equal prefixes
    score_gap: float  # largest log-probability gap to the token chosen instead

    def to_measurement(self, tolerance: float) -> Measurement:
        """Return the larger of both errors with a tolerance."""
        note = f"{self.equal} of {self.outputs} equal"
        if self.score_gap:
            note += (
                f", gap {self.score_gap:.1g}" if math.isfinite(self.score_gap) else "; one invalid"
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
    """Compare greedy outputs with the reference's; `model` scores the first differing tokens."""
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
            score_gap.append(math.inf)  # ended too early, or contains a forbidden token
        else:
            log_probs = _next_log_probs(model, source, expected_tokens[:shared])
            score_gap.append(
                float(log_probs[expected_tokens[shared]] - log_probs[found_tokens[shared]])
            )
    return Agreement(equal, len(expected), _max_or_nan(difference), _max_or_nan(score_gap))


def _output_tokens(hypothesis: Hypothesis) -> list[int]:
    """Return the tokens of an output, with the end of sentence if it was reached."""
    return [*hypothesis.tokens, EOS] if hypothesis.finished else hypothesis.tokens


@torch.inference_mode()
def _next_log_probs(
    model: EncoderDecoder, source: Sequence[int], prefix: Sequence[int]
) -> torch.Tensor:
    """Return the log-probabilities of the token after a prefix, without a KV cache: (V,)."""
    device = next(model.parameters()).device
    tgt_in, _ = pad_batch([[BOS, *prefix]], device)
    hidden = model.decode(tgt_in, model.encode(*pad_sources([source], device)))
    return model.project(hidden[0, -1]).float().log_softmax(-1)


def _max_or_nan(values: Sequence[float]) -> float:
    """Return the largest value; NaN if any is NaN."""
    return math.nan if any(map(math.isnan, values)) else max(values)
