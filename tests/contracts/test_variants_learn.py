"""The miniature of every norm, activation, position scheme and setting of heads learns to reverse,
and generates what it learnt.
"""

from __future__ import annotations

import pytest
import torch
from model_kit import generate_greedy
from torch import Tensor

from dragoman.config import ModelConfig
from dragoman.layers.norm_and_activation_catalogue import ACTIVATIONS, NORMS
from dragoman.models.factory import build_model
from dragoman.text.special_tokens import BOS, EOS

VARIANTS: dict[str, dict[str, object]] = {
    **{f"norm {name}": {"norm": name} for name in NORMS if name != "layer"},
    **{f"activation {name}": {"activation": name} for name in ACTIVATIONS if name != "relu"},
    "grouped": {"kv_heads": 1},
    "normed heads": {"qk_norm": "rms"},
    "wide heads": {"head_width": 24},
    "window": {"window": 3},
    "talking": {"talking_heads": True},
    "factorised, of length one": {"embedding_width": 12, "fix_norm": True},
}
# Relative positions give absolute ones only through </s>, which takes a second layer to find;
# ALiBi's slopes are steep enough for so short sentences in some of eight heads.
RELATIVE: dict[str, dict[str, object]] = {
    "rotary": {"width": 32, "heads": 2},
    "t5": {"width": 32, "heads": 2},
    "shaw": {"width": 32, "heads": 2},
    "transformer_xl": {"width": 32, "heads": 2},
    "alibi": {"width": 64, "heads": 8},
}

CHECK_EVERY = 50  # steps


def sentences(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sources with </s>, and their reversals."""
    tokens = torch.randint(4, 12, (rows, 6), generator=generator)
    return torch.cat([tokens, torch.full((rows, 1), EOS)], 1), tokens.flip(1)


def reversal_accuracy(max_steps: int, rate: float, **settings: object) -> float:
    """Train a miniature until it gets 90 % of new sentences right; return what it reached.

    The number of steps depends on the machine: rounding decides when a model finds the rule.
    """
    torch.manual_seed(0)
    config = ModelConfig(**{"ffn_width": 64, "residual": "pre_norm", "dropout": 0.0, **settings})  # type: ignore[arg-type]
    model = build_model(config, src_vocab_size=12, tgt_vocab_size=12)
    optimizer = torch.optim.Adam(model.parameters(), rate, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(0)
    accuracy = 0.0
    for step in range(1, max_steps + 1):
        src, tgt = sentences(48, generator)
        model.train()
        logits = model(src, torch.cat([torch.full((48, 1), BOS), tgt[:, :-1]], 1))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tgt.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % CHECK_EVERY == 0:
            src, tgt = sentences(100, generator)
            accuracy = (generate_greedy(model, src, 6) == tgt).all(1).float().mean().item()
            if accuracy >= 0.9:
                break
    return accuracy


@pytest.mark.parametrize("name", VARIANTS)
def test_the_miniature_learns_to_reverse(name: str) -> None:
    small = {"encoder": ("transformer",), "decoder": ("transformer",), "width": 32, "heads": 4}
    assert reversal_accuracy(900, 5e-3, **{**small, **VARIANTS[name]}) >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", RELATIVE)
def test_the_miniature_learns_to_reverse_by_distances(name: str) -> None:
    assert (
        reversal_accuracy(
            2_100,
            3e-3,
            encoder=("transformer*2",),
            decoder=("transformer*2",),
            positions=name,
            **RELATIVE[name],
        )
        >= 0.9
    )
