"""docs/extending.md: its code and commands run, and its new score passes the contract tests."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dragoman.attention.catalogue import ALIGNMENTS, SCORES
from dragoman.cli.app import main
from dragoman.models.block_options import BlockOptions

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)


def shown(block: str) -> list[str]:
    return [line.removeprefix("# ") for line in block.splitlines() if line.startswith("# ")]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Run the page's blocks in order; a block that begins with a file name is saved as that
    file.
    """
    for registry in (SCORES, ALIGNMENTS):  # the page registers names; they are gone afterwards
        monkeypatch.setattr(registry, "_entries", dict(registry))
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, Any] = {"__name__": "extending"}
    try:
        with torch.random.fork_rng(devices=[]):
            for number, block in enumerate(blocks(), start=1):
                run(block, f"extending.md, block {number}", names, tmp_path)
        yield names
    finally:
        sys.modules.pop("my_scores", None)


def run(block: str, where: str, names: dict[str, Any], folder: Path) -> None:
    file = re.match(r"# (\w+\.py)\n", block)
    if file:
        (folder / file[1]).write_text(block, encoding="utf-8")
        return
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, where, "exec"), names)
    assert printed.getvalue().splitlines() == shown(block), where


def contracts() -> ModuleType:
    """Import the contract tests of scores and alignments."""
    spec = importlib.util.spec_from_file_location(
        "score_contracts", Path(__file__).with_name("test_scores_and_alignments.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_runs_and_its_score_passes_the_contract_tests(page: dict[str, Any]) -> None:
    assert page["losses"][-1] < page["losses"][0] / 2
    found = contracts()
    pairwise = [
        found.test_stepping_equals_forward,
        found.test_hidden_keys_change_nothing,
        found.test_weights_times_values_are_the_context_and_rows_sum_to_one,
        found.test_no_mask_means_everything,
        found.test_gradients_equal_finite_differences,
        found.test_other_rows_and_padding_change_nothing,
        found.test_selecting_rows_commutes_with_stepping,
        found.test_training_in_mixed_precision_reaches_every_parameter,
    ]
    partners = [name for name in ALIGNMENTS if ("distance", name) in found.PAIRS]
    assert len(partners) >= 7
    assert "mine" in partners
    for promise in pairwise:
        for alignment in partners:
            promise("distance", alignment)
    for pair in [pair for pair in found.REFUSED if pair[0] == "distance"]:
        found.test_features_that_the_score_does_not_accept_are_rejected_when_built(pair)
    found.test_a_score_works_with_and_without_heads("distance")
    found.test_a_score_fits_into_multi_head_attention("distance")


def test_the_new_score_equals_its_equation(page: dict[str, Any]) -> None:
    score = SCORES.load("distance")(query_width=4, key_width=4).double()
    query, key = (
        torch.randn(2, 3, 4, dtype=torch.float64),
        torch.randn(2, 5, 4, dtype=torch.float64),
    )
    found = score(query, score.prepare(key))
    for row in range(2):
        for t in range(3):
            for s in range(5):
                wanted = (
                    -sum(
                        (float(q) - float(k)) ** 2
                        for q, k in zip(query[row, t], key[row, s], strict=True)
                    )
                    / 2
                )
                assert abs(float(found[row, t, s]) - wanted) < 1e-12


def test_registries_are_restored() -> None:
    assert "distance" not in SCORES
    assert "mine" not in ALIGNMENTS
    assert "my_scores" not in sys.modules


def test_the_commands_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = re.findall(r"^    (dragoman .*)$", PAGE.replace("\\\n", ""), flags=re.MULTILINE)
    assert commands
    monkeypatch.chdir(tmp_path)
    for language, line in (
        ("de", "ein Hund läuft hier {} mal"),
        ("en", "a dog runs here {} times"),
    ):
        (tmp_path / f"train.{language}").write_text(
            "".join(f"{line.format(n)}\n" for n in range(120)), encoding="utf-8"
        )
    for command in commands:
        assert "--dry-run" in command
        quick = (
            "--set text.tokenizer=characters --set data.cache_dir=cache "
            "--set train.batch_tokens=256 --set model.width=16 --set train.threads=1"
        )
        assert main(shlex.split(f"{command} {quick}")[1:]) == 0, capsys.readouterr().err
    assert "nothing was trained" in capsys.readouterr().err


def test_the_names_on_the_page_exist() -> None:
    for name in re.findall(r"`((?:dragoman|tests)/[\w/]+\.py)`", PAGE):
        assert (ROOT / name).is_file(), name
    for folder in re.findall(r"`((?:dragoman|tests)/[\w/]+/)`", PAGE):
        assert (ROOT / folder).is_dir(), folder
    assert {"problems", "suggest"} <= set(dir(BlockOptions))
