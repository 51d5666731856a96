"""CTranslate2 as an engine: an exported model decoded by its C++ code.

CTranslate2 takes tokens as strings, truncates long inputs silently and has another length penalty.
This module converts all of that to our conventions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import LengthPenalty, WuLengthPenalty
from dragoman.decoding.search_interface import SearchRequest, SearchStrategy
from dragoman.storage.atomic_and_safe_file_io import native_path
from dragoman.text.sentencepiece_tokenizer import Tokenizers
from dragoman.text.special_tokens import BOS, EOS, PAD, SPECIAL_TOKENS, UNK

# Padded tokens of a batch. Larger ones gain nothing on a CPU, and leave workers idle at the end.
# float32 weights take four times the memory bandwidth of int8, which more rows share.
BATCH_TOKENS, BATCH_TOKENS_INT8 = 1024, 768
_FORBIDDEN = frozenset((PAD, BOS, UNK))  # tokens that no output may hold


class _DecodedRow(NamedTuple):
    """One output of CTranslate2, as token ids."""

    tokens: list[int]
    finished: bool
    total: float  # log-probability, if scores were requested


class CTranslate2Engine:
    """An exported Transformer on several workers of one thread each: on few cores the fastest."""

    def __init__(
        self,
        folder: Path,
        tokenizers: Tokenizers,
        *,
        name: str,
        longest: int,
        workers: int,
        compute_type: str = "default",
        allow_beam: bool = True,
    ) -> None:
        from ctranslate2 import Translator

        self._allow_beam = allow_beam  # its beam search stops by another rule than ours
        self.name, self.workers, self.longest = name, workers, longest
        # While one thread converts results or the next batch, another's batch waits in the queue.
        self.client_threads = 2 * workers
        with native_path(folder) as readable:
            self._translator = Translator(
                readable,
                device="cpu",
                compute_type=compute_type,
                inter_threads=workers,
                intra_threads=1,
            )
        self.batch_tokens = (
            BATCH_TOKENS_INT8 if "int8" in self._translator.compute_type else BATCH_TOKENS
        )
        self._src, self._tgt = (tokenizer.tokens(range(len(tokenizer))) for tokenizer in tokenizers)
        self._ids = {token: token_id for token_id, token in enumerate(self._tgt)}

    def unsupported_reason(self, strategy: SearchStrategy, longest: int = 0) -> str:
        """Return why a search is unsupported: not greedy or beam search, or too many positions."""
        if strategy.beam_size is None:
            return f"does not support {strategy.name}"
        if not self._allow_beam and strategy.beam_size > 1:
            return "stops a beam search by another rule, and was not requested by name"
        if not isinstance(strategy.penalty, WuLengthPenalty):
            return f"does not support the length penalty {type(strategy.penalty).__name__}"
        return f"was exported for {self.longest} positions" if longest > self.longest else ""

    def generate(self, request: SearchRequest) -> list[list[Hypothesis]]:
        """Search; a row beyond its limit or with a forbidden token is searched again."""
        rows = range(len(request.sources))
        found = self._search(request, rows)
        invalid_rows = {
            row
            for row in rows
            if any(
                not _FORBIDDEN.isdisjoint(one.tokens[len(request.prefixes[row]) :])
                for one in found[row]
            )
        }
        if _beam_size(request.strategy) > 1:
            # A hypothesis beyond its row's limit took a beam slot; a greedy one is only cut.
            invalid_rows |= {
                row
                for row in rows
                if any(len(one.tokens) > _max_tokens(request, row) for one in found[row])
            }
        for row in invalid_rows:
            found[row] = self._search(request, [row], strict=True)[0]
        return self._hypotheses(request, found, inexact=invalid_rows)

    def log_probs(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Return the log-probability of each target token, and of EOS."""
        if not sources:
            return []
        given = [[self._src[each] for each in source] for source in sources]
        results = self._translator.score_batch(
            given, [[self._tgt[each] for each in row] for row in targets], max_input_length=0
        )
        return [list(result.log_probs) for result in results]

    def _search(
        self, request: SearchRequest, rows: Sequence[int], *, strict: bool = False
    ) -> list[list[_DecodedRow]]:
        """Search rows up to the largest of their limits; `strict` suppresses forbidden tokens."""
        size = _beam_size(request.strategy)
        alpha = _length_penalty(request.strategy).alpha
        prefixes = [request.prefixes[row] for row in rows]
        most = max(_max_tokens(request, row) for row in rows)
        options: dict[str, Any] = {
            "beam_size": size,
            "num_hypotheses": size,  # all, because it ranks them by another length penalty
            "length_penalty": alpha,
            "max_decoding_length": 1 + most,  # counts EOS
            "min_decoding_length": min(request.min_length, 1 + most),
            "max_input_length": 0,
            "return_end_token": True,
            "return_scores": request.return_scores or size > 1,
        }
        if any(prefixes):
            options["target_prefix"] = [[self._tgt[each] for each in prefix] for prefix in prefixes]
        if strict:
            options |= {
                "disable_unk": True,
                "suppress_sequences": [[SPECIAL_TOKENS[PAD]], [SPECIAL_TOKENS[BOS]]],
            }
        sources = [list(map(self._src.__getitem__, request.sources[row])) for row in rows]
        return [
            self._rows(result, alpha)
            for result in self._translator.translate_batch(sources, **options)
        ]

    def _rows(self, result: Any, alpha: float) -> list[_DecodedRow]:
        """Convert the outputs for one source to token ids."""
        decoded = []
        for at, tokens in enumerate(result.hypotheses):
            ids = list(map(self._ids.__getitem__, tokens))
            finished = bool(ids) and ids[-1] == EOS
            total = result.scores[at] * len(ids) ** alpha if result.scores else 0.0
            decoded.append(_DecodedRow(ids[:-1] if finished else ids, finished, total))
        return decoded

    def _hypotheses(
        self, request: SearchRequest, found: Sequence[Sequence[_DecodedRow]], *, inexact: set[int]
    ) -> list[list[Hypothesis]]:
        """Truncate each output to its limit, score it as the native search does, and rank.

        A search returns no log-probabilities of tokens, and its sums leave out forced tokens and
        are changed by suppressed ones: such rows, and all whose scores are requested, are rescored.
        """
        nbest = request.strategy.nbest
        kept: list[list[_DecodedRow]] = []
        rescored: list[tuple[int, int]] = []
        for row, candidates in enumerate(found):
            is_inexact = row in inexact or bool(request.prefixes[row])
            cut = [_truncate_row(one, _max_tokens(request, row)) for one in candidates]
            kept.append(cut if is_inexact else _rank_rows(cut, request.strategy)[:nbest])
            if request.return_scores or (is_inexact and len(cut) > 1):
                rescored += [(row, at) for at in range(len(kept[row]))]
        token_log_probs = self.log_probs(
            [request.sources[row] for row, _ in rescored],
            [kept[row][at].tokens for row, at in rescored],
        )
        log_probs = dict(zip(rescored, token_log_probs, strict=True))
        penalty = _length_penalty(request.strategy)
        decoded = [
            [
                _build_hypothesis(one, log_probs.get((row, at)), penalty)
                for at, one in enumerate(candidates)
            ]
            for row, candidates in enumerate(kept)
        ]
        return [_drop_duplicates(candidates)[:nbest] for candidates in decoded]


def _max_tokens(request: SearchRequest, row: int) -> int:
    """Return the maximum output length of a row: at least 1 and at least that of its prefix."""
    return max(request.limits[row], len(request.prefixes[row]), 1)


def _beam_size(strategy: SearchStrategy) -> int:
    """Return the beam size of a supported search."""
    assert strategy.beam_size is not None, "checked by unsupported_reason"
    return strategy.beam_size


def _length_penalty(strategy: SearchStrategy) -> WuLengthPenalty:
    """Return the length penalty of a supported search."""
    assert isinstance(strategy.penalty, WuLengthPenalty), "checked by unsupported_reason"
    return strategy.penalty


def _rank_rows(rows: Sequence[_DecodedRow], strategy: SearchStrategy) -> list[_DecodedRow]:
    """Sort outputs: finished ones first, each kind by its score under our length penalty."""
    if len(rows) == 1:
        return list(rows)
    penalty = _length_penalty(strategy)
    return sorted(
        rows,
        key=lambda row: (
            not row.finished,
            -penalty.score(row.total, len(row.tokens) + row.finished),
        ),
    )


def _truncate_row(row: _DecodedRow, limit: int) -> _DecodedRow:
    """Truncate an output at its limit; it is then unfinished."""
    return row if len(row.tokens) <= limit else _DecodedRow(row.tokens[:limit], False, row.total)


def _build_hypothesis(
    row: _DecodedRow, log_probs: list[float] | None, penalty: LengthPenalty
) -> Hypothesis:
    """Return the hypothesis; without log_probs it is scored from the sum of CTranslate2."""
    length = len(row.tokens) + row.finished
    kept = [] if log_probs is None else log_probs[:length]
    return Hypothesis(
        row.tokens,
        kept,
        penalty.score(sum(kept) if kept else row.total, max(length, 1)),
        row.finished,
    )


def _drop_duplicates(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    """Sort hypotheses and drop those that truncation made equal."""
    if len(hypotheses) == 1:
        return hypotheses
    seen: set[tuple[bool, tuple[int, ...]]] = set()
    kept = []
    for each in sorted(hypotheses, key=lambda each: (not each.finished, -each.score)):
        key = (each.finished, tuple(each.tokens))
        if key not in seen:
            seen.add(key)
            kept.append(each)
    return kept
