"""Durations as users type them."""

from __future__ import annotations

import pytest

from dragoman.cli.duration_parser import parse_duration
from dragoman.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("30m", 1800),
        ("1h", 3600),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("1h 30m", 5400),
        ("2d", 172_800),
        (" 10M ", 600),
        ("10 minutes", 600),
        ("2 hours 5 mins", 7500),
        ("1hr", 3600),
    ],
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "m",
        "thirty minutes",
        "30x",
        "30m later",
        "-5m",
        "1:30",
        "0",
        "30ms",
        "1e3s",
        "9" * 400 + "d",
    ],
)
def test_invalid_durations_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="a duration must be a number with its unit") as caught:
        parse_duration(text)
    assert f"found {text!r}" in str(caught.value)


def test_duration_without_a_unit_suggests_units() -> None:
    with pytest.raises(ConfigError, match="found '30'; did you mean 30s or 30m"):
        parse_duration("30")


@pytest.mark.parametrize("text", ["0s", "0h 0m", "0.0d"])
def test_a_duration_of_zero_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=f"a duration must be above 0; found '{text}'"):
        parse_duration(text)
