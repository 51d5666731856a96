"""Fewer bits and other programs: what they may change, and what they may not."""

from __future__ import annotations

import math

import torch

from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.greedy import GreedySearch
from dragoman.doctor.check_result import Measurement, NotApplicableError
from dragoman.doctor.int8_simulation import SimulatedInt8
from dragoman.doctor.model_checks import log_prob_tolerance
from dragoman.doctor.model_under_test import BEAM_SIZE, ModelUnderTest
from dragoman.doctor.output_comparison import compare_outputs
from dragoman.errors import ConfigError
from dragoman.inference import NativeEngine
from dragoman.inference.engine_selection import UntrustedEngineError

BFLOAT16_TOLERANCE = 0.5  # of a piece's log-probability
INT8_TOLERANCE = 1.0  # the same; what `dragoman export` refuses an int8 engine for as well
_INT8_MARK = "int8"  # in the name of an engine


def check_bfloat16(subject: ModelUnderTest) -> Measurement:
    """Search with products in bfloat16, as GPUs do."""
    with torch.autocast(subject.device.type, torch.bfloat16):
        found = subject.search_all(subject.reference_engine, GreedySearch())
    return compare_outputs(
        subject.model, subject.sources, subject.batched_outputs, found
    ).to_measurement(BFLOAT16_TOLERANCE)


def check_int8(subject: ModelUnderTest) -> Measurement:
    """Search with the products of linear layers in eight bits, as CPUs do."""
    model = subject.model
    with SimulatedInt8():
        found = subject.search_all(subject.reference_engine, GreedySearch())
    return compare_outputs(model, subject.sources, subject.batched_outputs, found).to_measurement(
        INT8_TOLERANCE
    )


def check_native_engine(subject: ModelUnderTest) -> Measurement:
    """Search as `translate` does, by whatever the native engine makes of the model, and by the model as it is.

    Greedily with scores and without, for which an engine may have a way of its own.
    """
    model = subject.model
    engine = NativeEngine(lambda: model)
    greedy, bare = (
        compare_outputs(
            model,
            subject.sources,
            subject.batched_outputs,
            subject.search_all(engine, GreedySearch(), return_scores=return_scores),
        ).to_measurement(log_prob_tolerance(subject))
        for return_scores in (True, False)
    )
    theirs = subject.search_all(engine, BeamSearch(size=BEAM_SIZE))
    beam_error = max(
        abs(one.score - other.score)
        for one, other in zip(subject.beam_outputs, theirs, strict=True)
    )
    worse = max(greedy, bare, key=lambda each: math.inf if math.isnan(each.error) else each.error)
    return worse._replace(error=max(worse.error, beam_error))


def check_exported_engine(subject: ModelUnderTest, name: str) -> Measurement:
    """Search by an engine that the bundle holds, and by the native one."""
    try:
        engine = subject.engines[name]()
    except (ConfigError, UntrustedEngineError) as error:
        raise NotApplicableError(str(error)) from error
    request = subject.request(GreedySearch(), range(len(subject.sources)))
    reason = engine.unsupported_reason(request.strategy, request.longest)
    if reason:
        raise NotApplicableError(f"it {reason}")
    found = subject.search_all(engine, GreedySearch())
    return compare_outputs(
        subject.model, subject.sources, subject.batched_outputs, found
    ).to_measurement(INT8_TOLERANCE if _INT8_MARK in name else log_prob_tolerance(subject))


def skip_without_engines(subject: ModelUnderTest) -> Measurement:
    """Say that there is no engine to compare with."""
    raise NotApplicableError("none here; dragoman export makes them")
