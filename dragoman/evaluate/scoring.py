"""Scores of translations by sacreBLEU, each with the signature that lets another person repeat it.

Validation during training and `dragoman evaluate` both call `score`, on detokenised text and the raw reference,
so that there is one BLEU and not two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from dragoman.errors import ConfigError, DataError, nearest


@dataclass(frozen=True, slots=True)
class Score:
    """One number, what it measures, and how it was measured."""

    name: str
    value: float
    signature: str

    def __str__(self) -> str:
        """Write the score as tables quote it: two decimals and the signature."""
        return f"{self.name} {self.value:.2f}  {self.signature}"


@dataclass(frozen=True, slots=True)
class Scores:
    """BLEU, chrF and TER of one set of translations, and what a reader must know about them."""

    bleu: Score
    chrf: Score
    ter: Score
    sentences: int
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Score]:
        """Go through the three scores."""
        return iter((self.bleu, self.chrf, self.ter))

    def as_dict(self) -> dict[str, Any]:
        """Turn the scores into plain values for JSON and model cards."""
        scores = {each.name: {"score": each.value, "signature": each.signature} for each in self}
        return {"scores": scores, "sentences": self.sentences, "notes": list(self.notes)}


@dataclass(frozen=True, slots=True)
class Metrics:
    """The three metrics set up one way: shared by scoring, comparing and validation."""

    bleu: BLEU
    chrf: CHRF
    ter: TER
    notes: tuple[str, ...] = ()


def metrics(*, lowercase: bool = False, tokenize: str = "", tgt_lang: str = "", sentence: bool = False) -> Metrics:
    """Set up the metrics for a language and a convention; `sentence` makes BLEU fit for single sentences."""
    tokeniser, notes = choose_tokeniser(tokenize, tgt_lang)
    try:
        bleu = BLEU(lowercase=lowercase, tokenize=tokeniser, effective_order=sentence)
    except (RuntimeError, ImportError, OSError) as error:  # a tokeniser whose package, or whose download, is not there
        found = " ".join(str(error).split())[:200].rstrip(".")
        raise ConfigError([f"--tokenize {tokeniser} must be usable here; found {found}; install it or take --tokenize char"]) from error
    asian = tgt_lang[:2] in ("zh", "ja", "ko")
    # TER's own way with Chinese and Japanese, without which a sentence is one word. It ignores case, as tercom does by default.
    ter = TER(normalized=asian, asian_support=asian)
    return Metrics(bleu, CHRF(lowercase=lowercase), ter, notes)


def choose_tokeniser(tokenize: str, tgt_lang: str) -> tuple[str, tuple[str, ...]]:
    """Choose BLEU's tokeniser: the one asked for, else the target language's, else 13a; with a note where we settle for less."""
    if tokenize:
        if tokenize not in BLEU.TOKENIZERS:
            raise ConfigError(
                [f"--tokenize must name a tokeniser of sacreBLEU; found {tokenize!r}; {nearest(tokenize, map(str, BLEU.TOKENIZERS))}"]
            )
        return tokenize, ()
    language = tgt_lang.replace("_", "-").split("-")[0].lower()
    if language == "zh":
        return "zh", ()
    if language in ("ja", "ko"):
        wanted = f"{language}-mecab"
        try:
            BLEU(tokenize=wanted)
        except (RuntimeError, ImportError):
            return "char", (
                f"BLEU counts characters: sacreBLEU's tokeniser {wanted} is not installed (pip install 'sacrebleu[{language}]'); "
                "compare only with scores whose signature says tok:char",
            )
        return wanted, ()
    return "13a", ()


def score(
    hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False, tokenize: str = "", tgt_lang: str = ""
) -> Scores:
    """Score translations against one reference each; both are plain text, one sentence an item."""
    check_aligned(hypotheses, references)
    chosen = metrics(lowercase=lowercase, tokenize=tokenize, tgt_lang=tgt_lang)
    return Scores(
        bleu=_corpus(chosen.bleu, hypotheses, references),
        chrf=_corpus(chosen.chrf, hypotheses, references),
        ter=_corpus(chosen.ter, hypotheses, references),
        sentences=len(hypotheses),
        notes=chosen.notes,
    )


def bleu(hypotheses: Sequence[str], references: Sequence[str], *, tgt_lang: str = "") -> Score:
    """Score by BLEU alone, for validation during training: the same number that `score` gives, sooner."""
    check_aligned(hypotheses, references)
    return _corpus(metrics(tgt_lang=tgt_lang).bleu, hypotheses, references)


def exact_match(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Say which share of the translations equals its reference, letter for letter."""
    check_aligned(hypotheses, references)
    return sum(map(str.__eq__, hypotheses, references)) / len(references)


def check_aligned(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    """Refuse texts that cannot be compared line by line."""
    if len(hypotheses) != len(references):
        raise DataError(
            "translations and references must have the same number of lines",
            found=f"{len(hypotheses):,} and {len(references):,}",
            fix="check that both are whole and of the same set",
        )
    if not references:
        raise DataError("scoring needs at least one sentence", found="0 lines", fix="check the reference file")


def _corpus(metric: Any, hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """Score a whole set with one metric; the signature exists only after that."""
    result = metric.corpus_score(list(hypotheses), [list(references)])
    return Score(str(result.name), float(result.score), str(metric.get_signature()))
