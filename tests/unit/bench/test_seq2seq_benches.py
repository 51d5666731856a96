"""Benches of models without attention, of gradients by distance and of monotonic decoding."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU

from dragoman.models.factory import build_model

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"bench.{name}")


def run(
    module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *options: str,
) -> dict[str, object]:
    monkeypatch.setattr(sys, "argv", [module.__name__, *options])
    module.main()
    found: dict[str, object] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    return found


def test_gradients_vanish_explode_and_stay(bench, monkeypatch, capsys, tmp_path) -> None:
    figure = tmp_path / "gradient.png"
    found = run(
        bench("gradient_by_distance"), monkeypatch, capsys, "--width", "32", "--plot", str(figure)
    )
    last = {name: values[-1] / values[0] for name, values in found["rows"].items()}
    assert last["rnn, U x 0.8"] < 1e-12
    assert last["rnn, U x 1.5"] > 100
    for name in ("lstm, U x 0.5", "gru, U x 0.5", "sru"):
        assert 0.05 < last[name] < 100
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_monotonic_decoding_reads_each_position_once(bench, monkeypatch, capsys) -> None:
    options = ("--width", "8", "--longest", "256", "--repeats", "1")
    found = run(bench("monotonic_decoding"), monkeypatch, capsys, *options)
    assert found["lengths"] == [64, 128, 256]
    assert set(found["slopes"]) == {"scan", "step"}


def test_mini_recipes_reports_a_row_per_run(bench, monkeypatch) -> None:
    module = bench("mini_recipes")
    monkeypatch.setattr(module, "PAIRS", 300)
    monkeypatch.setattr(module, "UNSEEN", 3)
    row = module.train_one("tiny", "plain", settings=("train.steps=2", "train.validate_every=2"))
    assert row["steps"] == 2
    assert row["task"] == "reverse"
    assert 0 <= row["exact"] <= 1
    assert "| tiny | plain | reverse | 2 |" in module.table([row])


def test_joined_pairs_use_every_pair_once(bench) -> None:
    pairs = [(f"s{n}", f"t{n}") for n in range(10)]
    joined = bench("attention_by_length").join_pairs(pairs, 3, random.Random(0))
    assert len(joined) == 3
    words = [(src.split(), tgt.split()) for src, tgt in joined]
    assert all([w[1:] for w in src] == [w[1:] for w in tgt] for src, tgt in words)
    assert len({w for src, _ in words for w in src}) == 9


def test_the_systems_differ_in_attention_and_build(bench) -> None:
    systems = bench("attention_by_length").systems(32)
    for config in systems.values():
        assert config.problems() == []
        build_model(config.model, src_vocab_size=50, tgt_vocab_size=50)
    fixed, attention = (systems[name].model.decoder[0] for name in ("fixed", "attention"))
    assert fixed.replace("fixed", "additive") == attention


def test_the_growth_of_a_gap_is_found_with_its_interval(bench) -> None:
    """A system that is right everywhere, and one that is wrong on half of the long sentences;
    scores are sacreBLEU's.
    """
    module = bench("attention_by_length")
    generator = random.Random(1)
    references = [
        " ".join(f"w{generator.randrange(500)}" for _ in range(length))
        for length in (10, 20, 35, 50)
        for _ in range(30)
    ]
    lengths = np.array([len(line.split()) for line in references])
    worse = [
        "x " * 50 if length > 45 and number % 2 else line
        for number, (line, length) in enumerate(zip(references, lengths, strict=True))
    ]
    statistics = {
        "none": module.SentenceStatistics(worse, references),
        "attention": module.SentenceStatistics(references, references),
    }
    report = module.compare(statistics, lengths, 100, 0)
    assert report["sentences"] == [30, 30, 30, 30]
    expected = BLEU().corpus_score(worse[90:], [references[90:]]).score
    assert report["bleu"]["none"][3] == pytest.approx(expected, abs=0.01)
    growth = report["growth of the gap to none"]
    assert growth["points"] == pytest.approx(100 - expected, abs=0.02)
    low, high = growth["interval"]
    assert low < growth["points"] < high
