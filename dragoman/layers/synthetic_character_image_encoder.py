"""Images of characters: rendering of strokes, and a convolutional network that encodes them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

IMAGE_SIZE = 28  # pixels a side, as in Lee et al. (2019), section 5.2
SEGMENT_WIDTH = 5  # numbers of a line segment: both ends, and whether it has ink
STROKE_RADIUS = 0.035  # of the unit square: a line is about two pixels thick


def render_strokes(strokes: Tensor, *, size: int = IMAGE_SIZE) -> Tensor:
    """Draw line segments (..., G, 5) of the unit square as images (..., size * size) in [0, 1].

    A segment is x0, y0, x1, y1 and its ink, 0 or 1; the nearest one with ink darkens a pixel.
    """
    strokes = strokes.float()
    axis = (torch.arange(size, device=strokes.device) + 0.5) / size
    x, y = axis.view(1, -1), axis.view(-1, 1)
    nearest = strokes.new_full((*strokes.shape[:-2], size, size), 4.0)  # squared distance
    # One segment after another: all at once would need twelve times the memory.
    for segment in strokes.unbind(dim=-2):
        left, top, right, bottom, ink = segment[..., None, None].unbind(dim=-3)  # (..., 1, 1)
        across, down = right - left, bottom - top
        from_left, from_top = x - left, y - top
        length = (across.square() + down.square()).clamp(min=1e-8)
        along = ((from_left * across + from_top * down) / length).clamp(0, 1)
        distance = (from_left - along * across).square() + (from_top - along * down).square()
        nearest = torch.minimum(nearest, distance + 4.0 * (1.0 - ink))
    edge = 1.0 / size  # the width over which a line fades
    dark = ((STROKE_RADIUS + edge / 2 - nearest.sqrt()) / edge).clamp(0, 1)
    return dark.flatten(-2)


class GlyphEncoder(nn.Module):
    """Four strided convolutions with ReLU and a linear layer: an image to a vector.

    Lee et al. (2019), supplementary table: Conv(64, 3, 2, BN, ReLU) four times and FC(64). Here
    layer normalization over an image's features replaces batch normalization, so that an element
    depends neither on the other elements nor on padding.
    """

    def __init__(self, width: int, *, channels: int = 64, size: int = IMAGE_SIZE) -> None:
        super().__init__()
        self.size = size
        layers: list[nn.Module] = []
        inputs = 1
        for _ in range(4):
            layers += [
                nn.Conv2d(inputs, channels, 3, stride=2, padding=1),
                nn.GroupNorm(1, channels),
                nn.ReLU(),
            ]
            inputs, size = channels, (size + 1) // 2
        self.layers = nn.Sequential(*layers)
        self.output = nn.Linear(channels * size * size, width)

    def forward(self, images: Tensor) -> Tensor:
        """Encode images (B, N, size * size): (B, N, D)."""
        features = self.layers(images.reshape(-1, 1, self.size, self.size))
        return self.output(features.flatten(1)).view(*images.shape[:2], -1)
