"""A file that claims what does not fit together is refused in one line, and in little memory."""

from __future__ import annotations

import base64
import copy
import json
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from explain_kit import TEXT, explained_translator

from dragoman.errors import DataError
from dragoman.explain import Explanation

Values = dict[str, Any]


@cache
def written() -> str:
    """Return an explanation of a small Transformer, with a lens, attribution and a beam."""
    translator = explained_translator("transformer")
    explanation = translator.add_branches(translator.explain(TEXT, beam=3), 1)
    head = f"{explanation.heads[0].site}.{explanation.heads[0].head}"
    explanation.ablations[head] = translator.ablate(explanation, [head]).to_dict()
    return explanation.to_json()


def put(*path: Any, value: Any) -> Callable[[Values], None]:
    """Return a change of one value."""

    def change(values: Any) -> None:
        for key in path[:-1]:
            values = values[key]
        values[path[-1]] = value

    return change


def put_node(field: str, dtype: str, node: int, value: float) -> Callable[[Values], None]:
    """Return a change of one number of one node of the beam."""

    def change(values: Values) -> None:
        entry = values["tensors"][values["beam"]["nodes"][field]]
        array = np.frombuffer(base64.b64decode(entry["data"]), dtype).copy()
        array[node] = value
        entry["data"] = base64.b64encode(array.tobytes()).decode()

    return change


def nested(depth: int) -> list[Any]:
    values: list[Any] = []
    for _ in range(depth):
        values = [values]
    return values


CHANGES: dict[str, tuple[Callable[[Values], None], str]] = {
    "shape of 10^27": (put("tensors", "x0.w", "shape", value=[10**9] * 3), "reshape"),
    "negative shape": (put("tensors", "x0.w", "shape", value=[-1]), "at least 0; found -1"),
    "shape of one axis": (lambda values: flatten(values["tensors"]["x0.w"]), "matrix for each"),
    "no base64": (put("tensors", "x0.w", "data", value="!!"), "must match"),
    "scale of 10^400": (put("tensors", "x0.w", "scale", value=10**400), "at most 2^53"),
    "scale NaN": (put("tensors", "x0.w", "scale", value=math.nan), "finite; found nan"),
    "pool of 10^12": (
        put("tensors", "x0.w", "pool", value={"q": [0, 10**12], "k": [0, 10**12]}),
        "matrix for each head",
    ),
    "heads of a site": (put("sites", 0, "heads", value=10**9), "matrix for each head"),
    "tensor of a site": (put("sites", 0, "tensor", value="no"), "name a tensor; found 'no'"),
    "two sites of one id": (
        lambda values: values["sites"].append(copy.deepcopy(values["sites"][0])),
        "different ids",
    ),
    "site of a head": (put("heads", 0, "site", value="z9"), "one of its site's; found z9.0"),
    "number of a head": (put("heads", 0, "head", value=10**9), "one of its site's; found"),
    "nodes nowhere": (put("beam", "nodes", "parent", value="no"), "vectors of one length"),
    "nodes of a matrix": (put("beam", "nodes", "parent", value="x0.w"), "vectors of one length"),
    "a cycle of parents": (put_node("parent", "<i4", 1, 2), "parents must come before"),
    "an unknown reason": (put_node("reason", "<u1", 1, 200), "below 9; found 200"),
    "leaf": (put("nbest", 0, "leaf", value=10**9), "n-best entry must end at one of"),
    "span": (put("source", "tokens", 0, "span", value=[0, 10**9]), "part of its text"),
    "span backwards": (put("source", "tokens", 0, "span", value=[3, 1]), "found 3 to 1 of"),
    "word": (put("target", "words", value=[[0, 10**9]]), "word of target must be a range"),
    "tokens": (put("source", "tokens", value=[]), "must be a range of its tokens"),
    "steps": (put("steps", value=[]), "as many as target tokens; found 0 and"),
    "lens": (put("lens", "rank", value="no"), "lens.rank must name a tensor; found 'no'"),
    "lens of no layers": (put("lens", "layers", value=[]), "lens must have 0 layers"),
    "attribution": (put("attribution", 0, "source", value="no"), "attribution.source must name"),
    "attribution of heads": (put("attribution", 0, "source", value="x0.w"), "must be a matrix"),
    "extra": (put("extras", "gates", value="no"), "extras.gates must name a tensor"),
    "curve": (
        put("positions", "curves", value=[{"site": "e0", "head": 0, "x": [1.0], "y": []}]),
        "a y for each x; found 1 and 0",
    ),
    "pieces": (put("pieces", value={"a": ""}), "ids of tokens; found 'a'"),
    "pieces of many digits": (put("pieces", value={"9" * 5000: ""}), "ids of tokens; found '99"),
    "half a character": (put("source", "text", value="\ud800"), "surrogate pair in '\\ud800'"),
    "NaN in the request": (put("request", "seed", value=math.nan), "finite; found nan"),
    "nesting": (put("positions", "note", value=nested(90)), "at most 64 deep; found more"),
    "heads that are off": (put("request", "off", value=5), "$.request.off"),
    "a branch": (put("branches", value={"0:5": {}}), "$.branches"),
    "an ablation": (put("ablations", value={"x0.0": {}}), "$.ablations"),
}


def flatten(entry: Values) -> None:
    entry["shape"] = [math.prod(entry["shape"])]


@pytest.mark.parametrize("name", CHANGES)
def test_one_line_says_what_does_not_fit(name: str) -> None:
    change, sentence = CHANGES[name]
    values = json.loads(written())
    change(values)
    with pytest.raises(DataError) as caught:
        Explanation.from_json(json.dumps(values))
    message = str(caught.value)
    assert sentence in message
    assert "\n" not in message
    assert len(message) < 400


def test_what_fits_is_read() -> None:
    explanation = Explanation.from_json(written())
    assert explanation.beam is not None
    assert explanation.lens is not None
    assert explanation.attribution
    assert explanation.branches
    assert explanation.ablations
    pooled = Explanation.from_json(explanation.to_json(20_000))
    assert pooled.digest == explanation.digest


def test_impossible_tokens_have_log_probability_minus_infinity() -> None:
    values = json.loads(written())
    values["steps"][0]["logprob"] = values["steps"][0]["top"][0][2] = None
    explanation = Explanation.from_json(json.dumps(values))
    assert explanation.log_probs[0] == -math.inf
    assert explanation.steps[0].top[0][2] == -math.inf
    assert explanation.to_dict()["steps"][0]["logprob"] is None


def test_a_path_of_the_model_changes_no_digest() -> None:
    explanation = explained_translator("transformer").explain(TEXT, beam=1)
    moved = explanation.with_path("models/other")
    assert moved.model["path"] == "models/other"
    assert moved.digest == explanation.digest
    assert Explanation.from_json(moved.to_json()).model["path"] == "models/other"
