"""Optional packages: what is missing, and the extra that has it."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

from dragoman.errors import ConfigError
from dragoman.runtime import optional_package_checks as package_checks
from dragoman.runtime.optional_package_checks import (
    EXTRAS,
    install_hint,
    is_installed,
    missing_reason,
    require_packages,
)

PROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"


@pytest.mark.parametrize("package", EXTRAS)
def test_the_hint_names_an_extra_that_has_the_package(package: str) -> None:
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    match = re.fullmatch(r"pip install 'dragoman\[(\w+)\]'", install_hint(package))
    assert match
    assert package in [re.split("[<>=]", each)[0] for each in extras[match[1]]]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 1", ""),
        ("raise OSError('wrong system\\nand more')", " (OSError: wrong system)"),
        ("raise ImportError('no symbol')", " (ImportError: no symbol)"),
        ("raise RuntimeError", " (RuntimeError: )"),
    ],
)
def test_a_package_that_does_not_load_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    name = "a_package_of_this_test"
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert missing_reason(name) == f"no {name}"
    (tmp_path / f"{name}.py").write_text(text)
    importlib.invalidate_caches()
    assert missing_reason(name) == (reason and f"a {name} that does not load{reason}")
    assert is_installed(name) == (not reason)
    sys.modules.pop(name, None)


def test_an_error_names_all_packages_that_are_missing_and_the_extra_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = {"optuna": "no optuna", "onnx": "an onnx that does not load"}
    monkeypatch.setattr(package_checks, "missing_reason", lambda name: missing.get(name, ""))
    require_packages("transformers", "ctranslate2")
    with pytest.raises(ConfigError) as caught:
        require_packages("transformers", "optuna", "onnx")
    assert (
        "this needs transformers and optuna and onnx; found no optuna and an onnx that does not "
        "load; install it: pip install 'dragoman[tune]'"
    ) in str(caught.value)
