"""Conversion of values to a setting's type, and the text of its range."""

from __future__ import annotations

from typing import Any

import pytest

from dragoman.config.setting_declaration import Paths, Setting, convert_value, format_bound


@pytest.mark.parametrize(
    ("value", "kind", "converted"),
    [
        ("1e5", int, 100_000),
        (2.0, int, 2),
        ("1e-3", float, 1e-3),
        (3, float, 3.0),
        (7, str, "7"),
        (None, int | None, None),
        ("3", int | None, 3),
        (["a"], Paths, "a"),
        (["a", "b"], Paths, ("a", "b")),
        ("lstm", tuple[str, ...], ("lstm",)),
        (["lstm(a=1", "b=2)", "ffn"], tuple[str, ...], ("lstm(a=1, b=2)", "ffn")),
        (["a(b(c", "d)", "e)", "f"], tuple[str, ...], ("a(b(c, d), e)", "f")),
    ],
)
def test_values_are_converted(value: Any, kind: Any, converted: Any) -> None:
    found = convert_value(value, kind)
    assert found == converted
    assert type(found) is type(converted)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1.5, int),
        ("1.5", int),
        (True, int),
        (True, float),
        (False, str),
        ("yes", bool),
        (1, bool),
        ([1], tuple[str, ...]),
        ({"a": 1}, tuple[str, ...]),
        ([True], tuple[int, ...]),
    ],
)
def test_values_of_another_type_are_rejected(value: Any, kind: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        convert_value(value, kind)


def test_both_ends_of_a_range_are_allowed() -> None:
    setting = Setting("", at_least=1, at_most=1_000_000)
    assert setting.describe_range() == "1 to 1,000,000"
    assert setting.problem("x", 1) is setting.problem("x", 1_000_000) is None
    assert setting.problem("x", 0) == "x must be at least 1; found 0; raise it"
    found = setting.problem("x", 1_000_001)
    assert found == "x must be at most 1,000,000; found 1000001; lower it"
    assert "finite" in str(setting.problem("x", float("nan")))
    assert Setting("", at_least=0.5).describe_range() == "at least 0.5"
    assert Setting("", at_most=2).describe_range() == "at most 2"
    assert format_bound(1e-12) == "1e-12"


def test_a_boolean_becomes_a_word_only_where_the_word_is_a_choice() -> None:
    switch, half = Setting("", choices=("auto", "on", "off")), Setting("", choices=("auto", "off"))
    assert (switch.restore_on_off(True), switch.restore_on_off(False)) == ("on", "off")
    assert (half.restore_on_off(True), half.restore_on_off(False)) == (True, "off")
    assert Setting("").restore_on_off(False) is False
