"""Between the trainer's objects and the run directory: what goes into a checkpoint, and how it comes back.

Where every rank holds the whole model, only rank 0 touches the directory; what it reads, the others get through the group, so
that no shared disk is needed. Where the model is shared out, every rank writes and reads its own rows, in a directory that all of
them see; rank 0 alone says what is published.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dragoman.checkpoint.checkpoint import (
    TENSOR_PARTS,
    Checkpoint,
    CheckpointTensors,
    open_checkpoint,
    step_directory_name,
    write_tensor_files,
)
from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.errors import ConfigError, DiskError, DivergedError
from dragoman.storage.atomic import FileRecord
from dragoman.storage.tensor_files import check_finite
from dragoman.training import optimizers
from dragoman.training.distributed.data_parallel import ParallelStrategy, named_weights
from dragoman.training.distributed.process_group import CallRanks, ProcessGroup
from dragoman.training.ema import EMA
from dragoman.training.train_state import read_train_state


class Checkpointer:
    """Publishes and restores a model with its optimiser and its running average."""

    def __init__(
        self,
        run: RunDirectory,
        *,
        model: nn.Module,
        parallel: ParallelStrategy,
        optimizer: Optimizer,
        ema: EMA | None,
        world: ProcessGroup,
    ) -> None:
        self._run, self._model, self._parallel, self._optimizer, self._ema = (
            run,
            model,
            parallel,
            optimizer,
            ema,
        )
        self._world = world
        self._initial_weights: dict[str, Tensor] | None = (
            None  # the weights of the start, until a first checkpoint stands
        )

    def start_new_run(self) -> None:
        """Start from the model as it is; a directory with a run in it is refused."""
        found = self._world.run_on_rank_zero(self._run.steps, "look at the run directory")
        if found:
            raise ConfigError(
                [
                    f"a new run needs a directory without one; found step {found[-1]} in {self._run.path}; resume it, or choose another"
                ]
            )
        self._world.run_on_rank_zero(self._check_disk_space, "look at the disk")
        if self._parallel.lockstep:
            self._check_shared_disk()
        if self._ema is not None:
            self._ema.load_state_dict(dict(self._parallel.local_module.named_parameters()))
        self._initial_weights = {
            name: tensor.detach().cpu().clone()
            for name, tensor in named_weights(self._parallel.local_module).items()
        }

    def restore(self) -> dict[str, Any] | None:
        """Load the newest checkpoint and return its state; without any, start from the model as it is and return None."""
        found = self._world.run_on_rank_zero(self._load_newest, "read the newest checkpoint")
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
        """Return to the newest checkpoint after a divergence, or to the weights of the start; the log is cut accordingly."""
        if self._initial_weights is None:
            return self.restore()
        self._load_weights(self._initial_weights)
        self._optimizer.state.clear()
        if self._ema is not None:
            self._ema.load_state_dict(self._initial_weights)
        self._world.run_on_rank_zero(lambda: self._run.truncate_log(0), "cut the log")
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
        """Publish a step; rank 0 decides and the others write their pieces or wait; False when a failing disk was put up with."""
        what = f"publish step {step}"

        def write(**how: Any) -> bool:
            done = self._run.save_checkpoint(
                step,
                self._tensors(),
                state,
                metrics,
                tolerate_disk_errors=tolerate_disk_errors,
                suspect=suspect,
                **how,
            )
            if done is not None:
                self._run.prune()
            return done is not None

        if self._parallel.lockstep:

            def write_together(ask: CallRanks) -> bool:
                return write(
                    write=lambda folder, _: _merge_file_records(ask(str(folder)), folder),
                    ranks=self._world.size,
                )

            published = bool(self._world.run_with_ranks(write_together, self._write_shards, what))
        else:
            published = bool(self._world.run_on_rank_zero(write, what))
        if published:
            self._initial_weights = None
        return published

    def keep_best(self, step: int) -> None:
        """Keep a published step as the best."""
        self._world.run_on_rank_zero(lambda: self._run.keep_best(step), f"keep step {step}")

    def _write_shards(self, folder: str) -> dict[str, Any]:
        """Write this rank's pieces and say what they are, or what went wrong: no rank may leave the others waiting."""
        tensors = self._tensors()
        if (
            not self._world.is_rank_zero
        ):  # numbers and buffers, which every rank holds, are rank 0's to write
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
        """Choose the tensors that this rank has a piece of."""
        return {name: tensor for name, tensor in tensors.items() if self._rows(name) is not None}

    def _rows(self, name: str) -> slice | None:
        """Say which rows of a weight, or of a moment, are this rank's."""
        parameter, _, slot = name.rpartition(".")
        return self._parallel.rows(name) or (
            None if slot == "step" else self._parallel.rows(parameter)
        )

    def _check_shared_disk(self) -> None:
        """Refuse ranks that do not see rank 0's directory: their pieces would be lost."""

        def look(name: str) -> bool:
            return (self._run.path / name).exists()

        def everybody(ask: CallRanks) -> list[bool]:
            probe_file = self._run.path / f".tmp-disk-0-{secrets.token_hex(4)}"
            probe_file.touch()
            try:
                return ask(probe_file.name)
            finally:
                probe_file.unlink()

        seen = self._world.run_with_ranks(everybody, look, "look whether all ranks share a disk")
        if not all(seen):
            found = (
                f"a file of rank 0 in {self._run.path} that rank {seen.index(False)} does not see"
            )
            raise ConfigError(
                [
                    f"train.fsdp needs --out on a disk that all ranks share; found {found}; use another, or train.fsdp=off"
                ]
            )

    def _tensors(self) -> dict[str, Mapping[str, Tensor] | None]:
        return {
            "weights": named_weights(self._parallel.local_module),
            "optimizer": optimizers.state_dict(self._optimizer, self._parallel.local_module),
            "ema": self._ema.state_dict() if self._ema is not None else None,
        }

    def _check_disk_space(self) -> None:
        weights = named_weights(self._parallel.local_module)
        moments = {
            f"{name}.{slot}": weight
            for name, weight in weights.items()
            for slot in ("exp_avg", "exp_avg_sq")
        }
        tensors: CheckpointTensors = {
            "weights": weights,
            "optimizer": moments,
            "ema": weights if self._ema is not None else None,
        }
        self._run.require_checkpoint_space(
            tensors, ranks=self._world.size if self._parallel.lockstep else 1
        )

    def _load_newest(self) -> dict[str, Any] | None:
        """Verify the newest checkpoint and cut the log to it; where rank 0 holds everything, load it too."""
        whole = named_weights(self._model)
        averaged = dict(self._model.named_parameters()) if self._ema is not None else None
        checkpoint = self._run.newest({"weights": whole, "ema": averaged})
        if checkpoint is None:
            self._run.truncate_log(0)
            return None
        if not self._parallel.lockstep:
            self._load(checkpoint)
        self._run.truncate_log(checkpoint.step)
        state = read_train_state(checkpoint)
        self._run.ensure_best_kept(int(state.get("best", {}).get("step", 0)))
        return {"step": checkpoint.step, "state": state}

    def _load(self, checkpoint: Checkpoint) -> None:
        """Read what this rank holds of a checkpoint, whoever wrote it."""
        rows: Callable[[str], slice | None] | None = self._rows if self._parallel.lockstep else None
        self._load_weights(checkpoint.load_weights(rows=rows))
        optimizers.load_state_dict(
            self._optimizer, self._parallel.local_module, checkpoint.load_optimizer(rows=rows)
        )
        ema = checkpoint.load_ema(rows=rows)
        if self._ema is not None and ema is not None:
            self._ema.load_state_dict(ema)

    @torch.no_grad()
    def _load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in named_weights(self._parallel.local_module).items():
            tensor.copy_(tensors[name])

    def _broadcast_state(self) -> None:
        """Give every rank what rank 0 read; moments that another rank has not got yet are made first."""
        for parameter in self._model.parameters():
            if parameter.requires_grad and not self._optimizer.state.get(parameter):
                self._optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        self._world.broadcast(named_weights(self._model).values())
        self._world.broadcast(optimizers.state_dict(self._optimizer, self._model).values())
        if self._ema is not None:
            self._world.broadcast(self._ema.state_dict().values())


def _merge_file_records(answers: list[dict[str, Any]], folder: Path) -> dict[str, FileRecord]:
    """Put together what the ranks wrote, or raise what one of them met."""
    for answer in answers:
        if "diverged" in answer:
            raise DivergedError(
                "only finite numbers are published",
                found=answer["diverged"],
                fix="lower train.learning_rate or set train.max_grad_norm, and resume from the last checkpoint",
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
                "rank 0 must see what every rank wrote",
                found=f"{'nothing' if size is None else f'{size} bytes'} where {record.bytes} of {name} were written",
                fix="keep --out on one disk that all ranks share",
            )
    return records
