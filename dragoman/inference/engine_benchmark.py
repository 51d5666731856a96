"""Which of several engines is the quickest for a bundle on this machine: measured once, and remembered.

What was found is kept in the user's cache folder, under a key of everything that it depends on: the model, the machine, the releases.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from dragoman._version import __version__
from dragoman.bundle import Bundle
from dragoman.decoding.search import SearchStrategy
from dragoman.inference.engine import Engine, SearchRequest
from dragoman.inference.engine_directory import model_digest
from dragoman.runtime.threads import map_in_threads
from dragoman.storage.atomic import read_regular, replace_file
from dragoman.storage.cache import cache_dir, make_private_directory, trust_problem

logger = logging.getLogger(__name__)

SECONDS_PER_ENGINE = 0.25  # that each engine is given, beside a first batch that does not count
_BATCH_ROWS = 16  # sentences of a batch
_MAX_CACHE_BYTES = 1 << 20  # of what is remembered


class EngineChoice(NamedTuple):
    """The quickest engine, and how many sentences a second each of them managed."""

    name: str
    rates: dict[str, float]
    from_cache: bool  # from an earlier time


def select_fastest_engine(
    engines: Mapping[str, Engine],
    bundle: Bundle,
    strategy: SearchStrategy,
    *,
    precision: str = "float32",
    cache: Path | None = None,
) -> EngineChoice | None:
    """Name the quickest of some engines of one precision; None where a bundle has no sentences to measure with."""
    cases = bundle.golden["cases"]
    if not cases:
        return None
    from_cache = load_measurement(bundle, strategy, precision=precision, cache=cache)
    if from_cache is not None and set(from_cache.rates) == set(engines):
        return from_cache
    path = _measurements_path(cache)
    sources = [case["src"] for case in cases]
    rates = {
        name: round(measure_throughput(engine, sources, strategy), 2)
        for name, engine in engines.items()
    }
    _write_measurements(
        path, {**_read_measurements(path), _measurement_key(bundle, strategy, precision): rates}
    )
    return EngineChoice(_fastest(rates), rates, from_cache=False)


def load_measurement(
    bundle: Bundle,
    strategy: SearchStrategy,
    *,
    precision: str = "float32",
    cache: Path | None = None,
) -> EngineChoice | None:
    """Return what was measured here before for a bundle, a search and a precision; None where nothing was."""
    rates = _read_measurements(_measurements_path(cache)).get(
        _measurement_key(bundle, strategy, precision)
    )
    if isinstance(rates, dict) and rates and all(_is_valid_rate(rate) for rate in rates.values()):
        return EngineChoice(_fastest(rates), rates, from_cache=True)
    return None


def measure_throughput(
    engine: Engine,
    sources: Sequence[Sequence[int]],
    strategy: SearchStrategy,
    *,
    seconds: float = SECONDS_PER_ENGINE,
) -> float:
    """Count the sentences that an engine translates in a second, its workers all at work."""
    rows = [sources[number % len(sources)] for number in range(_BATCH_ROWS)]
    request = SearchRequest(
        sources=rows,
        limits=[2 * len(row) + 10 for row in rows],
        prefixes=[[]] * _BATCH_ROWS,
        strategy=strategy,
        lines=range(_BATCH_ROWS),
        return_scores=False,
    )
    engine.generate(request)
    begin, done = time.perf_counter(), 0
    while done == 0 or time.perf_counter() - begin < seconds:
        done += sum(
            len(found)
            for found in map_in_threads(
                engine.generate, [request] * engine.client_threads, engine.client_threads
            )
        )
    return done / (time.perf_counter() - begin)


def _is_valid_rate(value: object) -> bool:
    """Whether a value read from the cache can be a number of sentences a second."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e9


def _fastest(rates: Mapping[str, float]) -> str:
    """Name the highest rate."""
    return max(rates, key=lambda name: rates[name])


def _measurements_path(cache: Path | None) -> Path:
    """Name the file that remembers."""
    return (cache_dir() if cache is None else cache) / "engines.json"


def _measurement_key(bundle: Bundle, strategy: SearchStrategy, precision: str) -> str:
    """Hash all that a measurement depends on."""
    releases = [f"{name} {_package_version(name)}" for name in ("torch", "ctranslate2")]
    machine = [
        platform.machine(),
        platform.processor(),
        torch.backends.cpu.get_cpu_capability(),
        platform.node(),
    ]
    parts = [
        model_digest(bundle),
        __version__,
        *releases,
        *machine,
        str(torch.get_num_threads()),
        repr(strategy),
        precision,
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _package_version(name: str) -> str:
    """Read a library's release without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _read_measurements(path: Path) -> dict[str, dict[str, float]]:
    """Read what is remembered; whatever is wrong with it, it can be measured again."""
    try:
        if trust_problem(path):
            return {}
        content = json.loads(read_regular(path, _MAX_CACHE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _write_measurements(path: Path, content: Mapping[str, Mapping[str, float]]) -> None:
    """Remember, where that can be done: whole or not at all."""
    try:
        make_private_directory(path.parent)
        replace_file(path, json.dumps(content).encode("utf-8"), mode=0o600)
    except OSError as error:
        logger.debug("%s cannot be written: %s", path, error)
