"""Log-probabilities of given translations, by one forward pass with teacher forcing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dragoman.config import Config
from dragoman.config.translation_directions import Direction
from dragoman.data.inference_batches import group_by_length, pad_batch, pad_sources
from dragoman.errors import DataError, DivergedError
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.runtime.out_of_memory import BatchHalving
from dragoman.text.sentencepiece_tokenizer import Tokenizers
from dragoman.text.special_tokens import BOS, EOS, UNK

_MAX_LOGITS = 1 << 23  # computed together, 32 MiB: a long pair may have billions
_MAX_TOKENS = 4096  # of a side, even if the model was trained on less: attention is quadratic


@dataclass(frozen=True, kw_only=True, slots=True)
class PairScore:
    """The log-probability of a target given its source, in natural logarithms."""

    log_prob: float  # sum over the target's tokens and EOS; NaN for a pair that is too long
    tokens: list[str]  # of the target, `</s>` last
    log_probs: list[float]  # one per token
    notes: Sequence[str] = ()  # anything unusual

    @property
    def per_token(self) -> float:
        """The mean log-probability of a token."""
        return self.log_prob / len(self.tokens)

    def __repr__(self) -> str:
        """Return the score and the number of tokens in one line."""
        return f"PairScore(log_prob={self.log_prob:.4f}, tokens={len(self.tokens)})"


class _TokenizedPair(NamedTuple):
    """A pair as token ids, with its notes."""

    src: list[int]
    tgt: list[int]
    notes: list[str]
    scored: bool


def score_pairs(
    model: EncoderDecoder,
    tokenizers: Tokenizers,
    config: Config,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    batch_size: int | None = None,
    directions: Sequence[Direction] | None = None,
) -> list[PairScore]:
    """Return the log-probability of each target given its source.

    With `directions`, one for each pair, sources begin with the tag of their target language.
    """
    if len(sources) != len(targets):
        raise DataError(
            "sources and targets must be equally many",
            found=f"{len(sources):,} and {len(targets):,}",
            fix="pass one target per source",
        )
    pairs = _encode_pairs(tokenizers, config, sources, targets, directions)
    scorable = [number for number, pair in enumerate(pairs) if pair.scored]
    lengths = [len(pairs[number].src) + len(pairs[number].tgt) + 2 for number in scorable]
    found: dict[int, list[float]] = {}
    halving = BatchHalving()
    for group in group_by_length(
        lengths, batch_tokens=config.decode.batch_tokens, max_rows=batch_size
    ):
        numbers = [scorable[index] for index in group]
        scores = halving.run(
            [pairs[number] for number in numbers],
            lambda part: _target_log_probs(model, part),
            padded_tokens=_padded_tokens,
        )
        found |= dict(zip(numbers, scores, strict=True))
    return [
        _build_pair_score(tokenizers, pair, found.get(number)) for number, pair in enumerate(pairs)
    ]


def _encode_pairs(
    tokenizers: Tokenizers,
    config: Config,
    sources: Sequence[str],
    targets: Sequence[str],
    directions: Sequence[Direction] | None,
) -> list[_TokenizedPair]:
    """Tokenize both sides and add notes; sources are stripped as for translation."""
    has_learned_positions = config.model.positions == "learned"
    longest = (
        config.model.max_positions - 1
        if has_learned_positions
        else max(_MAX_TOKENS, config.data.max_length)
    )
    trained = min(config.data.max_length, longest)
    src_rows = tokenizers.src.encode_batch([text.strip() for text in sources])
    tgt_rows = tokenizers.tgt.encode_batch([text if text.strip() else "" for text in targets])
    pairs = []
    tags = [
        [] if directions is None else [tokenizers.src.tag_ids[directions[number].target]]
        for number in range(len(sources))
    ]
    for tag, text, tgt in zip(tags, src_rows, tgt_rows, strict=True):
        src = [*tag, *text]
        length = max(len(src), len(tgt))
        notes = list(_pair_notes(text, tgt, length=length, longest=longest, trained=trained))
        pairs.append(_TokenizedPair(src, tgt, notes, length <= longest))
    return pairs


def _pair_notes(
    src: list[int], tgt: list[int], *, length: int, longest: int, trained: int
) -> Iterator[str]:
    """Yield notes on a pair; its length counts the tag of the source."""
    if not src or not tgt:
        empty = [name for name, row in (("source", src), ("target", tgt)) if not row]
        yield f"its {' and '.join(empty)} is empty"
    if length > longest:
        yield f"not scored: {length:,} tokens are more than the limit of {longest:,}"
    elif length > trained:
        yield f"{length:,} tokens are more than the {trained:,} that the model was trained on"
    unknown = tgt.count(UNK)
    if unknown:
        verb = "is" if unknown == 1 else "are"
        yield f"{unknown:,} of its target tokens {verb} unknown to the model"


def _padded_tokens(pairs: Sequence[_TokenizedPair]) -> int:
    """Return the padded size of a batch, both sides and their ends included."""
    return len(pairs) * (
        max(len(pair.src) for pair in pairs) + max(len(pair.tgt) for pair in pairs) + 2
    )


@torch.inference_mode()
def _target_log_probs(model: EncoderDecoder, pairs: Sequence[_TokenizedPair]) -> list[list[float]]:
    """Return the log-probability of each target token and of EOS, by one forward pass."""
    device = next(model.parameters()).device
    memory = model.encode(*pad_sources([pair.src for pair in pairs], device))
    tgt_in, mask = pad_batch([[BOS, *pair.tgt] for pair in pairs], device)
    hidden = model.decode(tgt_in, memory, mask)  # (B, T, D)
    # (N, D): without padding.
    rows = torch.cat([hidden[row, : len(pair.tgt) + 1] for row, pair in enumerate(pairs)])
    wanted = torch.tensor([token for pair in pairs for token in (*pair.tgt, EOS)], device=device)
    log_probs = _gather_log_probs(model, rows, wanted).tolist()
    if not all(map(math.isfinite, log_probs)):
        raise DivergedError(
            "log-probabilities must be finite",
            found=f"{next(each for each in log_probs if not math.isfinite(each))}",
            fix="the weights are not sound: run dragoman doctor on the model",
        )
    ends = list(_pair_ends(pairs))
    return [log_probs[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _gather_log_probs(model: EncoderDecoder, rows: Tensor, wanted: Tensor) -> Tensor:
    """Return the log-probability of the wanted token of each row, projecting in chunks."""
    step = max(1, _MAX_LOGITS // model.output_weight.size(0))
    parts = []
    for start in range(0, len(rows), step):
        logits = model.project(rows[start : start + step]).float()
        parts.append(
            logits.gather(1, wanted[start : start + step, None]).squeeze(1) - logits.logsumexp(1)
        )
    return torch.cat(parts).double().cpu()


def _pair_ends(pairs: Sequence[_TokenizedPair]) -> Iterator[int]:
    """Yield the end of each pair's tokens in the concatenated batch."""
    total = 0
    for pair in pairs:
        total += len(pair.tgt) + 1
        yield total


def _build_pair_score(
    tokenizers: Tokenizers, pair: _TokenizedPair, log_probs: list[float] | None
) -> PairScore:
    """Return a pair's score; one that was not computed is NaN."""
    tokens = tokenizers.tgt.tokens([*pair.tgt, EOS])
    if log_probs is None:
        return PairScore(log_prob=math.nan, tokens=tokens, log_probs=[], notes=pair.notes)
    return PairScore(
        log_prob=math.fsum(log_probs), tokens=tokens, log_probs=log_probs, notes=pair.notes
    )
