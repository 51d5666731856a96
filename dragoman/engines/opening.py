"""From a bundle to what runs it: the native engine, and beside it another where that is asked for or quicker."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from dragoman.bundle import Bundle
from dragoman.data.corpus import Corpus
from dragoman.decoding.stepping import Strategy
from dragoman.engines.choosing import choose_engine, settle_precision
from dragoman.engines.cpu.freezing import Pair
from dragoman.engines.cpu.shortlist import shortlist_of_texts
from dragoman.engines.face import Engine
from dragoman.engines.gpu.on_device import usual_precision
from dragoman.engines.measuring import choose_quickest
from dragoman.engines.native import Native
from dragoman.errors import ConfigError

logger = logging.getLogger(__name__)


class Opened(NamedTuple):
    """The engine that can do everything, and the one that translates, which may be the same."""

    native: Native
    engine: Engine


def open_engines(
    bundle: Bundle,
    device: torch.device,
    *,
    wanted: str = "auto",
    precision: str | None = None,
    measured_by: Strategy | None = None,
    shortlist: Corpus | None = None,
) -> Opened:
    """Open what is wanted of a bundle; with a strategy to measure by, `auto` takes what is the quickest at it here.

    A shortlist, made from the pairs of a corpus, is something that only the native engine has, on a CPU.
    """
    precision = settle_precision(precision, device)
    native = native_engine(bundle, device, precision)
    if shortlist is not None:
        if wanted not in ("auto", "native"):
            raise ConfigError([f"a shortlist needs the native engine; found {wanted}; leave out --engine or --shortlist"])
        if device.type != "cpu":
            raise ConfigError([f"a shortlist needs a CPU; found the device {device}; add --device cpu, or leave out --shortlist"])
        native.shortlist = shortlist_of_texts(shortlist, bundle.tokenizers)
        wanted = "native"
    other = choose_engine(bundle, wanted, device, precision)
    if other is None:
        _ = native.model  # now, so that a damaged model is told before anything is read
        return Opened(native, native)
    if measured_by is None or wanted != "auto":
        return Opened(native, other)
    return _quickest(bundle, native, other, measured_by)


def native_engine(bundle: Bundle, device: torch.device, precision: str | None = None) -> Native:
    """Make the engine of a bundle: on a CPU a worker for each thread, which few cores share better than a batch."""
    workers = torch.get_num_threads() if device.type == "cpu" else 1

    def pairs() -> list[Pair]:
        return [(case["src"], case["tgt"]) for case in bundle.golden["cases"]]

    return Native(lambda: bundle.model, precision=precision or usual_precision(device), workers=workers, pairs=pairs)


def described(engine: Engine) -> str:
    """Say what an engine is and how it divides its work."""
    threads = max(1, torch.get_num_threads() // engine.workers)
    return f"{engine.name} ({engine.workers} x {threads} {'thread' if threads == 1 else 'threads'})"


def _quickest(bundle: Bundle, native: Native, other: Engine, strategy: Strategy) -> Opened:
    """Measure which engine translates a bundle's own sentences the quickest, or remember it, and say what was measured."""
    engines: dict[str, Engine] = {described(each): each for each in (native, native.undivided(), other)}
    try:
        choice = choose_quickest(engines, bundle, strategy, precision=native.precision)
    except RuntimeError as error:
        said = next(iter(str(error).splitlines()), "")[:160]
        logger.warning(
            "the engine %s failed (%s): the native engine is used, and the result is the same but for rounding", other.name, said
        )
        return Opened(native, native)
    if choice is None:
        return Opened(native, other)
    if not choice.remembered:
        rates = ", ".join(f"{name} {rate:.0f}" for name, rate in choice.rates.items())
        logger.info("%s is the quickest here; sentences a second: %s", choice.name, rates)
    taken = engines[choice.name]
    return Opened(taken if isinstance(taken, Native) else native, taken)
