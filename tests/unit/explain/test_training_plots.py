"""Training curves, TensorBoard logs and checkpoint averaging."""

from __future__ import annotations

import builtins
import json
import math

import pytest
import torch

from dragoman.checkpoint.weight_average import average_weights
from dragoman.errors import ConfigError, DataError
from dragoman.explain import training_plots
from dragoman.explain.training_plots import draw_curves, read_log
from dragoman.training.tensorboard import TensorBoardWriter


def write_log(path, steps=200, *, bleu=True):
    lines = []
    for step in range(1, steps + 1):
        nll = 2 + 5 * math.exp(-step / 60) + 0.2 * math.sin(step)
        lines.append(
            {
                "step": step,
                "loss": nll + 0.3,
                "nll": nll,
                "lr": 1e-3 * min(step / 40, 1),
                "grad_norm": 1 + 1 / step,
                "tokens": 4000,
                "padding": 0.05,
                "seconds": 0.2,
            }
        )
        if step == 50:
            lines.append(
                {
                    "step": 50,
                    "loss": "nan",
                    "nll": "nan",
                    "lr": 1e-3,
                    "grad_norm": "nan",
                    "tokens": 1,
                    "padding": 0.0,
                    "seconds": 0.2,
                    "skipped": True,
                }
            )
        if step % 50 == 0:
            lines.append(
                {
                    "event": "validation",
                    "step": step,
                    "loss": nll - 0.1,
                    **({"bleu": step / 10} if bleu else {}),
                }
            )
            lines.append({"event": "checkpoint", "step": step})
    path.write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 201, "lo', encoding="utf-8"
    )
    return path


@pytest.mark.parametrize("bleu", [True, False])
def test_curves_are_drawn_from_the_log(tmp_path, bleu) -> None:
    picture = tmp_path / "curves.png"
    assert draw_curves(write_log(tmp_path / "log.jsonl", bleu=bleu), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


def test_the_last_marker_has_room(tmp_path, monkeypatch) -> None:
    drawn = []
    monkeypatch.setattr(training_plots, "save_figure", lambda figure, _: drawn.append(figure))
    draw_curves(write_log(tmp_path / "log.jsonl"), tmp_path / "curves.png")
    assert all(axes.get_xlim()[1] > 200 for axes in drawn[0].axes)


def test_gradients_of_zero_are_drawn_without_a_warning(tmp_path) -> None:
    log = write_log(tmp_path / "log.jsonl")
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()[:-1]]
    log.write_text(
        "".join(json.dumps({**line, "grad_norm": 0.0}) + "\n" for line in lines if "lr" in line)
    )
    assert draw_curves(log, tmp_path / "curves.png")  # warnings are errors


def test_the_log_is_read_without_skipped_and_cut_off_lines(tmp_path) -> None:
    steps, validations = read_log(write_log(tmp_path / "log.jsonl"))
    assert [record["step"] for record in steps] == list(range(1, 201))
    assert [record["step"] for record in validations] == [50, 100, 150, 200]


def test_a_long_log_is_thinned(tmp_path) -> None:
    steps, _ = read_log(write_log(tmp_path / "log.jsonl", steps=9000))
    assert 2000 <= len(steps) < 4000


def test_a_validation_that_was_repeated_counts_once(tmp_path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(
        '{"event": "validation", "step": 4, "loss": 2.0}\n{"event": "validation", "step": 4, '
        '"loss": 2.5}\n',
        encoding="utf-8",
    )
    assert read_log(log)[1] == [{"event": "validation", "step": 4, "loss": 2.5}]


def test_values_of_wrong_types_are_left_out(tmp_path) -> None:
    log = write_log(tmp_path / "log.jsonl")
    with log.open("ab") as file:
        for line in (
            '{"event": "validation"}',
            '{"event": "validation", "step": [1], "loss": 1}',
            '{"step": 1, "nll": 2.0}',
            "[" * 100_000,
        ):
            file.write(line.encode() + b"\n")
        file.write(b'{"step": "x", "lr": null, "nll": 1e999, "norm": {}}\n\xff\xfe\n')
    assert draw_curves(log, tmp_path / "curves.png")
    steps, validations = read_log(log)
    assert (len(steps), len(validations)) == (200, 4)


def test_nothing_is_drawn_from_nothing(tmp_path) -> None:
    assert not draw_curves(tmp_path / "missing.jsonl", tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def test_tensorboard_gets_the_same_values(tmp_path) -> None:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    board = TensorBoardWriter(tmp_path)
    board({"step": 1, "loss": 2.5, "nll": 2.0, "lr": 0.1, "grad_norm": "nan", "skipped": True})
    board({"event": "validation", "step": 1, "loss": 1.5, "bleu": 30.0})
    board.close()
    found = event_accumulator.EventAccumulator(str(tmp_path))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {
        "train/loss",
        "train/nll",
        "train/lr",
        "valid/loss",
        "valid/bleu",
    }
    assert found.Scalars("valid/bleu")[0].value == 30.0


def test_a_missing_tensorboard_is_reported_with_what_to_do(tmp_path, monkeypatch) -> None:
    real = builtins.__import__

    def without(name, *rest, **options):
        if "tensorboard" in name:
            raise ImportError("No module named 'tensorboard'")
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ConfigError,
        match=r"found none \(No module named 'tensorboard'\); install it with pip install "
        r"\"dragoman\[board\]\"",
    ):
        TensorBoardWriter(tmp_path)


def test_the_average_is_the_mean_of_each_tensor() -> None:
    models = [
        {"a": torch.full((2,), value), "b": torch.tensor([[value]])} for value in (1.0, 2.0, 6.0)
    ]
    found = average_weights(iter(models))
    assert torch.equal(found["a"], torch.full((2,), 3.0))
    assert found["b"].dtype == torch.float32


def test_many_equal_models_average_to_themselves() -> None:
    weights = {"a": torch.randn(5, generator=torch.Generator().manual_seed(0))}
    assert torch.equal(average_weights([weights] * 7)["a"], weights["a"])
    assert weights["a"].dtype == torch.float32


def test_models_that_differ_are_rejected_by_name() -> None:
    with pytest.raises(DataError, match=r"found a with \(2,\) and \(3,\)"):
        average_weights([{"a": torch.zeros(2)}, {"a": torch.zeros(3)}])
    with pytest.raises(DataError, match=r"found b with no shape and \(1,\)"):
        average_weights([{"a": torch.zeros(2)}, {"a": torch.zeros(2), "b": torch.zeros(1)}])
    with pytest.raises(DataError, match="found none"):
        average_weights([])
