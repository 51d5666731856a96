"""Measure checkpoint writing and verification against a plain write of the same bytes.

Run it as `python bench/checkpoint_write.py --megabytes 500 --folder /var/tmp`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from dragoman.checkpoint.run_directory import RunDirectory


def main() -> None:
    """Alternate both on the same disk; print medians, their ratio and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--folder", default=None, help="directory to write to; its disk is measured"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    # One third weights and two thirds Adam moments, in matrices of 1024 x 1024.
    side = 1024
    count = max(3, options.megabytes * 1_000_000 // (4 * side * side))
    tensors = {f"layer.{number}.weight": torch.randn(side, side) for number in range(count)}
    weights = dict(list(tensors.items())[: count // 3])
    moments = {f"{name}.exp_avg": tensor for name, tensor in list(tensors.items())[count // 3 :]}
    data = b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
    plain, published, verified = [], [], []
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        RunDirectory(Path(folder) / "run", keep_checkpoints=1) as run,
    ):
        for step in range(1, options.repeats + 2):
            plain.append(
                _seconds(lambda step=step: _write_plain(Path(folder) / f"plain-{step}", data))
            )
            (Path(folder) / f"plain-{step}").unlink()
            parts = {"weights": weights, "optimizer": moments, "ema": None}
            published.append(
                _seconds(
                    lambda step=step, parts=parts: run.save_checkpoint(step, parts, {"step": step})
                )
            )
            verified.append(_seconds(run.latest))
            run.prune()
    first, second, third = (statistics.median(times[1:]) for times in (plain, published, verified))
    print(
        f"{len(data) / 1e6:.0f} MB: plain write and fsync {first:.2f} s, "
        f"checkpoint {second:.2f} s, verification {third:.2f} s"
    )
    print(f"a checkpoint takes {second / first:.2f} times a plain write")
    print(
        json.dumps(
            {
                "bench": "checkpoint_write",
                "bytes": len(data),
                "plain_s": first,
                "publish_s": second,
                "ratio": second / first,
                "verify_s": third,
            }
            | {
                "spread_plain": [min(plain[1:]), max(plain[1:])],
                "spread_publish": [min(published[1:]), max(published[1:])],
            }
            | {"repeats": options.repeats, "torch": torch.__version__}
        )
    )


def _write_plain(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _seconds(action: object) -> float:
    began = time.monotonic()
    action()  # type: ignore[operator]
    return time.monotonic() - began


if __name__ == "__main__":
    main()
