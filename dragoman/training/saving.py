"""Between the trainer's objects and the run directory: what goes into a checkpoint, and how it comes back.

Only rank 0 touches the directory; what it reads, the others get through the group, so that no shared disk is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dragoman.errors import ConfigError
from dragoman.training import optimisers
from dragoman.training.checkpoint import RunDirectory, Tensors
from dragoman.training.distributed import World
from dragoman.training.ema import RunningAverage


class Saver:
    """Publishes and restores a model with its optimiser and its running average."""

    def __init__(self, run: RunDirectory, *, model: nn.Module, optimiser: Optimizer, average: RunningAverage | None, world: World) -> None:
        self._run, self._model, self._optimiser, self._average, self._world = run, model, optimiser, average, world
        self._origin: dict[str, Tensor] | None = None  # the weights of the start, until a first checkpoint stands

    def begin(self) -> None:
        """Start from the model as it is: everybody takes rank 0's weights; a directory with a run in it is refused."""
        found = self._world.share(self._run.steps, "look at the run directory")
        if found:
            raise ConfigError(
                [f"a new run needs a directory without one; found step {found[-1]} in {self._run.path}; resume it, or choose another"]
            )
        self._world.share(self._check_space, "look at the disk")
        self._world.broadcast(weights_of(self._model).values())
        if self._average is not None:
            self._average.load_state(dict(self._model.named_parameters()))
        self._origin = {name: tensor.detach().cpu().clone() for name, tensor in weights_of(self._model).items()}

    def restore(self) -> dict[str, Any] | None:
        """Load the newest checkpoint and return its state; without any, start from the model as it is and return None."""
        state = self._world.share(self._load_newest, "read the newest checkpoint")
        if state is None:
            self.begin()
            return None
        if self._world.size > 1:
            self._spread()
        return dict(state)

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
        """Publish a step from rank 0 while the others wait; False when a failing disk was put up with."""

        def write() -> bool:
            done = self._run.publish(step, self._tensors(), state, metrics, patient=patient, suspect=suspect)
            if done is not None:
                self._run.prune()
            return done is not None

        published = bool(self._world.share(write, f"publish step {step}"))
        if published:
            self._origin = None
        return published

    def keep_best(self, step: int) -> None:
        """Keep a published step as the best."""
        self._world.share(lambda: self._run.keep_best(step), f"keep step {step}")

    def _tensors(self) -> dict[str, Mapping[str, Tensor] | None]:
        return {
            "weights": weights_of(self._model),
            "optimizer": optimisers.export_state(self._optimiser, self._model),
            "ema": self._average.export_state() if self._average is not None else None,
        }

    def _check_space(self) -> None:
        weights = weights_of(self._model)
        twice = {f"{name}.{slot}": weight for name, weight in weights.items() for slot in ("exp_avg", "exp_avg_sq")}
        self._run.require_space({"weights": weights, "optimizer": twice, "ema": weights if self._average is not None else None})

    def _load_newest(self) -> dict[str, Any] | None:
        expected: Tensors = {"weights": weights_of(self._model), "ema": self._average.export_state() if self._average is not None else None}
        checkpoint = self._run.newest(expected)
        if checkpoint is None:
            self._run.truncate_log(0)
            return None
        self._load_weights(checkpoint.load_weights())
        optimisers.load_state(self._optimiser, self._model, checkpoint.load_optimizer())
        ema = checkpoint.load_ema()
        if self._average is not None and ema is not None:
            self._average.load_state(ema)
        self._run.truncate_log(checkpoint.step)
        state = checkpoint.state
        self._run.settle_best(int(state.get("best", {}).get("update", 0)))
        return state

    @torch.no_grad()
    def _load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in weights_of(self._model).items():
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


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Name every tensor of a model once: parameters, a tied one by its first name, and the buffers that are saved."""
    parameters = dict(model.named_parameters())
    saved = model.state_dict(keep_vars=True)
    buffers = {name: tensor for name, tensor in saved.items() if not isinstance(tensor, nn.Parameter)}
    return {name: tensor.detach() for name, tensor in {**parameters, **buffers}.items()}
