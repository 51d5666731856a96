"""Consistency checks of a model, each with its error and tolerance."""

from dragoman.doctor.check_result import CheckResult
from dragoman.doctor.checks import CHECKS, run_checks
from dragoman.doctor.model_under_test import ModelUnderTest, load_model_under_test

__all__ = ["CHECKS", "CheckResult", "ModelUnderTest", "load_model_under_test", "run_checks"]
