"""Which engine runs a bundle: the one that is asked for, or the best that the bundle holds and the machine can run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from dragoman.bundle import Bundle
from dragoman.engines.cpu.freezing import FLOAT32, HALVES, INT8, PRECISIONS
from dragoman.engines.face import Engine
from dragoman.engines.folder import FOLDER, engine_names, read_folder
from dragoman.engines.installed import lack, remedy, require
from dragoman.errors import BundleError, ConfigError, CorruptError, DragomanError, nearest

logger = logging.getLogger(__name__)

Rows = Sequence[Sequence[int]]

CTRANSLATE2 = "ctranslate2"
# The quickest first; whoever exported int8 wants it used.
ORDER = tuple(f"{CTRANSLATE2}-{quantisation}" for quantisation in ("int8", "int8_float32", "float32"))
DRIFT = 2.0  # times the largest error at export that golden vectors may be off: another release or machine, not another model
LEAST_DRIFT = 2e-3  # of log-probability


def choose_engine(bundle: Bundle, wanted: str, device: torch.device, precision: str | None = None) -> Engine | None:
    """Open the engine that is wanted, in a precision if one is given; None stands for the native one.

    `auto` takes the quickest that the bundle holds on a CPU. One that the bundle holds and that cannot be used, asked for by name or
    not, costs a line, and another or the native one does the same.
    """
    names = [name for name in ORDER if name in engine_names(bundle.path) and _has_precision(name, precision)]
    if wanted == "native":
        return None
    if wanted == "auto":
        return _first_that_opens(bundle, names) if names and device.type == "cpu" else None
    fitting = [name for name in names if wanted in (CTRANSLATE2, name)]
    if not fitting:
        raise _no_engine(bundle, wanted, names)
    if device.type != "cpu":
        raise ConfigError([f"the engine {wanted} runs on a CPU; found the device {device}; add --device cpu, or leave out --engine"])
    return _first_that_opens(bundle, fitting)


def runs_on_cpu(wanted: str, precision: str | None) -> bool:
    """Say whether what is asked for is there on CPUs alone, so that `auto` must not choose a GPU."""
    return precision == INT8 or wanted.startswith(CTRANSLATE2)


def open_engine(bundle: Bundle, name: str) -> Engine:
    """Verify and load one engine of a bundle, and check it against the golden vectors."""
    from dragoman.engines.ctranslate2 import CTranslate2

    folder = bundle.path / FOLDER / name
    facts = read_folder(folder, bundle)
    require(CTRANSLATE2)
    try:
        longest, error = int(facts["longest"]), float(facts["golden_error"])
        engine = CTranslate2(folder, bundle.tokenizers, name=name, longest=longest, workers=torch.get_num_threads())
    except (KeyError, TypeError, ValueError, RuntimeError) as problem:
        raise BundleError(f"{folder} must be one that ctranslate2 can read", found=f"{problem!s:.200}", fix="export it again") from problem
    found = golden_error(engine.log_probs, bundle)
    if not found <= max(LEAST_DRIFT, DRIFT * error):
        raise CorruptError(
            f"{folder} must compute what it did when it was made, within {max(LEAST_DRIFT, DRIFT * error):.4f} of the golden vectors",
            found=f"{found:.4f}",
            fix="export it again",
        )
    return engine


def golden_error(score: Callable[[Rows, Rows], list[list[float]]], bundle: Bundle) -> float:
    """Give the largest difference between what an engine thinks of the golden translations and what is written of them."""
    cases = bundle.golden["cases"]
    found = score([case["src"] for case in cases], [case["tgt"] for case in cases])
    differences = [
        abs(there - here) for case, row in zip(cases, found, strict=True) for there, here in zip(case["log_probs"], row, strict=False)
    ]
    return max(differences, default=0.0)


def settle_precision(precision: str | None, device: torch.device) -> str | None:
    """Refuse a precision that is not known or belongs to another device; where the GPU that it belongs to is missing, take float32."""
    if precision is not None and precision not in PRECISIONS:
        raise ConfigError([f"the precision must be one of {', '.join(PRECISIONS)}; found {precision!r}; {nearest(precision, PRECISIONS)}"])
    if precision == INT8 and device.type != "cpu":
        raise ConfigError([f"the precision int8 runs on a CPU; found the device {device}; add --device cpu, or leave out --precision"])
    if precision in HALVES and device.type != "cuda":
        logger.warning(
            "the precision %s runs on a GPU: %s computes in float32, and the result is the same but for rounding", precision, device
        )
        return FLOAT32
    return precision


def _has_precision(name: str, precision: str | None) -> bool:
    """Say whether an engine computes in a precision; its name tells."""
    return precision is None or ("-int8" in name) == (precision == INT8)


def _first_that_opens(bundle: Bundle, names: Sequence[str]) -> Engine | None:
    """Open the first engine that can be used; what keeps others from it is one line, with what is used instead."""
    missing = lack(CTRANSLATE2)
    if missing:
        reason = f"found {missing}; to have it: {remedy(CTRANSLATE2)}"
        logger.warning("the engine %s is not used (%s): %s", names[0], reason, _instead(names[0], None))
        return None
    problems: list[str] = []
    engine = None
    for name in names:
        try:
            engine = open_engine(bundle, name)
            break
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


def _no_engine(bundle: Bundle, wanted: str, names: Sequence[str]) -> ConfigError:
    """Make the error for an engine that a bundle does not hold."""
    if wanted != CTRANSLATE2 and wanted not in ORDER:
        known = ["auto", "native", CTRANSLATE2, *ORDER]
        return ConfigError([f"the engine must be auto, native or ctranslate2; found {wanted!r}; {nearest(wanted, known)}"])
    held = ", ".join(names) or "none"
    return ConfigError(
        [f"{bundle.path} must hold the engine {wanted}; found {held}; make it: dragoman export {bundle.path} --to ctranslate2"]
    )
