"""Small models for tests: perturbed weights, their C++ form, and greedy generation."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from dragoman.config import Config
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model
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


def build_perturbed_transformer(
    *vocab_sizes: int, seed: int = 0, **settings: Any
) -> EncoderDecoder:
    """Build a small Transformer with perturbed weights, in evaluation mode.

    `vocab_sizes` are of the source and the target, or of both; `settings` change ModelConfig.
    """
    torch.manual_seed(seed)
    shape = {
        "encoder": ["transformer*2"],
        "decoder": ["transformer*2"],
        "width": 32,
        "heads": 4,
        "ffn_width": 48,
    }
    model = build_model(
        Config().replace(model={**shape, **settings}).model,
        src_vocab_size=vocab_sizes[0],
        tgt_vocab_size=vocab_sizes[-1],
    )
    return perturb_weights(model).eval()


def convert_to_cpp(model: EncoderDecoder, precision: str = "float32") -> Any:
    """Return a model's CppTransformer; skip the test where the C++ kernels cannot run it."""
    from dragoman.inference.cpu.cpp_transformer import CppTransformer
    from dragoman.inference.cpu.cpu_engine_conversion import convert_model

    found = convert_model(model, precision).model
    if not isinstance(found, CppTransformer):
        pytest.skip(f"this processor has no compiled {precision}")
    return found


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
