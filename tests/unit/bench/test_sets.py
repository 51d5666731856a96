"""The bench of sets: the plain model is the same model, and slopes are fitted."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from dragoman.config import read_config
from dragoman.tasks.unordered_set_input_task import SetsTask

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.sets")


@pytest.mark.parametrize("recipe", ["lee2019_max", "lee2019_clustering"])
def test_the_plain_set_transformer_has_the_same_outputs(bench: ModuleType, recipe: str) -> None:
    config = read_config(recipe=recipe, overrides=["model.width=16", "model.ffn_width=16"])
    task = SetsTask(config, SetsTask.fit_text(config, lambda: iter(())))
    torch.manual_seed(0)
    ours = task.build_model().eval()
    plain = bench.PlainSetTransformer(ours).eval()
    batch = task.collate(task.generate("valid"), np.arange(4))
    with torch.no_grad():
        expected = ours(batch.elements, batch.mask)
        found = plain(batch.elements, batch.mask)
    torch.testing.assert_close(found.view_as(expected), expected, atol=1e-4, rtol=1e-4)


def test_fitted_slopes_are_exponents(bench: ModuleType) -> None:
    sizes = (100, 200, 400)
    assert bench.fit_slope(sizes, [3.0 * n**2 for n in sizes]) == pytest.approx(2.0)
    assert bench.fit_slope(sizes, [0.5 * n for n in sizes]) == pytest.approx(1.0)


def test_it_prints_a_row_for_each_system(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "--device cpu --steps 2 --rounds 1 --batch-tokens 100 --only maximum"
    monkeypatch.setattr(sys, "argv", ["sets.py", *arguments.split(), "--systems", "ours", "plain"])
    bench.main()
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [each["system"] for each in row["rows"]] == ["ours", "plain"]
    assert all(each["steps_s"] > 0 for each in row["rows"])
