"""A run directory with steps in it, and a way to damage them."""

from __future__ import annotations

from pathlib import Path

import torch

from dragoman.checkpoint.run_directory import RunDirectory


def checkpoint_tensors(step: int, width: int = 8) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of a checkpoint, which encode its step."""
    weight = torch.full((width, 4), float(step))
    return {
        "weights": {"layer.weight": weight},
        "optimizer": {"layer.weight.exp_avg": weight / 2},
        "ema": {"layer.weight": weight / 3},
    }


def save_checkpoint(run: RunDirectory, *steps: int, **options):
    """Publish checkpoints; return the last."""
    result = None
    for step in steps:
        run.training_log.append({"step": step, "loss": 1 / step})
        result = run.save_checkpoint(
            step,
            checkpoint_tensors(step),
            {"step": step, "cursor": [0, step]},
            {"loss": 1 / step},
            **options,
        )
    return result


def flip_byte(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
