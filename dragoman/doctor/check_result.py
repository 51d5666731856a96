"""The result of a check: its error, its tolerance, and whether it applied; and how checks run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dragoman.errors import DragomanError

logger = logging.getLogger(__name__)


class Measurement(NamedTuple):
    """The error that a check measured."""

    error: float  # the largest difference found; NaN if the model computes NaN
    tolerance: float  # the largest error that passes
    note: str = ""


class NotApplicableError(Exception):
    """The check does not apply to this model; the message, shown beside SKIP, is the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """One row of the table."""

    name: str
    passed: bool | None  # None if the check was skipped
    error: float | None = None
    tolerance: float | None = None
    note: str = ""

    @classmethod
    def from_measurement(cls, name: str, measured: Measurement) -> CheckResult:
        """Return PASS if the error is within its tolerance; NaN fails."""
        error, tolerance, note = measured
        return cls(
            name=name, passed=error <= tolerance, error=error, tolerance=tolerance, note=note
        )

    @property
    def verdict(self) -> str:
        """PASS, FAIL or SKIP."""
        return "SKIP" if self.passed is None else "PASS" if self.passed else "FAIL"

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values; NaN and infinity become strings."""
        error = self.error if self.error is None or math.isfinite(self.error) else str(self.error)
        return {
            "check": self.name,
            "verdict": self.verdict,
            "error": error,
            "tolerance": self.tolerance,
            "note": self.note,
        }


def run_named_checks(
    checks: Mapping[str, Callable[[], Measurement]],
    *,
    on_check: Callable[[str], None] = lambda name: None,
) -> Iterator[CheckResult]:
    """Run every check in turn and yield its result; an exception fails the check.

    `on_check` is called with each name before the check runs.
    """
    for name, check in checks.items():
        on_check(name)
        try:
            yield CheckResult.from_measurement(name, check())
        except NotApplicableError as reason:
            yield CheckResult(name=name, passed=None, note=str(reason))
        except DragomanError as error:
            yield CheckResult(name=name, passed=False, note=str(error))
        except Exception as error:  # a broken model can raise anything
            logger.debug("check %s raised an exception", name, exc_info=True)
            yield CheckResult(
                name=name, passed=False, note=f"{type(error).__name__}: {error!s:.200}"
            )
