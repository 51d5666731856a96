"""The list of checks and how they are run; a new check is a function listed in CHECKS."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

from dragoman.doctor import (
    batching_cache_and_mask_checks,
    bundle_content_checks,
    precision_and_engine_agreement,
)
from dragoman.doctor.check_result import CheckResult, Measurement, run_named_checks
from dragoman.doctor.model_under_test import ModelUnderTest

# A check raises NotApplicableError if it does not apply to the model.
Check = Callable[[ModelUnderTest], Measurement]

CHECKS: dict[str, Check] = {
    # First: it loads the model and reports why that fails.
    "vocabulary sizes": bundle_content_checks.check_vocabulary_sizes,
    "finite weights": bundle_content_checks.check_finite_weights,
    "tokenizer round trip": bundle_content_checks.check_tokenizer_round_trip,
    "golden vectors": bundle_content_checks.check_golden_vectors,
    "batching": batching_cache_and_mask_checks.check_batching,
    "KV cache": batching_cache_and_mask_checks.check_kv_cache,
    "beam 1 = greedy": batching_cache_and_mask_checks.check_beam_size_one,
    "beam scores": batching_cache_and_mask_checks.check_beam_scores,
    "causality": batching_cache_and_mask_checks.check_causality,
    "source padding": batching_cache_and_mask_checks.check_source_padding,
    "target padding": batching_cache_and_mask_checks.check_target_padding,
    "batch independence": batching_cache_and_mask_checks.check_batch_independence,
    "bfloat16": precision_and_engine_agreement.check_bfloat16,
    "int8": precision_and_engine_agreement.check_int8,
    "native engine": precision_and_engine_agreement.check_native_engine,
}


def select_checks(subject: ModelUnderTest) -> dict[str, Check]:
    """Return the checks, with one for each exported engine of the model."""
    engines = {
        name: functools.partial(precision_and_engine_agreement.check_exported_engine, name=name)
        for name in subject.engines
    }
    return {
        **CHECKS,
        **(engines or {"exported engines": precision_and_engine_agreement.skip_without_engines}),
    }


def run_checks(
    subject: ModelUnderTest,
    checks: Mapping[str, Check] | None = None,
    *,
    on_check: Callable[[str], None] = lambda name: None,
) -> Iterator[CheckResult]:
    """Run every check in turn and yield its result; an exception fails the check.

    `on_check` is called with each name before the check runs.
    """
    chosen = select_checks(subject) if checks is None else checks
    bound = {name: functools.partial(check, subject) for name, check in chosen.items()}
    return run_named_checks(bound, on_check=on_check)
