"""What a bundle holds: weights, vocabularies, text and golden vectors that fit each other."""

from __future__ import annotations

import math

import torch

from dragoman.bundle import format as layout
from dragoman.bundle.golden import read_golden_cases
from dragoman.decoding.padded_batch import pad_batch, pad_sources
from dragoman.doctor.check_result import Measurement, NotApplicableError
from dragoman.doctor.model_checks import log_prob_tolerance
from dragoman.doctor.model_under_test import ModelUnderTest
from dragoman.errors import DragomanError
from dragoman.text.special_tokens import BOS, EOS, UNK
from dragoman.text.tokenizer import Tokenizer


def check_finite_weights(subject: ModelUnderTest) -> Measurement:
    """Count the weights that are no numbers."""
    weights = {
        name: tensor
        for name, tensor in subject.model.state_dict().items()
        if tensor.is_floating_point()
    }
    wrong = {name: int((~tensor.isfinite()).sum()) for name, tensor in weights.items()}
    named = [name for name, count in wrong.items() if count]
    total = sum(tensor.numel() for tensor in weights.values())
    note = (
        f"not so in {', '.join(named[:2])}{' …' if len(named) > 2 else ''}"
        if named
        else f"{total:,} numbers"
    )
    return Measurement(sum(wrong.values()), 0, note)


def check_vocabulary_sizes(subject: ModelUnderTest) -> Measurement:
    """Compare the rows of embeddings and output with the pieces that the tokenizers know."""
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
    apart = {name: abs(count - wanted[name]) for name, count in rows.items()}
    if "shared" in rows:
        apart["src"] = abs(rows["shared"] - sizes["src"])
    note = (
        f"{sizes['src']:,} tokens"
        if sizes["src"] == sizes["tgt"]
        else f"{sizes['src']:,} and {sizes['tgt']:,} tokens"
    )
    return Measurement(max(apart.values()), 0, note)


def check_tokenizer_round_trip(subject: ModelUnderTest) -> Measurement:
    """Cut the golden sentences into pieces and join them again, inputs and outputs."""
    cases = subject.cases()
    both = [(subject.tokenizers.src, case["input"]) for case in cases] + [
        (subject.tokenizers.tgt, case["output"]) for case in cases
    ]
    kept = [(tokenizer, text) for tokenizer, text in both if UNK not in tokenizer.encode(text)]
    if not kept:
        raise NotApplicableError(
            "there are no golden sentences"
            if not both
            else "the vocabulary lacks letters of every golden sentence"
        )
    lost = [text for tokenizer, text in kept if not _round_trips(tokenizer, text)]
    note = (
        f"{lost[0]!r:.40} does not" if lost else f"{len(kept)} text{'' if len(kept) == 1 else 's'}"
    )
    return Measurement(len(lost), 0, note)


def _round_trips(tokenizer: Tokenizer, text: str) -> bool:
    """Say whether text has the same pieces after being joined: its Unicode form may change, once."""
    pieces = tokenizer.encode(text)
    return tokenizer.encode(tokenizer.decode(pieces)) == pieces


@torch.inference_mode()
def check_golden_vectors(subject: ModelUnderTest) -> Measurement:
    """Compare pieces, outputs and log-probabilities with those that were written with the model."""
    if subject.golden is None:
        raise NotApplicableError("the model has no golden vectors")
    tokenizers = subject.tokenizers
    cases = read_golden_cases(
        subject.golden, len(tokenizers.src), len(tokenizers.tgt), layout.GOLDEN
    )
    if not cases:
        raise NotApplicableError("there are no golden sentences")
    errors, model = [], subject.model
    for case in cases:
        pieces, output = (
            tokenizers.src.encode(case["input"])[: len(case["src"])],
            tokenizers.tgt.decode(case["tgt"]),
        )
        if (pieces, output) != (case["src"], case["output"]):
            return Measurement(
                math.inf,
                log_prob_tolerance(subject),
                f"other pieces or text for {case['input']!r:.40}",
            )
        end = [*case["tgt"], EOS] if case["finished"] else case["tgt"]
        tgt_in, _ = pad_batch([[BOS, *end[:-1]]], subject.device)
        log_probs = model.project(
            model.decode(tgt_in, model.encode(*pad_sources([case["src"]], subject.device)))
        )
        found = (
            log_probs[0, : len(end)]
            .float()
            .log_softmax(-1)
            .gather(1, torch.tensor(end, device=subject.device)[:, None])[:, 0]
        )
        errors.append(
            (found.double().cpu() - torch.tensor(case["log_probs"], dtype=torch.float64)).abs()
        )
    return Measurement(
        float(torch.cat(errors).amax()),
        log_prob_tolerance(subject),
        f"{len(cases)} sentence{'' if len(cases) == 1 else 's'} read anew",
    )
