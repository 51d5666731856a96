"""The JSON form of an explanation: its parts and tensors to JSON values and back, and its digest.

The fields are documented in `docs/explanation.md`, and `schema.json` is their schema;
`explanation_json_size_limit.py` cuts the whole to a budget of bytes.

Tensors are quantized and in base64: weights are `u8` with square-root companding (value = scale *
(u / 255)²: worst error 0.004 at 1, 4e-6 near 0), small signed matrices and vectors `f32`, large
signed ones `i8` with a scale, integers exact. Pooling in groups of positions sums keys and averages
queries, so that the sums of the rows stay the same.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dragoman.errors import DataError
from dragoman.explain.explanation import (
    FORMAT,
    FORMAT_VERSION,
    Array,
    AttentionSite,
    Attribution,
    Explanation,
    HeadSummary,
    NBestEntry,
    Step,
    Token,
    TokenizedText,
)
from dragoman.explain.explanation_schema_validation import (
    find_inconsistencies,
    find_problems,
    find_unusable_values,
)

DTYPES = {"u8": "<u1", "i8": "<i1", "u16": "<u2", "u32": "<u4", "i32": "<i4", "f32": "<f4"}

# A signed matrix of at most this size is exact: the attribution of a token with probability near 1
# is far below the largest, and one scale for all rows would round it to zero.
EXACT_CELLS = 16_384

Pool = dict[str, list[int]]  # "q" and "k": borders of groups, one more than there are groups
BEAM_FIELDS = ("parent", "token", "logprob", "cum", "step", "reason", "cut")
_BEAM_DTYPES = {"parent": "i32", "token": "i32", "step": "i32", "reason": "u8"}
# Parts that identify no content: how exact the capture was, how it was cut, what was precomputed.
_NOT_IN_DIGEST = ("digest", "checks", "limits", "branches", "ablations")


def encode_tensor(array: Array, *, pool: Pool | None = None, dtype: str = "") -> dict[str, Any]:
    """Return an array as a JSON object: dtype, code, scale, shape, pool and base64 data."""
    dtype, code, scale, values = quantize(np.asarray(array), dtype)
    return {
        "dtype": dtype,
        "code": code,
        "scale": scale,
        "shape": list(values.shape),
        "pool": pool,
        "data": base64.b64encode(np.ascontiguousarray(values).tobytes()).decode("ascii"),
    }


def decode_tensor(entry: Mapping[str, Any]) -> Array:
    """Return the array of `encode_tensor`: float32, or int64 for integers."""
    try:
        raw = np.frombuffer(
            base64.b64decode(entry["data"], validate=True), dtype=DTYPES[entry["dtype"]]
        ).reshape(entry["shape"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            "a tensor's data must be base64 of its dtype and shape",
            found=str(error)[:200],
            fix="write the explanation again",
        ) from error
    if entry["dtype"] == "u8" and entry["code"] == "sqrt":
        unit = (raw.astype(np.float64) / 255.0) ** 2
        return (entry["scale"] * unit).astype(np.float32)
    if entry["dtype"] == "i8":
        return (entry["scale"] * raw.astype(np.float64) / 127.0).astype(np.float32)
    return raw.astype(np.float32 if entry["dtype"] == "f32" else np.int64)


def quantize(array: Array, dtype: str) -> tuple[str, str, float, Array]:
    """Return dtype, code, scale and the values as they are written."""
    if array.dtype.kind in "biu" or dtype in ("u8", "u16", "u32", "i32"):
        dtype = dtype or integer_dtype(array)
        return dtype, "linear", 1.0, array.astype(DTYPES[dtype])
    if dtype == "f32" or is_exact(array):
        return "f32", "linear", 1.0, array.astype("<f4")
    array = np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=3e38, neginf=-3e38)
    largest = float(np.abs(array).max(initial=0.0))
    if array.min(initial=0.0) >= 0.0:
        # Rounding may put a weight above 1 by one unit in the last place.
        scale = 1.0 if largest <= 1.0 + 1e-4 else _round_scale(largest)
        unit = np.clip(array / scale, 0.0, 1.0)
        return "u8", "sqrt", scale, np.rint(np.sqrt(unit) * 255.0).astype("<u1")
    scale = _round_scale(largest)
    return "i8", "linear", scale, np.rint(array / scale * 127.0).clip(-127, 127).astype("<i1")


def is_exact(array: Array) -> bool:
    """Whether numbers are written as float32: vectors and small signed matrices."""
    small = array.ndim == 2 and array.size <= EXACT_CELLS
    return array.ndim < 2 or (small and bool(array.min(initial=0.0) < 0.0))


def integer_dtype(array: Array) -> str:
    """Return the smallest dtype that holds integers."""
    if array.min(initial=0) < 0:
        return "i32"
    largest = int(array.max(initial=0))
    return "u8" if largest < 1 << 8 else "u16" if largest < 1 << 16 else "u32"


def _round_scale(largest: float) -> float:
    """Return a scale that a decoded array gives again: that of a float32."""
    return float(np.float32(largest))


# --- pooling ---


def pool_edges(length: int, factor: int, words: Sequence[tuple[int, int]] = ()) -> list[int]:
    """Return the borders of ceil(length / factor) groups, at word edges where one is near."""
    groups = max(1, math.ceil(length / factor))
    starts = {start for start, _ in words} | {end for _, end in words}
    edges = [0]
    for group in range(1, groups):
        ideal = round(group * length / groups)
        latest = length - (groups - group)  # the groups after it hold one position each
        near = [
            edge
            for edge in starts
            if edges[-1] < edge <= latest and abs(edge - ideal) <= factor // 2
        ]
        edges.append(
            min(near, key=lambda edge: (abs(edge - ideal), edge))
            if near
            else min(max(ideal, edges[-1] + 1), latest)
        )
    return [*edges, length]


def pool_matrix(array: Array, queries: Sequence[int], keys: Sequence[int]) -> Array:
    """Return (..., Q, K) as groups: the sum over the keys and the mean over the queries of each."""
    exact = np.asarray(array, dtype=np.float64)
    summed = np.add.reduceat(exact, np.asarray(keys[:-1], dtype=np.intp), axis=-1)
    total = np.add.reduceat(summed, np.asarray(queries[:-1], dtype=np.intp), axis=-2)
    return (total / np.diff(queries)[:, None]).astype(np.float32)


def dump_json(values: Any) -> str:
    """Return compact JSON; non-ASCII text is not escaped."""
    return json.dumps(values, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def compute_digest(explanation: Explanation) -> str:
    """Return the SHA-256 of an explanation's content: its JSON form without a budget."""
    values = {
        key: value for key, value in encode_parts(explanation).items() if key not in _NOT_IN_DIGEST
    }
    values["model"] = {key: each for key, each in values["model"].items() if key != "path"}
    hasher = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for name, array in sorted(all_arrays(explanation).items()):
        dtype, code, scale, quantized = quantize(np.asarray(array), fixed_dtype(name))
        pool = explanation.pools.get(name)
        header = [name, dtype, code, scale, list(quantized.shape), pool]
        hasher.update(json.dumps(header, sort_keys=True).encode())
        hasher.update(np.ascontiguousarray(quantized).tobytes())
    return hasher.hexdigest()


def all_arrays(explanation: Explanation) -> dict[str, Array]:
    """Return the arrays by name, those of the beam included."""
    arrays = dict(explanation.arrays)
    if explanation.beam is not None:
        for name in BEAM_FIELDS:
            arrays[f"beam.{name}"] = np.asarray(getattr(explanation.beam, name))
    return arrays


def fixed_dtype(name: str) -> str:
    """Return the dtype that an array's name fixes; empty if its values decide."""
    prefix, _, rest = name.partition(".")
    return _BEAM_DTYPES.get(rest, "f32") if prefix == "beam" else ""


def encode_parts(explanation: Explanation) -> dict[str, Any]:
    """Return all parts but the tensors, numbers rounded."""
    arrays = explanation.arrays
    beam = explanation.beam
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "digest": "",
        "model": explanation.model,
        "request": explanation.request,
        "source": encode_text(explanation.source),
        "target": encode_text(explanation.target),
        "steps": [encode_step(step) for step in explanation.steps],
        "score": {
            key: _round(value) if isinstance(value, float) else value
            for key, value in explanation.score.items()
        },
        "nbest": [
            {
                "tokens": [int(each) for each in entry.tokens],
                "text": entry.text,
                "sum": _round(entry.sum),
                "normalised": _round(entry.normalised),
                "leaf": entry.leaf,
            }
            for entry in explanation.nbest
        ],
        "beam": None
        if beam is None
        else {
            "width": int(beam.width),
            "reasons": _beam_reasons(),
            "nodes": {name: f"beam.{name}" for name in BEAM_FIELDS},
            "dropped": int(beam.dropped),
        },
        "token_texts": {str(each): text for each, text in sorted(explanation.token_texts.items())},
        "sites": [
            {
                **dataclasses.asdict(site),
                "segments": [list(each) for each in site.segments],
                "tensor": site.tensor if site.tensor in arrays else None,
                "contribution": site.contribution if site.contribution in arrays else None,
            }
            for site in explanation.sites
        ],
        "heads": [
            {
                "site": head.site,
                "head": head.head,
                "labels": [[name, _round(score, 4)] for name, score in head.labels],
                "entropy": _round(head.entropy),
                "distance": _round(head.distance),
                "effect": {
                    "estimate": _round(head.effect_estimate),
                    "exact": _round(head.effect_exact),
                },
            }
            for head in explanation.heads
        ],
        "lens": explanation.lens,
        "attribution": [
            {**dataclasses.asdict(each), "gap": _round(each.gap)}
            for each in explanation.attribution
        ],
        "positions": explanation.positions,
        "extras": explanation.extras,
        "checks": {name: _significant(value) for name, value in explanation.checks.items()},
        "missing": explanation.missing,
        "branches": explanation.branches,
        "ablations": explanation.ablations,
    }


def decode_explanation(values: Any) -> Explanation:
    """Return the explanation of JSON values; raise DataError for another format or version."""
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise DataError(
            f'an explanation must be a JSON object with "format": "{FORMAT}"',
            found=repr(values.get("format")) if isinstance(values, dict) else type(values).__name__,
            fix="write it with dragoman explain --json",
        )
    if values.get("version") != FORMAT_VERSION:
        raise DataError(
            f"an explanation must have version {FORMAT_VERSION}",
            found=repr(values.get("version")),
            fix="use the dragoman that wrote it",
        )
    for problem in find_unusable_values(values):
        raise _inconsistent(problem)
    if problems := find_problems(values):
        raise DataError(
            "an explanation must follow its schema",
            found=problems[0],
            fix="write it with dragoman explain --json",
        )
    tensors = values["tensors"]
    arrays = {name: decode_tensor(entry) for name, entry in tensors.items()}
    for problem in find_inconsistencies(values, arrays):
        raise _inconsistent(problem)
    nodes = (values.get("beam") or {}).get("nodes", {})
    return Explanation(
        model=values["model"],
        request=values["request"],
        source=decode_text(values["source"]),
        target=decode_text(values["target"]),
        steps=[decode_step(step) for step in values["steps"]],
        score=values["score"],
        nbest=[NBestEntry(**entry) for entry in values["nbest"]],
        beam=_decode_beam(
            values.get("beam"),
            arrays,
            [entry["leaf"] for entry in values["nbest"] if entry["leaf"] is not None],
        ),
        sites=[_decode_site(site) for site in values["sites"]],
        heads=[_decode_head(head) for head in values["heads"]],
        lens=values.get("lens"),
        attribution=[_decode_attribution(each) for each in values["attribution"]],
        positions=values["positions"],
        extras=values["extras"],
        arrays={name: array for name, array in arrays.items() if name not in nodes.values()},
        checks=values["checks"],
        missing=values["missing"],
        token_texts={int(each): text for each, text in values["token_texts"].items()},
        branches=values.get("branches", {}),
        ablations=values.get("ablations", {}),
        pools={name: entry["pool"] for name, entry in tensors.items() if entry["pool"]},
        stored_digest=values.get("digest", ""),
    )


def _inconsistent(problem: str) -> DataError:
    must, _, found = problem.rpartition("; found ")
    return DataError(
        f"in an explanation, {must}", found=found, fix="write it with dragoman explain --json"
    )


def encode_text(text: TokenizedText) -> dict[str, Any]:
    """Return a text with its tokens and words as JSON values."""
    return {
        "text": text.text,
        "dir": text.dir,
        "lang": text.lang,
        "tokens": [
            {
                "id": int(token.id),
                "text": token.text,
                "span": list(token.span),
                "special": token.special,
                "rank": token.rank,
            }
            for token in text.tokens
        ],
        "words": [list(word) for word in text.words],
    }


def decode_text(values: Mapping[str, Any]) -> TokenizedText:
    """Return the text of `encode_text`."""
    return TokenizedText(
        text=values["text"],
        dir=values["dir"],
        lang=values["lang"],
        tokens=[
            Token(**{**token, "span": (token["span"][0], token["span"][1])})
            for token in values["tokens"]
        ],
        words=[(start, end) for start, end in values["words"]],
    )


def encode_step(step: Step) -> dict[str, Any]:
    """Return a step as JSON values."""
    return {
        "id": int(step.id),
        "logprob": _round(step.logprob),
        "rank": int(step.rank),
        "entropy": _round(step.entropy),
        "forced": bool(step.forced),
        "masked": int(step.masked),
        "top": [[int(each), text, _round(logprob, 5)] for each, text, logprob in step.top],
    }


def decode_step(values: Mapping[str, Any]) -> Step:
    """Return the step of `encode_step`."""
    return Step(
        **{
            **values,
            "logprob": _decode_logprob(values["logprob"]),
            "entropy": math.nan if values["entropy"] is None else values["entropy"],
            "top": [(each, text, _decode_logprob(score)) for each, text, score in values["top"]],
        }
    )


def _decode_logprob(value: float | None) -> float:
    """Return a log-probability; JSON has no number for the logarithm of 0."""
    return -math.inf if value is None else value


def _decode_site(values: Mapping[str, Any]) -> AttentionSite:
    known = {each.name for each in dataclasses.fields(AttentionSite)}
    segments = [(name, start, end) for name, start, end in values.get("segments") or ()]
    return AttentionSite(
        **{name: value for name, value in values.items() if name in known and name != "segments"},
        segments=segments,
    )


def _decode_attribution(values: Mapping[str, Any]) -> Attribution:
    return Attribution(**{name: value for name, value in values.items() if name != "of"})


def _decode_head(values: Mapping[str, Any]) -> HeadSummary:
    return HeadSummary(
        site=values["site"],
        head=values["head"],
        labels=[(name, score) for name, score in values["labels"]],
        entropy=values["entropy"],
        distance=values["distance"],
        effect_estimate=values["effect"]["estimate"],
        effect_exact=values["effect"]["exact"],
    )


def _decode_beam(
    values: Mapping[str, Any] | None, arrays: Mapping[str, Array], leaves: Sequence[int]
) -> Any:
    if values is None:
        return None
    from dragoman.decoding.beam_trace import BeamTrace

    nodes = {name: arrays[values["nodes"][name]] for name in BEAM_FIELDS}
    return BeamTrace(
        width=values["width"],
        **nodes,
        leaves=tuple(leaves),
        dropped=values.get("dropped", 0),
    )


def _beam_reasons() -> list[str]:
    from dragoman.decoding.beam_trace import REASONS

    return list(REASONS)


def _round(value: float | None, digits: int = 6) -> float | None:
    """Return a number rounded for JSON; None and non-finite numbers are None."""
    if value is None or not math.isfinite(value):
        return None
    return round(float(value), digits)


def _significant(value: float) -> float | None:
    """Return a small number with three significant digits."""
    return float(f"{value:.3g}") if math.isfinite(value) else None
