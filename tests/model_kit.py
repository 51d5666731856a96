"""Small models under test: weights that are all off their first values, and what a model says by
itself.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.special_tokens import BOS

M = TypeVar("M", bound=nn.Module)


def shaken(model: M, by: float = 0.1) -> M:
    """Move every weight off its first value: biases and norms begin as noughts and ones, and one
    mixed up would not show.

    The caller has seeded torch's generator.
    """
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(by * torch.randn_like(weight))
    return model


def said(model: EncoderDecoder, src: Tensor, length: int, mask: Tensor | None = None) -> Tensor:
    """Let a model generate from (B, S), the likeliest piece each time: (B, length)."""
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
