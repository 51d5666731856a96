"""Time of hard monotonic decoding by the length of source and target, on the CPU.

`scan` reads a source position when the head is on it, `step` scores all of them at every target
position. The head advances one key per step, as in a translation as long as its source. The
slope is that of log time over log length: 1 is linear, 2 quadratic.

    python bench/monotonic_decoding.py
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from dragoman.attention import AdditiveScore, Mechanism, MonotonicAlignment
from dragoman.attention.attention_mechanism import PreparedKeys
from dragoman.attention.softmax_and_gumbel_alignment import AlignmentState

Attend = Callable[[Tensor, PreparedKeys, AlignmentState], tuple[object, AlignmentState]]


class DiagonalScore(AdditiveScore):
    """An additive score that moves the head by one key per step, and counts the keys it reads."""

    reads = 0

    def forward(self, query: Tensor, prepared: Tensor, features: Tensor | None = None) -> Tensor:
        """Score as usual; the last feature of a query is its position, that of a key its own."""
        self.reads += query.size(0) * query.size(1) * prepared.size(-2)
        plain = super().forward(query[..., :-1], prepared[..., :-1])
        ahead = prepared[..., -1].unsqueeze(-2) - query[..., -1:]
        return torch.where(ahead >= 0, plain.abs() + 10.0, -10.0)

    def prepare(self, key: Tensor) -> Tensor:
        """Project the keys without their position."""
        return torch.cat([super().prepare(key[..., :-1]), key[..., -1:]], dim=-1)


def decode(attend: Attend, attention: Mechanism, query: Tensor, key: Tensor) -> float:
    """Return the seconds that attention takes in all decoding steps."""
    prepared = attention.prepare(key=key, value=key)
    state = attention.start(prepared)
    start = time.perf_counter()
    for position in query.unsqueeze(2).unbind(1):
        _, state = attend(position, prepared, state)
    return time.perf_counter() - start


def slope(lengths: list[int], seconds: list[float]) -> float:
    """Return the least-squares slope of log time over log length, of the longer half."""
    half = len(lengths) // 2
    return statistics.linear_regression(
        [math.log(length) for length in lengths[half:]],
        [math.log(value) for value in seconds[half:]],
    ).slope


@torch.no_grad()
def main() -> None:
    """Print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    width = arguments.width
    score = DiagonalScore(query_width=width, key_width=width, score_width=width)
    score.query_width = score.key_width = width + 1
    attention = Mechanism(score, MonotonicAlignment(offset=0.0)).eval()
    lengths = [64 * 2**n for n in range(20) if 64 * 2**n <= arguments.longest]
    times: dict[str, list[float]] = {"scan": [], "step": []}
    print(f"{'S = T':>7} {'scan ms':>9} {'step ms':>9} {'reads':>8} {'S + T':>8}")
    for length in lengths:
        positions = torch.arange(length).view(1, -1, 1).float()
        query, key = (torch.cat([torch.randn(1, length, width), positions], -1) for _ in range(2))
        reads = {}
        for name, attend in (("scan", attention.scan), ("step", attention.step)):
            score.reads = 0
            found = [decode(attend, attention, query, key) for _ in range(arguments.repeats)]
            reads[name] = score.reads // arguments.repeats
            times[name].append(statistics.median(found))
        scan, step = (1e3 * times[name][-1] for name in ("scan", "step"))
        print(f"{length:7} {scan:9.1f} {step:9.1f} {reads['scan']:8} {2 * length:8}")
        assert reads["scan"] <= 2 * length, "a position was read twice"
    slopes = {name: round(slope(lengths, seconds), 2) for name, seconds in times.items()}
    print(f"slope: {slopes['scan']} by scan, {slopes['step']} by step")
    print(
        json.dumps(
            {
                "bench": "monotonic_decoding",
                "lengths": lengths,
                "seconds": times,
                "slopes": slopes,
                "width": width,
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
            }
        )
    )


if __name__ == "__main__":
    main()
