"""Search errors and model errors, by their definitions."""

from __future__ import annotations

import pytest

from dragoman.explain.explanation_builder import diagnose


@pytest.mark.parametrize(
    ("reference", "found", "options", "verdict", "words"),
    [
        (-1.0, -2.0, {}, "search_error", "higher than its own output, -1.00 against -2.00"),
        (-2.0, -1.0, {}, "model_error", "lower than its own output, -2.00 against -1.00"),
        (-1.0, -1.00001, {}, "equal", "-1.00 against -1.00"),
        (-1.0, -1.00001, {"same_tokens": True}, "same", "The search found the reference"),
        (-9.0, -1.0, {"finished": False}, "search_error", "cut at its maximum length"),
    ],
)
def test_a_reference_is_a_search_error_if_the_model_prefers_it(
    reference: float, found: float, options: dict[str, bool], verdict: str, words: str
) -> None:
    diagnosis = diagnose(reference=reference, found=found, **options)
    assert diagnosis.verdict == verdict
    assert words in diagnosis.sentence
    assert diagnosis.sentence.endswith(".")
