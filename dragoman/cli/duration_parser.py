"""Parse durations: 90s, 30m, 1h, 1h30m."""

from __future__ import annotations

import re

from dragoman.errors import ConfigError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION_PART = re.compile(
    r"(\d+(?:\.\d+)?)\s*(s|m|h|d)"
    r"(?:(?<=s)ec(?:ond)?s?|(?<=m)in(?:ute)?s?|(?<=h)(?:ou)?rs?|(?<=d)ays?)?(?![a-z])",
    re.ASCII,
)


def parse_duration(text: str) -> float:
    """Return the seconds of `1h30m` or `90 minutes`; raise ConfigError without a unit."""
    compact = text.strip().lower()
    parts = _DURATION_PART.findall(compact)
    total = sum(float(amount) * _SECONDS[unit] for amount, unit in parts)
    if parts and total == 0:
        raise ConfigError(
            [f"a duration must be above 0; found {text!r}; for example 90s, 30m or 1h30m"]
        )
    if not parts or _DURATION_PART.sub("", compact).strip() or not 0 < total < float("inf"):
        bare = re.fullmatch(r"\d+(\.\d+)?", compact, re.ASCII) and float(compact) > 0
        hint = (
            f"did you mean {compact}s or {compact}m?" if bare else "for example 90s, 30m or 1h30m"
        )
        raise ConfigError(
            [f"a duration must be a number with its unit s, m, h or d; found {text!r}; {hint}"]
        )
    return total
