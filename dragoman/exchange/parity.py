"""Is what was exported the same model? Greedy outputs side by side, scores of the same pieces, and BLEU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dragoman.bundle import Bundle
from dragoman.decoding.beam_search import BeamSearch
from dragoman.evaluate.metrics import bleu_score
from dragoman.exchange.transformers_runner import ScoredText
from dragoman.inference import NativeEngine, Translator
from dragoman.inference.engine import Engine
from dragoman.inference.translation import replace_control_chars

TranslateFunction = Callable[[Sequence[str], Sequence[int]], list[ScoredText]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """How far an export agrees with the native engine."""

    program: str
    sentences: int
    equal: int  # greedy outputs that are the same, letter for letter
    difference: (
        float  # the largest one of the log-probability of a whole output, where both wrote the same
    )
    bleu: tuple[float, float] | None = None  # ours and theirs, by the model's own beam

    @property
    def equal_fraction(self) -> float:
        """Give the share of equal outputs."""
        return self.equal / self.sentences if self.sentences else 1.0

    def __str__(self) -> str:
        """Write the line that every export prints."""
        line = f"parity: greedy outputs equal on {self.equal:,} of {self.sentences:,} sentences ({100 * self.equal_fraction:.1f} %)"
        line += f", largest difference of a log-probability {self.difference:.1e}"
        if self.bleu is not None:
            ours, theirs = self.bleu
            line += f"; BLEU {ours:.2f} native, {theirs:.2f} {self.program}, difference {theirs - ours:+.2f}"
        return line

    def to_dict(self) -> dict[str, Any]:
        """Turn the figures into plain values for a manifest or JSON."""
        values: dict[str, Any] = {
            "sentences": self.sentences,
            "equal": self.equal,
            "difference": round(self.difference, 8),
        }
        return values | (
            {} if self.bleu is None else {"bleu_native": self.bleu[0], "bleu": self.bleu[1]}
        )


def compare_engine(
    bundle: Bundle, engine: Engine, texts: Sequence[str], references: Sequence[str] | None = None
) -> Parity:
    """Translate texts greedily with the native engine and with another, and compare; with references, BLEU by the model's own beam.

    An engine that has no beam search is compared in BLEU greedily as well.
    """
    native = NativeEngine(lambda: bundle.model)
    ours, theirs = (
        Translator(native, bundle.tokenizers, bundle.config, engine=each)
        for each in (native, engine)
    )
    pairs = [
        [(each.text, sum(each.log_probs)) for each in translator.stream(texts, beam=1)]
        for translator in (ours, theirs)
    ]
    outputs = None
    if references is not None:
        options = {"beam": 1} if engine.unsupported_reason(BeamSearch(2)) else {}
        outputs = (ours.translate(texts, **options), theirs.translate(texts, **options))
    return measure_parity(
        engine.name, pairs[0], pairs[1], outputs, references, bundle.config.data.tgt_lang
    )


def compare_texts(
    bundle: Bundle,
    program: str,
    translate: TranslateFunction,
    texts: Sequence[str],
    references: Sequence[str] | None,
) -> Parity:
    """Compare with a program that takes and gives text: greedy outputs, and BLEU of the same."""
    texts = [text.strip() for text in texts if text.strip()] if references is None else list(texts)
    native = Translator(NativeEngine(lambda: bundle.model), bundle.tokenizers, bundle.config)
    ours = [
        (each.text.strip(), sum(each.log_probs)) for each in native.stream(texts, beam=1)
    ]  # it strips, and we do not
    decode = bundle.config.decode
    lengths = [
        len(ids) for ids in bundle.tokenizers.src.encode_batch([text.strip() for text in texts])
    ]
    theirs = [
        (replace_control_chars(said.text).strip(), said.total)
        for said in translate(
            texts, [int(decode.max_length_ratio * n) + decode.max_length_extra for n in lengths]
        )
    ]
    outputs = ([text for text, _ in ours], [text for text, _ in theirs])
    return measure_parity(program, ours, theirs, outputs, references, bundle.config.data.tgt_lang)


def measure_parity(
    program: str,
    ours: Sequence[tuple[str, float]],
    theirs: Sequence[tuple[str, float]],
    outputs: tuple[Sequence[str], Sequence[str]] | None,
    references: Sequence[str] | None,
    tgt_lang: str,
) -> Parity:
    """Count what is equal among greedy outputs with their log-probabilities, and score outputs where there are references."""
    same = [(one, other) for one, other in zip(ours, theirs, strict=True) if one[0] == other[0]]
    scores = None
    if references is not None and outputs is not None:
        found = [bleu_score(each, references, tgt_lang=tgt_lang).value for each in outputs]
        scores = (found[0], found[1])
    difference = max((abs(one[1] - other[1]) for one, other in same), default=0.0)
    return Parity(
        program=program, sentences=len(ours), equal=len(same), difference=difference, bleu=scores
    )
