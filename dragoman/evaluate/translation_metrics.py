"""BLEU, chrF and TER by sacreBLEU, each with its signature; BLEU's tokenizer is chosen here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from dragoman.config import DataConfig
from dragoman.data.text_lines import read_lines
from dragoman.errors import ConfigError, DataError, suggest_name
from dragoman.text.language_tags_and_script_detection import (
    SCRIPT_NAMES,
    count_scripts,
    script_of_language,
)


def read_sentences(path: Path) -> list[str]:
    """Return the lines of a file, plain, .gz or .xz; empty lines are kept for alignment."""
    return [line.text for line in read_lines(path, max_line_bytes=DataConfig().max_line_bytes)]


MIN_CONTRADICTING_CHARS = 50  # of Han without kana, from which a text is not taken for Japanese
# By script; char for all others.
_TOKENIZERS = {"": "13a", "Hani": "zh", "Jpan": "ja-mecab", "Kore": "ko-mecab"}


@dataclass(frozen=True, slots=True)
class MetricScore:
    """The score of one metric with its sacreBLEU signature."""

    name: str
    value: float
    signature: str

    def __str__(self) -> str:
        """Return the score with two decimals and its signature."""
        return f"{self.name} {self.value:.2f}  {self.signature}"


@dataclass(frozen=True, slots=True)
class EvaluationScores:
    """BLEU, chrF and TER of one set of translations, with notes on the tokenizer."""

    bleu: MetricScore
    chrf: MetricScore
    ter: MetricScore
    sentences: int
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[MetricScore]:
        """Yield the three scores."""
        return iter((self.bleu, self.chrf, self.ter))

    def to_dict(self) -> dict[str, Any]:
        """Return the scores as JSON values."""
        scores = {each.name: {"score": each.value, "signature": each.signature} for each in self}
        return {"scores": scores, "sentences": self.sentences, "notes": list(self.notes)}


@dataclass(frozen=True, slots=True)
class SacrebleuMetrics:
    """The three metrics with one configuration, for evaluation, comparison and validation."""

    bleu: BLEU
    chrf: CHRF
    ter: TER
    notes: tuple[str, ...] = ()


class CharTER(TER):
    """TER over characters, for scripts without spaces; the signature has tok:char."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer_signature = "char"

    def _preprocess_segment(self, sent: str) -> str:
        return str(self.tokenizer(" ".join(sent)))


@dataclass(frozen=True, slots=True)
class TokenizerChoice:
    """The tokenizer for BLEU, the script of the target for TER, and why they were chosen."""

    name: str
    script: str  # as in `text/language_tags_and_script_detection.py`; empty for scripts with spaces
    reason: str
    warnings: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """The choice with its reason, then the warnings."""
        return (f"BLEU tokenizer {self.name}: {self.reason}", *self.warnings)


def build_metrics(
    *,
    lowercase: bool = False,
    tokenize: str = "",
    tgt_lang: str = "",
    references: Sequence[str] = (),
    sentence: bool = False,
) -> SacrebleuMetrics:
    """Return the metrics for a target language or the references' script.

    With `sentence`, BLEU uses the effective order, as sentence scores need.
    """
    choice = choose_tokenizer(tokenize, tgt_lang, references)
    try:
        bleu = BLEU(lowercase=lowercase, tokenize=choice.name, effective_order=sentence)
    except (RuntimeError, ImportError, OSError) as error:  # its package or download is missing
        found = " ".join(str(error).split())[:200].rstrip(".")
        raise ConfigError(
            [
                f"--tokenize {choice.name} must be usable here; found {found}; install it or use "
                "--tokenize char"
            ]
        ) from error
    notes = list(choice.notes)
    if empty := sum(not text.strip() for text in references):
        notes.append(
            f"{empty:,} of {len(references):,} references empty: they count as sentences, see "
            "dragoman data check"
        )
    return SacrebleuMetrics(
        bleu, CHRF(lowercase=lowercase), _build_ter(choice.script), tuple(notes)
    )


def _build_ter(script: str) -> TER:
    """Return TER for a script; scripts without spaces are split into characters."""
    if script in ("Hani", "Jpan"):
        return TER(normalized=True, asian_support=True)
    return TER() if script in ("", "Kore") else CharTER()


def choose_tokenizer(
    tokenize: str, tgt_lang: str, references: Sequence[str] = ()
) -> TokenizerChoice:
    """Choose BLEU's tokenizer: as given, else by target language, else by the references' script.

    A language tag takes precedence over the script, with a warning if they contradict each other.
    An unknown tag is ignored.
    """
    script, seen = count_scripts(references)
    expected = script_of_language(tgt_lang) if tgt_lang else None
    warnings: tuple[str, ...] = ()
    if expected is None:
        chosen, reason = script, _script_reason(script, seen, tgt_lang)
    else:
        chosen, reason = expected, f"the target language is {tgt_lang}"
        warnings = _language_warnings(expected, script, seen, tgt_lang)
    if tokenize:
        check_tokenizer(tokenize)
        return TokenizerChoice(tokenize, chosen, "set by --tokenize", warnings)
    name, missing = _script_tokenizer(chosen)
    return TokenizerChoice(name, chosen, reason, (*warnings, *missing))


def check_tokenizer(name: str) -> None:
    """Raise ConfigError if sacreBLEU has no tokenizer of this name."""
    if name and name not in BLEU.TOKENIZERS:
        raise ConfigError(
            [
                f"--tokenize must name a tokenizer of sacreBLEU; found {name!r}; "
                f"{suggest_name(name, map(str, BLEU.TOKENIZERS))}"
            ]
        )


def _script_reason(script: str, seen: int, tgt_lang: str) -> str:
    """Return the reason of a choice by the references' script."""
    if not seen:
        reason = "the default"
    elif script:
        reason = f"the references are written in {SCRIPT_NAMES[script]} script"
    else:
        reason = "the references have spaces between words"
    return f"{reason} (the language tag {tgt_lang!r:.40} does not decide)" if tgt_lang else reason


def _language_warnings(expected: str, script: str, seen: int, tgt_lang: str) -> tuple[str, ...]:
    """Return a warning if the references' script contradicts the target language."""
    # A name or a heading in Japanese may be Han only.
    too_short = seen < MIN_CONTRADICTING_CHARS and {expected, script} == {"Hani", "Jpan"}
    if (
        not seen
        or too_short
        or _TOKENIZERS.get(expected, "char") == _TOKENIZERS.get(script, "char")
    ):
        return ()
    found = (
        f"are written in {SCRIPT_NAMES[script]} script" if script else "have spaces between words"
    )
    return (
        f"the target language is {tgt_lang}, but the references {found}: "
        "check --tgt-lang (data.tgt_lang) or the reference file",
    )


def _script_tokenizer(script: str) -> tuple[str, tuple[str, ...]]:
    """Return a script's tokenizer, and a warning if the best one is not installed."""
    name = _TOKENIZERS.get(script, "char")
    if not name.endswith("-mecab"):
        return name, ()
    try:
        BLEU(tokenize=name)
    except (RuntimeError, ImportError):
        language = name.partition("-")[0]
        fallback, counts = (
            ("char", "characters") if script == "Jpan" else ("13a", "words between spaces")
        )
        return fallback, (
            f"BLEU counts {counts}: sacreBLEU's tokenizer {name} is not installed "
            f"(pip install 'sacrebleu[{language}]'); "
            f"compare only with scores whose signature has tok:{fallback}",
        )
    return name, ()


def score_translations(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    lowercase: bool = False,
    tokenize: str = "",
    tgt_lang: str = "",
) -> EvaluationScores:
    """Return BLEU, chrF and TER of detokenized translations against one reference each."""
    check_aligned(hypotheses, references)
    chosen = build_metrics(
        lowercase=lowercase, tokenize=tokenize, tgt_lang=tgt_lang, references=references
    )
    return EvaluationScores(
        bleu=_corpus_score(chosen.bleu, hypotheses, references),
        chrf=_corpus_score(chosen.chrf, hypotheses, references),
        ter=_corpus_score(chosen.ter, hypotheses, references),
        sentences=len(hypotheses),
        notes=chosen.notes,
    )


def bleu_score(
    hypotheses: Sequence[str], references: Sequence[str], *, tgt_lang: str = ""
) -> MetricScore:
    """Return BLEU alone, equal to that of `score_translations`, for validation."""
    check_aligned(hypotheses, references)
    return _corpus_score(
        build_metrics(tgt_lang=tgt_lang, references=references).bleu, hypotheses, references
    )


def sentence_chrf(hypotheses: Sequence[str], references: Sequence[str]) -> list[float]:
    """Return the chrF of each translation."""
    check_aligned(hypotheses, references)
    metric = CHRF()
    return [
        float(metric.sentence_score(hypothesis, [reference]).score)
        for hypothesis, reference in zip(hypotheses, references, strict=True)
    ]


def check_aligned(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    """Raise DataError unless both have the same number of lines, and the references any text."""
    if len(hypotheses) != len(references):
        raise DataError(
            "translations and references must have the same number of lines",
            found=f"{len(hypotheses):,} and {len(references):,}",
            fix="check that both belong to the same test set and are complete",
        )
    if not references:
        raise DataError(
            "scoring needs at least one sentence", found="0 lines", fix="check the reference file"
        )
    if not any(map(str.strip, references)):
        raise DataError(
            "references must hold text",
            found=f"{len(references):,} empty lines",
            fix="check the reference file",
        )


def _corpus_score(metric: Any, hypotheses: Sequence[str], references: Sequence[str]) -> MetricScore:
    """Return the corpus score of one metric; the signature is only available afterwards."""
    result = metric.corpus_score(list(hypotheses), [list(references)])
    return MetricScore(str(result.name), float(result.score), str(metric.get_signature()))
