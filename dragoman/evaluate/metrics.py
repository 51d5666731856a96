"""BLEU, chrF and TER by sacreBLEU, each with its signature."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from dragoman.config import DataConfig
from dragoman.data.lines import read_lines
from dragoman.errors import ConfigError, DataError, suggest_name
from dragoman.text.languages import SCRIPT_NAMES, count_scripts, script_of_language


def read_sentences(path: Path) -> list[str]:
    """Read a file of sentences, plain, .gz or .xz; empty lines stay, because they keep the files aligned."""
    return [line.text for line in read_lines(path, max_line_bytes=DataConfig().max_line_bytes)]


MIN_CONTRADICTING_CHARS = 50  # of Han without kana, from which on a text is hardly Japanese
_TOKENIZERS = {
    "": "13a",
    "Hani": "zh",
    "Jpan": "ja-mecab",
    "Kore": "ko-mecab",
}  # of every other script: char


@dataclass(frozen=True, slots=True)
class MetricScore:
    """One number, what it measures, and how it was measured."""

    name: str
    value: float
    signature: str

    def __str__(self) -> str:
        """Write the score as tables quote it: two decimals and the signature."""
        return f"{self.name} {self.value:.2f}  {self.signature}"


@dataclass(frozen=True, slots=True)
class EvaluationScores:
    """BLEU, chrF and TER of one set of translations, and what a reader must know about them."""

    bleu: MetricScore
    chrf: MetricScore
    ter: MetricScore
    sentences: int
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[MetricScore]:
        """Go through the three scores."""
        return iter((self.bleu, self.chrf, self.ter))

    def as_dict(self) -> dict[str, Any]:
        """Turn the scores into plain values for JSON and model cards."""
        scores = {each.name: {"score": each.value, "signature": each.signature} for each in self}
        return {"scores": scores, "sentences": self.sentences, "notes": list(self.notes)}


@dataclass(frozen=True, slots=True)
class SacrebleuMetrics:
    """The three metrics set up one way: shared by scoring, comparing and validation."""

    bleu: BLEU
    chrf: CHRF
    ter: TER
    notes: tuple[str, ...] = ()


class CharTER(TER):
    """TER over characters, for scripts without spaces that tercom does not split; the signature says tok:char."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer_signature = "char"

    def _preprocess_segment(self, sent: str) -> str:
        return str(self.tokenizer(" ".join(sent)))


@dataclass(frozen=True, slots=True)
class TokenizerChoice:
    """The tokenizer for BLEU, the script of the target for TER, and why they were chosen."""

    name: str
    script: str  # as in `text.languages`; empty for a spaced one
    reason: str
    warnings: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for a person: the choice and its reason, then the warnings."""
        return (f"BLEU tokenizer {self.name}: {self.reason}", *self.warnings)


def build_metrics(
    *,
    lowercase: bool = False,
    tokenize: str = "",
    tgt_lang: str = "",
    references: Sequence[str] = (),
    sentence: bool = False,
) -> SacrebleuMetrics:
    """Return the metrics for a target language or the references' script; `sentence` makes BLEU fit for single sentences."""
    choice = choose_tokenizer(tokenize, tgt_lang, references)
    try:
        bleu = BLEU(lowercase=lowercase, tokenize=choice.name, effective_order=sentence)
    except (
        RuntimeError,
        ImportError,
        OSError,
    ) as error:  # a tokenizer whose package, or whose download, is not there
        found = " ".join(str(error).split())[:200].rstrip(".")
        raise ConfigError(
            [
                f"--tokenize {choice.name} must be usable here; found {found}; install it or take --tokenize char"
            ]
        ) from error
    return SacrebleuMetrics(
        bleu, CHRF(lowercase=lowercase), _build_ter(choice.script), choice.notes
    )


def _build_ter(script: str) -> TER:
    """Return TER for a script: unspaced ones are split into characters. It ignores case, as tercom does by default."""
    if script in ("Hani", "Jpan"):
        return TER(normalized=True, asian_support=True)
    return TER() if script in ("", "Kore") else CharTER()


def choose_tokenizer(
    tokenize: str, tgt_lang: str, references: Sequence[str] = ()
) -> TokenizerChoice:
    """Choose BLEU's tokenizer: the one asked for, else the target language's, else that of the references' script.

    An explicit language wins over the script, with a warning where they contradict each other; a tag that is not known, or that
    says nothing about the script, leaves it to the references.
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
        return TokenizerChoice(tokenize, chosen, "asked for with --tokenize", warnings)
    name, missing = _script_tokenizer(chosen)
    return TokenizerChoice(name, chosen, reason, (*warnings, *missing))


def check_tokenizer(name: str) -> None:
    """Raise ConfigError if sacreBLEU has no tokenizer of this name."""
    if name and name not in BLEU.TOKENIZERS:
        raise ConfigError(
            [
                f"--tokenize must name a tokenizer of sacreBLEU; found {name!r}; {suggest_name(name, map(str, BLEU.TOKENIZERS))}"
            ]
        )


def _script_reason(script: str, seen: int, tgt_lang: str) -> str:
    """Return why the references decided."""
    if not seen:
        reason = "the default"
    elif script:
        reason = f"the references are written in {SCRIPT_NAMES[script]} script"
    else:
        reason = "the references have spaces between words"
    return f"{reason} (the language tag {tgt_lang!r:.40} does not decide)" if tgt_lang else reason


def _language_warnings(expected: str, script: str, seen: int, tgt_lang: str) -> tuple[str, ...]:
    """Warn where the references are clearly not written as their language usually is."""
    too_short = seen < MIN_CONTRADICTING_CHARS and {expected, script} == {
        "Hani",
        "Jpan",
    }  # a name or a heading may be Han alone
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
        f"the target language is {tgt_lang}, but the references {found}: check --tgt-lang (data.tgt_lang) or the reference file",
    )


def _script_tokenizer(script: str) -> tuple[str, tuple[str, ...]]:
    """Return a script's tokenizer, and a note where the best one is not installed."""
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
            f"BLEU counts {counts}: sacreBLEU's tokenizer {name} is not installed (pip install 'sacrebleu[{language}]'); "
            f"compare only with scores whose signature says tok:{fallback}",
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
    """Score translations against one reference each; both are plain text, one sentence an item."""
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
    """Score by BLEU alone, for validation during training: the same number that `score` gives, sooner."""
    check_aligned(hypotheses, references)
    return _corpus_score(
        build_metrics(tgt_lang=tgt_lang, references=references).bleu, hypotheses, references
    )


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
        raise DataError(
            "scoring needs at least one sentence", found="0 lines", fix="check the reference file"
        )


def _corpus_score(metric: Any, hypotheses: Sequence[str], references: Sequence[str]) -> MetricScore:
    """Score a whole set with one metric; the signature exists only after that."""
    result = metric.corpus_score(list(hypotheses), [list(references)])
    return MetricScore(str(result.name), float(result.score), str(metric.get_signature()))
