"""CTranslate2 behind the engine's face: an exported model searched by its C++ code.

It speaks in spelt pieces, cuts what is too long in silence, and ranks by another length penalty; all of that ends here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import LengthPenalty, WuLengthPenalty
from dragoman.decoding.search import SearchStrategy
from dragoman.inference.engine import SearchRequest
from dragoman.storage.atomic import native_path
from dragoman.text.special_tokens import BOS, EOS, PAD, SPECIAL_TOKENS, UNK
from dragoman.text.tokenizer import Tokenizers

# Padded places of a batch: larger ones gain nothing on a CPU, and leave a worker without work at the end. Weights in float32 take four
# times the memory's bandwidth, which more rows share.
BATCH_TOKENS, BATCH_TOKENS_INT8 = 1024, 768
_FORBIDDEN = frozenset((PAD, BOS, UNK))  # pieces that no output may hold


class _DecodedRow(NamedTuple):
    """One output as CTranslate2 gives it, in ids."""

    tokens: list[int]
    finished: bool
    total: float  # log-probability, where scores were asked for


class CTranslate2Engine:
    """An exported Transformer: several workers of one thread each, which on few cores is quicker than one of several threads."""

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

        self._allow_beam = (
            allow_beam  # whether it may search with a beam, which it ends by another rule than ours
        )
        self.name, self.workers, self.longest = name, workers, longest
        self.client_threads = (
            2 * workers
        )  # while one reads what a worker found, or spells what it is to do next, another's batch is in the queue
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
        self._ids = {piece: number for number, piece in enumerate(self._tgt)}

    def unsupported_reason(self, strategy: SearchStrategy, longest: int = 0) -> str:
        """Say why it cannot: only greedy and beam search under our length penalty, within the positions that were exported."""
        if not isinstance(strategy, (GreedySearch, BeamSearch)):
            return f"knows no {type(strategy).__name__.lower()}"
        if not self._allow_beam and isinstance(strategy, BeamSearch) and strategy.size > 1:
            return "ends a beam search by another rule, and nobody asked for it"
        if not isinstance(strategy.penalty, WuLengthPenalty):
            return f"knows no {type(strategy.penalty).__name__}"
        return f"was exported for {self.longest} positions" if longest > self.longest else ""

    def generate(self, request: SearchRequest) -> list[list[Hypothesis]]:
        """Search; what meets a limit of its own within a batch, or holds a piece that must not be, is searched again."""
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
        if isinstance(request.strategy, BeamSearch):
            # A hypothesis beyond its row's own limit took a place in the beam; a greedy one is only cut.
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
        """Score given targets: the log-probability of each piece, and of the end."""
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
        """Run a search over some rows, none being stopped before its limit; a strict one is kept from forbidden pieces."""
        size = request.strategy.size if isinstance(request.strategy, BeamSearch) else 1
        alpha = _length_penalty(request.strategy).alpha
        prefixes = [request.prefixes[row] for row in rows]
        most = max(_max_tokens(request, row) for row in rows)
        options: dict[str, Any] = {
            "beam_size": size,
            "num_hypotheses": size,  # all that it finished: it ranks by a power of the length, and we do not
            "length_penalty": alpha,
            "max_decoding_length": 1 + most,  # it counts the end, and we do not
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
        """Read what was found for one source."""
        decoded = []
        for at, pieces in enumerate(result.hypotheses):
            ids = list(map(self._ids.__getitem__, pieces))
            finished = bool(ids) and ids[-1] == EOS
            total = result.scores[at] * len(ids) ** alpha if result.scores else 0.0
            decoded.append(_DecodedRow(ids[:-1] if finished else ids, finished, total))
        return decoded

    def _hypotheses(
        self, request: SearchRequest, found: Sequence[Sequence[_DecodedRow]], *, inexact: set[int]
    ) -> list[list[Hypothesis]]:
        """Cut each output to its limit, score it as the native search would, and rank.

        While it searches it gives no log-probabilities of pieces, and its sums leave out what was forced and are blurred by
        what was forbidden: such rows, and all that are asked for with their scores, are scored by themselves.
        """
        nbest = request.strategy.nbest if isinstance(request.strategy, BeamSearch) else 1
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
    """Say how many pieces an output may have: a prefix raises its limit, and there is always room for one."""
    return max(request.limits[row], len(request.prefixes[row]), 1)


def _length_penalty(strategy: SearchStrategy) -> WuLengthPenalty:
    """Read the length penalty of a search that was not refused."""
    penalty = getattr(strategy, "penalty", None)
    assert isinstance(penalty, WuLengthPenalty), "others are refused"
    return penalty


def _rank_rows(rows: Sequence[_DecodedRow], strategy: SearchStrategy) -> list[_DecodedRow]:
    """Put outputs into our order: the finished ones first, each kind by its sum under our penalty."""
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
    """Cut an output at its limit; its end, which does not count, it then never reached."""
    return row if len(row.tokens) <= limit else _DecodedRow(row.tokens[:limit], False, row.total)


def _build_hypothesis(
    row: _DecodedRow, log_probs: list[float] | None, penalty: LengthPenalty
) -> Hypothesis:
    """Dress an output; without exact numbers its score is the engine's own sum under our penalty."""
    length = len(row.tokens) + row.finished
    kept = [] if log_probs is None else log_probs[:length]
    return Hypothesis(
        row.tokens,
        kept,
        penalty.score(sum(kept) if kept else row.total, max(length, 1)),
        row.finished,
    )


def _drop_duplicates(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    """Rank what was found, and leave out what cutting made the same."""
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
