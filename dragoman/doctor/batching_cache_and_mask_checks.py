"""Checks of a model's log-probabilities: batching, KV cache, beam search, masks.

A correct model differs only by rounding. Log-probabilities are compared, not logits, so that one
tolerance fits all vocabularies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dragoman.bundle.golden_vectors import DEVICE_TOLERANCE, TOLERANCE
from dragoman.data.inference_batches import PaddedBatch, pad_batch, pad_sources
from dragoman.decoding.beam_search import BeamSearch
from dragoman.doctor.check_result import Measurement, NotApplicableError
from dragoman.doctor.model_under_test import BEAM_SIZE, EXTRA_PADDING, ModelUnderTest, TokenPairs
from dragoman.doctor.output_comparison import compare_outputs
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.special_tokens import BOS, EOS, SPECIAL_TOKENS


def log_prob_tolerance(subject: ModelUnderTest) -> float:
    """Return the tolerance of token log-probabilities, that of golden vectors."""
    return TOLERANCE if subject.is_exact else DEVICE_TOLERANCE


def check_batching(subject: ModelUnderTest) -> Measurement:
    """Compare greedy search in batches with greedy search of single sentences."""
    return compare_outputs(
        subject.model, subject.sources, subject.single_outputs, subject.batched_outputs
    ).to_measurement(log_prob_tolerance(subject))


def check_beam_size_one(subject: ModelUnderTest) -> Measurement:
    """Compare beam search of size 1 with greedy search."""
    found = subject.search_all(subject.reference_engine, BeamSearch(size=1))
    return compare_outputs(
        subject.model, subject.sources, subject.batched_outputs, found
    ).to_measurement(log_prob_tolerance(subject))


@torch.inference_mode()
def check_beam_scores(subject: ModelUnderTest) -> Measurement:
    """Compare log-probabilities of beam hypotheses with those of a forward pass."""
    errors = []
    for source, found in zip(subject.sources, subject.beam_outputs, strict=True):
        end = torch.tensor(
            [*found.tokens, EOS] if found.finished else found.tokens, device=subject.device
        )
        _, _, log_probs = _teacher_forced_log_probs(subject, TokenPairs([source], [found.tokens]))
        expected = log_probs[0, : len(end)].gather(1, end.unsqueeze(1)).squeeze(1).double().cpu()
        errors.append((torch.tensor(found.log_probs, dtype=torch.float64) - expected).abs().amax())
    return Measurement(
        _max_error(errors), log_prob_tolerance(subject), f"beam size {BEAM_SIZE} and forward pass"
    )


@torch.inference_mode()
def check_kv_cache(subject: ModelUnderTest) -> Measurement:
    """Compare incremental decoding, token by token and in one call, with a forward pass."""
    model, errors = subject.model, []
    for pairs in subject.pairs():
        src, tgt_in, expected = _teacher_forced_log_probs(subject, pairs)
        try:
            state, found, half = model.start(model.encode(*src)), [], tgt_in.ids.size(1) // 2
            for tokens in (*tgt_in.ids[:, :half].unbind(1), tgt_in.ids[:, half:]):
                logits, state = model.extend(tokens.reshape(len(pairs.targets), -1), state)
                found.append(logits)
        except NotImplementedError as error:
            raise NotApplicableError("this decoder has no KV cache") from error
        errors.append(_max_difference(_log_softmax(torch.cat(found, 1)), expected, tgt_in.mask))
    return Measurement(
        _max_error(errors), log_prob_tolerance(subject), "token by token, and in one call"
    )


@torch.inference_mode()
def check_causality(subject: ModelUnderTest) -> Measurement:
    """Change later target tokens; earlier log-probabilities must stay the same."""
    errors = []
    for pairs in subject.pairs():
        src, tgt_in, expected = _teacher_forced_log_probs(subject, pairs)
        longest = tgt_in.ids.size(1)
        for position in sorted({1, longest // 2, longest - 1} - {0}):
            changed = tgt_in.ids.clone()
            changed[:, position:] = _other_tokens(
                changed[:, position:], len(subject.tokenizers.tgt)
            )
            found = _log_probs(subject.model, src, PaddedBatch(changed, tgt_in.mask))
            errors.append(
                _max_difference(
                    found[:, :position],
                    expected[:, :position],
                    None if tgt_in.mask is None else tgt_in.mask[:, :position],
                )
            )
    return Measurement(
        _max_error(errors), log_prob_tolerance(subject), "later target tokens changed"
    )


@torch.inference_mode()
def check_source_padding(subject: ModelUnderTest) -> Measurement:
    """Replace source padding by random tokens, and add more."""
    errors = []
    for pairs in subject.pairs():
        src, tgt_in, expected = _teacher_forced_log_probs(subject, pairs)
        padded = _replace_padding(src, len(subject.tokenizers.src))
        errors.append(
            _max_difference(_log_probs(subject.model, padded, tgt_in), expected, tgt_in.mask)
        )
    return Measurement(
        _max_error(errors), log_prob_tolerance(subject), "padding replaced and widened"
    )


@torch.inference_mode()
def check_target_padding(subject: ModelUnderTest) -> Measurement:
    """Replace target padding by random tokens, and add more."""
    errors = []
    for pairs in subject.pairs():
        src, tgt_in, expected = _teacher_forced_log_probs(subject, pairs)
        padded = _replace_padding(tgt_in, len(subject.tokenizers.tgt))
        found = _log_probs(subject.model, src, padded)[:, : tgt_in.ids.size(1)]
        errors.append(_max_difference(found, expected, tgt_in.mask))
    return Measurement(
        _max_error(errors), log_prob_tolerance(subject), "padding replaced and widened"
    )


@torch.inference_mode()
def check_batch_independence(subject: ModelUnderTest) -> Measurement:
    """Compare the forward pass of each sentence in a batch and alone."""
    errors = []
    for pairs in subject.pairs():
        _, _, expected = _teacher_forced_log_probs(subject, pairs)
        for row, (source, target) in enumerate(zip(*pairs, strict=True)):
            _, single, found = _teacher_forced_log_probs(subject, TokenPairs([source], [target]))
            errors.append(
                _max_difference(found, expected[row : row + 1, : single.ids.size(1)], None)
            )
    return Measurement(_max_error(errors), log_prob_tolerance(subject), "in a batch and alone")


def _teacher_forced_log_probs(
    subject: ModelUnderTest, pairs: TokenPairs
) -> tuple[PaddedBatch, PaddedBatch, Tensor]:
    """Pad a batch and run a forward pass; return source, target and log-probabilities (B, T, V)."""
    src, tgt_in = (
        pad_sources(pairs.sources, subject.device),
        pad_batch([[BOS, *target] for target in pairs.targets], subject.device),
    )
    return src, tgt_in, _log_probs(subject.model, src, tgt_in)


def _log_probs(model: EncoderDecoder, src: PaddedBatch, tgt_in: PaddedBatch) -> Tensor:
    """Return teacher-forced log-probabilities: (B, T, V)."""
    return _log_softmax(model.project(model.decode(tgt_in.ids, model.encode(*src), tgt_in.mask)))


def _log_softmax(logits: Tensor) -> Tensor:
    """Return log-probabilities in float32."""
    return logits.float().log_softmax(-1)


def _replace_padding(packed: PaddedBatch, vocabulary: int) -> PaddedBatch:
    """Add padding columns and fill all padding with random tokens."""
    rows, longest = packed.ids.shape
    mask = torch.ones_like(packed.ids, dtype=torch.bool) if packed.mask is None else packed.mask
    mask = torch.nn.functional.pad(mask, (0, EXTRA_PADDING))
    generator = torch.Generator().manual_seed(rows)
    random_tokens = torch.randint(
        len(SPECIAL_TOKENS), vocabulary, (rows, longest + EXTRA_PADDING), generator=generator
    ).to(packed.ids.device)
    return PaddedBatch(
        torch.where(mask, torch.nn.functional.pad(packed.ids, (0, EXTRA_PADDING)), random_tokens),
        mask,
    )


def _other_tokens(ids: Tensor, vocabulary: int) -> Tensor:
    """Return token ids that differ from these."""
    first = len(SPECIAL_TOKENS)
    return (ids - first + 1) % max(vocabulary - first, 1) + first


def _max_difference(found: Tensor, expected: Tensor, mask: Tensor | None) -> Tensor:
    """Return the largest difference at unpadded positions, on the device; NaN propagates."""
    difference = (found - expected).abs()
    return (difference if mask is None else difference.masked_fill(~mask.unsqueeze(-1), 0.0)).amax()


def _max_error(errors: Iterable[Tensor] | Sequence[Tensor]) -> float:
    """Return the largest error."""
    return float(torch.stack(list(errors)).amax())
