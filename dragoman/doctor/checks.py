"""The list of checks, and how they are run: to add one, write a function of a `Subject` and give it a line here."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping

from dragoman.doctor import holdings, precisions, promises
from dragoman.doctor.finding import Finding, Measured, NotApplicableError
from dragoman.doctor.subject import Subject
from dragoman.errors import DragomanError

logger = logging.getLogger(__name__)

Check = Callable[[Subject], Measured]  # raises NotApplicableError where there is nothing to check

CHECKS: dict[str, Check] = {
    "vocabularies fit": holdings.vocabularies_fit,  # first: it loads the model, and tells why that fails
    "weights finite": holdings.weights_are_finite,
    "text comes back": holdings.text_comes_back,
    "golden vectors": holdings.golden_vectors_hold,
    "batched = single": promises.batched_equals_single,
    "cached = uncached": promises.cached_equals_uncached,
    "beam 1 = greedy": promises.beam_of_one_is_greedy,
    "beam scores": promises.beams_are_scored_right,
    "no look ahead": promises.no_look_ahead,
    "source padding": promises.source_padding_changes_nothing,
    "target padding": promises.target_padding_changes_nothing,
    "batch neighbours": promises.neighbours_change_nothing,
    "bfloat16": precisions.survives_bfloat16,
    "int8": precisions.survives_int8,
    "native engine": precisions.native_engine_agrees,
}


def checks_for(subject: Subject) -> dict[str, Check]:
    """Give the checks, and one more for each engine that comes with the model."""
    engines = {name: functools.partial(precisions.engine_agrees, name=name) for name in subject.engines}
    return {**CHECKS, **(engines or {"exported engines": precisions.no_engine})}


def examine(
    subject: Subject, checks: Mapping[str, Check] | None = None, *, tell: Callable[[str], None] = lambda name: None
) -> Iterator[Finding]:
    """Make every check in turn, telling its name first; what a check cannot get through, it fails, and the next one is made."""
    for name, check in (checks_for(subject) if checks is None else checks).items():
        tell(name)
        try:
            yield Finding.of(name, check(subject))
        except NotApplicableError as reason:
            yield Finding(name=name, passed=None, note=str(reason))
        except DragomanError as error:
            yield Finding(name=name, passed=False, note=str(error))
        except Exception as error:  # a model that is broken may break anything, and the other rows say where
            logger.debug("%s could not be checked", name, exc_info=True)
            yield Finding(name=name, passed=False, note=f"{type(error).__name__}: {error!s:.200}")
