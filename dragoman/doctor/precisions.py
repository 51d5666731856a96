"""Fewer bits and other programs: what they may change, and what they may not."""

from __future__ import annotations

import math

import torch

from dragoman.decoding.beam import Beam
from dragoman.decoding.greedy import Greedy
from dragoman.doctor.agreement import agree
from dragoman.doctor.eight_bits import EightBits
from dragoman.doctor.finding import Measured, NotApplicableError
from dragoman.doctor.promises import tolerance
from dragoman.doctor.subject import BEAM, Subject
from dragoman.engines import Native
from dragoman.engines.choosing import UntrustedError
from dragoman.errors import ConfigError

BFLOAT16 = 0.5  # of a piece's log-probability
INT8 = 1.0  # the same; what `dragoman export` refuses an int8 engine for as well
_QUANTISED = "int8"  # in the name of an engine


def survives_bfloat16(subject: Subject) -> Measured:
    """Search with products in bfloat16, as GPUs do."""
    with torch.autocast(subject.device.type, torch.bfloat16):
        found = subject.search_all(subject.plain, Greedy())
    return agree(subject.model, subject.sources, subject.together, found).measured(BFLOAT16)


def survives_int8(subject: Subject) -> Measured:
    """Search with the products of linear layers in eight bits, as CPUs do."""
    model = subject.model
    with EightBits():
        found = subject.search_all(subject.plain, Greedy())
    return agree(model, subject.sources, subject.together, found).measured(INT8)


def native_engine_agrees(subject: Subject) -> Measured:
    """Search as `translate` does, by whatever the native engine makes of the model, and by the model as it is.

    Greedily with scores and without, for which an engine may have a way of its own.
    """
    model = subject.model
    engine = Native(lambda: model)
    greedy, bare = (
        agree(model, subject.sources, subject.together, subject.search_all(engine, Greedy(), scored=scored)).measured(tolerance(subject))
        for scored in (True, False)
    )
    theirs = subject.search_all(engine, Beam(size=BEAM))
    beams = max(abs(one.score - other.score) for one, other in zip(subject.beams, theirs, strict=True))
    worse = max(greedy, bare, key=lambda each: math.inf if math.isnan(each.error) else each.error)
    return worse._replace(error=max(worse.error, beams))


def engine_agrees(subject: Subject, name: str) -> Measured:
    """Search by an engine that the bundle holds, and by the native one."""
    try:
        engine = subject.engines[name]()
    except (ConfigError, UntrustedError) as error:
        raise NotApplicableError(str(error)) from error
    request = subject.request(Greedy(), range(len(subject.sources)))
    reason = engine.refusal(request.strategy, request.longest)
    if reason:
        raise NotApplicableError(f"it {reason}")
    found = subject.search_all(engine, Greedy())
    return agree(subject.model, subject.sources, subject.together, found).measured(INT8 if _QUANTISED in name else tolerance(subject))


def no_engine(subject: Subject) -> Measured:
    """Say that there is no engine to compare with."""
    raise NotApplicableError("none here; dragoman export makes them")
