"""Measure and list the engines of a bundle: throughput on this machine, cached, and export parity.

Measurements are cached in the user's cache folder under a hash of all that they depend on: the
model, the machine, the package versions.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dragoman._version import __version__
from dragoman.bundle import Bundle
from dragoman.decoding.search_interface import SearchRequest, SearchStrategy
from dragoman.errors import DragomanError
from dragoman.inference.cpu.cpu_engine_conversion import FLOAT32, INT8
from dragoman.inference.engine_protocol import Engine
from dragoman.inference.exported_engine_files import (
    ENGINES_DIRECTORY,
    list_engine_names,
    model_digest,
)
from dragoman.inference.untrusted_engine_trial import is_trusted
from dragoman.runtime.thread_pool_map import map_in_threads
from dragoman.storage import manifest
from dragoman.storage.atomic_and_safe_file_io import read_regular, replace_file
from dragoman.storage.trusted_cache_directory import (
    cache_dir,
    make_private_directory,
    trust_problem,
)

logger = logging.getLogger(__name__)

SECONDS_PER_ENGINE = 0.25  # after a warm-up batch
_BATCH_ROWS = 16  # sentences per batch
_MAX_CACHE_BYTES = 1 << 20
NATIVE = "native"


class EngineChoice(NamedTuple):
    """The fastest engine, and the throughput of each in sentences per second."""

    name: str
    rates: dict[str, float]
    from_cache: bool


def select_fastest_engine(
    engines: Mapping[str, Engine],
    bundle: Bundle,
    strategy: SearchStrategy,
    *,
    precision: str = "float32",
    cache: Path | None = None,
) -> EngineChoice | None:
    """Return the fastest of several engines of one precision; None if no sentences are stored."""
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
    """Return the cached measurement for a bundle, a strategy and a precision; None if none."""
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
    """Return the throughput of an engine in sentences per second, with all workers busy."""
    rows = [sources[number % len(sources)] for number in range(_BATCH_ROWS)]
    request = SearchRequest(
        sources=rows,
        limits=[2 * len(row) + 10 for row in rows],
        prefixes=[[]] * _BATCH_ROWS,
        strategy=strategy,
        sample_ids=range(_BATCH_ROWS),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """An engine of a bundle; None for what is unknown."""

    name: str
    program: str = ""
    type: str = ""  # of its weights
    bytes: int | None = None
    parity: dict[str, Any] | None = None  # measured by its export
    trouble: str = ""  # why it cannot be used, by its manifest; `verify` and `doctor` check more
    rate: float | None = None  # sentences per second, measured on this machine
    chosen: bool = False  # whether `translate` uses it here

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary."""
        return asdict(self)


def list_engines(bundle: Bundle, strategy: SearchStrategy) -> list[EngineInfo]:
    """List the native engine and those in a bundle, with their cached throughput.

    Only manifests are read; no engine is opened.
    """
    choices = {
        precision: load_measurement(bundle, strategy, precision=precision)
        for precision in (FLOAT32, INT8)
    }
    rates = {
        name: rate for choice in choices.values() if choice for name, rate in choice.rates.items()
    }
    default = choices[FLOAT32]  # the precision that is used by default
    fastest = default.name if default else ""
    native = max(
        (rate for name, rate in rates.items() if _engine_name(name) == NATIVE), default=None
    )
    held = [
        EngineInfo(
            name=NATIVE,
            program="dragoman",
            type=FLOAT32,
            rate=native,
            chosen=_engine_name(fastest) == NATIVE,
        )
    ]
    for name in list_engine_names(bundle.path):
        rate = next((rate for each, rate in rates.items() if _engine_name(each) == name), None)
        held.append(_read_engine_info(bundle, name, rate, chosen=_engine_name(fastest) == name))
    return held


def _engine_name(described: str) -> str:
    """Return the name of an engine without its number of threads."""
    return described.partition(" ")[0]


def _read_engine_info(bundle: Bundle, name: str, rate: float | None, *, chosen: bool) -> EngineInfo:
    """Read the manifest of one engine, which is untrusted input."""
    try:
        facts = manifest.read_manifest(bundle.path / ENGINES_DIRECTORY / name)
        size = sum(int(record["bytes"]) for record in facts["files"].values())
    except (DragomanError, OSError, KeyError, TypeError, ValueError):
        return EngineInfo(name=name, trouble="damaged: export it again")
    trouble = ""
    if facts.get("model_sha256") != model_digest(bundle):
        trouble = "stale: export it again"
    elif not is_trusted(manifest.manifest_digest(facts)):
        trouble = "not made here: opened only if --engine names it"
    program, _, kind = name.partition("-")
    return EngineInfo(
        name=name,
        program=program,
        type=kind,
        bytes=size,
        parity=_read_parity(facts),
        trouble=trouble,
        rate=rate,
        chosen=chosen,
    )


def _read_parity(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the results of an export's parity check if they are valid numbers."""
    found = facts.get("parity")
    if not isinstance(found, dict) or not {"sentences", "equal"} <= found.keys():
        return None
    known = {
        name: found[name]
        for name in ("sentences", "equal", "difference", "bleu_native", "bleu")
        if name in found
    }
    numbers = all(type(value) in (int, float) and abs(value) < 1e15 for value in known.values())
    return known if numbers and ("bleu" in known) == ("bleu_native" in known) else None


def _is_valid_rate(value: object) -> bool:
    """Whether a value read from the cache can be a throughput."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e9


def _fastest(rates: Mapping[str, float]) -> str:
    """Return the name with the highest throughput."""
    return max(rates, key=lambda name: rates[name])


def _measurements_path(cache: Path | None) -> Path:
    """Return the path of the cached measurements."""
    return (cache_dir() if cache is None else cache) / "engines.json"


def _measurement_key(bundle: Bundle, strategy: SearchStrategy, precision: str) -> str:
    """Return a hash of all that a measurement depends on."""
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
    """Return the version of a package without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _read_measurements(path: Path) -> dict[str, dict[str, float]]:
    """Read the cached measurements; an invalid cache is empty."""
    try:
        if trust_problem(path):
            return {}
        content = json.loads(read_regular(path, _MAX_CACHE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _write_measurements(path: Path, content: Mapping[str, Mapping[str, float]]) -> None:
    """Write the measurements atomically, if the cache folder is writable."""
    try:
        make_private_directory(path.parent)
        replace_file(path, json.dumps(content).encode("utf-8"), mode=0o600)
    except OSError as error:
        logger.debug("%s cannot be written: %s", path, error)
