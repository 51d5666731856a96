"""The public names: listed once, and imported on first access."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dragoman

PUBLIC = {
    "Classifier",
    "Config",
    "DragomanError",
    "Explanation",
    "LanguageModel",
    "MaskedLanguageModel",
    "PairClassifier",
    "SetModel",
    "Tagger",
    "Translation",
    "Translator",
    "__version__",
    "edit",
    "explore",
    "load",
    "read_config",
    "record",
    "train",
}


def test_the_list_is_frozen() -> None:
    """Public names do not vanish (transformers#43256); a new one is added here on purpose."""
    assert set(dragoman.__all__) == PUBLIC
    assert len(dragoman.__all__) == len(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_can_be_imported(name: str) -> None:
    value = getattr(dragoman, name)
    assert isinstance(value, str) or value.__doc__


def test_dir_lists_them_all() -> None:
    assert {name for name in dir(dragoman) if not name.startswith("__")} == PUBLIC - {"__version__"}


def test_unknown_name_lists_the_public_ones() -> None:
    with pytest.raises(
        AttributeError, match="no attribute 'Translater'; it has Classifier, Config, DragomanError"
    ):
        _ = dragoman.Translater


def test_no_public_name_is_unlisted() -> None:
    code = "import dragoman; print(sorted(n for n in vars(dragoman) if not n.startswith('_')))"
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(dragoman.__file__).parents[1],
    ).stdout
    # The rest are submodules that Python adds on import, and names that the file itself needs.
    assert set(ast.literal_eval(out)) - PUBLIC <= {
        "TYPE_CHECKING",
        "Any",
        "annotations",
        "importlib",
        "errors",
    }


def test_the_types_are_shipped() -> None:
    assert (Path(dragoman.__file__).parent / "py.typed").exists()
