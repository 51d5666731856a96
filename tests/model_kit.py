"""Small models for tests: perturbed weights, and greedy generation."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.special_tokens import BOS

M = TypeVar("M", bound=nn.Module)


def perturb_weights(model: M, by: float = 0.1) -> M:
    """Add noise to every weight: biases and norms are initialized to zeros and ones, which would
    hide a swap.

    The caller has seeded torch's generator.
    """
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(by * torch.randn_like(weight))
    return model


def generate_greedy(
    model: EncoderDecoder, src: Tensor, length: int, mask: Tensor | None = None
) -> Tensor:
    """Return greedy outputs (B, length) for sources (B, S)."""
    model.eval()
    with torch.inference_mode():
        state, tokens, output = (
            model.start(model.encode(src, mask)),
            torch.full((len(src),), BOS),
            [],
        )
        for _ in range(length):
            logits, state = model.step(tokens, state)
            tokens = logits.argmax(-1)
            output.append(tokens)
    return torch.stack(output, 1)
