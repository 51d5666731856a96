"""Comparison of systems: paired bootstrap test and sentences with the largest changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest

from dragoman.errors import ConfigError, DataError
from dragoman.evaluate.translation_metrics import build_metrics, check_aligned

BOOTSTRAP_SAMPLES = 1000  # sacreBLEU's default for the paired bootstrap
SIGNIFICANCE_LEVEL = 0.05  # p-value below which a difference is significant


@dataclass(frozen=True, slots=True)
class SystemScore:
    """One system's score in one metric; `p` is the p-value of its difference from the baseline."""

    system: str
    metric: str
    value: float
    mean: float  # of the bootstrap samples
    margin: float  # half of their 95 % confidence interval
    p: float | None  # None for the baseline, the first system

    @property
    def is_significant(self) -> bool:
        """Whether the difference from the baseline is significant."""
        return self.p is not None and self.p < SIGNIFICANCE_LEVEL


@dataclass(frozen=True, slots=True)
class SentenceChange:
    """A sentence that two systems translate differently, with the change of its score."""

    line: int  # from 1
    change: float
    reference: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results of the paired bootstrap, and the sentences with the largest changes."""

    results: tuple[SystemScore, ...]
    signatures: Mapping[str, str]
    moved: tuple[SentenceChange, ...]
    samples: int
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        fields = ("system", "metric", "value", "mean", "margin", "p")
        lines = ("line", "change", "reference", "before", "after")
        return {
            "results": [{name: getattr(each, name) for name in fields} for each in self.results],
            "signatures": dict(self.signatures),
            "samples": self.samples,
            "moved": [{name: getattr(each, name) for name in lines} for each in self.moved],
            "notes": list(self.notes),
        }


def compare_systems(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str],
    *,
    lowercase: bool = False,
    tokenize: str = "",
    tgt_lang: str = "",
    by: str = "chrf",
    show: int = 10,
    samples: int = BOOTSTRAP_SAMPLES,
) -> Comparison:
    """Compare systems with the first, the baseline, and find the second's largest changes."""
    check_metric(by)
    check_system_count(len(systems))
    check_systems(systems, references)
    first, second = list(systems.values())[:2]
    check_aligned(first, references)
    chosen = build_metrics(
        lowercase=lowercase, tokenize=tokenize, tgt_lang=tgt_lang, references=references
    )
    named = {"BLEU": chosen.bleu, "chrF2": chosen.chrf, "TER": chosen.ter}
    signatures, results = _bootstrap(systems, references, named, samples)
    moved = largest_changes(
        first,
        second,
        references,
        by=by,
        show=show,
        tgt_lang=tgt_lang,
        lowercase=lowercase,
        tokenize=tokenize,
    )
    return Comparison(tuple(results), signatures, tuple(moved), samples, chosen.notes)


def check_system_count(systems: int) -> None:
    """Raise DataError unless there are at least two systems."""
    if systems < 2:
        raise DataError(
            "comparing needs two sets of translations or more",
            found=str(systems),
            fix="name at least two",
        )


def check_systems(systems: Mapping[str, Sequence[str]], references: Sequence[str]) -> None:
    """Raise DataError unless every system has a line for each reference."""
    for name, lines in systems.items():
        if len(lines) != len(references):
            raise DataError(
                f"{name} must have as many lines as the reference",
                found=f"{len(lines):,} and {len(references):,}",
                fix="translate the same file with every system",
            )


def check_metric(by: str) -> None:
    """Raise ConfigError unless sentences can be ranked by this metric."""
    if by not in ("chrf", "bleu"):
        raise ConfigError(
            [
                f"--by must be chrf or bleu; found {by!r}; "
                "TER has no upper bound and one bad line would dominate"
            ]
        )


def largest_changes(
    before: Sequence[str],
    after: Sequence[str],
    references: Sequence[str],
    *,
    by: str = "chrf",
    show: int = 10,
    lowercase: bool = False,
    tokenize: str = "",
    tgt_lang: str = "",
) -> list[SentenceChange]:
    """Return the sentences whose score changed most, in either direction, largest first."""
    chosen = build_metrics(
        lowercase=lowercase,
        tokenize=tokenize,
        tgt_lang=tgt_lang,
        references=references,
        sentence=True,
    )
    by_name: dict[str, BLEU | CHRF] = {"chrf": chosen.chrf, "bleu": chosen.bleu}
    check_metric(by)
    metric = by_name[by]
    moved = []
    for line, (old, new, reference) in enumerate(
        zip(before, after, references, strict=True), start=1
    ):
        if old != new:
            change = (
                metric.sentence_score(new, [reference]).score
                - metric.sentence_score(old, [reference]).score
            )
            moved.append(SentenceChange(line, float(change), reference, old, new))
    return sorted(moved, key=lambda each: (-abs(each.change), each.line))[:show]


def _bootstrap(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str],
    named: Mapping[str, Any],
    samples: int,
) -> tuple[dict[str, str], list[SystemScore]]:
    """Run sacreBLEU's paired bootstrap over all systems and metrics."""
    outputs: list[tuple[str, Sequence[str]]] = [
        (name, list(lines)) for name, lines in systems.items()
    ]
    signatures, scores = PairedTest(
        outputs, dict(named), [list(references)], test_type="bs", n_samples=samples
    )()
    found = []
    for metric in named:
        results: Sequence[Any] = scores[metric]
        for (system, _), each in zip(outputs, results, strict=True):
            p = each.p_value
            if p is not None and each.score == results[0].score:
                p = 1.0  # sacreBLEU counts strictly larger differences only, which gives 0 here
            found.append(
                SystemScore(system, metric, float(each.score), float(each.mean), float(each.ci), p)
            )
    return {name: str(signature) for name, signature in signatures.items()}, found
