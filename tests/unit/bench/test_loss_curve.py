"""The loss-curve comparison: its statistics, equal initial weights, and detection of
differences.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
TINY = ("--device", "cpu", "--size", "tiny", "--loss-curve")


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.loss_curve")


@pytest.fixture
def timing(curves: ModuleType) -> ModuleType:
    return importlib.import_module("bench.train_gpu")


@pytest.fixture
def track(curves: Any, timing: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    options = parse_arguments(
        timing,
        monkeypatch,
        "--curve-steps",
        "4",
        "--frozen-steps",
        "5",
        "--rate",
        "0.01",
        "--warm-up",
        "2",
    )
    return curves.LossCurveRunner(
        options,
        timing.load_corpus(options, tmp_path),
        timing.model_config("tiny"),
        torch.device("cpu"),
        tmp_path,
    )


def parse_arguments(timing: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> Namespace:
    monkeypatch.setattr(sys, "argv", ["bench/train_gpu.py", *TINY, *words])
    return timing.parse_arguments()


# The arithmetic


def test_windows_have_means_spreads_and_errors(curves: Any) -> None:
    """Computed by hand, for runs whose loss is constant in each tenth."""
    plain = [[mean] * 5 + [0.0] * 45 for mean in (1.0, 2.0, 3.0)]
    ours = [[mean] * 5 + [1.0] * 45 for mean in (3.0, 5.0, 7.0)]
    first, *others = curves.compare(ours, plain)
    assert (first["from"], first["to"]) == (1, 5)
    assert (first["ours"], first["plain"]) == ([3.0, 5.0, 7.0], [1.0, 2.0, 3.0])
    assert first["plain_mean"] == 2.0
    assert first["plain_deviation"] == pytest.approx(1.0)  # (1 + 0 + 1) / 2, its root
    assert first["difference"] == pytest.approx(3.0)
    assert first["error"] == pytest.approx((5 / 3) ** 0.5)  # variances of 4 and 1, three runs each
    assert first["in_errors"] == pytest.approx(3 / (5 / 3) ** 0.5)
    assert [(window["from"], window["to"]) for window in others] == [
        (start, start + 4) for start in range(6, 47, 5)
    ]
    assert all(window["difference"] == 1.0 and window["error"] == 0.0 for window in others)
    assert all(window["in_errors"] > 1e8 for window in others), (
        "a difference without any spread is beyond doubt"
    )
    assert all(window["in_errors"] == 0.0 for window in curves.compare(plain, plain)), (
        "and no difference is none, whatever the spread"
    )


def test_the_mean_is_over_the_window_before_the_spread_is_over_runs(curves: Any) -> None:
    """Variation common to all runs is not noise; brute force over torch's moments."""
    torch.manual_seed(0)
    ours, plain = (torch.randn(runs, 40, dtype=torch.float64) for runs in (4, 3))
    for index, window in enumerate(curves.compare(ours.tolist(), plain.tolist())):
        part = slice(4 * index, 4 * index + 4)
        our_means, plain_means = ours[:, part].mean(dim=1), plain[:, part].mean(dim=1)
        error = float(our_means.var() / 4 + plain_means.var() / 3) ** 0.5
        assert window["difference"] == pytest.approx(float(our_means.mean() - plain_means.mean()))
        assert window["error"] == pytest.approx(error)
        assert window["in_errors"] == pytest.approx(window["difference"] / error)


@pytest.mark.parametrize(("updates", "sizes"), [(3, {1}), (10, {1}), (25, {2, 3}), (500, {50})])
def test_windows_contain_every_step_once(curves: Any, updates: int, sizes: set[int]) -> None:
    curve = [float(update) for update in range(1, updates + 1)]
    windows = curves.compare([curve, curve], [curve, curve])
    assert len(windows) == min(updates, 10)
    seen = [update for window in windows for update in range(window["from"], window["to"] + 1)]
    assert seen == list(range(1, updates + 1))
    assert {window["to"] - window["from"] + 1 for window in windows} == sizes
    assert all(window["plain_mean"] == (window["from"] + window["to"]) / 2 for window in windows)


def test_how_often_equal_groups_are_two_errors_apart(curves: Any) -> None:
    """The docstring's 12 and 18 %, which are Student's for three runs each, by drawing."""
    draw = random.Random(1)

    def false_positive_rate(spread: float) -> float:
        trials = 4000
        groups = [
            [[[draw.gauss(0.0, width)] for _ in range(3)] for width in (1.0, spread)]
            for _ in range(trials)
        ]
        return sum(abs(curves.compare(*group)[0]["in_errors"]) > 2 for group in groups) / trials

    assert false_positive_rate(1.0) == pytest.approx(0.116, abs=0.02)
    assert false_positive_rate(1e-6) == pytest.approx(0.1835, abs=0.02)


def test_pairs_are_compared_step_by_step(curves: Any) -> None:
    base = curves.LossCurve([1.0, 5.0, 9.0], [1.0, 2.0, 4.0], {})
    ours = curves.LossCurve([1.5, 5.0, 10.0], [1.0, 2.5, 6.0], {})
    found = curves.paired_differences(ours, base)
    assert found["nll"] == pytest.approx(0.5)  # of 0.5, 0 and 1
    assert found["nll_error"] == pytest.approx(0.5 / 3**0.5)
    assert found["norm_ratio"] == pytest.approx(1.25)  # of 1, 1.25 and 1.5
    assert found["norm_ratio_error"] == pytest.approx(0.25 / 3**0.5)


def test_the_table_has_a_line_per_window_and_marks_the_worst(
    curves: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    spread = {"plain_mean": 5.0, "plain_deviation": 0.1}
    windows: list[dict[str, Any]] = [
        {"from": 1, "to": 50, "difference": 0.01, "error": 0.02, "in_errors": 0.5, **spread},
        {"from": 51, "to": 100, "difference": -0.25, "error": 0.125, "in_errors": -2.0, **spread},
        {"from": 101, "to": 150, "difference": 0.2, "error": 0.08, "in_errors": 2.5, **spread},
    ]
    largest = curves.print_windows("compiled+cuda_graphs bfloat16", windows)
    assert largest == {"nats": 0.25, "in_errors": 2.5, "within_two": 2, "windows": 3}
    *_, header, first, second, third, last = capsys.readouterr().out.splitlines()
    assert header.split() == [
        "steps",
        "float32",
        "deviation",
        "difference",
        "error",
        "in",
        "errors",
    ]
    assert first.split() == ["1-50", "5.0000", "0.1000", "0.0100", "0.0200", "0.5"]
    assert second.split() == ["51-100", "5.0000", "0.1000", "-0.2500", "0.1250", "-2.0"]
    assert third.split()[0] == "101-150"
    assert last == (
        "largest difference 0.2500 nats, largest in standard errors 2.5; 2 of 3 windows "
        "within two standard errors"
    )


# The runs


def test_options_reach_the_runs(curves: Any, timing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = parse_arguments(timing, monkeypatch)
    assert (usual.curve_steps, usual.seeds, usual.frozen_steps, usual.rate, usual.warm_up) == (
        500,
        3,
        60,
        7e-4,
        4000,
    )
    harsh = parse_arguments(
        timing,
        monkeypatch,
        "--rate",
        "0.003",
        "--warm-up",
        "7",
        "--curve-steps",
        "11",
        "--frozen-steps",
        "5",
        "--batch-tokens",
        "99",
    )
    track = curves.LossCurveRunner(harsh, None, None, torch.device("cpu"), None)
    monkeypatch.setattr(track, "plan", lambda *_, **__: None)
    configs = []
    monkeypatch.setattr(
        track,
        "_run",
        lambda label, config, *_: (
            configs.append(config) or curves.LossCurve([], [], {"weight": torch.ones(1)})
        ),
    )
    track.train("any", {"precision": "float32", "compile": "off"}, 4)
    track.run_frozen("any", {"precision": "bfloat16"}, 5, {"weight": torch.ones(1)})
    trained, held = configs
    assert (
        trained.learning_rate,
        trained.warmup_steps,
        trained.steps,
        trained.batch_tokens,
        trained.seed,
    ) == (0.003, 7, 11, 99, 4)
    assert (trained.precision, trained.compile, trained.schedule) == (
        "float32",
        "off",
        "inverse_sqrt",
    )
    assert (held.learning_rate, held.steps, held.seed, held.precision) == (0.0, 5, 5, "bfloat16")


@pytest.mark.parametrize(
    ("option", "found"), [("--seeds", "1 and 60"), ("--frozen-steps", "3 and 1")]
)
def test_one_run_or_step_has_no_spread(
    timing: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
    found: str,
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(timing, monkeypatch, option, "1")
    assert f"must be at least 2; found {found}" in capsys.readouterr().err


def test_gpu_paths_are_compared_with_float32_only(curves: Any) -> None:
    on_gpu, on_cpu = (curves.compared_setups(torch.device(kind)) for kind in ("cuda", "cpu"))
    plain = {"compile": "off", "cuda_graphs": "off", "precision": "float32"}
    assert on_gpu == {
        "compiled+cuda_graphs bfloat16": {
            "compile": "on",
            "cuda_graphs": "auto",
            "precision": "bfloat16",
        },
        "plain float32": plain,
    }
    assert on_cpu == {"eager bfloat16": plain | {"precision": "bfloat16"}, "plain float32": plain}


def test_runs_differ_in_dropout_only(
    curves: Any, track: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun, batches = [], []
    build_trainer = curves.build_trainer

    def watched(model: Any, plan: Any, *more: Any, **named: Any) -> Any:
        trainer = build_trainer(model, plan, *more, **named)
        begun.append({name: tensor.clone() for name, tensor in trainer.model.state_dict().items()})
        batches.append([list(batch) for batch in plan._order])
        return trainer

    monkeypatch.setattr(curves, "build_trainer", watched)
    plain = curves.compared_setups(torch.device("cpu"))["plain float32"]
    first, again, other = (track.train("plain", plain, seed) for seed in (1, 1, 2))
    assert first.nll == again.nll
    assert first.norm == again.norm
    assert all(one != two for one, two in zip(first.nll, other.nll, strict=True))
    assert batches[0] == batches[1] == batches[2]
    assert len(batches[0]) == len(first.nll) == 4
    for state in begun[1:]:
        torch.testing.assert_close(state, begun[0], rtol=0, atol=0)
    assert any(not torch.equal(first.weights[name], tensor) for name, tensor in begun[0].items()), (
        "a run moves its weights"
    )
    assert [line.split(",")[1].split()[:4] for line in capsys.readouterr().out.splitlines()] == [
        ["seed", seed, "4", "steps"] for seed in "112"
    ]
    assert [
        path.name
        for path in track._folder.iterdir()
        if path.is_dir() and path.name.startswith("tmp")
    ] == []


def test_frozen_weights_give_equal_losses_on_equal_paths(curves: Any, track: Any) -> None:
    plain = curves.compared_setups(torch.device("cpu"))["plain float32"]
    weights = track.train("plain", plain, 1).weights
    kept = {name: tensor.clone() for name, tensor in weights.items()}
    base, same, other = (track.run_frozen("plain", plain, seed, weights) for seed in (1, 1, 2))
    assert len(base.nll) == 5
    assert curves.paired_differences(same, base) == {
        "nll": 0.0,
        "nll_error": 0.0,
        "norm_ratio": 1.0,
        "norm_ratio_error": 0.0,
    }
    noise = curves.paired_differences(other, base)
    assert noise["nll"] != 0.0
    assert noise["norm_ratio"] != 1.0
    assert 0.0 < noise["nll_error"] < 0.5
    torch.testing.assert_close(base.weights, kept, rtol=0, atol=0)
    torch.testing.assert_close(weights, kept, rtol=0, atol=0)


def test_frozen_weights_reach_the_bf16_compute_copies(curves: Any, track: Any) -> None:
    plain = curves.compared_setups(torch.device("cpu"))["plain float32"]
    first, weights = track.train("plain", plain, 1).nll[0], track.train("plain", plain, 1).weights
    base, rounded = (
        track.run_frozen("any", setup, 1, weights)
        for setup in (plain, {"precision": "bfloat16", "param_dtype": "bfloat16"})
    )
    found = curves.paired_differences(rounded, base)
    assert 0.0 < abs(found["nll"]) < 0.01 < abs(first - base.nll[0]), (
        "the initial weights would be further off"
    )
    assert found["norm_ratio"] == pytest.approx(1.0, abs=0.02)


def test_frozen_weights_reveal_a_path_with_errors(
    curves: Any, track: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient that is a hundredth too long changes no loss, and shows to five digits."""
    plain = curves.compared_setups(torch.device("cpu"))["plain float32"]
    weights = track.train("plain", plain, 1).weights
    base = track.run_frozen("plain", plain, 1, weights)
    train_step = importlib.import_module("dragoman.training.train_step")
    backward = train_step.SingleProcess.backward
    monkeypatch.setattr(
        train_step.SingleProcess,
        "backward",
        lambda self, loss: backward(self, replace(loss, total=1.01 * loss.total)),
    )
    found = curves.paired_differences(track.run_frozen("plain", plain, 1, weights), base)
    assert found["nll"] == 0.0
    assert found["norm_ratio"] == pytest.approx(1.01, abs=1e-5)
    assert found["norm_ratio_error"] < 1e-5


def test_weights_that_move_are_rejected(
    curves: Any, track: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = curves.compared_setups(torch.device("cpu"))["plain float32"]
    monkeypatch.setattr(
        track, "_run", lambda *_: curves.LossCurve([], [], {"weight": torch.tensor([1.0, 2.5])})
    )
    with pytest.raises(AssertionError, match=r"found a change of 0\.5"):
        track.run_frozen("plain", plain, 1, {"weight": torch.tensor([1.0, 2.0])})


def test_a_run_that_skips_steps_is_rejected(
    curves: Any, track: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_trainer = curves.build_trainer
    monkeypatch.setattr(
        curves,
        "build_trainer",
        lambda *more, on_record: build_trainer(*more, on_record=lambda record: None),
    )
    with pytest.raises(AssertionError, match="each of its 4 steps once; found 0"):
        track.train("plain", curves.compared_setups(torch.device("cpu"))["plain float32"], 1)


def test_the_command(
    timing: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys,
        "argv",
        ["bench/train_gpu.py", *TINY, "--curve-steps", "20", "--seeds", "2", "--frozen-steps", "6"],
    )
    timing.main()
    lines = capsys.readouterr().out.splitlines()
    runs = [line.split("  ")[1] for line in lines if "last loss" in line]
    trained = [
        f"{name}, seed {seed}" for name in ("eager bfloat16", "plain float32") for seed in (1, 2)
    ]
    held = [
        f"{name}, frozen"
        for name in ("plain float32, seed 1", "eager bfloat16, seed 1", "plain float32, seed 2")
    ]
    assert runs == trained + held
    found = json.loads(lines[-1])
    assert len(found["loss_curve"]) == found["largest"]["windows"] == 10
    assert all(len(window["ours"]) == len(window["plain"]) == 2 for window in found["loss_curve"])
    assert (
        found["largest"]["nats"]
        == max(abs(window["difference"]) for window in found["loss_curve"])
        < 0.02
    )
    assert set(found["frozen"]) == {"eager bfloat16, seed 1", "plain float32, seed 2"}
    ours, noise = found["frozen"].values()
    assert 0.0 < abs(ours["nll"]) < 0.01
    assert ours["nll_error"] < noise["nll_error"], "with the same dropout only rounding is left"
    assert ours["norm_ratio"] == pytest.approx(1.0, abs=0.01)
    names = (
        "bench",
        "data",
        "size",
        "curve_steps",
        "seeds",
        "rate",
        "warm_up",
        "frozen_steps",
        "torch",
    )
    assert [found[name] for name in names] == [
        "train_gpu",
        "drawn",
        "tiny",
        20,
        2,
        7e-4,
        4000,
        6,
        torch.__version__,
    ]
    assert found["device"].startswith("CPU")
