"""Checks of a model, each with its error and tolerance, and of the installation."""

from dragoman.doctor.check_catalogue import CHECKS, run_checks
from dragoman.doctor.check_result import CheckResult
from dragoman.doctor.installation_checks import run_installation_checks
from dragoman.doctor.model_under_test import ModelUnderTest, load_model_under_test
from dragoman.doctor.non_translation_model_checks import TaskModelUnderTest, run_task_checks

__all__ = [
    "CHECKS",
    "CheckResult",
    "ModelUnderTest",
    "TaskModelUnderTest",
    "load_model_under_test",
    "run_checks",
    "run_installation_checks",
    "run_task_checks",
]
