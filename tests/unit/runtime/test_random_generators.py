from __future__ import annotations

import ast
from pathlib import Path

import torch

import dragoman
from dragoman.runtime.random_generators import isolated_rng, seed_generators


def test_seed_generators_equals_torch_manual_seed() -> None:
    torch.manual_seed(11)
    expected = torch.rand(5)
    seed_generators(11, torch.device("cpu"))
    assert torch.equal(torch.rand(5), expected)


def test_isolated_rng_restores_the_generators() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with isolated_rng(9):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with isolated_rng(9):
        assert torch.equal(torch.rand(3), inside)


def test_training_code_uses_no_global_generator() -> None:
    """Generator states would have to be saved; derived seeds need not (flair#1189)."""
    package = Path(dragoman.__file__).parent
    for path in [
        *(package / "training").glob("*.py"),
        *(package / "tasks").glob("*.py"),
        *(package / "data").glob("*.py"),
    ]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert "random" not in names, path
            if (
                isinstance(node, ast.Attribute)
                and node.attr == "random"
                and isinstance(node.value, ast.Name)
            ):
                assert node.value.id not in ("np", "numpy"), path
