"""Programs that are optional: what is said where one is not installed."""

from __future__ import annotations

import importlib.util

from dragoman.errors import ConfigError

EXTRAS = {"ctranslate2": "fast", "transformers": "hf", "onnx": "onnx", "onnxscript": "onnx", "onnxruntime": "onnx"}


def is_installed(package: str) -> bool:
    """Say whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def require(*packages: str) -> None:
    """Refuse to go on without packages, and say how to get them."""
    missing = [package for package in packages if not is_installed(package)]
    if missing:
        extra = EXTRAS[missing[0]]
        raise ConfigError(
            [f"this needs {' and '.join(packages)}; found no {' and no '.join(missing)}; install it: pip install 'dragoman[{extra}]'"]
        )
