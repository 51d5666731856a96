"""What a model promises of its numbers, whatever it has learnt: read with targets given, and searched.

A sound model differs here by rounding alone. Log-probabilities are compared, so that one tolerance fits all vocabularies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dragoman.bundle.golden import DEVICE_TOLERANCE, TOLERANCE
from dragoman.decoding.beam import Beam
from dragoman.decoding.packing import Packed, pack, pack_sources
from dragoman.doctor.agreement import agree
from dragoman.doctor.finding import Measured, NotApplicableError
from dragoman.doctor.subject import BEAM, PADDING, Pairs, Subject
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.specials import BOS, EOS, SPECIALS


def tolerance(subject: Subject) -> float:
    """Say how far rounding may go: as far as for golden vectors, which cross machines as well."""
    return TOLERANCE if subject.exact else DEVICE_TOLERANCE


def batched_equals_single(subject: Subject) -> Measured:
    """Search sentences in batches and one by one."""
    return agree(subject.model, subject.sources, subject.alone, subject.together).measured(tolerance(subject))


def beam_of_one_is_greedy(subject: Subject) -> Measured:
    """Search by a beam that keeps one hypothesis, and greedily."""
    beams = subject.search_all(subject.plain, Beam(size=1))
    return agree(subject.model, subject.sources, subject.together, beams).measured(tolerance(subject))


@torch.inference_mode()
def beams_are_scored_right(subject: Subject) -> Measured:
    """Search by a beam, whose hypotheses change places in the cache, and score what it found anew without one."""
    errors = []
    for source, found in zip(subject.sources, subject.beams, strict=True):
        end = torch.tensor([*found.tokens, EOS] if found.finished else found.tokens, device=subject.device)
        _, _, log_probs = _read(subject, Pairs([source], [found.tokens]))
        expected = log_probs[0, : len(end)].gather(1, end.unsqueeze(1)).squeeze(1).double().cpu()
        errors.append((torch.tensor(found.log_probs, dtype=torch.float64) - expected).abs().amax())
    return Measured(_largest(errors), tolerance(subject), f"a beam of {BEAM}, and read anew")


@torch.inference_mode()
def cached_equals_uncached(subject: Subject) -> Measured:
    """Read targets piece by piece with a cache, the second half at once, and all of them without one."""
    model, errors = subject.model, []
    for pairs in subject.pairs():
        src, tgt_in, expected = _read(subject, pairs)
        try:
            state, found, half = model.start(model.encode(*src)), [], tgt_in.ids.size(1) // 2
            for piece in (*tgt_in.ids[:, :half].unbind(1), tgt_in.ids[:, half:]):
                logits, state = model.extend(piece.reshape(len(pairs.targets), -1), state)
                found.append(logits)
        except NotImplementedError as error:
            raise NotApplicableError("this decoder has no cache") from error
        errors.append(_difference(_normal(torch.cat(found, 1)), expected, tgt_in.mask))
    return Measured(_largest(errors), tolerance(subject), "piece by piece; half at once")


@torch.inference_mode()
def no_look_ahead(subject: Subject) -> Measured:
    """Change later pieces of the target; what comes before them must not notice."""
    errors = []
    for pairs in subject.pairs():
        src, tgt_in, expected = _read(subject, pairs)
        longest = tgt_in.ids.size(1)
        for place in sorted({1, longest // 2, longest - 1} - {0}):
            changed = tgt_in.ids.clone()
            changed[:, place:] = _others(changed[:, place:], len(subject.tokenizers.tgt))
            found = _log_probs(subject.model, src, Packed(changed, tgt_in.mask))
            errors.append(_difference(found[:, :place], expected[:, :place], None if tgt_in.mask is None else tgt_in.mask[:, :place]))
    return Measured(_largest(errors), tolerance(subject), "later target pieces changed")


@torch.inference_mode()
def source_padding_changes_nothing(subject: Subject) -> Measured:
    """Put rubbish where sources are padded, and more of it behind."""
    errors = []
    for pairs in subject.pairs():
        src, tgt_in, expected = _read(subject, pairs)
        padded = _with_rubbish(src, len(subject.tokenizers.src))
        errors.append(_difference(_log_probs(subject.model, padded, tgt_in), expected, tgt_in.mask))
    return Measured(_largest(errors), tolerance(subject), "padding replaced and widened")


@torch.inference_mode()
def target_padding_changes_nothing(subject: Subject) -> Measured:
    """Put rubbish where targets are padded, and more of it behind."""
    errors = []
    for pairs in subject.pairs():
        src, tgt_in, expected = _read(subject, pairs)
        padded = _with_rubbish(tgt_in, len(subject.tokenizers.tgt))
        found = _log_probs(subject.model, src, padded)[:, : tgt_in.ids.size(1)]
        errors.append(_difference(found, expected, tgt_in.mask))
    return Measured(_largest(errors), tolerance(subject), "padding replaced and widened")


@torch.inference_mode()
def neighbours_change_nothing(subject: Subject) -> Measured:
    """Read each sentence in a batch, and by itself."""
    errors = []
    for pairs in subject.pairs():
        _, _, expected = _read(subject, pairs)
        for row, (source, target) in enumerate(zip(*pairs, strict=True)):
            _, alone, found = _read(subject, Pairs([source], [target]))
            errors.append(_difference(found, expected[row : row + 1, : alone.ids.size(1)], None))
    return Measured(_largest(errors), tolerance(subject), "in a batch and alone")


def _read(subject: Subject, pairs: Pairs) -> tuple[Packed, Packed, Tensor]:
    """Pack a batch and read it with its targets given; give what was packed and the log-probabilities (B, T, V)."""
    src, tgt_in = pack_sources(pairs.sources, subject.device), pack([[BOS, *target] for target in pairs.targets], subject.device)
    return src, tgt_in, _log_probs(subject.model, src, tgt_in)


def _log_probs(model: EncoderDecoder, src: Packed, tgt_in: Packed) -> Tensor:
    """Read targets that are given: (B, T, V)."""
    return _normal(model.project(model.decode(tgt_in.ids, model.encode(*src), tgt_in.mask)))


def _normal(logits: Tensor) -> Tensor:
    """Turn logits into log-probabilities, in float32 at least."""
    return logits.float().log_softmax(-1)


def _with_rubbish(packed: Packed, vocabulary: int) -> Packed:
    """Add columns of padding, and fill all padding with pieces that mean something elsewhere."""
    rows, longest = packed.ids.shape
    mask = torch.ones_like(packed.ids, dtype=torch.bool) if packed.mask is None else packed.mask
    mask = torch.nn.functional.pad(mask, (0, PADDING))
    generator = torch.Generator().manual_seed(rows)
    rubbish = torch.randint(len(SPECIALS), vocabulary, (rows, longest + PADDING), generator=generator).to(packed.ids.device)
    return Packed(torch.where(mask, torch.nn.functional.pad(packed.ids, (0, PADDING)), rubbish), mask)


def _others(ids: Tensor, vocabulary: int) -> Tensor:
    """Give pieces other than these."""
    first = len(SPECIALS)
    return (ids - first + 1) % max(vocabulary - first, 1) + first


def _difference(found: Tensor, expected: Tensor, mask: Tensor | None) -> Tensor:
    """Find the largest difference at real positions; it stays on the device, and is NaN where anything is."""
    apart = (found - expected).abs()
    return (apart if mask is None else apart.masked_fill(~mask.unsqueeze(-1), 0.0)).amax()


def _largest(errors: Iterable[Tensor] | Sequence[Tensor]) -> float:
    """Take the largest of errors."""
    return float(torch.stack(list(errors)).amax())
