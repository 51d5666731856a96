"""Checkpoints of the trainer: space for them, the log that belongs to them, and the best one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_kit import SETTINGS, assert_same_run, log_of, tensors_of, tiny_trainer

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.errors import ConfigError
from dragoman.training import optimizer as optimizers
from dragoman.training.distributed.process_group import ProcessGroup
from dragoman.training.ema import EMA
from dragoman.training.model_and_optimizer_checkpoint import Checkpointer
from dragoman.training.task_protocol import Loss
from dragoman.training.train_step import SingleProcess


def train(path: Path, *, resume: bool = False, **options: Any) -> None:
    with RunDirectory(path) as run:
        tiny_trainer(run, **options).fit(resume=resume)


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "sgd"])
def test_a_new_run_needs_space_for_all_tensors_of_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, ema_decay: float
) -> None:
    needed: dict[str, tuple[int, ...]] = {}

    def note(self: RunDirectory, tensors: Any, *, ranks: int) -> None:
        assert ranks == 1
        for part, values in tensors.items():
            needed.update({f"{part}/{name}": tuple(t.shape) for name, t in (values or {}).items()})

    monkeypatch.setattr(RunDirectory, "require_checkpoint_space", note)
    train(tmp_path, steps=1, optimizer=optimizer, ema_decay=ema_decay)
    assert needed == {name: tuple(tensor.shape) for name, tensor in tensors_of(tmp_path).items()}


def test_the_log_of_a_run_that_crashed_before_its_first_checkpoint_begins_anew(
    tmp_path: Path,
) -> None:
    def crash(record: Any) -> None:
        if record["step"] == 3:
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - raised above
        train(tmp_path / "crashed", parts={"on_record": crash})
    assert [record["step"] for record in log_of(tmp_path / "crashed")] == [1, 2, 3]
    train(tmp_path / "crashed", resume=True)
    train(tmp_path / "whole")
    assert_same_run(tmp_path / "crashed", tmp_path / "whole")


def test_resumed_run_keeps_the_best_checkpoint_that_a_crash_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"validate": lambda model: {"loss": 1.0}}
    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "keep_best", lambda self, step: None)
        train(tmp_path, steps=4, parts=parts)
    assert RunDirectory(tmp_path).best() is None
    train(tmp_path, steps=4, parts=parts, resume=True)
    best = RunDirectory(tmp_path).best()
    assert best is not None
    assert best.step == 4


class SmallRun:
    """A linear layer with AdamW, an EMA and a state that each step leaves to the next."""

    def __init__(self, run: RunDirectory) -> None:
        torch.manual_seed(0)
        self.run, self.model = run, nn.Linear(3, 2)
        self.optimizer = optimizers.build_adamw(self.model, SETTINGS)
        self.ema = EMA(self.model, 0.9)
        self.memory = torch.full((2,), 7.0)
        self.checkpointer = Checkpointer(
            run,
            model=self.model,
            parallel=SingleProcess(self.model),
            optimizer=self.optimizer,
            ema=self.ema,
            world=ProcessGroup(),
            task=self,
        )

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        raise NotImplementedError

    def carried_state(self) -> dict[str, Tensor]:
        return {"memory": self.memory}

    def load_carried_state(self, state: Mapping[str, Tensor]) -> None:
        self.memory = state.get("memory", torch.zeros(2)).clone()

    def train_step(self, step: int) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, float(step))
        self.optimizer.step()
        self.ema.update(step)
        self.memory = self.memory + step
        self.run.training_log.append({"step": step})

    def save(self, step: int, **options: Any) -> bool:
        state = {"step": step, "max_steps": 9}
        options = {"tolerate_disk_errors": False, "suspect": False, **options}
        return self.checkpointer.save_checkpoint(step, state, metrics={}, **options)

    def tensors(self) -> dict[str, list[float]]:
        parts = {
            "weights": self.model.state_dict(),
            "optimizer": optimizers.state_dict(self.optimizer, self.model),
            "ema": self.ema.state_dict(),
            "carried": self.carried_state(),
        }
        return {
            f"{part}/{name}": tensor.flatten().tolist()
            for part, tensors in parts.items()
            for name, tensor in tensors.items()
        }

    def logged_steps(self) -> list[int]:
        return [record["step"] for record in self.run.records() if "event" not in record]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallRun]:
    with RunDirectory(tmp_path) as run:
        yield SmallRun(run)


def test_a_rollback_before_the_first_checkpoint_starts_from_scratch(small: SmallRun) -> None:
    small.checkpointer.start_new_run()
    initial = small.tensors()
    assert initial["carried/memory"] == [0.0, 0.0]
    small.train_step(1)
    first = small.tensors()
    small.train_step(2)
    assert small.checkpointer.roll_back() is None
    assert small.tensors() == initial
    assert not small.optimizer.state
    assert small.logged_steps() == []
    small.train_step(1)
    assert small.tensors() == first


def test_a_rollback_after_a_checkpoint_returns_to_it(small: SmallRun) -> None:
    small.checkpointer.start_new_run()
    small.train_step(1)
    assert small.save(1)
    saved = small.tensors()
    small.train_step(2)
    small.train_step(3)
    assert small.checkpointer.roll_back() == {"step": 1, "max_steps": 9}
    assert small.tensors() == saved
    assert small.logged_steps() == [1]


def test_a_checkpoint_that_was_not_saved_is_not_rolled_back_to(
    small: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.checkpointer.start_new_run()
    initial = small.tensors()
    small.train_step(1)
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "save_checkpoint", lambda *args, **options: None)
        assert not small.save(1, tolerate_disk_errors=True)
    assert small.checkpointer.roll_back() is None
    assert small.tensors() == initial


def test_old_checkpoints_are_pruned_but_the_last_that_is_not_suspect(small: SmallRun) -> None:
    small.checkpointer.start_new_run()
    for step in range(1, 7):
        small.train_step(step)
        assert small.save(step, suspect=step > 2)
    assert small.run.steps() == [2, 4, 5, 6]


def test_a_new_run_rejects_the_directory_of_another(tmp_path: Path) -> None:
    train(tmp_path, steps=2)
    with pytest.raises(ConfigError, match="without checkpoints; found step 2"):
        train(tmp_path, steps=2)
