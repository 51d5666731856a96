"""Golden vectors: a few inputs with what the model made of them when it was written, checked when it is loaded.

They catch what hashes cannot: another release, library or device that computes something else from the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dragoman.attention.positions import LearnedPositions
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.padded_batch import pad_batch, pad_sources
from dragoman.decoding.search import search
from dragoman.errors import BundleError, CorruptError
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.special_tokens import BOS, EOS
from dragoman.text.tokenizer import Tokenizers

FORMAT_VERSION = 1
DEFAULT_INPUTS = (
    "Guten Morgen.",
    "1979-05-03",
    "a b c",
)  # for a model that nobody gave inputs for: any text has an answer
TOLERANCE = (
    1e-3  # of log-probability: float32 on another CPU differs by 1e-5, a wrong weight by much more
)
DEVICE_TOLERANCE = 2e-2  # other devices multiply with fewer bits
_MAX_CASES, _MAX_TOKENS = 16, 512
_MAX_LOG_PROB = 1e30  # log-probability that is still a number


def make_golden(
    model: EncoderDecoder, tokenizers: Tokenizers, inputs: Sequence[str]
) -> dict[str, Any]:
    """Translate a few inputs greedily, in float32 on the CPU, and keep every number."""
    cases = []
    longest = _max_case_tokens(model)
    for text in list(inputs)[:_MAX_CASES] or DEFAULT_INPUTS:
        src = tokenizers.src.encode(text)[:_MAX_TOKENS]
        if not 0 < len(src) <= longest:
            continue
        with torch.inference_mode():
            memory = model.encode(*pad_sources([src]))
        [[best]] = search(
            model,
            memory,
            limits=torch.tensor([min(longest, len(src) + 50)]),
            strategy=GreedySearch(),
        )
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
    return {"format": FORMAT_VERSION, "search": "greedy", "cases": cases}


def _max_case_tokens(model: EncoderDecoder) -> int:
    """Return how many tokens a case may have on a side: learned positions end somewhere, and an end takes one as well."""
    positions = (model.src_entrance.positions, model.tgt_entrance.positions)
    return min(
        _MAX_TOKENS,
        *(
            each.max_positions - 1 if isinstance(each, LearnedPositions) else _MAX_TOKENS
            for each in positions
        ),
    )


def check_golden(
    model: EncoderDecoder, tokenizers: Tokenizers, golden: Mapping[str, Any], where: str
) -> None:
    """Compare what the tokenizers and the model give now with what they gave; `where` names the file in an error."""
    cases = read_golden_cases(golden, len(tokenizers.src), len(tokenizers.tgt), where)
    for number, case in enumerate(cases, start=1):
        _check_text(case, tokenizers, f"{where}, case {number} ({case['input']!r:.60})")
    if not cases:
        return
    device = next(model.parameters()).device
    ends = [[*case["tgt"], EOS] if case["finished"] else case["tgt"] for case in cases]
    given = [[BOS, *end[:-1]] if end else [BOS] for end in ends]
    with torch.inference_mode():
        memory = model.encode(*pad_sources([case["src"] for case in cases], device))
        tgt_in, mask = pad_batch(given, device)
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


def has_discrete_attention(model: EncoderDecoder) -> bool:
    """Tell whether a model attends by comparing numbers, such as to hash: then devices that round otherwise may part ways."""
    return any(getattr(module, "is_discrete", False) for module in model.modules())


def _check_text(case: Mapping[str, Any], tokenizers: Tokenizers, where: str) -> None:
    """Check that text still becomes the same pieces, and pieces the same text."""
    pieces = tokenizers.src.encode(case["input"])[:_MAX_TOKENS]
    output = tokenizers.tgt.decode(case["tgt"])
    for what, wanted, found in (
        ("pieces", case["src"], pieces),
        ("output", case["output"], output),
    ):
        if wanted != found:
            raise CorruptError(
                f"{where}: {what} must be {wanted!r:.120}",
                found=f"{found!r:.120}",
                fix="the tokenizer is not the one it was",
            )


def read_golden_cases(
    golden: Mapping[str, Any], src_size: int, tgt_size: int, where: str
) -> list[dict[str, Any]]:
    """Check the form of the file, which anybody may have written: numbers that would crash a model are refused."""
    if golden.get("format") != FORMAT_VERSION:
        raise BundleError(
            f"{where} must have format {FORMAT_VERSION}",
            found=f"{golden.get('format')!r:.80}",
            fix="use a newer release of dragoman",
        )
    cases = golden.get("cases")
    if not isinstance(cases, list) or len(cases) > _MAX_CASES:
        found = f"{len(cases)} of them" if isinstance(cases, list) else type(cases).__name__
        raise BundleError(
            f"{where} must hold a list of at most {_MAX_CASES} cases",
            found=found,
            fix="copy the model directory again",
        )
    for number, case in enumerate(cases, start=1):
        problem = _case_problem(case, src_size, tgt_size)
        if problem:
            raise BundleError(
                f"{where}, case {number} must be one that the model can answer",
                found=problem,
                fix="copy the model directory again",
            )
    return cases


def _case_problem(case: Any, src_size: int, tgt_size: int) -> str:
    """Say what is wrong with a case, or nothing."""
    if (
        not isinstance(case, dict)
        or not {"input", "src", "tgt", "finished", "output", "log_probs"} <= case.keys()
    ):
        return "fields are missing"
    if not (
        isinstance(case["input"], str)
        and isinstance(case["output"], str)
        and isinstance(case["finished"], bool)
    ):
        return "text or flag of another type"
    for name, size in (("src", src_size), ("tgt", tgt_size)):
        ids = case[name]
        if (
            not isinstance(ids, list)
            or len(ids) > _MAX_TOKENS
            or not all(type(i) is int and 0 <= i < size for i in ids)
        ):
            return f"{name} that is not a list of at most {_MAX_TOKENS} pieces of the vocabulary"
    if not case["src"]:
        return "an empty source"
    numbers = case["log_probs"]
    if not isinstance(numbers, list) or len(numbers) != len(case["tgt"]) + case["finished"]:
        return "log_probs that are not one a piece"
    if not all(
        type(n) in (int, float) and -_MAX_LOG_PROB <= n <= _MAX_LOG_PROB for n in numbers
    ):  # NaN is neither
        return "log_probs that are not numbers"
    return ""
