from __future__ import annotations

import ast
import hashlib
from pathlib import Path

import torch

import dragoman
from dragoman.runtime.seeds import derive_seed, isolated_rng, seed_generators


def test_seeds_are_the_written_function_of_the_position() -> None:
    digest = hashlib.sha256(b"1/20/3/0").digest()
    assert derive_seed(1, 20, 3, 0) == int.from_bytes(digest[:8], "big") >> 1
    assert derive_seed(1, 20, 3, "0") == derive_seed(1, 20, 3, 0)


def test_seeds_fit_any_generator_and_do_not_meet() -> None:
    seeds = {
        derive_seed(run, step, micro_index, stream)
        for run in (1, 2)
        for step in range(50)
        for micro_index in range(4)
        for stream in ("0", "0.1", "text")
    }
    assert len(seeds) == 2 * 50 * 4 * 3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_reseeding_is_what_torch_does() -> None:
    torch.manual_seed(11)
    expected = torch.rand(5)
    seed_generators(11, torch.device("cpu"))
    assert torch.equal(torch.rand(5), expected)


def test_a_fork_leaves_the_generators_as_they_were() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with isolated_rng(9):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with isolated_rng(9):
        assert torch.equal(torch.rand(3), inside)


def test_training_code_uses_no_global_generator() -> None:
    """State that Python or NumPy carries would have to be saved; seeds that positions give need not be (flairNLP/flair#1189)."""
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
