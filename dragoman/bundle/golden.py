"""Golden vectors: a few inputs with what the model made of them when it was written, checked when it is loaded.

They catch what hashes cannot: another release, library or device that computes something else from the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dragoman.attention.positions import Learned
from dragoman.decoding.greedy import Greedy
from dragoman.decoding.packing import pack, pack_sources
from dragoman.decoding.search import search
from dragoman.errors import BundleError, CorruptError
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.specials import BOS, EOS
from dragoman.text.tokenizer import Tokenizers

FORMAT = 1
INPUTS = ("Guten Morgen.", "1979-05-03", "a b c")  # for a model that nobody gave inputs for: any text has an answer
TOLERANCE = 1e-3  # of log-probability: float32 on another CPU differs by 1e-5, a wrong weight by much more
DEVICE_TOLERANCE = 2e-2  # other devices multiply with fewer bits
_MOST_CASES, _MOST_PIECES = 16, 512
_LARGEST = 1e30  # log-probability that is still a number


def make_golden(model: EncoderDecoder, tokenizers: Tokenizers, inputs: Sequence[str]) -> dict[str, Any]:
    """Translate a few inputs greedily, in float32 on the CPU, and keep every number."""
    cases = []
    longest = _longest(model)
    for text in list(inputs)[:_MOST_CASES] or INPUTS:
        src = tokenizers.src.encode(text)[:_MOST_PIECES]
        if not 0 < len(src) <= longest:
            continue
        with torch.inference_mode():
            memory = model.encode(*pack_sources([src]))
        [[best]] = search(model, memory, limits=torch.tensor([min(longest, len(src) + 50)]), strategy=Greedy())
        cases.append(
            {
                "input": text,
                "src": src,
                "tgt": best.tokens,
                "finished": best.finished,
                "output": tokenizers.tgt.decode(best.tokens),
                "log_probs": [round(each, 6) for each in best.log_probs],
            }
        )
    return {"format": FORMAT, "search": "greedy", "cases": cases}


def _longest(model: EncoderDecoder) -> int:
    """Return how many tokens a case may have on a side: learned positions end somewhere, and an end takes one as well."""
    positions = (model.src_entrance.positions, model.tgt_entrance.positions)
    return min(_MOST_PIECES, *(each.max_positions - 1 if isinstance(each, Learned) else _MOST_PIECES for each in positions))


def check_golden(model: EncoderDecoder, tokenizers: Tokenizers, golden: Mapping[str, Any], where: str) -> None:
    """Compare what the tokenizers and the model give now with what they gave; `where` names the file in an error."""
    cases = golden_cases(golden, len(tokenizers.src), len(tokenizers.tgt), where)
    for number, case in enumerate(cases, start=1):
        _check_text(case, tokenizers, f"{where}, case {number} ({case['input']!r:.60})")
    if not cases:
        return
    device = next(model.parameters()).device
    ends = [[*case["tgt"], EOS] if case["finished"] else case["tgt"] for case in cases]
    given = [[BOS, *end[:-1]] if end else [BOS] for end in ends]
    with torch.inference_mode():
        memory = model.encode(*pack_sources([case["src"] for case in cases], device))
        tgt_in, mask = pack(given, device)
        log_probs = model.project(model.decode(tgt_in, memory, mask)).float().log_softmax(-1).cpu()
    tolerance = TOLERANCE if device.type == "cpu" else DEVICE_TOLERANCE
    for number, (case, end) in enumerate(zip(cases, ends, strict=True), start=1):
        for place, (token, wanted) in enumerate(zip(end, case["log_probs"], strict=True)):
            found = float(log_probs[number - 1, place, token])
            if not abs(found - wanted) <= tolerance:
                raise CorruptError(
                    f"{where}, case {number} ({case['input']!r:.60}): piece {place + 1} must have log-probability {wanted:.5f}",
                    found=f"{found:.5f}",
                    fix="this release or device computes something else; compare with the CPU and with the release in card.md",
                )


def chooses(model: EncoderDecoder) -> bool:
    """Tell whether a model attends by comparing numbers, such as to hash: then devices that round otherwise may part ways."""
    return any(getattr(module, "chooses", False) for module in model.modules())


def _check_text(case: Mapping[str, Any], tokenizers: Tokenizers, where: str) -> None:
    """Check that text still becomes the same pieces, and pieces the same text."""
    pieces = tokenizers.src.encode(case["input"])[:_MOST_PIECES]
    output = tokenizers.tgt.decode(case["tgt"])
    for what, wanted, found in (("pieces", case["src"], pieces), ("output", case["output"], output)):
        if wanted != found:
            raise CorruptError(
                f"{where}: {what} must be {wanted!r:.120}", found=f"{found!r:.120}", fix="the tokenizer is not the one it was"
            )


def golden_cases(golden: Mapping[str, Any], src_size: int, tgt_size: int, where: str) -> list[dict[str, Any]]:
    """Check the form of the file, which anybody may have written: numbers that would crash a model are refused."""
    if golden.get("format") != FORMAT:
        raise BundleError(
            f"{where} must have format {FORMAT}", found=f"{golden.get('format')!r:.80}", fix="use a newer release of dragoman"
        )
    cases = golden.get("cases")
    if not isinstance(cases, list) or len(cases) > _MOST_CASES:
        found = f"{len(cases)} of them" if isinstance(cases, list) else type(cases).__name__
        raise BundleError(f"{where} must hold a list of at most {_MOST_CASES} cases", found=found, fix="copy the model directory anew")
    for number, case in enumerate(cases, start=1):
        problem = _problem(case, src_size, tgt_size)
        if problem:
            raise BundleError(
                f"{where}, case {number} must be one that the model can answer", found=problem, fix="copy the model directory anew"
            )
    return cases


def _problem(case: Any, src_size: int, tgt_size: int) -> str:
    """Say what is wrong with a case, or nothing."""
    if not isinstance(case, dict) or not {"input", "src", "tgt", "finished", "output", "log_probs"} <= case.keys():
        return "fields are missing"
    if not (isinstance(case["input"], str) and isinstance(case["output"], str) and isinstance(case["finished"], bool)):
        return "text or flag of another type"
    for name, size in (("src", src_size), ("tgt", tgt_size)):
        ids = case[name]
        if not isinstance(ids, list) or len(ids) > _MOST_PIECES or not all(type(i) is int and 0 <= i < size for i in ids):
            return f"{name} that is not a list of at most {_MOST_PIECES} pieces of the vocabulary"
    if not case["src"]:
        return "an empty source"
    numbers = case["log_probs"]
    if not isinstance(numbers, list) or len(numbers) != len(case["tgt"]) + case["finished"]:
        return "log_probs that are not one a piece"
    if not all(type(n) in (int, float) and -_LARGEST <= n <= _LARGEST for n in numbers):  # NaN is neither
        return "log_probs that are not numbers"
    return ""
