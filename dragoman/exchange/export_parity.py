"""Parity of an export with the native engine: greedy outputs, log-probabilities and BLEU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dragoman.bundle import Bundle
from dragoman.decoding.beam_search import BeamSearch
from dragoman.evaluate.translation_metrics import bleu_score
from dragoman.exchange.huggingface_runner import ScoredText
from dragoman.inference import NativeEngine, Translator
from dragoman.inference.engine_protocol import Engine
from dragoman.text.imported_tokenizer import marian_language_code
from dragoman.text.sentencepiece_tokenizer import replace_control_chars

TranslateFunction = Callable[[Sequence[str], Sequence[int]], list[ScoredText]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """How far an export agrees with the native engine."""

    program: str
    sentences: int
    equal: int  # greedy outputs that are equal strings
    difference: (
        float  # largest difference of an output's log-probability, if both outputs are equal
    )
    bleu: tuple[float, float] | None = None  # native and exported, with the model's beam

    @property
    def equal_fraction(self) -> float:
        """The fraction of equal outputs."""
        return self.equal / self.sentences if self.sentences else 1.0

    def __str__(self) -> str:
        """Return the line that every export prints."""
        line = (
            f"parity: greedy outputs equal on {self.equal:,} of {self.sentences:,} sentences "
            f"({100 * self.equal_fraction:.1f} %)"
        )
        line += f", largest difference of a log-probability {self.difference:.1e}"
        if self.bleu is not None:
            ours, theirs = self.bleu
            line += f"; BLEU {ours:.2f} native, {theirs:.2f} {self.program}"
            line += f", difference {theirs - ours:+.2f}"
        return line

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a manifest or JSON."""
        values: dict[str, Any] = {
            "sentences": self.sentences,
            "equal": self.equal,
            "difference": round(self.difference, 8),
        }
        return values | (
            {} if self.bleu is None else {"bleu_native": self.bleu[0], "bleu": self.bleu[1]}
        )


def compare_engine(
    bundle: Bundle,
    engine: Engine,
    texts: Sequence[str],
    references: Sequence[str] | None = None,
    target_language: str | None = None,
) -> Parity:
    """Compare greedy translations of two engines; with references also BLEU with the model's beam.

    BLEU of an engine without beam search is that of greedy search. The target language is that of
    a model of several directions.
    """
    native = NativeEngine(lambda: bundle.model)
    ours, theirs = (
        Translator(
            native,
            bundle.tokenizers,
            bundle.config,
            engine=each,
            identifier=bundle.identifier,
            target_language=target_language,
        )
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
        engine.name,
        pairs[0],
        pairs[1],
        outputs,
        references,
        target_language or bundle.config.data.tgt_lang,
    )


def compare_texts(
    bundle: Bundle,
    program: str,
    translate: TranslateFunction,
    texts: Sequence[str],
    references: Sequence[str] | None,
    target_language: str | None = None,
) -> Parity:
    """Compare with a program that translates text: greedy outputs, and their BLEU."""
    texts = [text.strip() for text in texts if text.strip()] if references is None else list(texts)
    native = Translator(
        NativeEngine(lambda: bundle.model),
        bundle.tokenizers,
        bundle.config,
        identifier=bundle.identifier,
        target_language=target_language,
    )
    ours = [
        (each.text.strip(), sum(each.log_probs)) for each in native.stream(texts, beam=1)
    ]  # the other program strips outputs
    decode = bundle.config.decode
    language = target_language
    src = bundle.tokenizers.src.tagged(language) if language else bundle.tokenizers.src
    lengths = [len(ids) for ids in src.encode_batch([text.strip() for text in texts])]
    if language:  # Marian reads the code as one token
        texts = [f"{marian_language_code(language)}{text}" for text in texts]
    theirs = [
        (replace_control_chars(reference.text).strip(), reference.total)
        for reference in translate(
            texts, [int(decode.max_length_ratio * n) + decode.max_length_extra for n in lengths]
        )
    ]
    outputs = ([text for text, _ in ours], [text for text, _ in theirs])
    return measure_parity(
        program, ours, theirs, outputs, references, language or bundle.config.data.tgt_lang
    )


def measure_parity(
    program: str,
    ours: Sequence[tuple[str, float]],
    theirs: Sequence[tuple[str, float]],
    outputs: tuple[Sequence[str], Sequence[str]] | None,
    references: Sequence[str] | None,
    tgt_lang: str,
) -> Parity:
    """Count equal greedy outputs, compare log-probabilities, and compute BLEU with references."""
    same = [(one, other) for one, other in zip(ours, theirs, strict=True) if one[0] == other[0]]
    scores = None
    if references is not None and outputs is not None:
        found = [bleu_score(each, references, tgt_lang=tgt_lang).value for each in outputs]
        scores = (found[0], found[1])
    difference = max((abs(one[1] - other[1]) for one, other in same), default=0.0, key=_nan_last)
    return Parity(
        program=program, sentences=len(ours), equal=len(same), difference=difference, bleu=scores
    )


def _nan_last(value: float) -> tuple[bool, float]:
    """Return a key that sorts NaN after all numbers, so that the largest of some is NaN."""
    return math.isnan(value), value
