"""Which engine runs a bundle: the one that is asked for, or the best that the bundle holds and the machine can run."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence

import torch

from dragoman.bundle import Bundle
from dragoman.engines.face import Engine
from dragoman.engines.folder import FOLDER, engine_names, read_folder
from dragoman.engines.freezing import HALVES, INT8, PRECISIONS
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

    `auto` takes the quickest that the bundle holds on a CPU, and where that cannot be used says so in a line and goes on with the
    native engine. An engine that is asked for by name must be there and work.
    """
    names = [name for name in ORDER if name in engine_names(bundle.path) and _has_precision(name, precision)]
    if wanted == "native":
        return None
    if wanted == "auto":
        return _first_that_opens(bundle, names) if device.type == "cpu" else None
    fitting = [name for name in names if wanted in (CTRANSLATE2, name)]
    if not fitting:
        raise _no_engine(bundle, wanted, names)
    if device.type != "cpu":
        raise ConfigError([f"the engine {wanted} runs on a CPU; found the device {device}; add --device cpu, or leave out --engine"])
    return open_engine(bundle, fitting[0])


def open_engine(bundle: Bundle, name: str) -> Engine:
    """Verify and load one engine of a bundle, and check it against the golden vectors."""
    from dragoman.engines.ctranslate2 import CTranslate2

    folder = bundle.path / FOLDER / name
    facts = read_folder(folder, bundle)
    if importlib.util.find_spec(CTRANSLATE2) is None:
        raise ConfigError(["the engine needs ctranslate2; found none; install it: pip install 'dragoman[fast]'"])
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


def check_precision(precision: str | None, device: torch.device) -> None:
    """Refuse a precision that is not known, or not there."""
    if precision is not None and precision not in PRECISIONS:
        raise ConfigError([f"the precision must be one of {', '.join(PRECISIONS)}; found {precision!r}; {nearest(precision, PRECISIONS)}"])
    if precision == INT8 and device.type != "cpu":
        raise ConfigError([f"the precision int8 runs on a CPU; found the device {device}; add --device cpu, or leave out --precision"])
    if precision in HALVES and device.type != "cuda":
        raise ConfigError([f"the precision {precision} runs on a GPU; found the device {device}; leave out --precision"])


def _has_precision(name: str, precision: str | None) -> bool:
    """Say whether an engine computes in a precision; its name tells."""
    return precision is None or ("-int8" in name) == (precision == INT8)


def _first_that_opens(bundle: Bundle, names: Sequence[str]) -> Engine | None:
    """Open the first engine that can be used, and say why others cannot."""
    for name in names:
        try:
            return open_engine(bundle, name)
        except DragomanError as error:
            logger.warning("the engine %s is not used, and the result is the same: %s", name, error)
    return None


def _no_engine(bundle: Bundle, wanted: str, names: Sequence[str]) -> ConfigError:
    """Make the error for an engine that a bundle does not hold."""
    if wanted != CTRANSLATE2 and wanted not in ORDER:
        known = ["auto", "native", CTRANSLATE2, *ORDER]
        return ConfigError([f"the engine must be auto, native or ctranslate2; found {wanted!r}; {nearest(wanted, known)}"])
    held = ", ".join(names) or "none"
    return ConfigError(
        [f"{bundle.path} must hold the engine {wanted}; found {held}; make it: dragoman export {bundle.path} --to ctranslate2"]
    )
