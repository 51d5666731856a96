"""Tables, CSV files and figures of trials."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from dragoman.tune import study_report
from dragoman.tune.search_space import SearchParameter
from dragoman.tune.study_report import best_trial, draw_trials, format_table, rank_trials, write_csv
from dragoman.tune.trial_journal import TrialRecord

SPACE = (
    SearchParameter("model.dropout", low=0.0, high=0.4),
    SearchParameter("train.learning_rate", low=1e-4, high=1e-2, log=True),
    SearchParameter("train.optimizer", ("adam", "adamw")),
)


def trial(number: int, state: str, value: float | None, reason: str = "") -> TrialRecord:
    values = {"model.dropout": 0.1 * number, "train.learning_rate": 1e-3, "train.optimizer": "adam"}
    return TrialRecord(number, dict(values), state, [1], [1.0], value, 65.0, 1000, reason)


TRIALS = [
    trial(0, "failed", None, "a, b\nand $c$"),
    trial(1, "complete", 1.5),
    trial(2, "pruned", 0.5),
    trial(3, "complete", 1.25),
    trial(4, "running", None),
]


def test_complete_trials_come_first_best_first() -> None:
    assert [each.number for each in rank_trials(TRIALS, lower=True)] == [3, 1, 2, 4, 0]
    assert [each.number for each in rank_trials(TRIALS, lower=False)] == [1, 3, 2, 4, 0]
    assert best_trial(TRIALS, lower=True) is TRIALS[3]
    assert best_trial(TRIALS[:1], lower=True) is None
    assert best_trial([], lower=True) is None


def test_the_table() -> None:
    assert format_table(TRIALS, SPACE, metric="loss", lower=True) == [
        "trial    loss  dropout  learning_rate  optimizer        time  state",
        "    3  1.2500      0.3          0.001       adam  1 min 05 s  complete",
        "    1  1.5000      0.1          0.001       adam  1 min 05 s  complete",
        "    2  0.5000      0.2          0.001       adam  1 min 05 s  pruned",
        "    4       -      0.4          0.001       adam  1 min 05 s  running",
        "    0       -        0          0.001       adam  1 min 05 s  failed",
    ]
    narrow = format_table(TRIALS, SPACE, metric="loss", lower=True, columns=50)
    assert all(len(line) <= 50 for line in narrow)
    assert narrow[-1] == "(1 more setting in trials.csv)" or "more settings" in narrow[-1]


def test_the_csv_file_keeps_any_reason(tmp_path: Path) -> None:
    write_csv(tmp_path / "trials.csv", TRIALS, SPACE, metric="loss")
    with (tmp_path / "trials.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["reason"] == "a, b\nand $c$"
    assert [row["loss"] for row in rows] == ["", "1.5", "0.5", "1.25", ""]


def test_figures(tmp_path: Path) -> None:
    assert not draw_trials([tmp_path / "none.png"], TRIALS[:1], SPACE, metric="loss", lower=True)
    assert not (tmp_path / "none.png").exists()
    paths = [tmp_path / "trials.png", tmp_path / "trials.svg"]
    assert draw_trials(paths, TRIALS, SPACE, metric="loss", lower=True)
    text = paths[1].read_text()
    for word in ("dropout", "learning_rate", "adamw", "best so far", "pruned", "loss"):
        assert f">{word}<" in text
    only = [trial(0, "pruned", 2.0)]
    assert draw_trials([tmp_path / "pruned.png"], only, SPACE[:1], metric="bleu", lower=False)


def test_trials_far_off_the_complete_ones_do_not_set_the_limits() -> None:
    """Three times their range is shown beyond them, and a margin of 8 %."""
    complete = [trial(0, "complete", 2.0), trial(1, "complete", 3.0)]
    near = [trial(2, "pruned", 5.0), trial(3, "pruned", 1.0)]
    far = [trial(4, "pruned", 50.0), trial(5, "pruned", -50.0)]
    for trials, low, high in (
        (complete, 2.0, 3.0),
        ([*complete, *near], 1.0, 5.0),
        ([*complete, *far], 2.0 - 3.0, 3.0 + 3.0),
        ([*far], -50.0, 50.0),
    ):
        margin = 0.08 * (high - low)
        assert study_report._limits(trials) == pytest.approx((low - margin, high + margin))
