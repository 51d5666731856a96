"""A small training loop over RunDirectory: 60 thousand parameters, a few milliseconds a step."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.errors import DragomanError, StoppedError
from dragoman.runtime import signals
from dragoman.storage import fault_injection
from dragoman.storage.disk_space_and_errors import os_errors_converted


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 96)
        self.inner = nn.Linear(96, 190)
        self.outer = nn.Linear(190, 96)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.outer(self.dropout(torch.relu(self.inner(hidden))))
        return hidden @ self.embedding.weight.T


def run(
    directory: str,
    *,
    steps: int = 12,
    every: int = 4,
    pause: float = 0.0,
    nan_at: int = 0,
    tolerate_disk_errors: bool = True,
    keep: int = 2,
) -> int:
    """Train as the real loop does, and return the exit code that the command would end with."""
    try:
        with RunDirectory(Path(directory), keep_checkpoints=keep) as place:
            return _train(
                place,
                steps=steps,
                every=every,
                pause=pause,
                nan_at=nan_at,
                tolerate_disk_errors=tolerate_disk_errors,
            )
    except DragomanError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


def _train(
    place: RunDirectory,
    *,
    steps: int,
    every: int,
    pause: float,
    nan_at: int,
    tolerate_disk_errors: bool,
) -> int:
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    weights = dict(model.named_parameters())
    place.require_checkpoint_space(
        {"weights": weights, "optimizer": weights, "ema": weights}
    )  # moments come in pairs, and there are no others yet
    newest = place.latest({"weights": weights})
    done, best = 0, float(10**9)
    if newest is not None:
        model.load_state_dict(newest.load_weights())
        _load(optimizer, model, newest.load_optimizer())
        done, best = newest.step, newest.state["best"]
    place.truncate_log(done)
    for step in range(done + 1, steps + 1):
        loss = _train_step(model, optimizer, step, nan_at)
        place.training_log.append({"step": step, "loss": loss.hex()})
        if signals.is_stop_urgent():
            return StoppedError.exit_code
        stop = signals.stop_requested()
        if step % every == 0 or step == steps or stop or signals.checkpoint_requested():
            fault_injection.point("valid.mid")
            better = step % every == 0 and loss < best
            best = min(best, loss) if better else best
            signals.clear_checkpoint_request()
            last = stop or step == steps
            if place.save_checkpoint(
                step,
                _tensors(model, optimizer),
                {"step": step, "best": best},
                tolerate_disk_errors=tolerate_disk_errors and not last,
            ):
                if better:
                    place.keep_best(step)
                place.prune()
        if stop:
            return StoppedError.exit_code
        time.sleep(pause)
    return 0


def _train_step(model: Net, optimizer: torch.optim.Optimizer, step: int, nan_at: int) -> float:
    fault_injection.point("step.before")
    torch.manual_seed(
        int.from_bytes(hashlib.sha256(f"1/{step}".encode()).digest()[:8], "little") >> 1
    )
    with os_errors_converted(Path("data")):
        fault_injection.point("data.next")
    tokens = torch.randint(256, (4, 32))
    logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), (tokens * 7 % 256).flatten())
    optimizer.zero_grad()
    loss.backward()
    fault_injection.point("step.after_backward")
    optimizer.step()
    if step == nan_at:
        with torch.no_grad():
            model.inner.bias[3] = float("nan")
    return loss.item()


def _tensors(model: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    slots = {
        f"{name}.{slot}": value
        for name, parameter in model.named_parameters()
        for slot, value in optimizer.state.get(parameter, {}).items()
    }
    weights = dict(model.named_parameters())
    return {
        "weights": weights,
        "optimizer": slots or weights,
        "ema": {"outer.bias": model.outer.bias},
    }


def _load(optimizer: torch.optim.Optimizer, model: Net, tensors: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            slot: tensors[f"{name}.{slot}"].clone() for slot in ("step", "exp_avg", "exp_avg_sq")
        }
