"""Checks of reduced precisions and of inference engines against the reference."""

from __future__ import annotations

import math

import torch

from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.greedy import GreedySearch
from dragoman.doctor.batching_cache_and_mask_checks import log_prob_tolerance
from dragoman.doctor.check_result import Measurement, NotApplicableError
from dragoman.doctor.fake_quantization import SimulatedInt8
from dragoman.doctor.model_under_test import BEAM_SIZE, ModelUnderTest
from dragoman.doctor.output_comparison import compare_outputs
from dragoman.errors import ConfigError
from dragoman.inference import NativeEngine
from dragoman.inference.engine_selection import UntrustedEngineError

BFLOAT16_TOLERANCE = 0.5  # in token log-probability
INT8_TOLERANCE = 1.0  # in token log-probability; also the limit of `dragoman export`
_INT8_MARK = "int8"  # in an engine's name


def check_bfloat16(subject: ModelUnderTest) -> Measurement:
    """Compare greedy search under bfloat16 autocast with the reference."""
    with torch.autocast(subject.device.type, torch.bfloat16):
        found = subject.search_all(subject.reference_engine, GreedySearch())
    return compare_outputs(
        subject.model, subject.sources, subject.batched_outputs, found
    ).to_measurement(BFLOAT16_TOLERANCE)


def check_int8(subject: ModelUnderTest) -> Measurement:
    """Compare greedy search with simulated int8 linear layers with the reference."""
    model = subject.model
    with SimulatedInt8():
        found = subject.search_all(subject.reference_engine, GreedySearch())
    return compare_outputs(model, subject.sources, subject.batched_outputs, found).to_measurement(
        INT8_TOLERANCE
    )


def check_native_engine(subject: ModelUnderTest) -> Measurement:
    """Compare the native engine with the reference, by greedy and by beam search."""
    model = subject.model
    engine = NativeEngine(lambda: model)
    scored, unscored = (
        compare_outputs(
            model,
            subject.sources,
            subject.batched_outputs,
            subject.search_all(engine, GreedySearch(), return_scores=return_scores),
        ).to_measurement(log_prob_tolerance(subject))
        for return_scores in (True, False)
    )
    native = subject.search_all(engine, BeamSearch(size=BEAM_SIZE))
    beam_error = max(
        abs(one.score - other.score)
        for one, other in zip(subject.beam_outputs, native, strict=True)
    )
    worse = max(
        scored, unscored, key=lambda each: math.inf if math.isnan(each.error) else each.error
    )
    return worse._replace(error=max(worse.error, beam_error))


def check_exported_engine(subject: ModelUnderTest, name: str) -> Measurement:
    """Compare greedy search of an exported engine with the reference."""
    try:
        engine = subject.engines[name]()
    except (ConfigError, UntrustedEngineError) as error:
        raise NotApplicableError(str(error)) from error
    request = subject.request(GreedySearch(), range(len(subject.sources)))
    reason = engine.unsupported_reason(request.strategy, request.longest)
    if reason:
        raise NotApplicableError(f"the engine {reason}")
    found = subject.search_all(engine, GreedySearch())
    return compare_outputs(
        subject.model, subject.sources, subject.batched_outputs, found
    ).to_measurement(INT8_TOLERANCE if _INT8_MARK in name else log_prob_tolerance(subject))


def skip_without_engines(subject: ModelUnderTest) -> Measurement:
    """Raise NotApplicableError: the model has no exported engines."""
    raise NotApplicableError("none; see dragoman export")
