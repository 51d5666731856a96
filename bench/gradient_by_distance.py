r"""Gradient of an RNN's last state with respect to an earlier input, by the distance between them.

The gradient of a plain RNN is a product of one Jacobian a step. It vanishes or explodes with the
distance, as the largest singular value of U is below or above 1 (Bengio et al. 1994, Pascanu et
al. 2013); LSTM, GRU and SRU add to their states and keep it. An LSTM with large U may still
explode, which is why gradients are clipped. Hidden-to-hidden matrices U are orthogonal, times a
factor; an SRU has none.

    python bench/gradient_by_distance.py [--plot gradient.png]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn

from dragoman.layers.rnn import GRU, LSTM, RNN, SRU, TanhRNN, TorchRNN

DISTANCES = (1, 2, 5, 10, 20, 50, 100, 200)
GAINS = {"rnn": (0.8, 1.0, 1.5), "lstm": (0.5, 1.0), "gru": (0.5, 1.0), "sru": (1.0,)}
CELLS: dict[str, type[RNN]] = {"rnn": TanhRNN, "lstm": LSTM, "gru": GRU, "sru": SRU}


def build(kind: type[RNN], width: int, gain: float) -> RNN:
    """Build an RNN in double precision; LSTM and GRU with gates that remember.

    A forget gate at its initial bias of 1 passes 0.73 of the cell a step; with a bias of 5, as
    trained gates have where distance matters, 0.993.
    """
    torch.manual_seed(0)
    rnn = kind(width, width).double()
    with torch.no_grad():
        if isinstance(rnn, TorchRNN):
            rnn.module.weight_hh_l0.mul_(gain)
        if isinstance(rnn, (LSTM, GRU)):  # forget gate, update gate
            rnn.module.bias_ih_l0[width : 2 * width] = 5.0
        elif isinstance(rnn, SRU):
            rnn.bias_l0[0] = 5.0
    return rnn


def gradients(rnn: RNN, distances: tuple[int, ...], scale: float) -> list[float]:
    """Return the median norm of the gradient of a random projection of the last output."""
    torch.manual_seed(1)
    length = max(distances) + 101  # the first states, near zero, are left out
    x = (scale * torch.randn(16, length, rnn.width, dtype=torch.float64)).requires_grad_()
    direction = nn.functional.normalize(torch.randn(16, rnn.width, dtype=torch.float64), dim=-1)
    last: Tensor = rnn.run_forward(x)[:, -1]
    (grad,) = torch.autograd.grad((last * direction).sum(), x)
    norms = grad.norm(dim=-1).median(dim=0).values  # (T,), of 16 sequences
    return [float(norms[length - 1 - distance]) for distance in distances]


def main() -> None:
    """Print a table and a line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--scale", type=float, default=0.1, help="standard deviation of the inputs")
    parser.add_argument("--plot", type=Path, help="write a figure")
    arguments = parser.parse_args()
    rows: dict[str, list[float]] = {}
    for name, gains in GAINS.items():
        for gain in gains:
            rnn = build(CELLS[name], arguments.width, gain)
            label = f"{name}, U x {gain:g}" if name != "sru" else name
            rows[label] = gradients(rnn, DISTANCES, arguments.scale)
    print(f"{'distance':>13}" + "".join(f"{distance:>10}" for distance in DISTANCES))
    for name, values in rows.items():
        print(f"{name:>13}" + "".join(f"{value:10.1e}" for value in values))
    if arguments.plot:
        plot(rows, arguments.plot)
    signature = {"width": arguments.width, "scale": arguments.scale, "torch": torch.__version__}
    print(
        json.dumps(
            {"bench": "gradient_by_distance", "distances": DISTANCES, "rows": rows, **signature}
        )
    )


def plot(rows: dict[str, list[float]], path: Path) -> None:
    """Draw the gradients over the distance, both axes logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, values in rows.items():
        axes.loglog(DISTANCES, values, marker=".", label=name)
    axes.set_xlabel("distance in positions")
    axes.set_ylabel("norm of the gradient")
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
