"""`dragoman score`: log-probabilities of given translations (teacher forcing)."""

from __future__ import annotations

import itertools
import math
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.cli.command_progress_bar import is_terminal, progress
from dragoman.cli.options import (
    BatchSizeOption,
    DefaultModelOption,
    DeviceOption,
    FromOption,
    JsonOption,
    PairsOption,
    PairsSrcOption,
    PairsTgtOption,
    QuietOption,
    SrcFieldOption,
    SrcLangOption,
    TgtFieldOption,
    TgtLangOption,
    ToOption,
)
from dragoman.cli.parallel_corpus_opener import open_corpus
from dragoman.cli.terminal_output import format_count, print_json, print_note, print_result
from dragoman.cli.translate import CHECKED_LINES, warn_of_other_languages
from dragoman.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dragoman.data.parallel_corpus import Corpus, SentencePair
    from dragoman.inference import PairScore

BUFFER_PAIRS = 2048  # pairs read ahead, so that pairs of similar length share a batch
NOTES_SHOWN = 3


def score(
    model: DefaultModelOption,
    src: PairsSrcOption = "",
    tgt: PairsTgtOption = "",
    pairs: PairsOption = "",
    src_field: SrcFieldOption = "",
    tgt_field: TgtFieldOption = "",
    src_lang: SrcLangOption = "",
    tgt_lang: TgtLangOption = "",
    to: ToOption = None,
    from_: FromOption = None,
    normalize: Annotated[
        bool, typer.Option("--normalize", help="Print the mean over the tokens instead of the sum.")
    ] = False,
    batch_size: BatchSizeOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Print the log-probabilities of given translations.

    There is one number per line: the log-probability of the target sentence given its
    source. It is the sum over the target tokens and the end-of-sentence token, in
    natural logarithms; a pair too long for the model scores nan. With --json each
    line is an object: line, log_prob, per_token, tokens, log_probs (one per token,
    `</s>` last) and notes.
    """
    corpus = open_corpus(
        src=src,
        tgt=tgt,
        pairs=pairs,
        src_field=src_field,
        tgt_field=tgt_field,
        src_lang=src_lang,
        tgt_lang=tgt_lang,
        what="a score",
    )
    # Also validates the files before the model is loaded.
    total = sum(1 for _ in _iter_pairs(corpus))
    if not total:
        files = " and ".join(map(str, corpus.files))
        raise DataError(
            f"{files} must hold pairs to score",
            found="no line at all",
            fix="check the path, or what wrote the file",
        )

    from dragoman.inference import Translator  # imports torch

    translator = Translator.load(model, device=device, engine="native")
    summary = _ScoreSummary()
    first = [pair.src for pair in itertools.islice(_iter_pairs(corpus), CHECKED_LINES)]
    warn_of_other_languages(
        translator, first, corpus.files[0], source_language=from_, target_language=to
    )
    with progress("scoring", total, "pairs", shown=not is_terminal(sys.stdout)) as bar:
        sentence_pairs = _iter_pairs(corpus)
        while buffer := list(itertools.islice(sentence_pairs, BUFFER_PAIRS)):
            found = translator.score(
                [pair.src for pair in buffer],
                [pair.tgt for pair in buffer],
                batch_size=batch_size,
                source_language=from_,
                target_language=to,
            )
            for pair, one in zip(buffer, found, strict=True):
                _print_pair_score(pair, one, normalize=normalize, json=json)
                summary.add(pair, one)
                bar.advance()
    summary.show()


def _iter_pairs(corpus: Corpus) -> Iterator[SentencePair]:
    """Yield every pair; raise DataError for a line that cannot be read."""
    from dragoman.data.parallel_corpus import BadPair

    for record in corpus.records():
        if isinstance(record, BadPair):
            raise record.line.error()
        yield record


def _print_pair_score(pair: SentencePair, one: PairScore, *, normalize: bool, json: bool) -> None:
    """Print the score of one pair."""
    if json:
        is_scored = not math.isnan(one.log_prob)
        numbers = (
            {"log_prob": round(one.log_prob, 6), "per_token": round(one.per_token, 6)}
            if is_scored
            else {"log_prob": None, "per_token": None}
        )
        tokens = {"tokens": one.tokens, "log_probs": [round(each, 6) for each in one.log_probs]}
        print_json({"line": pair.number, **numbers, **tokens, "notes": list(one.notes)})
    else:
        print_result(f"{one.per_token if normalize else one.log_prob:.6f}")


class _ScoreSummary:
    """Totals over all pairs, printed to stderr."""

    def __init__(self) -> None:
        self.pairs = self.tokens = self.characters = self.num_skipped = self.num_noted = 0
        self.log_prob = 0.0

    def add(self, pair: SentencePair, one: PairScore) -> None:
        """Add a pair, and print the first few notes."""
        if math.isnan(one.log_prob):
            self.num_skipped += 1
        else:
            self.pairs += 1
            self.tokens += len(one.tokens)
            self.characters += len(pair.tgt) + 1  # the end of a line counts as one
            self.log_prob += one.log_prob
        self.num_noted += bool(one.notes)
        if one.notes and self.num_noted <= NOTES_SHOWN:
            print_note(f"line {pair.number}: {'; '.join(one.notes)}")

    def show(self) -> None:
        """Print the totals."""
        if self.num_noted > NOTES_SHOWN:
            print_note(
                f"{format_count(self.num_noted, 'line')} with notes in total; --json includes them"
            )
        if not self.pairs:
            print_note(f"no mean: none of {format_count(self.num_skipped, 'pair')} was scored")
            return
        mean = self.log_prob / max(1, self.tokens)
        skipped = (
            f"; {format_count(self.num_skipped, 'pair')} not scored" if self.num_skipped else ""
        )
        by_character = math.exp(min(-self.log_prob / max(1, self.characters), 700))
        metrics = (
            f"mean log-probability {mean:.4f} per token, perplexity "
            f"{math.exp(min(-mean, 700)):.4g}, {by_character:.4g} per character"
        )
        print_note(
            f"{format_count(self.pairs, 'pair')}, {format_count(self.tokens, 'token')}: "
            f"{metrics}{skipped}"
        )
