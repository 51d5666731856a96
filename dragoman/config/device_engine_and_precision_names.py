"""Names of devices, engines, precisions and utilities, validated before torch is imported."""

from __future__ import annotations

import re

from dragoman.errors import ConfigError, suggest_name

ENGINES = (
    "auto",
    "native",
    "ctranslate2",
    "ctranslate2-int8",
    "ctranslate2-int8_float32",
    "ctranslate2-float32",
)
QUANTIZATIONS = ("float32", "int8", "int8_float32")  # of a CTranslate2 export
BUNDLE_QUANTIZATIONS = ("float32", "int8")  # of the weights in a model directory
PRECISIONS = ("float32", "int8", "float16", "bfloat16")
UTILITIES = ("chrf", "bleu")  # of minimum Bayes risk decoding
_DEVICE_PATTERN = re.compile(r"auto|cpu|(cuda|mps|cpu)(:(0|[1-9][0-9]{0,2}))?")


def device_problem(name: str) -> str:
    """Return the problem with a device name, or ""; torch checks whether the device exists."""
    if _DEVICE_PATTERN.fullmatch(name):
        return ""
    return f"the device must be auto, cpu, cuda, cuda:1 or mps; found {name!r}; try auto"


def check_device(name: str) -> None:
    """Raise ConfigError if the name is not a device name."""
    if problem := device_problem(name):
        raise ConfigError([problem])


def check_engine(name: str) -> None:
    """Raise ConfigError if the name is not an engine; whether a model has it is checked later."""
    if name not in ENGINES:
        raise ConfigError(
            [
                f"the engine must be auto, native or ctranslate2; found {name!r}; "
                f"{suggest_name(name, ENGINES, listed=True)}"
            ]
        )


def check_quantization(name: str) -> None:
    """Raise ConfigError if CTranslate2 weights cannot be exported with this quantization."""
    if name not in QUANTIZATIONS:
        raise ConfigError(
            [
                f"the quantization must be one of {', '.join(QUANTIZATIONS)}; found {name!r}; "
                "float32 is exact"
            ]
        )


def check_bundle_quantization(name: str) -> None:
    """Raise ConfigError if the weights of a model directory cannot be stored so."""
    if name not in BUNDLE_QUANTIZATIONS:
        raise ConfigError(
            [
                f"the quantization must be one of {', '.join(BUNDLE_QUANTIZATIONS)}; found "
                f"{name!r}; float32 is exact"
            ]
        )


def check_precision(name: str | None) -> None:
    """Raise ConfigError if the name is not a precision; None leaves the choice to the engine."""
    if name is not None and name not in PRECISIONS:
        raise ConfigError(
            [
                f"the precision must be one of {', '.join(PRECISIONS)}; found {name!r}; "
                f"{suggest_name(name, PRECISIONS, listed=True)}"
            ]
        )


def utility_problem(name: object) -> str:
    """Return the problem with the utility of minimum Bayes risk decoding, or ""."""
    if name in UTILITIES:
        return ""
    return f"mbr must be one of {', '.join(UTILITIES)}; found {name!r:.60}; try chrf"


def check_utility(name: str | None) -> None:
    """Raise ConfigError if the name is not a utility of minimum Bayes risk decoding."""
    if name is not None and (problem := utility_problem(name)):
        raise ConfigError([f"--{problem}"])
