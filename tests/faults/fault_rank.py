"""One rank of a small run, forked by the fault server or started by torchrun.

fault_rank.py '{"directory": ...}'
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from dragoman.runtime import signals

if __name__ == "__main__":
    signals.install_handlers()

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch.nn import functional as F
from training_kit import tiny_trainer

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.errors import DragomanError, StoppedError
from dragoman.training.distributed.process_group import ProcessGroup, init_process_group
from dragoman.training.task_protocol import Loss


class NonFiniteTask:
    """A task whose loss is not finite at one step of one rank."""

    def __init__(self, task: Any, rank: int, world: ProcessGroup, update: int) -> None:
        self.task, self.here, self.nan_step, self.update = task, rank == world.rank, update, 0

    def loss(self, model: Any, batch: Any) -> Loss:
        found = self.task.loss(model, batch)
        return (
            Loss(found.total * float("nan"), found.nll, found.count)
            if self.here and self.update == self.nan_step
            else found
        )


def validate(model: Any) -> dict[str, float]:
    """Return the loss of a copied sentence after several forward passes.

    Rank 0 runs them alone: the weights of a sharded model must stay gathered between them.
    """
    src = torch.arange(4, 10).unsqueeze(0)
    logits = [model(src, src.roll(1, dims=1), None) for _ in range(2)]
    signals.raise_if_stop_requested()
    assert torch.equal(*logits)
    return {"loss": float(F.cross_entropy(logits[0][0], src[0]))}


def run(
    directory: str,
    *,
    environment: dict[str, str] | None = None,
    nan: list[int] | None = None,
    timeout: float = 20.0,
    pause: float = 0.0,
    copy: str = "",
    model: dict[str, Any] | None = None,
    **settings: Any,
) -> int:
    os.environ.update(environment or {})
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ.get("RANK", 0)) + 99)  # rank 0's weights must win
    world = init_process_group(torch.device("cpu"), timeout=timeout)
    place = RunDirectory(Path(directory))
    if world.is_rank_zero:
        place.lock()
    trace = (Path(directory).parent / f"trace-{world.rank}.jsonl").open("a")
    changes = {name: settings.pop(name, 0.0) for name in ("dropout", "layer_drop")} | _tuples(
        model or {}
    )
    options: dict[str, Any] = {"model": {**changes, "seed": 1 + world.rank}}
    parts = {
        "distributed": world,
        "validate": validate,
    }
    trainer = tiny_trainer(place, parts=parts, **options, **settings)
    task = trainer._step.task
    if nan:
        task = trainer._step.task = NonFiniteTask(task, nan[0], world, nan[1])
    train_step = trainer.train_step

    def note(batch: Any) -> None:
        task.update = batch.step
        trace.write(
            json.dumps(
                {
                    "step": batch.step,
                    "examples": [ids.tolist() for ids in batch.examples],
                    "pid": os.getpid(),
                }
            )
            + "\n"
        )
        trace.flush()
        signals.wait_for_stop(pause)
        train_step(batch)

    trainer.train_step = note
    try:
        if copy:
            return republish(trainer, Path(copy), world)
        result = trainer.fit(resume=True)
        return StoppedError.exit_code if result.stopped else 0
    except DragomanError as error:
        sys.stderr.write(f"rank {world.rank}: {error}\n")
        return error.exit_code
    finally:
        world.close()
        if world.is_rank_zero:
            place.close()


def republish(trainer: Any, copy: Path, world: ProcessGroup) -> int:
    """Load the newest checkpoint and save it in another run's directory."""
    trainer._start_or_resume(resume=True)
    with RunDirectory(copy) if world.is_rank_zero else contextlib.nullcontext():
        trainer._checkpointer._run = RunDirectory(copy)
        trainer._checkpointer.save_checkpoint(
            1, {}, metrics={}, tolerate_disk_errors=False, suspect=False
        )
    return 0


def _tuples(changes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()
    }


if __name__ == "__main__":
    code = run(**json.loads(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a rank whose peers are gone must not wait for them in an exit handler
