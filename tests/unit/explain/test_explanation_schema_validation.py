"""Files from elsewhere: the validator agrees with jsonschema; what does not fit is refused."""

from __future__ import annotations

import base64
import copy
import json
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from explain_kit import TEXT, explained_translator

from dragoman.bundle.format import BOX
from dragoman.errors import DataError
from dragoman.explain import Explanation
from dragoman.explain.explanation import (
    AttentionSite,
    Attribution,
    HeadSummary,
    NBestEntry,
    Step,
    Token,
    TokenizedText,
)
from dragoman.explain.explanation_schema_validation import (
    explanation_schema,
    find_problems,
    find_unusable_values,
)


def whole() -> dict[str, Any]:
    """Return the JSON form of an explanation that has every part."""
    text = TokenizedText(
        "ab", tokens=[Token(5, "ab", (0, 2), rank=3), Token(2, "</s>", (2, 2), special=True)]
    )
    return Explanation(
        model={"task": "translate"},
        request={"beam": 2},
        source=text,
        target=text,
        steps=[Step(5, -0.1, 1, 0.3, top=[(5, "ab", -0.1)]), Step(2, -0.2, 1, 0.4, forced=True)],
        score={"sum": -0.3, "normalised": -0.2, "penalty": "gnmt 0.6"},
        nbest=[NBestEntry([5], "ab", -0.3, -0.2)],
        sites=[
            AttentionSite(
                "x0", "decoder.0.cross", "cross", "cross", 0, 1, "target", "source",
                segments=[("memory", 0, 1)], key_labels=["a", "b"],
            )
        ],
        heads=[HeadSummary("x0", 0, [("align", 0.8)], 0.4, 1.2, -0.5, None)],
        lens={"layers": ["d0"], "rank": "lens.rank", "top": [[[["ab", 0.9]]]], "exact_last": True},
        attribution=[Attribution("occlusion", "occ.s")],
        positions={"kind": "sinusoidal", "note": "a note", "tensor": None, "curves": []},
        arrays={
            "x0.w": np.full((1, 2, 2), 0.5, dtype=np.float32),
            "lens.rank": np.ones((1, 2), dtype=np.int64),
            "occ.s": np.asarray([[0.5, -0.5], [1.0, 0.0]], dtype=np.float32),
        },
        missing={"beam": "It was decoded greedily."},
    ).to_dict()  # fmt: skip


CHANGES: list[tuple[str, list[Any], Any]] = [
    ("$.version: must be 1", ["version"], 2),
    ("$: must have 'steps'", ["steps"], ...),
    ("$.source.dir: must be one of ltr, rtl; found 'up'", ["source", "dir"], "up"),
    ("$.steps[0].rank: must be at least 1; found 0", ["steps", 0, "rank"], 0),
    ("$.steps[1].forced: must be of type boolean; found 1", ["steps", 1, "forced"], 1),
    ("$.steps[0].id: must be of type integer; found True", ["steps", 0, "id"], True),
    ("$.steps[0].top[0][3]: must not be there", ["steps", 0, "top", 0], [5, "ab", -0.1, 9]),
    ("$.steps[0].top[0]: must have items, at least 3", ["steps", 0, "top", 0], [5, "ab"]),
    ("$.digest: must match", ["digest"], "xyz"),
    ("$.missing.'colour': must not be there", ["missing", "colour"], "none"),
    ("$.missing.beam: must have characters, at least 1", ["missing", "beam"], ""),
    ("$.tensors.'x0.w'.dtype: must be one of", ["tensors", "x0.w", "dtype"], "f64"),
    ("$.tensors.'x0.w'.pool: must", ["tensors", "x0.w", "pool"], {"q": [0, 1]}),
    ("$.sites[0].sum: must be one of one, sub, none", ["sites", 0, "sum"], "two"),
    ("$.checks.'row_sum': must be of type number or null", ["checks", "row_sum"], "small"),
]


def test_the_schema_is_one_and_a_whole_explanation_is_valid() -> None:
    schema = explanation_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    values = json.loads(json.dumps(whole()))
    assert list(jsonschema.Draft202012Validator(schema).iter_errors(values)) == []
    assert find_problems(values) == []


@pytest.mark.parametrize(("problem", "path", "value"), CHANGES)
def test_the_invalid_value_is_named(problem: str, path: list[Any], value: Any) -> None:
    values = json.loads(json.dumps(whole()))
    container = values
    for part in path[:-1]:
        container = container[part]
    if value is ...:
        del container[path[-1]]
    else:
        container[path[-1]] = value
    found = find_problems(values)
    assert found
    assert found[0].startswith(problem)
    assert not jsonschema.Draft202012Validator(explanation_schema()).is_valid(values)
    if path != ["version"]:
        with pytest.raises(DataError, match="must follow its schema; found"):
            Explanation.from_dict(values)


def test_nonfinite_values_are_rejected() -> None:
    values = whole()
    values["steps"][0]["logprob"] = float("nan")
    assert find_problems(values)[0].startswith("$.steps[0].logprob: must be finite; found nan")


def test_few_problems_are_listed_of_many() -> None:
    values = copy.deepcopy(whole())
    values["source"]["tokens"] = [None] * 100
    assert len(find_problems(values)) == 20


def test_unknown_keywords_are_an_error() -> None:
    with pytest.raises(ValueError, match="'oneOf' is not known"):
        find_problems({}, {"oneOf": []})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "an explanation must be a JSON object; found"),
        ("[]", "found list"),
        ('{"format": "other"}', "found 'other'"),
        ('{"format": "dragoman.explanation", "version": 7}', "must have version 1; found 7"),
    ],
)
def test_other_files_are_rejected(text: str, problem: str) -> None:
    with pytest.raises(DataError) as error:
        Explanation.from_json(text)
    assert problem in str(error.value)


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


MISFITS: dict[str, tuple[Callable[[Values], None], str]] = {
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
    "a second root": (put_node("parent", "<i4", 1, -1), "parents must come before"),
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
    "token_texts": (put("token_texts", value={"a": ""}), "token ids; found 'a'"),
    "token_texts of many digits": (
        put("token_texts", value={"9" * 5000: ""}),
        "token ids; found '99",
    ),
    "half a character": (put("source", "text", value="\ud800"), "surrogate pair in '\\ud800'"),
    "NaN in the request": (put("request", "seed", value=math.nan), "finite; found nan"),
    "nesting": (put("positions", "note", value=nested(90)), "at most 64 deep; found more"),
    "heads that are off": (put("request", "off", value=5), "$.request.off"),
    "a branch": (put("branches", value={"0:5": {}}), "$.branches"),
    "an ablation": (put("ablations", value={"x0.0": {}}), "$.ablations"),
}


def flatten(entry: Values) -> None:
    entry["shape"] = [math.prod(entry["shape"])]


@pytest.mark.parametrize("name", MISFITS)
def test_the_error_is_one_line(name: str) -> None:
    change, sentence = MISFITS[name]
    values = json.loads(written())
    change(values)
    with pytest.raises(DataError) as caught:
        Explanation.from_json(json.dumps(values))
    message = str(caught.value)
    assert sentence in message
    assert "\n" not in message
    assert len(message) < 400


def test_valid_values_are_read() -> None:
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


def test_a_shared_path_names_no_folders_of_its_maker() -> None:
    explanation = explained_translator("transformer").explain(TEXT, beam=1)
    for path, expected in [
        ("/home/ada/models/de-en", "de-en"),
        ("models/de-en", "models/de-en"),
        (BOX, ""),
    ]:
        assert explanation.with_path(path, share=True).model["path"] == expected
    assert explanation.with_path("/home/ada/de-en").model["path"] == "/home/ada/de-en"
    assert explanation.with_path(BOX).model["path"] == ""


def test_text_in_any_script_is_usable() -> None:
    assert list(find_unusable_values({"text": ["ä", "我们", "😀"], "\u00fc": 0.5})) == []
    assert len(list(find_unusable_values(["ok", "\udfff", "ä\ud800", math.inf]))) == 3
