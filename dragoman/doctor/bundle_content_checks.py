"""Checks of a bundle's contents: weights, vocabularies, tokenizers and golden vectors."""

from __future__ import annotations

import math

from dragoman.bundle import format as layout
from dragoman.bundle.golden_vectors import (
    encode_golden,
    golden_log_probs,
    largest_error,
    read_golden_cases,
)
from dragoman.doctor.batching_cache_and_mask_checks import log_prob_tolerance
from dragoman.doctor.check_result import Measurement, NotApplicableError
from dragoman.doctor.model_under_test import ModelUnderTest
from dragoman.errors import DragomanError
from dragoman.text.sentencepiece_tokenizer import Tokenizer
from dragoman.text.special_tokens import UNK


def check_finite_weights(subject: ModelUnderTest) -> Measurement:
    """Count the weights that are NaN or infinite."""
    weights = {
        name: tensor
        for name, tensor in subject.model.state_dict().items()
        if tensor.is_floating_point()
    }
    wrong = {name: int((~tensor.isfinite()).sum()) for name, tensor in weights.items()}
    named = [name for name, count in wrong.items() if count]
    total = sum(tensor.numel() for tensor in weights.values())
    note = (
        f"in {', '.join(named[:2])}{' …' if len(named) > 2 else ''}"
        if named
        else f"{total:,} weights"
    )
    return Measurement(sum(wrong.values()), 0, note)


def check_vocabulary_sizes(subject: ModelUnderTest) -> Measurement:
    """Compare the rows of embeddings and output projection with the vocabulary sizes."""
    if isinstance(subject.loaded_or_error, DragomanError):
        raise subject.loaded_or_error
    model, sizes = (
        subject.model,
        {"src": len(subject.tokenizers.src), "tgt": len(subject.tokenizers.tgt)},
    )
    rows = {
        name: table.get_parameter("weight").size(0) for name, table in model.embeddings.items()
    } | {"output": model.output_weight.size(0)}
    wanted = {"output": sizes["tgt"], "shared": sizes["tgt"], **sizes}
    differences = {name: abs(count - wanted[name]) for name, count in rows.items()}
    if "shared" in rows:
        differences["src"] = abs(rows["shared"] - sizes["src"])
    note = (
        f"{sizes['src']:,} tokens"
        if sizes["src"] == sizes["tgt"]
        else f"{sizes['src']:,} and {sizes['tgt']:,} tokens"
    )
    return Measurement(max(differences.values()), 0, note)


def check_tokenizer_round_trip(subject: ModelUnderTest) -> Measurement:
    """Encode and decode the golden sentences, inputs and outputs."""
    cases = subject.cases()
    both = [(subject.tokenizers.src, case["input"]) for case in cases] + [
        (subject.tokenizers.tgt, case["output"]) for case in cases
    ]
    kept = [(tokenizer, text) for tokenizer, text in both if UNK not in tokenizer.encode(text)]
    if not kept:
        raise NotApplicableError(
            "there are no golden sentences"
            if not both
            else "every golden sentence has characters unknown to the vocabulary"
        )
    lost = [text for tokenizer, text in kept if not _round_trips(tokenizer, text)]
    note = (
        f"{lost[0]!r:.40} changed" if lost else f"{len(kept)} text{'' if len(kept) == 1 else 's'}"
    )
    return Measurement(len(lost), 0, note)


def _round_trips(tokenizer: Tokenizer, text: str) -> bool:
    """Whether decoding and encoding again gives the same tokens; the Unicode form may change."""
    tokens = tokenizer.encode(text)
    return tokenizer.encode(tokenizer.decode(tokens)) == tokens


def check_golden_vectors(subject: ModelUnderTest) -> Measurement:
    """Compare tokens, outputs and log-probabilities with those stored with the model."""
    if subject.golden is None:
        raise NotApplicableError("the model has no golden vectors")
    tokenizers = subject.tokenizers
    cases = read_golden_cases(
        subject.golden, len(tokenizers.src), len(tokenizers.tgt), layout.GOLDEN
    )
    if not cases:
        raise NotApplicableError("there are no golden sentences")
    for case in cases:
        language = case.get("target_language", "")
        tokens = encode_golden(tokenizers, case["input"], language)[: len(case["src"])]
        if (tokens, tokenizers.tgt.decode(case["tgt"])) != (case["src"], case["output"]):
            note = f"other tokens or text for {case['input']!r:.40}"
            return Measurement(math.inf, log_prob_tolerance(subject), note)
    # One by one: padding has checks of its own.
    found = [golden_log_probs(subject.model, [case])[0] for case in cases]
    return Measurement(
        largest_error(cases, found),
        log_prob_tolerance(subject),
        f"{len(cases)} sentence{'' if len(cases) == 1 else 's'}",
    )
