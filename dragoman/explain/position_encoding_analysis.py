"""How the order of tokens enters a model: position vectors, relative scores, reach; and a figure.

Vectors added to the embeddings are shown as the similarity of positions; terms inside
self-attention as a curve for each head: the part of the score that the distance decides, averaged
over the queries (and keys) of the sentence. Convolutions and windows have a reach.

The figure, `save_positions`, is read from the model's modules; no sentence is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dragoman.attention.absolute_position_encodings import (
    LearnedPositions,
    Positions,
    RelativePosition,
    SinusoidalPositions,
)
from dragoman.attention.attention_weight_hooks import find_attentions
from dragoman.attention.multi_head import SelfAttention, _normalize_heads
from dragoman.attention.relative_position_encodings import (
    AlibiBias,
    RotaryEmbedding,
    ShawRelativeKeys,
    T5RelativeBias,
    TransformerXLBias,
)
from dragoman.explain.plot_style import (
    FAINT,
    PALETTE,
    SIGNED_MAP,
    TWO_COLUMNS,
    figure_style,
    save_figure,
)
from dragoman.explain.teacher_forced_pass import TeacherForcedPair
from dragoman.layers.convs2s import GatedConvolution
from dragoman.layers.rnn import RNN, SlicedRNN
from dragoman.models.block_stack import Stack
from dragoman.models.encoder_decoder import EncoderDecoder

MAX_POSITIONS = 128  # of the similarity
MAX_DISTANCE = 32  # of the curves
SIMILARITY = "pos.sim"  # name of the array

_NOTES = {
    "sinusoidal": "Sines and cosines of the position are added to the embeddings.",
    "learned": "A trained vector for each position is added to the embeddings.",
    "recurrent": "An RNN reads the tokens one after another; it needs no positions.",
    "convolution": "Convolutions read a window of adjacent tokens; there is no position encoding.",
    "none": "There is no position encoding; only the decoder's causal mask depends on the order.",
    RotaryEmbedding: "Queries and keys are rotated by their positions. A curve is the score of "
    "the sentence's mean query and mean key at a distance.",
    AlibiBias: "A penalty that grows with the distance is added to the scores, steeper in some "
    "heads than in others.",
    T5RelativeBias: "A trained number for each range of distances is added to the scores.",
    ShawRelativeKeys: "A trained vector for each distance is added to the keys. A curve is what "
    "it adds to the score of the sentence's mean query.",
    TransformerXLBias: "A projection of sines and cosines of the distance acts as a second key. A "
    "curve is what it adds to the score of the sentence's mean query.",
}
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


class PositionSummary(NamedTuple):
    """How order enters a model, and the arrays that it names."""

    positions: dict[str, Any]  # kind, note, tensor, curves, reach
    arrays: dict[str, NDArray[np.float32]]


class _Curve(NamedTuple):
    """The score of each head at each distance, key position minus query position."""

    distances: list[int]
    scores: Tensor  # (H, n)


def summarize_positions(pair: TeacherForcedPair, site_ids: Mapping[str, str]) -> PositionSummary:
    """Return how order enters a model; `site_ids` are the sites of module paths, such as "e0"."""
    model = pair.model
    stack_input = model.src_input if isinstance(model, EncoderDecoder) else model.stack_input
    absolute = stack_input.positions
    relative = {
        path: module
        for path, module in find_attentions(model).items()
        if isinstance(module, SelfAttention) and module.relative_position is not None
    }
    length = max(pair.src_length, pair.tgt_length)
    arrays: dict[str, NDArray[np.float32]] = {}
    similarity = position_similarity(absolute, length)
    if similarity is not None:
        arrays[SIMILARITY] = similarity
    reach, reach_note = describe_reach(model)
    kind, notes = "none", list[str]()
    if isinstance(absolute, LearnedPositions):
        kind = "learned"
    elif isinstance(absolute, SinusoidalPositions):
        kind = "sinusoidal"
    if kind != "none":
        notes.append(_NOTES[kind])
    kinds = dict.fromkeys(type(module.relative_position) for module in relative.values())
    if kinds and kind == "none":
        kind = "rotary" if RotaryEmbedding in kinds else "relative"
    notes += [_NOTES[each] for each in kinds if each in _NOTES]
    if kind == "none":
        kind = _order_of_blocks(model)
        notes.append(_NOTES[kind])
    curves = [
        {"site": site_ids[path], "head": head, "x": curve.distances, "y": row}
        for path, curve in _read_curves(pair, relative).items()
        if path in site_ids
        for head, row in enumerate(np.round(curve.scores.double().cpu().numpy(), 4).tolist())
    ]
    return PositionSummary(
        {
            "kind": kind,
            "note": " ".join([*notes, *([reach_note] if reach_note else [])]),
            "tensor": SIMILARITY if similarity is not None else None,
            "curves": curves,
            "reach": reach,
        },
        arrays,
    )


def position_similarity(positions: Positions, length: int) -> NDArray[np.float32] | None:
    """Return the cosine similarity (P, P) of the first position vectors; None if there are none.

    P is the length of the sentence, at least 32 and at most 128.
    """
    count = min(max(length, MAX_DISTANCE), MAX_POSITIONS, positions.max_positions)
    with torch.no_grad():
        vectors = positions.vectors(0, count)
        if vectors is None:
            return None
        unit = nn.functional.normalize(vectors.float(), dim=-1)
        array: NDArray[np.float32] = (unit @ unit.T).clamp(-1, 1).cpu().numpy()
    return array


def describe_reach(model: nn.Module) -> tuple[int | None, str]:
    """Return how far a position sees to a side, and a sentence; None if there is no limit.

    The number is that of the encoder if it has a limit, else of the decoder.
    """
    sides = [
        (name, stack)
        for name in ("encoder", "decoder")
        if isinstance(stack := getattr(model, name, None), Stack) and stack.depth
    ]
    found = [(name, reach) for name, stack in sides if (reach := _stack_reach(stack)) is not None]
    if not found:
        return None, ""
    ranges = " and ".join(f"{reach} in the {name}" for name, reach in found)
    return found[0][1], f"A position sees at most this many tokens to the left: {ranges}."


def _stack_reach(stack: Stack) -> int | None:
    """Return how far to the left a position of a stack sees; None if there is no limit."""
    if any(isinstance(module, (RNN, SlicedRNN)) for module in stack.modules()):
        return None
    reach = 0
    for path, module in stack.named_modules():
        if isinstance(module, GatedConvolution):
            reach += module.left_padding
        elif isinstance(module, SelfAttention):
            if not module.window:
                return None
            reach += module.window
        elif path.endswith(".self"):  # LSH attention
            return None
    return reach


def _order_of_blocks(model: nn.Module) -> str:
    """Return the kind of a model without position encodings: recurrent, convolution or none."""
    if any(isinstance(module, RNN) for module in model.modules()):
        return "recurrent"
    has_convolution = any(isinstance(module, GatedConvolution) for module in model.modules())
    return "convolution" if has_convolution else "none"


def _read_curves(
    pair: TeacherForcedPair, attentions: Mapping[str, SelfAttention]
) -> dict[str, _Curve]:
    """Return the curve of each self-attention with relative positions."""
    if not attentions:
        return {}
    with torch.no_grad(), _collected_inputs(attentions) as inputs:
        pair.baseline()
        curves = {}
        for path, attention in attentions.items():
            is_source = path.startswith("encoder.")
            length = pair.src_length if is_source else pair.tgt_length
            curves[path] = distance_curve(attention, inputs[path], length, causal=not is_source)
        return curves


def distance_curve(attention: SelfAttention, x: Tensor, length: int, *, causal: bool) -> _Curve:
    """Return the part of the scores that the distance decides, for inputs x (1, T, D).

    Scores are linear in the query and, with rotary embeddings, in the key: the mean over the
    sentence is the score of the mean query and key.
    """
    farthest = min(max(length - 1, 1), MAX_DISTANCE)
    distances = list(range(-farthest, 1 if causal else farthest + 1))
    relative_position = attention.relative_position
    assert relative_position is not None, "the attention has relative positions"
    query, key = _mean_query_key(attention, x)  # (1, H, 1, Dh)
    if relative_position.has_bias:
        offsets = torch.tensor([distances], device=x.device)  # (1, n)
        bias = relative_position.bias(offsets, query)
        return _Curve(distances, bias.reshape(-1, len(distances)))  # (H, n)
    # q R(d) k for a key d positions later; for one before it the query is rotated instead.
    count = farthest + 1
    rotated = [
        relative_position.rotate(part.expand(-1, -1, count, -1), None) for part in (query, key)
    ]
    before = (rotated[0] * key).sum(-1).flip(-1)  # distances -farthest to 0
    after = (query * rotated[1]).sum(-1)[..., 1:]  # 1 to farthest
    scores = before if causal else torch.cat([before, after], dim=-1)
    return _Curve(distances, (scores * query.size(-1) ** -0.5)[0])


def _mean_query_key(attention: SelfAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean query and key (1, H, 1, Dh) of inputs (1, T, D), not rotated."""
    sizes = [attention.inner, attention.kv_inner, attention.value_inner]
    packed = torch.split(attention.query_key_value(x), sizes, dim=-1)[:2]
    query, key = (attention.split(part, 1).squeeze(1) for part in packed)
    if attention.query_norm is not None and attention.key_norm is not None:
        query = _normalize_heads(attention.query_norm, query)
        key = _normalize_heads(attention.key_norm, key)
    key = key.repeat_interleave(attention.heads // attention.kv_heads, dim=1)
    return query.mean(dim=2, keepdim=True), key.mean(dim=2, keepdim=True)


@contextmanager
def _collected_inputs(attentions: Mapping[str, SelfAttention]) -> Iterator[dict[str, Tensor]]:
    """Collect the inputs (1, T, D) of attentions within the block, in this thread only."""
    owner, inputs = threading.get_ident(), dict[str, Tensor]()

    def collect(path: str, args: tuple[Any, ...]) -> None:
        if threading.get_ident() == owner:
            inputs[path] = args[0]

    handles = [
        module.register_forward_pre_hook(lambda _, args, path=path: collect(path, args))
        for path, module in attentions.items()
    ]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


class PositionEncodingTable(NamedTuple):
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
    """The term added to scores, or their factor, at each distance of key and query."""

    where: str
    kind: str
    distances: NDArray[np.int64]
    values: NDArray[np.float32]  # (H, distances)


class ConvolutionReach(NamedTuple):
    """Positions that reach the output of a stack of convolutions, layer by layer."""

    where: str
    left: list[int]  # before the position, after each layer
    right: list[int]


PositionPart = PositionEncodingTable | PositionCurves | ConvolutionReach


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
            parts.append(PositionEncodingTable(_where(name), kind, table))
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
    stack = {"src_input": "encoder input", "tgt_input": "decoder input"}.get(
        parts[0], "input" if parts[0] in ("stack_input", "embedding") else parts[0]
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
    if isinstance(part, PositionEncodingTable):
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


def _draw_table(figure: Any, axes: Any, part: PositionEncodingTable) -> None:
    """Draw the vectors: a row per position, a column per dimension."""
    most = max(1e-6, float(np.abs(part.vectors).max()))
    _draw_matrix(figure, axes, part.vectors, most)
    axes.set(
        title=f"{part.kind.capitalize()} positions, {part.where}",
        xlabel="dimension",
        ylabel="position",
    )


def _draw_similarity(figure: Any, axes: Any, part: PositionEncodingTable) -> None:
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
