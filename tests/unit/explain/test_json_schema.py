"""The validator agrees with the package jsonschema, and names what is wrong."""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonschema
import numpy as np
import pytest

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
from dragoman.explain.validation import explanation_schema, find_problems


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
def test_what_is_wrong_is_named(problem: str, path: list[Any], value: Any) -> None:
    values = json.loads(json.dumps(whole()))
    place = values
    for part in path[:-1]:
        place = place[part]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    found = find_problems(values)
    assert found
    assert found[0].startswith(problem)
    assert not jsonschema.Draft202012Validator(explanation_schema()).is_valid(values)
    if path != ["version"]:
        with pytest.raises(DataError, match="must follow its schema; found"):
            Explanation.from_dict(values)


def test_what_is_not_finite_is_refused() -> None:
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
def test_other_files_are_refused(text: str, problem: str) -> None:
    with pytest.raises(DataError) as error:
        Explanation.from_json(text)
    assert problem in str(error.value)
