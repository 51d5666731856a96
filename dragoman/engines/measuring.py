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
from dragoman.decoding.stepping import Strategy
from dragoman.engines.face import Engine, Request
from dragoman.engines.folder import model_digest
from dragoman.engines.spreading import spread
from dragoman.files.atomic import read_regular, replace_file
from dragoman.files.cache import cache_folder, distrust, make_private

logger = logging.getLogger(__name__)

SECONDS = 0.25  # that each engine is given, beside a first batch that does not count
_ROWS = 16  # sentences of a batch
_MOST_BYTES = 1 << 20  # of what is remembered


class Choice(NamedTuple):
    """The quickest engine, and how many sentences a second each of them managed."""

    name: str
    rates: dict[str, float]
    remembered: bool  # from an earlier time


def choose_quickest(
    engines: Mapping[str, Engine], bundle: Bundle, strategy: Strategy, *, precision: str = "float32", cache: Path | None = None
) -> Choice | None:
    """Name the quickest of some engines of one precision; None where a bundle has no sentences to measure with."""
    cases = bundle.golden["cases"]
    if not cases:
        return None
    remembered = recall(bundle, strategy, precision=precision, cache=cache)
    if remembered is not None and set(remembered.rates) == set(engines):
        return remembered
    path = _place(cache)
    sources = [case["src"] for case in cases]
    rates = {name: round(measure(engine, sources, strategy), 2) for name, engine in engines.items()}
    _write(path, {**_read(path), _key(bundle, strategy, precision): rates})
    return Choice(_best(rates), rates, remembered=False)


def recall(bundle: Bundle, strategy: Strategy, *, precision: str = "float32", cache: Path | None = None) -> Choice | None:
    """Return what was measured here before for a bundle, a search and a precision; None where nothing was."""
    rates = _read(_place(cache)).get(_key(bundle, strategy, precision))
    if isinstance(rates, dict) and rates and all(_is_rate(rate) for rate in rates.values()):
        return Choice(_best(rates), rates, remembered=True)
    return None


def measure(engine: Engine, sources: Sequence[Sequence[int]], strategy: Strategy, *, seconds: float = SECONDS) -> float:
    """Count the sentences that an engine translates in a second, its workers all at work."""
    rows = [sources[number % len(sources)] for number in range(_ROWS)]
    request = Request(
        sources=rows,
        limits=[2 * len(row) + 10 for row in rows],
        prefixes=[[]] * _ROWS,
        strategy=strategy,
        lines=range(_ROWS),
        scored=False,
    )
    engine.generate(request)
    begin, done = time.perf_counter(), 0
    while done == 0 or time.perf_counter() - begin < seconds:
        done += sum(len(found) for found in spread(engine.generate, [request] * engine.callers, engine.callers))
    return done / (time.perf_counter() - begin)


def _is_rate(value: object) -> bool:
    """Whether a value read from the cache can be a number of sentences a second."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e9


def _best(rates: Mapping[str, float]) -> str:
    """Name the highest rate."""
    return max(rates, key=lambda name: rates[name])


def _place(cache: Path | None) -> Path:
    """Name the file that remembers."""
    return (cache_folder() if cache is None else cache) / "engines.json"


def _key(bundle: Bundle, strategy: Strategy, precision: str) -> str:
    """Hash all that a measurement depends on."""
    releases = [f"{name} {_release(name)}" for name in ("torch", "ctranslate2")]
    machine = [platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability(), platform.node()]
    parts = [model_digest(bundle), __version__, *releases, *machine, str(torch.get_num_threads()), repr(strategy), precision]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _release(name: str) -> str:
    """Read a library's release without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _read(path: Path) -> dict[str, dict[str, float]]:
    """Read what is remembered; whatever is wrong with it, it can be measured again."""
    try:
        if distrust(path):
            return {}
        content = json.loads(read_regular(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(path: Path, content: Mapping[str, Mapping[str, float]]) -> None:
    """Remember, where that can be done: whole or not at all."""
    try:
        make_private(path.parent)
        replace_file(path, json.dumps(content).encode("utf-8"), mode=0o600)
    except OSError as error:
        logger.debug("%s cannot be written: %s", path, error)
