"""Golden vectors: a few inputs with their outputs and log-probabilities, checked on loading.

They detect what hashes cannot: a release, library or device that computes something else from the
same weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dragoman.attention.absolute_position_encodings import LearnedPositions
from dragoman.data.inference_batches import pad_batch, pad_sources
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.search_interface import search
from dragoman.errors import BundleError, CorruptError
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.sentencepiece_tokenizer import Tokenizers
from dragoman.text.special_tokens import BOS, EOS

FORMAT_VERSION = 1
DEFAULT_INPUTS = ("Guten Morgen.", "1979-05-03", "a b c")  # for models without given inputs
TOLERANCE = 1e-3  # of a log-probability: float32 on another CPU differs by about 1e-5
DEVICE_TOLERANCE = 2e-2  # matrix multiplications of other devices have lower precision
_MAX_CASES, _MAX_TOKENS = 16, 512
_MAX_LOG_PROB = 1e30  # larger values are rejected


class GoldenInput(NamedTuple):
    """An input of the golden vectors; its target language for a multilingual model."""

    text: str
    target_language: str = ""


def encode_golden(tokenizers: Tokenizers, text: str, target_language: str) -> list[int]:
    """Return the source tokens of a golden input, its language tag included."""
    src = tokenizers.src.tagged(target_language) if target_language else tokenizers.src
    return src.encode(text)[:_MAX_TOKENS]


def make_golden(
    model: EncoderDecoder, tokenizers: Tokenizers, inputs: Sequence[str | GoldenInput]
) -> dict[str, Any]:
    """Return golden vectors of a few inputs: greedy search in float32 on the CPU."""
    cases = []
    longest = _max_case_tokens(model)
    default_language = next(iter(tokenizers.src.tag_ids), "")
    for given in list(inputs)[:_MAX_CASES] or DEFAULT_INPUTS:
        text, language = (given, default_language) if isinstance(given, str) else given
        src = encode_golden(tokenizers, text, language)
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
                **({"target_language": language} if language else {}),
                "src": src,
                "tgt": best.tokens,
                "finished": best.finished,
                "output": tokenizers.tgt.decode(best.tokens),
                "log_probs": [round(each, 6) for each in best.log_probs],
            }
        )
    return {"format": FORMAT_VERSION, "search": "greedy", "cases": cases}


def _max_case_tokens(model: EncoderDecoder) -> int:
    """Return the maximum tokens per side of a case; learned positions limit it."""
    positions = (model.src_input.positions, model.tgt_input.positions)
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
    """Raise CorruptError, naming the file `where`, if tokens or log-probabilities differ now."""
    cases = read_golden_cases(golden, len(tokenizers.src), len(tokenizers.tgt), where)
    languages = {case.get("target_language", "") for case in cases} - {""}
    if unknown := languages - set(tokenizers.src.tag_ids):
        raise BundleError(
            f"{where} must name languages of the vocabulary",
            found=f"{min(unknown)!r:.80}",
            fix="copy the model directory again",
        )
    for number, case in enumerate(cases, start=1):
        _check_text(case, tokenizers, f"{where}, case {number} ({case['input']!r:.60})")
    device = next(model.parameters()).device
    tolerance = TOLERANCE if device.type == "cpu" else DEVICE_TOLERANCE
    for number, (case, log_probs) in enumerate(
        zip(cases, golden_log_probs(model, cases), strict=True), start=1
    ):
        pairs = zip(log_probs.tolist(), case["log_probs"], strict=True)
        for position, (found, expected) in enumerate(pairs, start=1):
            if not abs(found - expected) <= tolerance:
                raise CorruptError(
                    f"{where}, case {number} ({case['input']!r:.60}): "
                    f"token {position} must have log-probability {expected:.5f}",
                    found=f"{found:.5f}",
                    fix="this release or device computes something else; "
                    "compare with the CPU and with the release in card.md",
                )


@torch.inference_mode()
def golden_log_probs(model: EncoderDecoder, cases: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Return the teacher-forced log-probabilities of each case's tokens, float64 on the CPU."""
    if not cases:
        return []
    device = next(model.parameters()).device
    targets = [[*case["tgt"], EOS] if case["finished"] else case["tgt"] for case in cases]
    memory = model.encode(*pad_sources([case["src"] for case in cases], device))
    tgt_in, mask = pad_batch([[BOS, *target[:-1]] for target in targets], device)
    log_probs = model.project(model.decode(tgt_in, memory, mask)).float().log_softmax(-1).cpu()
    return [
        row[range(len(target)), target].double()
        for row, target in zip(log_probs, targets, strict=True)
    ]


def largest_error(
    cases: Sequence[Mapping[str, Any]], found: Iterable[Sequence[float] | Tensor]
) -> float:
    """Return the largest error of log-probabilities of the cases' tokens; NaN if one is NaN."""
    errors = [torch.zeros(1, dtype=torch.float64)]
    for case, row in zip(cases, found, strict=True):
        values = torch.as_tensor(row, dtype=torch.float64)[: len(case["log_probs"])]
        expected = torch.tensor(case["log_probs"], dtype=torch.float64)[: len(values)]
        errors.append((values - expected).abs())
    return float(torch.cat(errors).amax())


def has_discrete_attention(model: EncoderDecoder) -> bool:
    """Whether attention makes discrete choices, such as LSH buckets, which rounding can change."""
    return any(getattr(module, "is_discrete", False) for module in model.modules())


def _check_text(case: Mapping[str, Any], tokenizers: Tokenizers, where: str) -> None:
    """Raise CorruptError unless the tokenizers still return the same tokens and text."""
    tokens = encode_golden(tokenizers, case["input"], case.get("target_language", ""))
    output = tokenizers.tgt.decode(case["tgt"])
    for what, expected, found in (
        ("tokens", case["src"], tokens),
        ("output", case["output"], output),
    ):
        if expected != found:
            raise CorruptError(
                f"{where}: {what} must be {expected!r:.120}",
                found=f"{found!r:.120}",
                fix="the tokenizer has changed; restore it from a copy",
            )


def read_golden_cases(
    golden: Mapping[str, Any], src_size: int, tgt_size: int, where: str
) -> list[dict[str, Any]]:
    """Return the cases of the file; raise BundleError for values that would crash a model."""
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
                f"{where}, case {number} must be valid for the model",
                found=problem,
                fix="copy the model directory again",
            )
    return cases


def _case_problem(case: Any, src_size: int, tgt_size: int) -> str:
    """Return the problem with a case; empty if it is valid."""
    if (
        not isinstance(case, dict)
        or not {"input", "src", "tgt", "finished", "output", "log_probs"} <= case.keys()
    ):
        return "fields are missing"
    if not (
        isinstance(case["input"], str)
        and isinstance(case["output"], str)
        and isinstance(case["finished"], bool)
        and isinstance(case.get("target_language", ""), str)
    ):
        return "text or flag of another type"
    for name, size in (("src", src_size), ("tgt", tgt_size)):
        ids = case[name]
        if (
            not isinstance(ids, list)
            or len(ids) > _MAX_TOKENS
            or not all(type(i) is int and 0 <= i < size for i in ids)
        ):
            return f"{name} that is not a list of at most {_MAX_TOKENS} token ids of the vocabulary"
    if not case["src"]:
        return "an empty source"
    numbers = case["log_probs"]
    if not isinstance(numbers, list) or len(numbers) != len(case["tgt"]) + case["finished"]:
        return "log_probs that are not one per token"
    # NaN fails both comparisons.
    if not all(type(n) in (int, float) and -_MAX_LOG_PROB <= n <= _MAX_LOG_PROB for n in numbers):
        return "log_probs that are not numbers"
    return ""
