"""A calibration of the confidence to put into bundles."""

from __future__ import annotations

from pathlib import Path

from dragoman.evaluate.confidence_calibration import ConfidenceMap

CALIBRATION = ConfidenceMap(
    good_chrf=61.5,
    length_ratio=1.0,
    weights={"mean_log_prob": 2.0, "min_log_prob": 0.5, "known_tokens": 1.0, "length_fit": 0.25},
    bias=1.5,
    fitted_on=400,
    measured_on=410,
    calibration_error=0.052,
    chance_error=0.04,
    auroc=0.812,
)


def add_calibration(bundle: Path, path: Path) -> Path:
    """Write a translation model again, at another path, with the calibration."""
    from dragoman.bundle import Bundle, write_bundle

    found = Bundle.load(bundle)
    write_bundle(
        path,
        config=found.config,
        tokenizers=found.tokenizers,
        weights=found.model.state_dict(),
        golden=[case["input"] for case in found.golden["cases"]],
        calibration=CALIBRATION,
    )
    return path
