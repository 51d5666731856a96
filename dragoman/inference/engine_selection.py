"""Select and open the engine that runs a bundle: native, or an exported one that is trusted.

Whether the native engine runs C++ kernels or PyTorch on a CPU: `cpu/cpu_engine_conversion.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dragoman.bundle import Bundle
from dragoman.config.device_engine_and_precision_names import check_engine, check_precision
from dragoman.data.parallel_corpus import Corpus
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.search_interface import SearchRequest, SearchStrategy
from dragoman.errors import BundleError, ConfigError, CorruptError, DragomanError
from dragoman.inference.cpu.cpu_engine_conversion import FLOAT32, HALF_PRECISIONS, INT8, TokenPair
from dragoman.inference.cpu.lexical_shortlist import build_shortlist
from dragoman.inference.cuda.cuda_backend import default_precision
from dragoman.inference.dragoman_model_engine import NativeEngine
from dragoman.inference.engine_protocol import Engine
from dragoman.inference.engine_throughput import select_fastest_engine
from dragoman.inference.exported_engine_files import (
    ENGINE_NAMES,
    ENGINES_DIRECTORY,
    engine_digest,
    list_engine_names,
    verify_engine,
)
from dragoman.inference.untrusted_engine_trial import is_trusted, require_trial
from dragoman.runtime.optional_package_checks import install_hint, missing_reason, require_packages

logger = logging.getLogger(__name__)


CTRANSLATE2 = "ctranslate2"
# Golden log-probabilities may differ by this factor of the error at export, at least MIN_DRIFT:
# that is another release or machine, not another model.
MAX_DRIFT_FACTOR = 2.0
MIN_DRIFT = 2e-3


class UntrustedEngineError(BundleError):
    """An engine that was not exported on this machine and has passed no trial here."""


class RejectedEngineError(BundleError):
    """An engine that was requested by name and failed its trial."""


def choose_engine(
    bundle: Bundle, requested: str, device: torch.device, precision: str | None = None
) -> Engine | None:
    """Open the requested engine, in a precision if one is given; None stands for the native one.

    `auto` changes no output: it uses an engine on a CPU only if that has the requested precision,
    float32 by default, if the model decodes greedily, which all engines do alike, and if it is
    trusted (`untrusted_engine_trial.py`). An engine requested by name is tried in a child process
    first if it is not trusted. For a damaged one a warning is logged, and another one is used.
    """
    if requested == "native":
        return None
    available = list_engine_names(bundle.path)
    if requested == "auto":
        candidates = [
            name for name in available if engine_precision(name) == (precision or FLOAT32)
        ]
        if device.type != "cpu" or bundle.config.decode.beam > 1 or not candidates:
            return None
        return _open_first_usable(bundle, candidates, is_requested=False)
    _check_engine_name(bundle, requested, available, precision)
    if device.type != "cpu":
        raise ConfigError(
            [
                f"the engine {requested} runs on a CPU; found the device {device}; "
                "add --device cpu, or leave out --engine"
            ]
        )
    candidates = [
        name
        for name in ENGINE_NAMES
        if name in available
        and requested in (CTRANSLATE2, name)
        and precision in (None, engine_precision(name))
    ]
    # Fallbacks have the same precision as the first.
    candidates = [
        name for name in candidates if engine_precision(name) == engine_precision(candidates[0])
    ]
    engine = _open_first_usable(bundle, candidates, is_requested=True)
    if (
        engine is not None
        and requested == CTRANSLATE2
        and precision is None
        and engine_precision(engine.name) != FLOAT32
    ):
        logger.info(
            "the engine %s computes in int8: some outputs differ from those in float32", engine.name
        )
    return engine


def engine_precision(name: str) -> str:
    """Return the precision of an exported engine from its name."""
    return INT8 if "-int8" in name else FLOAT32


def requires_cpu(requested: str, precision: str | None) -> bool:
    """Whether an engine or a precision needs a CPU, so that `auto` must not select a GPU."""
    return precision == INT8 or requested.startswith(CTRANSLATE2)


def open_engine(bundle: Bundle, name: str, *, allow_beam: bool = True) -> Engine:
    """Verify and load one engine of a bundle, and compare it with the golden vectors.

    Raise UntrustedEngineError, before any of its files is parsed, if it is not trusted. Without
    `allow_beam` it does not support beam search.
    """
    folder = bundle.path / ENGINES_DIRECTORY / name
    if not is_trusted(engine_digest(folder)):
        raise UntrustedEngineError(
            f"the engine {name} must be exported on this machine to be opened",
            found="one that came with the model",
            fix=f"--engine {name} tries it in a child process, and then it is trusted",
        )
    return _load_engine(bundle, name, allow_beam=allow_beam)


def run_engine_trial(path: str, name: str) -> None:
    """Load an engine of a bundle and decode with it: the trial, run in a child process."""
    bundle = Bundle.load(path)
    decode_golden(_load_engine(bundle, name, allow_beam=True), bundle)


def decode_golden(engine: Engine, bundle: Bundle) -> None:
    """Decode the first golden sentence, as a trial of an engine."""
    sources = [case["src"] for case in bundle.golden["cases"]][:1]
    limits, prefixes = [len(source) + 10 for source in sources], [list[int]() for _ in sources]
    if sources:
        engine.generate(
            SearchRequest(
                sources=sources,
                limits=limits,
                prefixes=prefixes,
                strategy=GreedySearch(),
                sample_ids=range(1),
            )
        )


def _open_requested(bundle: Bundle, name: str) -> Engine:
    """Open an engine, after a trial if untrusted; raise RejectedEngineError if that fails."""
    facts = verify_engine(bundle.path / ENGINES_DIRECTORY / name, bundle)
    try:
        require_trial(
            facts,
            "dragoman.inference.engine_selection:run_engine_trial",
            [str(bundle.path), name],
            label=f"the engine {name}",
        )
    except BundleError as error:
        raise RejectedEngineError(error.must, found=error.found, fix=error.fix) from error
    return _load_engine(bundle, name, allow_beam=True)


def _load_engine(bundle: Bundle, name: str, *, allow_beam: bool) -> Engine:
    """Verify and load an engine, trusted or not."""
    from dragoman.inference.ctranslate2_engine import CTranslate2Engine

    folder = bundle.path / ENGINES_DIRECTORY / name
    facts = verify_engine(folder, bundle)
    require_packages(CTRANSLATE2)
    try:
        longest, error = int(facts["longest"]), float(facts["golden_error"])
        workers = torch.get_num_threads()
        engine = CTranslate2Engine(
            folder,
            bundle.tokenizers,
            name=name,
            longest=longest,
            workers=workers,
            allow_beam=allow_beam,
        )
        found = bundle.golden_error(engine.log_probs)
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as problem:
        raise BundleError(
            f"{folder} must be one that ctranslate2 can read",
            found=f"{problem!s:.200}",
            fix="export it again",
        ) from problem
    if not found <= max(MIN_DRIFT, MAX_DRIFT_FACTOR * error):
        raise CorruptError(
            f"{folder} must compute what it did when it was exported, "
            f"within {max(MIN_DRIFT, MAX_DRIFT_FACTOR * error):.4f} of the golden vectors",
            found=f"{found:.4f}",
            fix="export it again",
        )
    return engine


def resolve_precision(precision: str | None, device: torch.device) -> str | None:
    """Return the precision; float32 for half precision without a GPU. Raise ConfigError if bad."""
    check_precision(precision)
    if precision == INT8 and device.type != "cpu":
        raise ConfigError(
            [
                f"the precision int8 runs on a CPU; found the device {device}; "
                "add --device cpu, or leave out --precision"
            ]
        )
    if precision in HALF_PRECISIONS and device.type != "cuda":
        logger.warning(
            "the precision %s runs on a GPU: %s computes in float32, "
            "and the result is the same but for rounding",
            precision,
            device,
        )
        return FLOAT32
    return precision


def _open_first_usable(
    bundle: Bundle, names: Sequence[str], *, is_requested: bool
) -> Engine | None:
    """Open the first usable engine; log in one line why others are not used, and what is instead.

    An engine that is requested by name gets a trial if it is not trusted, and may use beam search.
    """
    missing = missing_reason(CTRANSLATE2)
    if missing:
        reason = f"found {missing}; to have it: {install_hint(CTRANSLATE2)}"
        logger.warning(
            "the engine %s is not used (%s): %s",
            names[0],
            reason,
            _fallback_message(names[0], None),
        )
        return None
    problems: list[str] = []
    engine = None
    for name in names:
        try:
            engine = (
                _open_requested(bundle, name)
                if is_requested
                else open_engine(bundle, name, allow_beam=False)
            )
            break
        except RejectedEngineError:
            raise
        except UntrustedEngineError as error:
            logger.info("%s", error)
        except DragomanError as error:
            problems.append(f"the engine {name} is not used ({error})")
    if problems:
        logger.warning("%s: %s", "; ".join(problems), _fallback_message(names[0], engine))
    return engine


def _fallback_message(name: str, engine: Engine | None) -> str:
    """Return the part of a warning that names the engine used instead."""
    exact = "int8" not in name and (engine is None or "int8" not in engine.name)
    used = "the native engine" if engine is None else engine.name
    return f"{used} is used, and the result is the same{'' if exact else ' but for rounding'}"


def _check_engine_name(
    bundle: Bundle, requested: str, available: Sequence[str], precision: str | None
) -> None:
    """Raise ConfigError for an engine that is unknown, missing, or of another precision."""
    check_engine(requested)
    candidates = [name for name in available if requested in (CTRANSLATE2, name)]
    quantization = (
        requested.removeprefix(f"{CTRANSLATE2}-")
        if requested in ENGINE_NAMES
        else precision or FLOAT32
    )
    command = f"dragoman export {bundle.path} --to ctranslate2 --quantization {quantization}"
    if not candidates:
        raise ConfigError(
            [
                f"{bundle.path} must hold the engine {requested}; "
                f"found {', '.join(available) or 'none'}; make it: {command}"
            ]
        )
    if precision is not None and all(engine_precision(name) != precision for name in candidates):
        there = " and ".join(sorted({engine_precision(name) for name in candidates}))
        fix = (
            f"make one: {command}"
            if requested == CTRANSLATE2
            else "leave out --precision, or name another engine"
        )
        raise ConfigError(
            [f"the engine {requested} must compute in {precision}; found one in {there}; {fix}"]
        )


class OpenedEngines(NamedTuple):
    """The native engine, and the one that translates, which may be the same."""

    native: NativeEngine
    engine: Engine


def open_engines(
    bundle: Bundle,
    device: torch.device,
    *,
    requested: str = "auto",
    precision: str | None = None,
    benchmark_strategy: SearchStrategy | None = None,
    shortlist: Corpus | None = None,
) -> OpenedEngines:
    """Open the engines of a bundle; with a strategy to benchmark, `auto` selects the fastest here.

    A shortlist is built from a corpus; only the native engine on a CPU supports one.
    """
    precision = resolve_precision(precision, device)
    native = build_native_engine(bundle, device, precision)
    if shortlist is not None:
        if requested not in ("auto", "native"):
            raise ConfigError(
                [
                    f"a shortlist needs the native engine; found {requested}; "
                    "leave out --engine or --shortlist"
                ]
            )
        if device.type != "cpu":
            raise ConfigError(
                [
                    f"a shortlist needs a CPU; found the device {device}; "
                    "add --device cpu, or leave out --shortlist"
                ]
            )
        native.shortlist = build_shortlist(shortlist, bundle.tokenizers)
        requested = "native"
    other = choose_engine(bundle, requested, device, precision)
    if other is None:
        _ = (
            native.model
        )  # load it now, so that a damaged model is reported before any input is read
        return OpenedEngines(native, native)
    if benchmark_strategy is None or requested != "auto":
        return OpenedEngines(native, other)
    return _select_fastest(bundle, native, other, benchmark_strategy)


def build_native_engine(
    bundle: Bundle, device: torch.device, precision: str | None = None
) -> NativeEngine:
    """Build the native engine of a bundle: on a CPU one worker per thread, each with a batch."""
    workers = torch.get_num_threads() if device.type == "cpu" else 1

    def pairs() -> list[TokenPair]:
        return [(case["src"], case["tgt"]) for case in bundle.golden["cases"]]

    return NativeEngine(
        lambda: bundle.model,
        precision=precision or default_precision(device),
        workers=workers,
        pairs=pairs,
    )


def describe_engine(engine: Engine) -> str:
    """Return the name of an engine with its workers and threads."""
    threads = max(1, torch.get_num_threads() // engine.workers)
    return f"{engine.name} ({engine.workers} x {threads} {'thread' if threads == 1 else 'threads'})"


def _select_fastest(
    bundle: Bundle, native: NativeEngine, other: Engine, strategy: SearchStrategy
) -> OpenedEngines:
    """Return the fastest engine for the golden sentences, measured or cached; log it."""
    engines: dict[str, Engine] = {
        describe_engine(each): each for each in (native, native.single_worker(), other)
    }
    try:
        choice = select_fastest_engine(engines, bundle, strategy, precision=native.precision)
    except RuntimeError as error:
        reason = next(iter(str(error).splitlines()), "")[:160]
        logger.warning(
            "the engine %s failed (%s): the native engine is used, "
            "and the result is the same but for rounding",
            other.name,
            reason,
        )
        return OpenedEngines(native, native)
    if choice is None:
        return OpenedEngines(native, other)
    if not choice.from_cache:
        rates = ", ".join(f"{name} {rate:.0f}" for name, rate in choice.rates.items())
        logger.info("%s is the fastest here; sentences per second: %s", choice.name, rates)
    selected = engines[choice.name]
    return OpenedEngines(selected if isinstance(selected, NativeEngine) else native, selected)
