"""How order enters a model, as a figure: position tables, relative biases, rotations, convolutions.

Everything is read from the model's modules; no sentence is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dragoman.attention.positions import Positions, RelativePosition, SinusoidalPositions
from dragoman.attention.relative_positions import (
    AlibiBias,
    RotaryEmbedding,
    ShawRelativeKeys,
    T5RelativeBias,
    TransformerXLBias,
)
from dragoman.explain.figures import (
    FAINT,
    PALETTE,
    SIGNED_MAP,
    TWO_COLUMNS,
    figure_style,
    save_figure,
)
from dragoman.layers.convolution import GatedConvolution

POSITIONS = 64  # rows of a table, and distances on either side, that are drawn
MAX_PANELS = 8
_PANEL_INCHES = 2.3
_RELATIVE_NAMES: dict[type[RelativePosition], str] = {
    AlibiBias: "ALiBi bias",
    T5RelativeBias: "T5's relative bias",
    TransformerXLBias: "Transformer-XL's bias, without content",
    RotaryEmbedding: "rotary embedding, mean rotation",
    ShawRelativeKeys: "relative keys of Shaw et al.",
}


class PositionTable(NamedTuple):
    """Vectors that are added to embeddings."""

    where: str
    kind: str  # sinusoidal or learned
    vectors: NDArray[np.float32]  # (P, D)

    @property
    def similarity(self) -> NDArray[np.float32]:
        """Cosine of every two positions, (P, P)."""
        norms = np.maximum(np.linalg.norm(self.vectors, axis=1, keepdims=True), 1e-12)
        unit = self.vectors / norms
        found: NDArray[np.float32] = unit @ unit.T
        return found


class PositionCurves(NamedTuple):
    """What is added to scores, or multiplies them, at each distance of key and query."""

    where: str
    kind: str
    distances: NDArray[np.int64]
    values: NDArray[np.float32]  # (H, distances)


class ConvolutionReach(NamedTuple):
    """Positions that reach the output of a stack of convolutions, layer by layer."""

    where: str
    left: list[int]  # before the position, after each layer
    right: list[int]


PositionPart = PositionTable | PositionCurves | ConvolutionReach


@torch.inference_mode()
def find_positions(model: nn.Module, *, positions: int = POSITIONS) -> list[PositionPart]:
    """Return every position encoding of a model and the reach of its convolutions."""
    parts = list[PositionPart]()
    relative = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, RelativePosition)
    }
    inside = tuple(f"{name}." for name in relative)
    seen = list[NDArray[np.float32]]()
    for name, module in model.named_modules():
        if isinstance(module, Positions) and not name.startswith(inside or ("\0",)):
            vectors = module.vectors(0, min(positions, module.max_positions))
            if vectors is None:
                continue
            table = vectors.float().cpu().numpy()
            if any(table.shape == other.shape and (table == other).all() for other in seen):
                continue
            seen.append(table)
            kind = "sinusoidal" if isinstance(module, SinusoidalPositions) else "learned"
            parts.append(PositionTable(_where(name), kind, table))
    for name, module in relative.items():
        curves = _curves(module, positions)
        if curves is None:
            continue
        twin = next(
            (
                at
                for at, part in enumerate(parts)
                if isinstance(part, PositionCurves) and np.array_equal(part.values, curves[1])
            ),
            None,
        )
        if twin is None:
            parts.append(PositionCurves(_where(name), _RELATIVE_NAMES[type(module)], *curves))
        else:
            parts[twin] = PositionCurves(
                "every layer with these heads", _RELATIVE_NAMES[type(module)], *curves
            )
    return parts + _reaches(model)


def describe_missing(model: nn.Module) -> str:
    """Return a sentence on how a model without position encodings knows the order."""
    if any(isinstance(module, (nn.RNNBase, nn.RNNCellBase)) for module in model.modules()) or any(
        "rnn" in type(module).__module__ for module in model.modules()
    ):
        return "this model has no position encoding: its recurrence reads tokens in order"
    return "this model has no position encoding: it does not know the order of its input"


def _where(name: str) -> str:
    """Return the stack and layer of a module path: `decoder.3.self.positions`."""
    parts = name.split(".")
    stack = {"src_entrance": "encoder input", "tgt_entrance": "decoder input"}.get(
        parts[0], "input" if parts[0] in ("entrance", "embedding") else parts[0]
    )
    layer = next((part for part in parts[1:] if part.isdigit()), None)
    return f"{stack}, layer {layer}" if layer is not None else stack


def _curves(
    module: RelativePosition, positions: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
    """Return distances, key minus query, and the values (H, distances) of a relative encoding."""
    device = next(iter([*module.buffers(), *module.parameters()]), torch.zeros(0)).device
    distances = torch.arange(-positions, positions + 1, device=device)
    if isinstance(module, RotaryEmbedding):
        table = module.sinusoids.vectors(0, positions + 1).float()  # sines and cosines
        cosines = table[:, 1::2].mean(dim=1)
        return distances.cpu().numpy(), cosines[distances.abs()].unsqueeze(0).cpu().numpy()
    if isinstance(module, ShawRelativeKeys):
        reach = module.max_distance
        kept = torch.arange(-reach, reach + 1)
        return kept.numpy(), module.weight.float().norm(dim=1).unsqueeze(0).cpu().numpy()
    if isinstance(module, TransformerXLBias):
        width = module.proj.weight.size(0) // module.heads
        query = torch.zeros(1, module.heads, 1, width, device=device)
        distances = distances[distances <= 0] if module.causal else distances
        values = module.bias(distances.unsqueeze(0), query)[0, :, 0]
        return distances.cpu().numpy(), values.float().cpu().numpy()
    if isinstance(module, (AlibiBias, T5RelativeBias)):
        values = module.bias(distances.unsqueeze(0), torch.zeros(0, device=device))[:, 0]
        if isinstance(module, T5RelativeBias) and module.causal:
            distances, values = distances[: positions + 1], values[:, : positions + 1]
        return distances.cpu().numpy(), values.float().cpu().numpy()
    return None


def _reaches(model: nn.Module) -> list[PositionPart]:
    """Return how far the convolutions of each stack reach."""
    stacks: dict[str, list[GatedConvolution]] = {}
    for name, module in model.named_modules():
        if isinstance(module, GatedConvolution):
            stacks.setdefault(name.split(".")[0], []).append(module)
    return [
        ConvolutionReach(
            stack,
            np.cumsum([each.left_padding for each in layers]).tolist(),
            np.cumsum([each.right_padding for each in layers]).tolist(),
        )
        for stack, layers in stacks.items()
    ]


def save_positions(path: str | Path, parts: Sequence[PositionPart]) -> int:
    """Draw position encodings, at most MAX_PANELS panels; return how many parts were left out."""
    from matplotlib.figure import Figure

    panels = list[Callable[[Any, Any], None]]()
    drawn = 0
    for part in parts:
        found = _panels(part)
        if len(panels) + len(found) > MAX_PANELS:
            break
        panels += found
        drawn += 1
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    with figure_style():
        figure = Figure(
            figsize=(TWO_COLUMNS * columns / 2, _PANEL_INCHES * rows), layout="constrained"
        )
        grid = figure.subplots(rows, columns, squeeze=False).flat
        for axes, draw in zip(grid, panels, strict=False):
            draw(figure, axes)
        for axes in list(figure.axes)[len(panels) : rows * columns]:
            if not axes.has_data():
                axes.set_axis_off()
        save_figure(figure, path)
    return len(parts) - drawn


def _panels(part: PositionPart) -> list[Callable[[Any, Any], None]]:
    """Return functions that draw the panels of a part into axes of a figure."""
    if isinstance(part, PositionTable):
        return [
            lambda figure, axes: _draw_table(figure, axes, part),
            lambda figure, axes: _draw_similarity(figure, axes, part),
        ]
    if isinstance(part, PositionCurves):
        return [lambda _, axes: _draw_curves(axes, part)]
    return [lambda _, axes: _draw_reach(axes, part)]


def _draw_matrix(figure: Any, axes: Any, values: NDArray[np.float32], most: float) -> None:
    """Draw signed values as a heat map with its scale."""
    image = axes.imshow(
        values, cmap=SIGNED_MAP, vmin=-most, vmax=most, aspect="auto", interpolation="nearest"
    )
    axes.grid(False)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.05)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=6, length=1.5)


def _draw_table(figure: Any, axes: Any, part: PositionTable) -> None:
    """Draw the vectors: a row per position, a column per dimension."""
    most = max(1e-6, float(np.abs(part.vectors).max()))
    _draw_matrix(figure, axes, part.vectors, most)
    axes.set(
        title=f"{part.kind.capitalize()} positions, {part.where}",
        xlabel="dimension",
        ylabel="position",
    )


def _draw_similarity(figure: Any, axes: Any, part: PositionTable) -> None:
    """Draw the cosine of every two positions."""
    _draw_matrix(figure, axes, part.similarity, 1.0)
    axes.set(title="Cosine of two positions", xlabel="position", ylabel="position")


def _draw_curves(axes: Any, part: PositionCurves) -> None:
    """Draw a line per head over the distance of key and query."""
    heads = len(part.values)
    for head, values in enumerate(part.values):
        axes.plot(
            part.distances,
            values,
            color=PALETTE[head % len(PALETTE)],
            linestyle=("-", (0, (4, 2)), (0, (1, 1.5)))[head // len(PALETTE) % 3],
            linewidth=1.0,
            label=f"head {head}" if heads > 1 else None,
        )
    axes.axvline(0, color=FAINT, linewidth=0.6)
    axes.set(
        title=f"{part.kind[:1].upper()}{part.kind[1:]}\n{part.where}",
        xlabel="position of the key minus that of the query",
        ylabel="mean cosine"
        if part.kind.startswith("rotary")
        else "norm of the key"
        if "keys" in part.kind
        else "added to the score",
    )
    if 1 < heads <= 8:
        axes.legend(ncols=2, handlelength=1.2, columnspacing=0.8)


def _draw_reach(axes: Any, part: ConvolutionReach) -> None:
    """Draw the positions that each layer's output depends on."""
    for layer, (left, right) in enumerate(zip(part.left, part.right, strict=True)):
        axes.barh(layer, left + right + 1, left=-left - 0.5, color=PALETTE[0], height=0.7)
        axes.text(
            right + 1,
            layer,
            f" {left + right + 1}",
            va="center",
            fontsize=7,
            color=FAINT,
        )
    axes.set_yticks(range(len(part.left)))
    axes.axvline(0, color=FAINT, linewidth=0.6)
    axes.grid(axis="y", visible=False)
    axes.set(
        title=f"Reach of the convolutions, {part.where}",
        xlabel="position relative to the output",
        ylabel="convolution",
    )
