"""Which engine runs a bundle: the one that is asked for, or the best that the bundle holds and the machine can run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from dragoman.bundle import Bundle
from dragoman.bundle import format as layout
from dragoman.bundle.golden import golden_cases
from dragoman.config.names import check_engine, check_precision
from dragoman.decoding.greedy import Greedy
from dragoman.engines.cpu.freezing import FLOAT32, HALVES, INT8
from dragoman.engines.face import Engine, Request
from dragoman.engines.folder import FOLDER, NAMES, engine_digest, engine_names, read_folder
from dragoman.engines.installed import lack, remedy, require
from dragoman.engines.trust import is_trusted, record_trust, try_in_child
from dragoman.errors import BundleError, ConfigError, CorruptError, DragomanError
from dragoman.files import manifest

logger = logging.getLogger(__name__)

Rows = Sequence[Sequence[int]]

CTRANSLATE2 = "ctranslate2"
DRIFT = 2.0  # times the largest error at export that golden vectors may be off: another release or machine, not another model
LEAST_DRIFT = 2e-3  # of log-probability


class UntrustedError(BundleError):
    """An engine that was not made on this machine and has passed no trial here."""


class RejectedError(BundleError):
    """An engine that was asked for by name and failed its trial."""


def choose_engine(bundle: Bundle, wanted: str, device: torch.device, precision: str | None = None) -> Engine | None:
    """Open the engine that is wanted, in a precision if one is given; None stands for the native one.

    `auto` changes no output: it takes an engine on a CPU only where that computes in the precision asked for, float32 by
    default, searches as the native engine does, which is so for greedy search, and is trusted (`dragoman.engines.trust`).
    An engine asked for by name is tried in a child process first if it is not trusted. A damaged one is reported in one
    line, and another or the native one is used.
    """
    if wanted == "native":
        return None
    held = engine_names(bundle.path)
    if wanted == "auto":
        fitting = [name for name in held if precision_of(name) == (precision or FLOAT32)]
        if device.type != "cpu" or bundle.config.decode.beam > 1 or not fitting:
            return None
        return _first_that_opens(bundle, fitting, named=False)
    _check_name(bundle, wanted, held, precision)
    if device.type != "cpu":
        raise ConfigError([f"the engine {wanted} runs on a CPU; found the device {device}; add --device cpu, or leave out --engine"])
    fitting = [name for name in NAMES if name in held and wanted in (CTRANSLATE2, name) and precision in (None, precision_of(name))]
    fitting = [name for name in fitting if precision_of(name) == precision_of(fitting[0])]  # none stands in for one of another precision
    engine = _first_that_opens(bundle, fitting, named=True)
    if engine is not None and wanted == CTRANSLATE2 and precision is None and precision_of(engine.name) != FLOAT32:
        logger.info("the engine %s computes in int8: some outputs differ from those in float32", engine.name)
    return engine


def precision_of(name: str) -> str:
    """Return the precision of an exported engine, which its name tells."""
    return INT8 if "-int8" in name else FLOAT32


def runs_on_cpu(wanted: str, precision: str | None) -> bool:
    """Say whether what is asked for is there on CPUs alone, so that `auto` must not choose a GPU."""
    return precision == INT8 or wanted.startswith(CTRANSLATE2)


def open_engine(bundle: Bundle, name: str, *, beams: bool = True) -> Engine:
    """Verify and load one engine of a bundle, and compare it with the golden vectors.

    Raise UntrustedError before anything of it is parsed if it is not trusted. Without `beams` it refuses beam search.
    """
    folder = bundle.path / FOLDER / name
    if not is_trusted(engine_digest(folder)):
        raise UntrustedError(
            f"the engine {name} must be made on this machine to be opened",
            found="one that came with the model",
            fix=f"--engine {name} tries it in a process of its own, and then it is trusted",
        )
    return _open(bundle, name, beams=beams)


def try_engine(path: str, name: str) -> None:
    """Load an engine of a bundle and search with it: a trial, to be run in a child process."""
    bundle = Bundle.load(path)
    search_golden(_open(bundle, name, beams=True), bundle)


def search_golden(engine: Engine, bundle: Bundle) -> None:
    """Search for the first golden sentence, as a trial of an engine."""
    sources = [case["src"] for case in bundle.golden["cases"]][:1]
    limits, prefixes = [len(source) + 10 for source in sources], [list[int]() for _ in sources]
    if sources:
        engine.generate(Request(sources=sources, limits=limits, prefixes=prefixes, strategy=Greedy(), lines=range(1)))


def _open_named(bundle: Bundle, name: str) -> Engine:
    """Open an engine; one that is not trusted is tried in a child process first and recorded, or RejectedError is raised."""
    facts = read_folder(bundle.path / FOLDER / name, bundle)
    digest = manifest.manifest_digest(facts)
    if is_trusted(digest):
        return _open(bundle, name, beams=True)
    require(CTRANSLATE2)
    logger.info("the engine %s was not made on this machine: trying it in a process of its own, once", name)
    size = sum(record["bytes"] for record in facts["files"].values())
    try:
        try_in_child("dragoman.engines.choosing:try_engine", [str(bundle.path), name], what=f"the engine {name}", bytes=size)
    except BundleError as error:
        raise RejectedError(error.must, found=error.found, fix=error.fix) from error
    record_trust(digest)
    return _open(bundle, name, beams=True)


def _open(bundle: Bundle, name: str, *, beams: bool) -> Engine:
    """Verify and load an engine, whoever made it."""
    from dragoman.engines.ctranslate2 import CTranslate2

    folder = bundle.path / FOLDER / name
    facts = read_folder(folder, bundle)
    require(CTRANSLATE2)
    try:
        longest, error = int(facts["longest"]), float(facts["golden_error"])
        workers = torch.get_num_threads()
        engine = CTranslate2(folder, bundle.tokenizers, name=name, longest=longest, workers=workers, beams=beams)
        found = golden_error(engine.log_probs, bundle)
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as problem:
        raise BundleError(f"{folder} must be one that ctranslate2 can read", found=f"{problem!s:.200}", fix="export it again") from problem
    if not found <= max(LEAST_DRIFT, DRIFT * error):
        raise CorruptError(
            f"{folder} must compute what it did when it was made, within {max(LEAST_DRIFT, DRIFT * error):.4f} of the golden vectors",
            found=f"{found:.4f}",
            fix="export it again",
        )
    return engine


def golden_error(score: Callable[[Rows, Rows], list[list[float]]], bundle: Bundle) -> float:
    """Give the largest difference between what an engine thinks of the golden translations and what is written of them."""
    cases = golden_cases(bundle.golden, len(bundle.tokenizers.src), len(bundle.tokenizers.tgt), str(bundle.path / layout.GOLDEN))
    found = score([case["src"] for case in cases], [case["tgt"] for case in cases])
    differences = [
        abs(there - here) for case, row in zip(cases, found, strict=True) for there, here in zip(case["log_probs"], row, strict=False)
    ]
    return max(differences, default=0.0)


def settle_precision(precision: str | None, device: torch.device) -> str | None:
    """Refuse a precision that is not known or belongs to another device; where the GPU that it belongs to is missing, take float32."""
    check_precision(precision)
    if precision == INT8 and device.type != "cpu":
        raise ConfigError([f"the precision int8 runs on a CPU; found the device {device}; add --device cpu, or leave out --precision"])
    if precision in HALVES and device.type != "cuda":
        logger.warning(
            "the precision %s runs on a GPU: %s computes in float32, and the result is the same but for rounding", precision, device
        )
        return FLOAT32
    return precision


def _first_that_opens(bundle: Bundle, names: Sequence[str], *, named: bool) -> Engine | None:
    """Open the first engine that can be used; what keeps others from it is one line, with what is used instead.

    One that was `named` is tried in a child process where it is not trusted, and may search with a beam.
    """
    missing = lack(CTRANSLATE2)
    if missing:
        reason = f"found {missing}; to have it: {remedy(CTRANSLATE2)}"
        logger.warning("the engine %s is not used (%s): %s", names[0], reason, _instead(names[0], None))
        return None
    problems: list[str] = []
    engine = None
    for name in names:
        try:
            engine = _open_named(bundle, name) if named else open_engine(bundle, name, beams=False)
            break
        except RejectedError:
            raise
        except UntrustedError as error:
            logger.info("%s", error)
        except DragomanError as error:
            problems.append(f"the engine {name} is not used ({error})")
    if problems:
        logger.warning("%s: %s", "; ".join(problems), _instead(names[0], engine))
    return engine


def _instead(name: str, engine: Engine | None) -> str:
    """Say what is used in an engine's place."""
    exact = "int8" not in name and (engine is None or "int8" not in engine.name)
    used = "the native engine" if engine is None else engine.name
    return f"{used} is used, and the result is the same{'' if exact else ' but for rounding'}"


def _check_name(bundle: Bundle, wanted: str, held: Sequence[str], precision: str | None) -> None:
    """Raise ConfigError for an engine that is unknown, that a bundle does not hold, or that computes in another precision."""
    check_engine(wanted)
    fitting = [name for name in held if wanted in (CTRANSLATE2, name)]
    quantisation = wanted.removeprefix(f"{CTRANSLATE2}-") if wanted in NAMES else precision or FLOAT32
    command = f"dragoman export {bundle.path} --to ctranslate2 --quantisation {quantisation}"
    if not fitting:
        raise ConfigError([f"{bundle.path} must hold the engine {wanted}; found {', '.join(held) or 'none'}; make it: {command}"])
    if precision is not None and all(precision_of(name) != precision for name in fitting):
        there = " and ".join(sorted({precision_of(name) for name in fitting}))
        fix = f"make one: {command}" if wanted == CTRANSLATE2 else "leave out --precision, or name another engine"
        raise ConfigError([f"the engine {wanted} must compute in {precision}; found one in {there}; {fix}"])
