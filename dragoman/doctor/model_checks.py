"""What a model promises of its numbers, whatever it has learnt: read with targets given, and searched.

A sound model differs here by rounding alone. Log-probabilities are compared, so that one tolerance fits all vocabularies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dragoman.bundle.golden import DEVICE_TOLERANCE, TOLERANCE
from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.padded_batch import PaddedBatch, pad_batch, pad_sources
from dragoman.doctor.check_result import Measurement, NotApplicableError
from dragoman.doctor.model_under_test import BEAM_SIZE, EXTRA_PADDING, ModelUnderTest, TokenPairs
from dragoman.doctor.output_comparison import compare_outputs
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.special_tokens import BOS, EOS, SPECIAL_TOKENS


def log_prob_tolerance(subject: ModelUnderTest) -> float:
    """Say how far rounding may go: as far as for golden vectors, which cross machines as well."""
    return TOLERANCE if subject.is_exact else DEVICE_TOLERANCE


def check_batching(subject: ModelUnderTest) -> Measurement:
    """Search sentences in batches and one by one."""
    return compare_outputs(
        subject.model, subject.sources, subject.single_outputs, subject.batched_outputs
    ).to_measurement(log_prob_tolerance(subject))


def check_beam_of_one(subject: ModelUnderTest) -> Measurement:
    """Search by a beam that keeps one hypothesis, and greedily."""
    found = subject.search_all(subject.reference_engine, BeamSearch(size=1))
    return compare_outputs(
        subject.model, subject.sources, subject.batched_outputs, found
    ).to_measurement(log_prob_tolerance(subject))


@torch.inference_mode()
def check_beam_scores(subject: ModelUnderTest) -> Measurement:
    """Search by a beam, whose hypotheses change places in the cache, and score what it found anew without one."""
    errors = []
    for source, found in zip(subject.sources, subject.beam_outputs, strict=True):
        end = torch.tensor(
            [*found.tokens, EOS] if found.finished else found.tokens, device=subject.device
        )
        _, _, log_probs = _teacher_forced_log_probs(subject, TokenPairs([source], [found.tokens]))
        expected = log_probs[0, : len(end)].gather(1, end.unsqueeze(1)).squeeze(1).double().cpu()
        errors.append((torch.tensor(found.log_probs, dtype=torch.float64) - expected).abs().amax())
    return Measurement(
        _max_error(errors), log_prob_tolerance(subject), f"a beam of {BEAM_SIZE}, and read anew"
    )


@torch.inference_mode()
def check_kv_cache(subject: ModelUnderTest) -> Measurement:
    """Read targets piece by piece with a cache, the second half at once, and all of them without one."""
    model, errors = subject.model, []
    for pairs in subject.pairs():
        src, tgt_in, expected = _teacher_forced_log_probs(subject, pairs)
        try:
            state, found, half = model.start(model.encode(*src)), [], tgt_in.ids.size(1) // 2
            for piece in (*tgt_in.ids[:, :half].unbind(1), tgt_in.ids[:, half:]):
                logits, state = model.extend(piece.reshape(len(pairs.targets), -1), state)
                found.append(logits)
        except NotImplementedError as error:
            raise NotApplicableError("this decoder has no cache") from error
        errors.append(_max_difference(_log_softmax(torch.cat(found, 1)), expected, tgt_in.mask))
    return Measurement(
        _max_error(errors), log_prob_tolerance(subject), "piece by piece; half at once"
    )


@torch.inference_mode()
def check_causality(subject: ModelUnderTest) -> Measurement:
    """Change later pieces of the target; what comes before them must not notice."""
    errors = []
    for pairs in subject.pairs():
        src, tgt_in, expected = _teacher_forced_log_probs(subject, pairs)
        longest = tgt_in.ids.size(1)
        for place in sorted({1, longest // 2, longest - 1} - {0}):
            changed = tgt_in.ids.clone()
            changed[:, place:] = _other_tokens(changed[:, place:], len(subject.tokenizers.tgt))
            found = _log_probs(subject.model, src, PaddedBatch(changed, tgt_in.mask))
            errors.append(
                _max_difference(
                    found[:, :place],
                    expected[:, :place],
                    None if tgt_in.mask is None else tgt_in.mask[:, :place],
                )
            )
    return Measurement(
        _max_error(errors), log_prob_tolerance(subject), "later target pieces changed"
    )


@torch.inference_mode()
def check_source_padding(subject: ModelUnderTest) -> Measurement:
    """Put rubbish where sources are padded, and more of it behind."""
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
    """Put rubbish where targets are padded, and more of it behind."""
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
def check_batch_neighbors(subject: ModelUnderTest) -> Measurement:
    """Read each sentence in a batch, and by itself."""
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
    """Pack a batch and read it with its targets given; give what was packed and the log-probabilities (B, T, V)."""
    src, tgt_in = (
        pad_sources(pairs.sources, subject.device),
        pad_batch([[BOS, *target] for target in pairs.targets], subject.device),
    )
    return src, tgt_in, _log_probs(subject.model, src, tgt_in)


def _log_probs(model: EncoderDecoder, src: PaddedBatch, tgt_in: PaddedBatch) -> Tensor:
    """Read targets that are given: (B, T, V)."""
    return _log_softmax(model.project(model.decode(tgt_in.ids, model.encode(*src), tgt_in.mask)))


def _log_softmax(logits: Tensor) -> Tensor:
    """Turn logits into log-probabilities, in float32 at least."""
    return logits.float().log_softmax(-1)


def _replace_padding(packed: PaddedBatch, vocabulary: int) -> PaddedBatch:
    """Add columns of padding, and fill all padding with pieces that mean something elsewhere."""
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
    """Give pieces other than these."""
    first = len(SPECIAL_TOKENS)
    return (ids - first + 1) % max(vocabulary - first, 1) + first


def _max_difference(found: Tensor, expected: Tensor, mask: Tensor | None) -> Tensor:
    """Find the largest difference at real positions; it stays on the device, and is NaN where anything is."""
    apart = (found - expected).abs()
    return (apart if mask is None else apart.masked_fill(~mask.unsqueeze(-1), 0.0)).amax()


def _max_error(errors: Iterable[Tensor] | Sequence[Tensor]) -> float:
    """Take the largest of errors."""
    return float(torch.stack(list(errors)).amax())
