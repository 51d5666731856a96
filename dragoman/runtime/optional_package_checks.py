"""Optional packages: whether one can be imported, and how to install it."""

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
    "optuna": "tune",
    "tensorboard": "board",
    "babel": "demo",
    "starlette": "web",
    "uvicorn": "web",
    "httptools": "web",
}


def missing_reason(package: str) -> str:
    """Return why a package cannot be imported, after trying; "" if it can."""
    if importlib.util.find_spec(package) is None:
        return f"no {package}"
    try:
        importlib.import_module(package)
    except Exception as error:  # a package built for another system may raise anything
        reason = next(iter(str(error).splitlines()), "")[:120]
        return f"a {package} that does not load ({type(error).__name__}: {reason})"
    return ""


def install_hint(package: str) -> str:
    """Return the command that installs a package."""
    return f"pip install 'dragoman[{EXTRAS[package]}]'"


def is_installed(package: str) -> bool:
    """Whether a package can be imported."""
    return not missing_reason(package)


def require_packages(*packages: str) -> None:
    """Raise ConfigError if a package cannot be imported, with the command that installs it."""
    missing = {package: found for package in packages if (found := missing_reason(package))}
    if missing:
        first = next(iter(missing))
        raise ConfigError(
            [
                f"this needs {' and '.join(packages)}; found {' and '.join(missing.values())}; "
                f"install it: {install_hint(first)}"
            ]
        )
