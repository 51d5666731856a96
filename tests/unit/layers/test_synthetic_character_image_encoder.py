"""Rendering of strokes, and the encoder of images."""

import math

import torch

from dragoman.layers.synthetic_character_image_encoder import (
    IMAGE_SIZE,
    STROKE_RADIUS,
    GlyphEncoder,
    render_strokes,
)


def test_pixels_are_dark_by_their_distance_from_the_nearest_segment():
    segments = torch.tensor(
        [[0.1, 0.2, 0.8, 0.6, 1.0], [0.5, 0.9, 0.5, 0.9, 1.0], [0.0, 0.0, 1.0, 0.0, 0.0]]
    )
    image = render_strokes(segments).view(IMAGE_SIZE, IMAGE_SIZE)
    for row in range(0, IMAGE_SIZE, 3):
        for column in range(0, IMAGE_SIZE, 3):
            x, y = (column + 0.5) / IMAGE_SIZE, (row + 0.5) / IMAGE_SIZE
            along = max(0.0, min(1.0, ((x - 0.1) * 0.7 + (y - 0.2) * 0.4) / (0.49 + 0.16)))
            near = min(
                math.hypot(x - 0.1 - 0.7 * along, y - 0.2 - 0.4 * along),
                math.hypot(x - 0.5, y - 0.9),
            )
            dark = (STROKE_RADIUS + 0.5 / IMAGE_SIZE - near) * IMAGE_SIZE
            assert abs(float(image[row, column]) - max(0.0, min(1.0, dark))) < 1e-4


def test_an_image_is_encoded_alone():
    torch.manual_seed(0)
    encoder = GlyphEncoder(8).train()
    images = torch.rand(2, 3, IMAGE_SIZE**2)
    with torch.no_grad():
        together = encoder(images)
        torch.testing.assert_close(encoder(images[1:, :1]), together[1:, :1])
    assert together.shape == (2, 3, 8)
