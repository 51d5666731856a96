"""What a check says: how far off it was, how far it may be, and whether it had anything to check."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple


class Measurement(NamedTuple):
    """The outcome of a check that could be made."""

    error: float  # the largest difference found; NaN where the model does not compute numbers
    tolerance: float  # the largest that a sound model may have
    note: str = ""


class NotApplicableError(Exception):
    """There is nothing to check here; the message says why, and is shown beside SKIP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """One row of the table."""

    name: str
    passed: bool | None  # None where the check did not apply
    error: float | None = None
    tolerance: float | None = None
    note: str = ""

    @classmethod
    def from_measurement(cls, name: str, measured: Measurement) -> CheckResult:
        """Judge what was measured; an error that is not a number never passes."""
        error, tolerance, note = measured
        return cls(
            name=name, passed=error <= tolerance, error=error, tolerance=tolerance, note=note
        )

    @property
    def verdict(self) -> str:
        """The word for it: PASS, FAIL or SKIP."""
        return "SKIP" if self.passed is None else "PASS" if self.passed else "FAIL"

    def facts(self) -> dict[str, Any]:
        """Turn it into plain values; JSON knows no infinity, so that one is written as a word."""
        error = self.error if self.error is None or math.isfinite(self.error) else str(self.error)
        return {
            "check": self.name,
            "verdict": self.verdict,
            "error": error,
            "tolerance": self.tolerance,
            "note": self.note,
        }
