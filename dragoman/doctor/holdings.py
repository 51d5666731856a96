"""What a bundle holds: weights, vocabularies, text and golden vectors that fit each other."""

from __future__ import annotations

import math

import torch

from dragoman.bundle import format as layout
from dragoman.bundle.golden import golden_cases
from dragoman.decoding.packing import pack, pack_sources
from dragoman.doctor.finding import Measured, NotApplicableError
from dragoman.doctor.promises import tolerance
from dragoman.doctor.subject import Subject
from dragoman.errors import DragomanError
from dragoman.text.specials import BOS, EOS, UNK
from dragoman.text.tokenizer import Tokenizer


def weights_are_finite(subject: Subject) -> Measured:
    """Count the weights that are no numbers."""
    weights = {name: tensor for name, tensor in subject.model.state_dict().items() if tensor.is_floating_point()}
    wrong = {name: int((~tensor.isfinite()).sum()) for name, tensor in weights.items()}
    named = [name for name, count in wrong.items() if count]
    total = sum(tensor.numel() for tensor in weights.values())
    note = f"not so in {', '.join(named[:2])}{' …' if len(named) > 2 else ''}" if named else f"{total:,} numbers"
    return Measured(sum(wrong.values()), 0, note)


def vocabularies_fit(subject: Subject) -> Measured:
    """Compare the rows of embeddings and output with the pieces that the tokenizers know."""
    if isinstance(subject.loaded, DragomanError):
        raise subject.loaded
    model, sizes = subject.model, {"src": len(subject.tokenizers.src), "tgt": len(subject.tokenizers.tgt)}
    rows = {name: table.get_parameter("weight").size(0) for name, table in model.embeddings.items()} | {
        "output": model.output_weight.size(0)
    }
    wanted = {"output": sizes["tgt"], "shared": sizes["tgt"], **sizes}
    apart = {name: abs(count - wanted[name]) for name, count in rows.items()}
    if "shared" in rows:
        apart["src"] = abs(rows["shared"] - sizes["src"])
    note = f"{sizes['src']:,} pieces" if sizes["src"] == sizes["tgt"] else f"{sizes['src']:,} and {sizes['tgt']:,} pieces"
    return Measured(max(apart.values()), 0, note)


def text_comes_back(subject: Subject) -> Measured:
    """Cut the golden sentences into pieces and join them again, inputs and outputs."""
    cases = subject.cases()
    both = [(subject.tokenizers.src, case["input"]) for case in cases] + [(subject.tokenizers.tgt, case["output"]) for case in cases]
    kept = [(tokenizer, text) for tokenizer, text in both if UNK not in tokenizer.encode(text)]
    if not kept:
        raise NotApplicableError("there are no golden sentences" if not both else "the vocabulary lacks letters of every golden sentence")
    lost = [text for tokenizer, text in kept if not _comes_back(tokenizer, text)]
    note = f"{lost[0]!r:.40} does not" if lost else f"{len(kept)} text{'' if len(kept) == 1 else 's'}"
    return Measured(len(lost), 0, note)


def _comes_back(tokenizer: Tokenizer, text: str) -> bool:
    """Say whether text has the same pieces after being joined: its Unicode form may change, once."""
    pieces = tokenizer.encode(text)
    return tokenizer.encode(tokenizer.decode(pieces)) == pieces


@torch.inference_mode()
def golden_vectors_hold(subject: Subject) -> Measured:
    """Compare pieces, outputs and log-probabilities with those that were written with the model."""
    if subject.golden is None:
        raise NotApplicableError("the model has no golden vectors")
    tokenizers = subject.tokenizers
    cases = golden_cases(subject.golden, len(tokenizers.src), len(tokenizers.tgt), layout.GOLDEN)
    if not cases:
        raise NotApplicableError("there are no golden sentences")
    errors, model = [], subject.model
    for case in cases:
        pieces, output = tokenizers.src.encode(case["input"])[: len(case["src"])], tokenizers.tgt.decode(case["tgt"])
        if (pieces, output) != (case["src"], case["output"]):
            return Measured(math.inf, tolerance(subject), f"other pieces or text for {case['input']!r:.40}")
        end = [*case["tgt"], EOS] if case["finished"] else case["tgt"]
        tgt_in, _ = pack([[BOS, *end[:-1]]], subject.device)
        log_probs = model.project(model.decode(tgt_in, model.encode(*pack_sources([case["src"]], subject.device))))
        found = log_probs[0, : len(end)].float().log_softmax(-1).gather(1, torch.tensor(end, device=subject.device)[:, None])[:, 0]
        errors.append((found.double().cpu() - torch.tensor(case["log_probs"], dtype=torch.float64)).abs())
    return Measured(float(torch.cat(errors).amax()), tolerance(subject), f"{len(cases)} sentence{'' if len(cases) == 1 else 's'} read anew")
