"""Is what was exported the same model? Greedy outputs side by side, scores of the same pieces, and BLEU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dragoman.bundle import Bundle
from dragoman.engines import Native
from dragoman.engines.face import Engine
from dragoman.evaluate.scoring import bleu, check_aligned
from dragoman.translator import Translator


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """How far an export agrees with the native engine."""

    program: str
    sentences: int
    equal: int  # greedy outputs that are the same, letter for letter
    difference: float  # the largest one of the log-probability of a whole output, where both wrote the same
    bleu: tuple[float, float] | None = None  # ours and theirs, by the model's own beam

    @property
    def share(self) -> float:
        """Give the share of equal outputs."""
        return self.equal / self.sentences if self.sentences else 1.0

    def __str__(self) -> str:
        """Write the line that every export prints."""
        line = f"parity: greedy outputs equal on {self.equal:,} of {self.sentences:,} sentences ({100 * self.share:.1f} %)"
        line += f", largest difference of a log-probability {self.difference:.1e}"
        if self.bleu is not None:
            ours, theirs = self.bleu
            line += f"; BLEU {ours:.2f} native, {theirs:.2f} {self.program}, difference {theirs - ours:+.2f}"
        return line

    def facts(self) -> dict[str, Any]:
        """Turn the figures into plain values for a manifest or JSON."""
        values: dict[str, Any] = {"sentences": self.sentences, "equal": self.equal, "difference": round(self.difference, 8)}
        return values | ({} if self.bleu is None else {"bleu_native": self.bleu[0], "bleu": self.bleu[1]})


def compare(bundle: Bundle, engine: Engine, texts: Sequence[str], references: Sequence[str] | None = None) -> Parity:
    """Translate texts greedily with the native engine and with another, and compare; with references, by beam for BLEU."""
    if references is not None:
        check_aligned(texts, references)
    native = Native(lambda: bundle.model)
    ours, theirs = (Translator(native, bundle.tokenizers, bundle.config, engine=each) for each in (native, engine))
    pairs = list(zip(ours.stream(texts, beam=1), theirs.stream(texts, beam=1), strict=True))
    same = [(one, other) for one, other in pairs if one.text == other.text]
    scores = None
    if references is not None:
        found = [bleu(each.translate(texts), references, tgt_lang=bundle.config.data.tgt_lang).value for each in (ours, theirs)]
        scores = (found[0], found[1])
    return Parity(
        program=engine.name,
        sentences=len(pairs),
        equal=len(same),
        difference=max((abs(sum(one.log_probs) - sum(other.log_probs)) for one, other in same), default=0.0),
        bleu=scores,
    )
