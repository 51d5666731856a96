"""The fixtures of the explorer: generated data, and a model that is trained once."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dragoman.explain.explanation import Explanation
from dragoman.explain.explanation_schema_validation import find_problems

PATH = Path(__file__).resolve().parents[3] / "tools" / "explorer_fixtures.py"


@pytest.fixture(scope="module")
def fixtures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("explorer_fixtures", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["explorer_fixtures"] = module
    spec.loader.exec_module(module)
    return module


def test_data_is_the_same_for_a_seed(fixtures: ModuleType) -> None:
    for fixture in fixtures.FIXTURES.values():
        first, second = (list(fixture.corpus(random.Random(3), 5)) for _ in range(2))
        assert first == second
        assert len(first) == 5


def test_verbs_stand_where_each_language_has_them(fixtures: ModuleType) -> None:
    pairs = list(fixtures.make_sentences(random.Random(1), 300))
    perfect = [pair for pair in pairs if " hat " in pair[0] and not pair[0].startswith("Heute")]
    assert perfect
    for german, english in perfect:
        assert german.rstrip(".").split()[-1].startswith("ge")
        assert " has " in english
    assert any(
        german.startswith("Heute") and english.startswith("Today") for german, english in pairs
    )


def test_a_model_is_trained_once_and_explained(fixtures: ModuleType, tmp_path: Path) -> None:
    out = fixtures.build("sets", tmp_path, tiny=True)
    written = (out / "manifest.json").stat().st_mtime_ns
    assert fixtures.build("sets", tmp_path, tiny=True) == out
    assert (out / "manifest.json").stat().st_mtime_ns == written
    [path] = fixtures.explain("sets", tmp_path)
    found = Explanation.from_json(path.read_text())
    assert found.model["task"] == "sets"
    assert find_problems(found.to_dict()) == []
