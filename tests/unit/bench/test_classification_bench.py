"""The bench of classifiers runs at its smallest size, and compares models of one size."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dragoman.config import read_config
from dragoman.models.factory import count_parameters

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.classification")


def test_it_runs_and_prints_json_for_scripts(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--size", "tiny", "--steps", "2", "--device", "cpu", "--no-compile", "--only", "han"]
    monkeypatch.setattr(sys, "argv", ["bench/classification.py", *options])
    bench.main()
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert [row["system"] for row in found["rows"]] == [
        "han: ours, eager",
        "han: plain, shuffled",
        "han: plain, our batches",
    ]
    assert all(row["tokens_s"] > 0 for row in found["rows"])


@pytest.mark.parametrize("member", ["han", "transformer"])
def test_both_models_are_of_one_size(bench: ModuleType, member: str) -> None:
    config = read_config(recipe=bench.MEMBERS[member])
    task, _ = bench.build_task(config, argparse.Namespace(texts=20, size="tiny"))
    plain = bench.PlainHAN(task) if member == "han" else bench.PlainTransformer(task)
    embeddings = len(task.text.vocabulary) * config.model.width
    positions = sum(each.numel() for name, each in plain.named_parameters() if "position" in name)
    ours = count_parameters(task.build_model()) - embeddings
    assert count_parameters(plain) - embeddings - positions == pytest.approx(ours, rel=0.02)


def test_few_labels_compares_variants_with_nb_svm_on_draws_of_each_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that repeats its first training label takes the place of a trained one."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    bench = importlib.import_module("few_labels")
    path = tmp_path / "data.jsonl"
    rows = [{"text": f"{'good' if at % 2 else 'bad'} {at}", "label": at % 2} for at in range(40)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    seen = list[tuple[int, int, str, int]]()

    def train(folder: Path, examples: list[str], valid: list[str], variant: str, seed: int) -> Path:
        assert not set(examples) & set(valid)
        seen.append((len(examples), len(valid), variant, seed))
        return folder

    class Repeating:
        def predict(self, texts: list[str]) -> list[argparse.Namespace]:
            return [argparse.Namespace(label="1") for _ in texts]

    monkeypatch.setattr(bench, "train", train)
    monkeypatch.setattr(bench.dragoman, "load", lambda path: Repeating())
    options = ["--train", str(path), "--test", str(path), "--sizes", "20", "--seeds", "1", "2"]
    options += ["--valid", "5", "--test-texts", "30", "--variant", "", "--variant=--mini"]
    monkeypatch.setattr(sys, "argv", ["few_labels.py", *options])
    bench.main()
    assert seen == [(20, 5, variant, seed) for seed in (1, 2) for variant in ("", "--mini")]
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["accuracy"] for line in lines if line.startswith("{")] == [50.0] * 4
    assert lines[-3].startswith("20 texts  100.0 ± 0.0  NB-SVM")
    assert lines[-1].endswith("--mini")
