"""Saves the trainer's model, optimizer and EMA as checkpoints, and loads them again.

With a replicated model only rank 0 reads and writes the run directory, and broadcasts what it read,
so that no shared disk is needed. With a sharded model (FSDP) every rank writes and reads its own
rows in a directory on a shared disk, and rank 0 alone publishes the checkpoint. Damaged checkpoints
are found by `RunDirectory.latest` in checkpoint/run_directory.py. On resume `Trainer` calls
`load_latest` and restores the step, the position in the data and the counters from it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dragoman.checkpoint.checkpoint_io import (
    TENSOR_PARTS,
    Checkpoint,
    CheckpointTensors,
    open_checkpoint,
    step_directory_name,
    write_tensor_files,
)
from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.errors import ConfigError, DiskError, DivergedError
from dragoman.storage.atomic_and_safe_file_io import FileRecord
from dragoman.storage.tensor_files import check_finite
from dragoman.training import optimizer as optimizers
from dragoman.training.distributed.data_parallel import named_weights
from dragoman.training.distributed.process_group import CallRanks, ProcessGroup
from dragoman.training.ema import EMA
from dragoman.training.task_protocol import StatefulTask, Task
from dragoman.training.train_step import ParallelStrategy
from dragoman.training.trainer_state import read_trainer_state


class Checkpointer:
    """Saves and loads a model with its optimizer and EMA."""

    def __init__(
        self,
        run: RunDirectory,
        *,
        model: nn.Module,
        parallel: ParallelStrategy,
        optimizer: Optimizer,
        ema: EMA | None,
        world: ProcessGroup,
        task: Task | None = None,
    ) -> None:
        self._run, self._model, self._parallel = run, model, parallel
        self._carrying = task if isinstance(task, StatefulTask) else None
        self._optimizer, self.ema, self._world = optimizer, ema, world
        # Kept until the first checkpoint is saved, for a rollback.
        self._initial_weights: dict[str, Tensor] | None = None

    def start_new_run(self) -> None:
        """Start from the model's current weights.

        Raise ConfigError if the directory holds a run.
        """
        found = self._world.run_on_rank_zero(self._run.steps, "list the checkpoints")
        if found:
            raise ConfigError(
                [
                    "a new run needs a directory without checkpoints; "
                    f"found step {found[-1]} in {self._run.path}; resume it, or choose another"
                ]
            )
        self._world.run_on_rank_zero(self._check_disk_space, "check the disk space")
        if self._parallel.lockstep:
            self._check_shared_disk()
        if self.ema is not None:
            self.ema.load_state_dict(dict(self._parallel.local_module.named_parameters()))
        self._load_carried({})
        self._initial_weights = {
            name: tensor.detach().cpu().clone()
            for name, tensor in named_weights(self._parallel.local_module).items()
        }

    def load_latest(self) -> dict[str, Any] | None:
        """Load the checkpoint that `RunDirectory.latest` finds and return its state.

        Without one, start a new run and return None.
        """
        found = self._world.run_on_rank_zero(self._load_on_rank_zero, "load the newest checkpoint")
        if found is None:
            self.start_new_run()
            return None
        if self._parallel.lockstep:
            self._check_shared_disk()
            self._load(
                open_checkpoint(
                    self._run.path / step_directory_name(found["step"]), sizes_only=True
                )
            )
        elif self._world.size > 1:
            self._broadcast_state()
        return dict(found["state"])

    def roll_back(self) -> dict[str, Any] | None:
        """Load the newest checkpoint, or the initial weights, and truncate the log accordingly."""
        if self._initial_weights is None:
            return self.load_latest()
        self._load_weights(self._initial_weights)
        self._load_carried({})
        self._optimizer.state.clear()
        if self.ema is not None:
            self.ema.load_state_dict(self._initial_weights)
        self._world.run_on_rank_zero(lambda: self._run.truncate_log(0), "truncate the log")
        return None

    def save_checkpoint(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, float],
        tolerate_disk_errors: bool,
        suspect: bool,
    ) -> bool:
        """Save a checkpoint on rank 0 (FSDP: on all ranks).

        Return False after a tolerated disk error.
        """
        what = f"save the checkpoint of step {step}"

        def write(**options: Any) -> bool:
            saved = self._run.save_checkpoint(
                step,
                self._tensors(),
                state,
                metrics,
                tolerate_disk_errors=tolerate_disk_errors,
                suspect=suspect,
                **options,
            )
            if saved is not None:
                self._run.prune()
            return saved is not None

        if self._parallel.lockstep:

            def write_sharded(call_ranks: CallRanks) -> bool:
                return write(
                    write=lambda folder, _: _merge_file_records(call_ranks(str(folder)), folder),
                    ranks=self._world.size,
                )

            saved = bool(self._world.run_with_ranks(write_sharded, self._write_shards, what))
        else:
            saved = bool(self._world.run_on_rank_zero(write, what))
        if saved:
            self._initial_weights = None
        return saved

    def keep_best(self, step: int) -> None:
        """Keep a saved checkpoint as the best; `TrainerState.record_validation` decides which."""
        self._world.run_on_rank_zero(
            lambda: self._run.keep_best(step), f"keep the checkpoint of step {step}"
        )

    def _write_shards(self, folder: str) -> dict[str, Any]:
        """Write this rank's shards.

        Return their file records, or the error, since other ranks wait for it.
        """
        tensors = self._tensors()
        if not self._world.is_rank_zero:  # replicated scalars and buffers are saved by rank 0
            tensors = {
                part: values and self._select_sharded(values) for part, values in tensors.items()
            }
        try:
            for part in TENSOR_PARTS:
                check_finite(tensors.get(part) or {}, part)
            records = write_tensor_files(
                Path(folder), tensors, file_suffix=self._parallel.file_suffix
            )
        except DivergedError as error:
            return {"diverged": str(error.found)}
        except OSError as error:
            return {
                "errno": error.errno,
                "error": f"{error.strerror or error} on rank {self._world.rank}",
            }
        return {"files": {name: list(record) for name, record in records.items()}}

    def _select_sharded(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of which this rank holds a shard."""
        return {name: tensor for name, tensor in tensors.items() if self._rows(name) is not None}

    def _rows(self, name: str) -> slice | None:
        """Return which rows of a weight or of its moments this rank holds."""
        parameter, _, slot = name.rpartition(".")
        return self._parallel.local_rows(name) or (
            None if slot == "step" else self._parallel.local_rows(parameter)
        )

    def _check_shared_disk(self) -> None:
        """Raise ConfigError if a rank does not see rank 0's directory: its shards would be lost."""

        def is_visible(name: str) -> bool:
            return (self._run.path / name).exists()

        def probe(call_ranks: CallRanks) -> list[bool]:
            probe_file = self._run.path / f".tmp-disk-0-{secrets.token_hex(4)}"
            probe_file.touch()
            try:
                return call_ranks(probe_file.name)
            finally:
                probe_file.unlink()

        seen = self._world.run_with_ranks(probe, is_visible, "check for a shared disk")
        if not all(seen):
            found = (
                f"a file of rank 0 in {self._run.path} that rank {seen.index(False)} does not see"
            )
            raise ConfigError(
                [
                    f"train.fsdp needs --out on a disk that all ranks share; found {found}; "
                    "use another, or train.fsdp=off"
                ]
            )

    def _tensors(self) -> dict[str, Mapping[str, Tensor] | None]:
        return {
            "weights": named_weights(self._parallel.local_module),
            "optimizer": optimizers.state_dict(self._optimizer, self._parallel.local_module),
            "ema": self.ema.state_dict() if self.ema is not None else None,
            "carried": (self._carrying and self._carrying.carried_state()) or None,
        }

    def _load_carried(self, state: Mapping[str, Tensor]) -> None:
        """Restore the task's carried state, such as Transformer-XL's memory."""
        if self._carrying is not None:
            self._carrying.load_carried_state(state)

    def _check_disk_space(self) -> None:
        weights = named_weights(self._parallel.local_module)
        shapes = optimizers.full_state_shapes(self._optimizer, self._parallel.local_module)
        moments = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        tensors: CheckpointTensors = {
            "weights": weights,
            "optimizer": moments,
            "ema": weights if self.ema is not None else None,
        }
        self._run.require_checkpoint_space(
            tensors, ranks=self._world.size if self._parallel.lockstep else 1
        )

    def _load_on_rank_zero(self) -> dict[str, Any] | None:
        """Verify the newest checkpoint and truncate the log to it.

        Load it, unless it is sharded.
        """
        weights = named_weights(self._model)
        averaged = dict(self._model.named_parameters()) if self.ema is not None else None
        checkpoint = self._run.latest({"weights": weights, "ema": averaged})
        if checkpoint is None:
            self._run.truncate_log(0)
            return None
        if not self._parallel.lockstep:
            self._load(checkpoint)
        self._run.truncate_log(checkpoint.step)
        state = read_trainer_state(checkpoint)
        self._run.ensure_best_kept(int(state.get("best", {}).get("step", 0)))
        return {"step": checkpoint.step, "state": state}

    def _load(self, checkpoint: Checkpoint) -> None:
        """Load this rank's part of a checkpoint, however many ranks saved it."""
        rows: Callable[[str], slice | None] | None = self._rows if self._parallel.lockstep else None
        self._load_weights(checkpoint.load_weights(rows=rows))
        optimizers.load_state_dict(
            self._optimizer, self._parallel.local_module, checkpoint.load_optimizer(rows=rows)
        )
        ema = checkpoint.load_ema(rows=rows)
        if self.ema is not None and ema is not None:
            self.ema.load_state_dict(ema)
        self._load_carried(checkpoint.load_carried())

    @torch.no_grad()
    def _load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in named_weights(self._parallel.local_module).items():
            tensor.copy_(tensors[name])

    def _broadcast_state(self) -> None:
        """Broadcast the checkpoint that rank 0 loaded.

        Optimizer moments are allocated on the other ranks first.
        """
        for parameter in self._model.parameters():
            if parameter.requires_grad and not self._optimizer.state.get(parameter):
                self._optimizer.state[parameter] = optimizers.zero_state(self._optimizer, parameter)
        self._world.broadcast(named_weights(self._model).values())
        self._world.broadcast(optimizers.state_dict(self._optimizer, self._model).values())
        if self.ema is not None:
            self._world.broadcast(self.ema.state_dict().values())


def _merge_file_records(answers: list[dict[str, Any]], folder: Path) -> dict[str, FileRecord]:
    """Return the file records of all ranks, or raise the error of one of them."""
    for answer in answers:
        if "diverged" in answer:
            raise DivergedError(
                "checkpoints must have finite values",
                found=answer["diverged"],
                fix="lower train.learning_rate or set train.max_grad_norm, and resume "
                "from the last checkpoint",
            )
        if "error" in answer:
            raise OSError(answer["errno"], answer["error"], str(folder))
    records = {
        name: FileRecord(*record) for answer in answers for name, record in answer["files"].items()
    }
    for name, record in records.items():
        size = (folder / name).stat().st_size if (folder / name).exists() else None
        if size != record.bytes:
            raise DiskError(
                "rank 0 must see the files of every rank",
                found=f"{'no file' if size is None else f'{size} bytes'} for {name}, "
                f"of which {record.bytes} bytes were written",
                fix="use a directory for --out on a disk that all ranks share",
            )
    return records
