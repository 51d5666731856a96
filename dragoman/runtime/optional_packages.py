"""Programs that are optional: what is said where one is not installed, or does not load."""

from __future__ import annotations

import importlib
import importlib.util

from dragoman.errors import ConfigError

EXTRAS = {
    "ctranslate2": "fast",
    "transformers": "hf",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "onnxruntime": "onnx",
}


def missing_reason(package: str) -> str:
    """Say what is wrong with a package, by importing it; empty where nothing is."""
    if importlib.util.find_spec(package) is None:
        return f"no {package}"
    try:
        importlib.import_module(package)
    except Exception as error:  # a package made for another system or release raises what it likes
        reason = next(iter(str(error).splitlines()), "")[:120]
        return f"a {package} that does not load ({type(error).__name__}: {reason})"
    return ""


def install_hint(package: str) -> str:
    """Say how to get a package."""
    return f"pip install 'dragoman[{EXTRAS[package]}]'"


def is_installed(package: str) -> bool:
    """Say whether a package can be used."""
    return not missing_reason(package)


def require_packages(*packages: str) -> None:
    """Refuse to go on without packages, and say how to get them."""
    missing = {package: found for package in packages if (found := missing_reason(package))}
    if missing:
        first = next(iter(missing))
        raise ConfigError(
            [
                f"this needs {' and '.join(packages)}; found {' and '.join(missing.values())}; install it: {install_hint(first)}"
            ]
        )
