"""Explanations of any size from random numbers, valid by dragoman/explain/schema.json: what the
page's tests show.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np

WORDS = [
    "the",
    "house",
    "at",
    "the",
    "river",
    "was",
    "built",
    "by",
    "an",
    "old",
    "engineer",
    "who",
    "never",
    "saw",
    "the",
    "sea",
    ",",
    "and",
    "his",
    "daughter",
    "keeps",
    "the",
    "keys",
]
REASONS = (
    "kept",
    "beam_full",
    "finished",
    "worse_finished",
    "length_cap",
    "no_repeat",
    "constraint",
    "duplicate",
    "early_stop",
)


def encode(array: np.ndarray, dtype: str) -> dict[str, Any]:
    """Return a tensor of the wire format: u8 by square roots, i8 with a scale, others as they
    are.
    """
    code, scale = "linear", 1.0
    if dtype == "u8" and array.dtype.kind == "f":
        code = "sqrt"
        scale = float(max(1.0, array.max(initial=0.0)))
        raw = np.round(255 * np.sqrt(array / scale)).astype("<u1")
    elif dtype == "i8":
        scale = float(np.abs(array).max(initial=0.0)) or 1.0
        raw = np.round(127 * array / scale).astype("<i1")
    else:
        raw = array.astype(
            {"u8": "<u1", "u16": "<u2", "u32": "<u4", "i32": "<i4", "f32": "<f4"}[dtype]
        )
    return {
        "dtype": dtype,
        "code": code,
        "scale": scale,
        "shape": list(array.shape),
        "pool": None,
        "data": base64.b64encode(raw.tobytes()).decode(),
    }


def graphemes(text: str) -> list[str]:
    """Return clusters of a base character with its marks, joiners and variation selectors."""
    clusters: list[str] = []
    joined = False
    for character in text:
        extends = unicodedata.combining(character) or unicodedata.category(character) in (
            "Mn",
            "Me",
            "Mc",
        )
        if clusters and (extends or joined or character in "\u200d\ufe0f"):
            clusters[-1] += character
        else:
            clusters.append(character)
        joined = character == "\u200d"
    return clusters


def tokenize(text: str, *, longest: int = 5) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Return tokens that tile the text, each with the space before it, and the words as token
    ranges.
    """
    tokens: list[dict[str, Any]] = []
    words: list[list[int]] = []
    for match in re.finditer(r"\s*\S+|\s+$", text):
        start, first = match.start(), len(tokens)
        parts = graphemes(match.group())
        for at in range(0, len(parts), longest):
            piece = "".join(parts[at : at + longest])
            tokens.append(
                {
                    "id": 4 + int(hashlib.sha256(piece.encode()).hexdigest()[:8], 16) % 7996,
                    "text": piece,
                    "span": [start, start + len(piece)],
                    "special": False,
                    "rank": len(tokens) * 37 % 8000,
                }
            )
            start += len(piece)
        words.append([first, len(tokens)])
    end = len(text)
    tokens.append({"id": 3, "text": "</s>", "span": [end, end], "special": True, "rank": None})
    return tokens, words


def direction(text: str) -> str:
    """Return "rtl" where the first strong character is right-to-left."""
    for character in text:
        kind = unicodedata.bidirectional(character)
        if kind in ("R", "AL"):
            return "rtl"
        if kind == "L":
            return "ltr"
    return "ltr"


def random_text(count: int, rng: np.random.Generator) -> str:
    """Return a text of about that many tokens."""
    words = [WORDS[int(i)] for i in rng.integers(0, len(WORDS), count)]
    while words and sum(-(-(len(word) + 1) // 5) for word in words) > max(count, 1):
        words.pop()
    return " ".join(words) or "the"


def softmax(scores: np.ndarray) -> np.ndarray:
    """Return rows that sum to 1."""
    exp = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def weights_of(
    kind: str, queries: int, keys: int, rng: np.random.Generator, causal: bool
) -> np.ndarray:
    """Return one head's weights with the habit that its label names."""
    q, k = np.arange(queries)[:, None], np.arange(keys)[None, :]
    scores = rng.normal(0, 1, (queries, keys))
    if kind == "align":
        scores -= 2.5 * np.abs(k - q * (keys - 1) / max(1, queries - 1))
    elif kind == "offset -1":
        scores -= 3.0 * np.abs(k - np.maximum(q - 1, 0))
    elif kind == "sink":
        scores[:, -1 if not causal else 0] += 7
    elif kind == "focused":
        scores *= 4
    if causal:
        scores = np.where(k <= q, scores, -np.inf)
    return softmax(scores)


def beam_of(
    ids: Sequence[int], log_probs: np.ndarray, width: int, count: int, rng: np.random.Generator
) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """Return the nodes of a search that found `ids`, about `count` of them, and the n-best list."""
    steps = len(ids)
    fields: dict[str, list[float]] = {
        k: [] for k in ("parent", "token", "logprob", "cum", "step", "reason", "cut")
    }

    def add(parent: int, token: int, logprob: float, step: int, reason: str, cut: float) -> int:
        cum = logprob + (fields["cum"][parent] if parent >= 0 else 0.0)
        for key, value in zip(
            fields, (parent, token, logprob, cum, step, REASONS.index(reason), cut)
        ):
            fields[key].append(value)
        return len(fields["parent"]) - 1

    alive = [add(-1, 2, 0.0, -1, "kept", 0.0)]
    per_step = max(width, (count - 1) // steps)
    nbest: list[dict[str, Any]] = []
    for step, token in enumerate(ids):
        last = step == steps - 1
        winner = alive[0]
        best = fields["cum"][winner] + float(log_probs[step])
        kept = [
            add(winner, token, float(log_probs[step]), step, "finished" if last else "kept", best)
        ]
        others = []
        for rank in range(1, min(per_step, len(alive)) if last else per_step):
            parent = alive[rank] if last else alive[int(rng.integers(0, len(alive)))]
            # Below the winner at every step, so that the kept ones have the best scores.
            short = best - 0.3 * rank - float(rng.random()) * 0.2 - fields["cum"][parent]
            other = 3 if last else 4 + (token + 31 * rank) % 7996
            others.append((parent, other, min(short, -0.01)))
        others.sort(key=lambda each: -(fields["cum"][each[0]] + each[2]))
        cut = best
        for rank, (parent, other, logprob) in enumerate(others, start=1):
            if rank < width:
                cut = fields["cum"][parent] + logprob
                kept.append(add(parent, other, logprob, step, "finished" if last else "kept", cut))
            else:
                reason = "no_repeat" if rank % 17 == 16 else "beam_full"
                add(parent, other, logprob, step, reason, cut)
        alive = kept
    for leaf in alive:
        path, node = [], leaf
        while node > 0:
            path.append(int(fields["token"][node]))
            node = int(fields["parent"][node])
        total = float(fields["cum"][leaf])
        nbest.append(
            {"tokens": path[::-1], "sum": total, "normalised": total / len(path), "leaf": leaf}
        )
    nbest.sort(key=lambda each: -each["normalised"])
    types = {
        "parent": "i4",
        "token": "i4",
        "logprob": "f4",
        "cum": "f4",
        "step": "i4",
        "reason": "u1",
        "cut": "f4",
    }
    return {key: np.asarray(values, dtype=types[key]) for key, values in fields.items()}, nbest


def make_explanation(
    *,
    source: str | None = None,
    target: str | None = None,
    source_length: int = 9,
    target_length: int = 9,
    layers: int = 3,
    heads: int = 4,
    width: int = 4,
    nodes: int = 140,
    seed: int = 0,
    task: str = "translate",
    missing: dict[str, str] | None = None,
    languages: tuple[str, str] = ("en", "de"),
) -> dict[str, Any]:
    """Return an explanation as JSON values: texts, or random ones of these lengths, and random
    numbers.
    """
    rng = np.random.default_rng(seed)
    missing = missing or {}
    source = random_text(source_length - 1, rng) if source is None else source
    target = random_text(target_length - 1, rng) if target is None else target
    tensors: dict[str, dict[str, Any]] = {}
    sides = {}
    for name, text, lang in (("source", source, languages[0]), ("target", target, languages[1])):
        tokens, words = tokenize(text)
        sides[name] = {
            "text": text,
            "dir": direction(text),
            "lang": lang,
            "tokens": tokens,
            "words": words,
        }
    s, t = (len(sides[name]["tokens"]) for name in ("source", "target"))
    ids = [token["id"] for token in sides["target"]["tokens"]]
    token_texts = {str(token["id"]): token["text"] for token in sides["target"]["tokens"]}

    steps = []
    for index, token in enumerate(sides["target"]["tokens"]):
        logits = np.sort(rng.normal(0, 1, 8))[::-1]
        logits[0] += float(rng.uniform(0, 4))
        log_probs = np.log(softmax(logits) * 0.97)
        rank = 2 if index % 5 == 3 else 1
        top = []
        for place, log_prob in enumerate(log_probs):
            alternative = " " + WORDS[(index + 3 * place) % len(WORDS)]
            top.append([4 + (index * 31 + place * 97) % 7996, alternative, float(log_prob)])
        top[rank - 1] = [token["id"], token["text"], top[rank - 1][2]]
        token_texts.update({str(each[0]): each[1] for each in top})
        steps.append(
            {
                "id": token["id"],
                "logprob": float(log_probs[rank - 1]),
                "rank": rank,
                "entropy": float(-(np.exp(log_probs) * log_probs).sum()),
                "forced": False,
                "masked": 0,
                "top": top,
            }
        )
    log_probs = np.asarray([step["logprob"] for step in steps])
    total = float(log_probs.sum())

    sites, summaries = [], []
    kinds = ["align", "sink", "offset -1", "focused", "broad"]
    if "heads" not in missing:
        for group, letter, query, key, rows, columns, causal in (
            ("encoder", "e", "source", "source", s, s, False),
            ("decoder", "d", "target", "target_in", t, t, True),
            ("cross", "x", "target", "source", t, s, False),
        ):
            for layer in range(layers):
                site = f"{letter}{layer}"
                habits = [kinds[(head + layer) % len(kinds)] for head in range(heads)]
                weights = np.stack(
                    [weights_of(each, rows, columns, rng, causal) for each in habits]
                )
                norms = weights * rng.uniform(0.2, 1.4, (heads, 1, columns))
                tensors[f"{site}.w"] = encode(weights, "u8")
                tensors[f"{site}.c"] = encode(norms, "u8")
                sites.append(
                    {
                        "id": site,
                        "path": f"{'encoder' if letter == 'e' else 'decoder'}.{layer}.{'cross' if letter == 'x' else 'self'}",
                        "kind": "cross" if letter == "x" else "self",
                        "group": group,
                        "layer": layer,
                        "heads": heads,
                        "query": query,
                        "key": key,
                        "sum": "one",
                        "causal": causal,
                        "ordered": True,
                        "segments": [],
                        "query_labels": None,
                        "key_labels": None,
                        "tensor": f"{site}.w",
                        "contribution": f"{site}.c",
                    }
                )
                for head, habit in enumerate(habits):
                    entropy = -(weights[head] * np.log(weights[head] + 1e-12)).sum(-1).mean()
                    q, k = np.arange(rows)[:, None], np.arange(columns)[None, :]
                    effect = -abs(rng.normal(0, 1.2)) if habit == "align" else rng.normal(0, 0.05)
                    summaries.append(
                        {
                            "site": site,
                            "head": head,
                            "labels": [[habit, float(rng.uniform(0.6, 1))]],
                            "entropy": float(entropy),
                            "distance": float((weights[head] * abs(q - k)).sum(-1).mean()),
                            "effect": {"estimate": float(effect), "exact": None},
                        }
                    )
    attribution = []
    if "attribution" not in missing:
        near = weights_of("align", t, s, rng, False)
        tensors["ixg.s"] = encode(near * rng.choice([1, 1, 1, -0.4], (t, s)), "i8")
        tensors["ixg.t"] = encode(np.tril(rng.normal(0, 0.1, (t, t)), -1), "i8")
        attribution.append(
            {
                "method": "input_x_gradient",
                "source": "ixg.s",
                "target": "ixg.t",
                "signed": True,
                "gap": 0.03,
            }
        )
    lens = None
    if "token" not in missing:
        ranks = np.stack(
            [
                np.maximum(
                    1, (rng.integers(1, 4000, t) * (1 - (layer + 1) / layers) ** 2).astype(int)
                )
                for layer in range(layers)
            ]
        )
        ranks[-1] = [step["rank"] for step in steps]
        tensors["lens.rank"] = encode(ranks, "u32")
        lens = {
            "layers": [f"d{layer}" for layer in range(layers)],
            "rank": "lens.rank",
            "top": [
                [
                    [
                        [each[1], float(np.exp(each[2]))]
                        for each in (
                            steps[at]["top"] if layer == layers - 1 else steps[at]["top"][::-1]
                        )[:5]
                    ]
                    for at in range(t)
                ]
                for layer in range(layers)
            ],
            "exact_last": True,
        }
    beam, nbest = (
        None,
        [{"tokens": ids, "text": target, "sum": total, "normalised": total / t, "leaf": None}],
    )
    if "beam" not in missing:
        arrays, nbest = beam_of(ids, log_probs, width, nodes, rng)
        types = {
            "parent": "i32",
            "token": "i32",
            "logprob": "f32",
            "cum": "f32",
            "step": "i32",
            "reason": "u8",
            "cut": "f32",
        }
        for key, array in arrays.items():
            tensors[f"beam.{key}"] = encode(array, types[key])
        for node_id in arrays["token"]:
            token_texts.setdefault(str(node_id), " " + WORDS[int(node_id) % len(WORDS)])
        beam = {
            "width": width,
            "reasons": list(REASONS),
            "nodes": {key: f"beam.{key}" for key in types},
        }
        for entry in nbest:
            entry["text"] = "".join(token_texts[str(i)] for i in entry["tokens"] if i != 3).strip()
    positions = {"kind": "none", "note": "", "tensor": None, "curves": [], "reach": None}
    if "positions" not in missing:
        size = max(s, t)
        angle = np.subtract.outer(np.arange(size), np.arange(size))
        tensors["pos.sim"] = encode(np.cos(angle / 2) * np.exp(-abs(angle) / 9), "i8")
        positions = {
            "kind": "sinusoidal",
            "note": "Sines and cosines of the position are added to the embeddings.",
            "tensor": "pos.sim",
            "curves": [],
            "reach": None,
        }
    body = {
        "format": "dragoman.explanation",
        "version": 1,
        "model": {
            "name": "synthetic",
            "digest": "0" * 64,
            "family": "transformer",
            "task": task,
            "layers": {"encoder": layers, "decoder": layers},
            "heads": heads,
            "d_model": 64 * heads,
            "tokenizer": "sentencepiece",
            "attributions": ["input_x_gradient", "integrated_gradients", "occlusion"],
        },
        "request": {
            "text": source,
            "source_lang": languages[0],
            "target_lang": languages[1],
            "beam": width,
            "length_penalty": 1.0,
            "max_len": 100,
            "prefix": [],
            "off": [],
            "reference": None,
            "seed": seed,
        },
        **sides,
        "steps": steps,
        "score": {"sum": total, "normalised": total / t, "penalty": "average"},
        "nbest": nbest,
        "token_texts": token_texts,
        "beam": beam,
        "sites": sites,
        "heads": summaries,
        "lens": lens,
        "attribution": attribution,
        "positions": positions,
        "extras": {},
        "tensors": tensors,
        "branches": {},
        "ablations": {},
        "missing": missing,
        "checks": {"row_sum": 2e-7, "output": 3e-6, "score": 1e-6, "capture": 0.0, "pool": 0},
        "limits": {"budget": 2_000_000, "bytes": 0, "pooled": [], "dropped": []},
    }
    body["digest"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return body
