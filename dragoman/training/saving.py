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

from dragoman.errors import ConfigError, DiskError, DivergedError
from dragoman.files.atomic import FileRecord
from dragoman.training import optimisers
from dragoman.training.checkpoint import RunDirectory, Tensors
from dragoman.training.distributed import Ask, World
from dragoman.training.ema import RunningAverage
from dragoman.training.holding import Holding, weights_of
from dragoman.training.stored import PARTS, Checkpoint, open_checkpoint, step_name, write_parts
from dragoman.training.tensors import require_finite


class Saver:
    """Publishes and restores a model with its optimiser and its running average."""

    def __init__(
        self, run: RunDirectory, *, model: nn.Module, holding: Holding, optimiser: Optimizer, average: RunningAverage | None, world: World
    ) -> None:
        self._run, self._model, self._holding, self._optimiser, self._average = run, model, holding, optimiser, average
        self._world = world
        self._origin: dict[str, Tensor] | None = None  # the weights of the start, until a first checkpoint stands

    def begin(self) -> None:
        """Start from the model as it is; a directory with a run in it is refused."""
        found = self._world.share(self._run.steps, "look at the run directory")
        if found:
            raise ConfigError(
                [f"a new run needs a directory without one; found step {found[-1]} in {self._run.path}; resume it, or choose another"]
            )
        self._world.share(self._check_space, "look at the disk")
        if self._holding.lockstep:
            self._check_shared_disk()
        if self._average is not None:
            self._average.load_state(dict(self._holding.shares.named_parameters()))
        self._origin = {name: tensor.detach().cpu().clone() for name, tensor in weights_of(self._holding.shares).items()}

    def restore(self) -> dict[str, Any] | None:
        """Load the newest checkpoint and return its state; without any, start from the model as it is and return None."""
        found = self._world.share(self._find_newest, "read the newest checkpoint")
        if found is None:
            self.begin()
            return None
        if self._holding.lockstep:
            self._check_shared_disk()
            self._load(open_checkpoint(self._run.path / step_name(found["step"]), sizes_only=True))
        elif self._world.size > 1:
            self._spread()
        return dict(found["state"])

    def go_back(self) -> dict[str, Any] | None:
        """Return to the newest checkpoint after a divergence, or to the weights of the start; the log is cut accordingly."""
        if self._origin is None:
            return self.restore()
        self._load_weights(self._origin)
        self._optimiser.state.clear()
        if self._average is not None:
            self._average.load_state(self._origin)
        self._world.share(lambda: self._run.truncate_log(0), "cut the log")
        return None

    def publish(self, step: int, state: Mapping[str, Any], *, metrics: Mapping[str, float], patient: bool, suspect: bool) -> bool:
        """Publish a step; rank 0 decides and the others write their pieces or wait; False when a failing disk was put up with."""
        what = f"publish step {step}"

        def write(**how: Any) -> bool:
            done = self._run.publish(step, self._tensors(), state, metrics, patient=patient, suspect=suspect, **how)
            if done is not None:
                self._run.prune()
            return done is not None

        if self._holding.lockstep:

            def write_together(ask: Ask) -> bool:
                return write(write=lambda folder, _: _gathered(ask(str(folder)), folder), ranks=self._world.size)

            published = bool(self._world.conduct(write_together, self._write_pieces, what))
        else:
            published = bool(self._world.share(write, what))
        if published:
            self._origin = None
        return published

    def keep_best(self, step: int) -> None:
        """Keep a published step as the best."""
        self._world.share(lambda: self._run.keep_best(step), f"keep step {step}")

    def _write_pieces(self, folder: str) -> dict[str, Any]:
        """Write this rank's pieces and say what they are, or what went wrong: no rank may leave the others waiting."""
        tensors = self._tensors()
        if not self._world.leads:  # numbers and buffers, which every rank holds, are rank 0's to write
            tensors = {part: values and self._cut_of(values) for part, values in tensors.items()}
        try:
            for part in PARTS:
                require_finite(tensors.get(part) or {}, part)
            records = write_parts(Path(folder), tensors, label=self._holding.label)
        except DivergedError as error:
            return {"diverged": str(error.found)}
        except OSError as error:
            return {"errno": error.errno, "error": f"{error.strerror or error} on rank {self._world.rank}"}
        return {"files": {name: list(record) for name, record in records.items()}}

    def _cut_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Choose the tensors that this rank has a piece of."""
        return {name: tensor for name, tensor in tensors.items() if self._rows(name) is not None}

    def _rows(self, name: str) -> slice | None:
        """Say which rows of a weight, or of a moment, are this rank's."""
        parameter, _, slot = name.rpartition(".")
        return self._holding.rows(name) or (None if slot == "step" else self._holding.rows(parameter))

    def _check_shared_disk(self) -> None:
        """Refuse ranks that do not see rank 0's directory: their pieces would be lost."""

        def look(name: str) -> bool:
            return (self._run.path / name).exists()

        def everybody(ask: Ask) -> list[bool]:
            mark = self._run.path / f".tmp-disk-0-{secrets.token_hex(4)}"
            mark.touch()
            try:
                return ask(mark.name)
            finally:
                mark.unlink()

        seen = self._world.conduct(everybody, look, "look whether all ranks share a disk")
        if not all(seen):
            found = f"a file of rank 0 in {self._run.path} that rank {seen.index(False)} does not see"
            raise ConfigError([f"train.shard needs --out on a disk that all ranks share; found {found}; use another, or train.shard=off"])

    def _tensors(self) -> dict[str, Mapping[str, Tensor] | None]:
        return {
            "weights": weights_of(self._holding.shares),
            "optimizer": optimisers.export_state(self._optimiser, self._holding.shares),
            "ema": self._average.export_state() if self._average is not None else None,
        }

    def _check_space(self) -> None:
        weights = weights_of(self._holding.shares)
        twice = {f"{name}.{slot}": weight for name, weight in weights.items() for slot in ("exp_avg", "exp_avg_sq")}
        tensors: Tensors = {"weights": weights, "optimizer": twice, "ema": weights if self._average is not None else None}
        self._run.require_space(tensors, ranks=self._world.size if self._holding.lockstep else 1)

    def _find_newest(self) -> dict[str, Any] | None:
        """Verify the newest checkpoint and cut the log to it; where rank 0 holds everything, load it too."""
        whole = weights_of(self._model)
        averaged = dict(self._model.named_parameters()) if self._average is not None else None
        checkpoint = self._run.newest({"weights": whole, "ema": averaged})
        if checkpoint is None:
            self._run.truncate_log(0)
            return None
        if not self._holding.lockstep:
            self._load(checkpoint)
        self._run.truncate_log(checkpoint.step)
        state = checkpoint.standing
        self._run.settle_best(int(state.get("best", {}).get("update", 0)))
        return {"step": checkpoint.step, "state": state}

    def _load(self, checkpoint: Checkpoint) -> None:
        """Read what this rank holds of a checkpoint, whoever wrote it."""
        rows: Callable[[str], slice | None] | None = self._rows if self._holding.lockstep else None
        self._load_weights(checkpoint.load_weights(rows=rows))
        optimisers.load_state(self._optimiser, self._holding.shares, checkpoint.load_optimizer(rows=rows))
        ema = checkpoint.load_ema(rows=rows)
        if self._average is not None and ema is not None:
            self._average.load_state(ema)

    @torch.no_grad()
    def _load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in weights_of(self._holding.shares).items():
            tensor.copy_(tensors[name])

    def _spread(self) -> None:
        """Give every rank what rank 0 read; moments that another rank has not got yet are made first."""
        for parameter in self._model.parameters():
            if parameter.requires_grad and not self._optimiser.state.get(parameter):
                self._optimiser.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        self._world.broadcast(weights_of(self._model).values())
        self._world.broadcast(optimisers.export_state(self._optimiser, self._model).values())
        if self._average is not None:
            self._world.broadcast(self._average.export_state().values())


def _gathered(answers: list[dict[str, Any]], folder: Path) -> dict[str, FileRecord]:
    """Put together what the ranks wrote, or raise what one of them met."""
    for answer in answers:
        if "diverged" in answer:
            raise DivergedError(
                "only finite numbers are published",
                found=answer["diverged"],
                fix="lower train.learning_rate or set train.clip, and resume from the last checkpoint",
            )
        if "error" in answer:
            raise OSError(answer["errno"], answer["error"], str(folder))
    records = {name: FileRecord(*record) for answer in answers for name, record in answer["files"].items()}
    for name, record in records.items():
        size = (folder / name).stat().st_size if (folder / name).exists() else None
        if size != record.bytes:
            raise DiskError(
                "rank 0 must see what every rank wrote",
                found=f"{'nothing' if size is None else f'{size} bytes'} where {record.bytes} of {name} were written",
                fix="keep --out on one disk that all ranks share",
            )
    return records
