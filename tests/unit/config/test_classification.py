"""Settings of classification: lists of numbers, and inconsistencies that are reported."""

from __future__ import annotations

from typing import Any

import pytest

from dragoman.config.classification import ClassifyConfig
from dragoman.config.setting_declaration import convert_value, describe_type, list_settings


def test_lists_of_numbers_are_read_from_numbers_and_text() -> None:
    kind = {each.name: each.type for each in list_settings(ClassifyConfig)}["filter_widths"]
    assert convert_value([3, "4"], kind) == (3, 4)
    assert convert_value(5, kind) == (5,)
    assert describe_type(kind) == "a list of integers"
    with pytest.raises(ValueError, match="three"):
        convert_value(["three"], kind)


def test_the_defaults_are_consistent() -> None:
    assert not list(ClassifyConfig().problems())


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"filter_widths": (3, 0)}, "found 0"),
        ({"filter_widths": (64, 65)}, "must be from 1 to 64; found 65"),
        ({"filter_widths": (3, 3)}, "found [3, 3]"),
        ({"pooling": "none"}, "found neither classify.filter_widths nor classify.ngrams"),
        ({"hierarchical": True, "filter_widths": (3,)}, "found classify.filter_widths=[3]"),
        ({"hierarchical": True, "pooling": "none", "ngrams": 1}, "found classify.pooling=none"),
        ({"sentence_encoder": ("bigru",)}, "found ['bigru']"),
        ({"sentence_dropout": 0.1}, "found 0.1"),
        ({"filter_input": "one_hot"}, "found classify.filter_widths=[]"),
        ({"overlap_penalty": 1.0, "pooling": "max"}, "found max"),
        ({"branch_loss": 1.0}, "found classify.ngrams=0"),
        ({"attribute_field": "facts", "pooling": "labels"}, "found classify.pooling=labels"),
        ({"label_names": True, "pooling": "max"}, "found classify.pooling=max"),
        (
            {"label_names": True, "pooling": "labels", "hierarchical": True},
            "found classify.hierarchical=true",
        ),
    ],
)
def test_inconsistent_settings_are_reported(values: dict[str, Any], found: str) -> None:
    problems = list(ClassifyConfig(**values).problems())
    assert len(problems) == 1
    assert found in problems[0]
