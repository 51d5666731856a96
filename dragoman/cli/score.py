"""`dragoman score`: the log-probability that a model gives to sentence pairs."""

from __future__ import annotations

import itertools
import math
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.cli.corpora import open_corpus
from dragoman.cli.options import (
    BatchSizeOption,
    DeviceOption,
    JsonOption,
    ModelOption,
    PairsOption,
    PairsSrcOption,
    PairsTgtOption,
    SrcFieldOption,
    SrcLangOption,
    TgtFieldOption,
    TgtLangOption,
)
from dragoman.cli.progress import is_terminal, progress
from dragoman.cli.show import as_json, count, note, result
from dragoman.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dragoman.data.corpus import Corpus, Pair
    from dragoman.translator import PairScore

WINDOW = 2048  # pairs that are read ahead, so that like lengths go together
NOTES_SHOWN = 3


def score(
    model: ModelOption,
    src: PairsSrcOption = "",
    tgt: PairsTgtOption = "",
    pairs: PairsOption = "",
    src_field: SrcFieldOption = "",
    tgt_field: TgtFieldOption = "",
    src_lang: SrcLangOption = "",
    tgt_lang: TgtLangOption = "",
    normalize: Annotated[bool, typer.Option("--normalize", help="Write the mean of the tokens instead of the sum.")] = False,
    batch_size: BatchSizeOption = None,
    json: JsonOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Write the log-probability of each target given its source, one number a line.

    It is the sum over the target's tokens and its end, in natural logarithms; a pair too long for the model gives nan. With
    --json each line is an object: line, log_prob, per_token, tokens and log_probs (one a token, `</s>` last) and notes.
    """
    corpus = open_corpus(
        src=src, tgt=tgt, pairs=pairs, src_field=src_field, tgt_field=tgt_field, src_lang=src_lang, tgt_lang=tgt_lang, what="a score"
    )
    total = sum(1 for _ in _pairs(corpus))  # and every mistake in the files is found before the model is loaded
    if not total:
        files = " and ".join(map(str, corpus.files))
        raise DataError(f"{files} must hold pairs to score", found="no line at all", fix="check the path, or what wrote the file")

    from dragoman.translator import Translator  # here, so that --help stays quick

    translator = Translator.load(model, device=device, engine="native")
    summary = _Summary()
    with progress("scoring", total, "pairs", shown=not is_terminal(sys.stdout)) as bar:
        lines = _pairs(corpus)
        while window := list(itertools.islice(lines, WINDOW)):
            found = translator.score([pair.src for pair in window], [pair.tgt for pair in window], batch_size=batch_size)
            for pair, one in zip(window, found, strict=True):
                _show(pair, one, normalize=normalize, json=json)
                summary.add(pair, one)
                bar.advance()
    summary.show()


def _pairs(corpus: Corpus) -> Iterator[Pair]:
    """Yield every pair; a line that cannot be read is an error, for a number must stand for each."""
    from dragoman.data.corpus import BadPair

    for record in corpus.records():
        if isinstance(record, BadPair):
            raise record.line.error()
        yield record


def _show(pair: Pair, one: PairScore, *, normalize: bool, json: bool) -> None:
    """Write one pair's score."""
    if json:
        able = not math.isnan(one.log_prob)
        numbers = (
            {"log_prob": round(one.log_prob, 6), "per_token": round(one.per_token, 6)} if able else {"log_prob": None, "per_token": None}
        )
        tokens = {"tokens": one.tokens, "log_probs": [round(each, 6) for each in one.log_probs]}
        as_json({"line": pair.number, **numbers, **tokens, "notes": list(one.notes)})
    else:
        result(f"{one.per_token if normalize else one.log_prob:.6f}")


class _Summary:
    """What all pairs come to, for stderr."""

    def __init__(self) -> None:
        self.pairs = self.tokens = self.left_out = self.noted = 0
        self.log_prob = 0.0

    def add(self, pair: Pair, one: PairScore) -> None:
        """Count a pair, and show the first few notes at once."""
        if math.isnan(one.log_prob):
            self.left_out += 1
        else:
            self.pairs += 1
            self.tokens += len(one.tokens)
            self.log_prob += one.log_prob
        self.noted += bool(one.notes)
        if one.notes and self.noted <= NOTES_SHOWN:
            note(f"line {pair.number}: {'; '.join(one.notes)}")

    def show(self) -> None:
        """Write the totals."""
        if self.noted > NOTES_SHOWN:
            note(f"{count(self.noted, 'line')} had such notes in all; --json writes them with each line")
        mean = self.log_prob / max(1, self.tokens)
        left_out = f"; {count(self.left_out, 'pair')} not scored" if self.left_out else ""
        figures = f"mean log-probability {mean:.4f} per token, perplexity {math.exp(min(-mean, 700)):.4g}"
        note(f"{count(self.pairs, 'pair')}, {count(self.tokens, 'token')}: {figures}{left_out}")
