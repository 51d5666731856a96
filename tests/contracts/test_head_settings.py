"""What settings of heads, embeddings and stacks promise: the contracts of 4.6 for each, alone and
with positions inside attention.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from dragoman.attention import record
from dragoman.config import ModelConfig
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model

VARIANTS: dict[str, dict[str, object]] = {
    "wide heads": {"head_width": 12},
    "narrow heads": {"heads": 3, "head_width": 4},
    "narrow values": {"value_width": 3},
    "wide values": {"value_width": 7},
    "values apart": {
        "head_width": 6,
        "value_width": 9,
        "kv_heads": 2,
        "qk_norm": "rms",
        "window": 3,
        "positions": "rotary",
    },
    "values apart, xl": {"value_width": 2, "kv_heads": 2, "positions": "transformer_xl"},
    "values apart, talking": {"value_width": 5, "talking_heads": True},
    "grouped": {"kv_heads": 2},
    "one key": {"kv_heads": 1},
    "layer": {"qk_norm": "layer"},
    "rms": {"qk_norm": "rms"},
    "t5": {"qk_norm": "t5"},
    "scale": {"qk_norm": "scale"},
    "window": {"window": 2},
    "talking": {"talking_heads": True},
    "all talking": {
        "talking_heads": True,
        "kv_heads": 2,
        "qk_norm": "rms",
        "window": 3,
        "positions": "transformer_xl",
    },
    "shared": {"share_layers": "all"},
    "shared attention": {"share_layers": "attention", "positions": "t5"},
    "shared feed-forward": {"share_layers": "ffn"},
    "factorised": {"embedding_width": 4},
    "factorised apart": {"embedding_width": 4, "tie_embeddings": "none", "output_bias": True},
    "length one": {"fix_norm": True, "norm": "scale", "residual": "pre_norm"},
    "length one apart": {"fix_norm": True, "tie_embeddings": "none", "embedding_width": 4},
    "layers left out": {"layer_drop": 0.5},
    "by depth": {"initialization": "depth_scaled"},
    "by residuals": {"initialization": "residual_scaled", "residual": "pre_norm"},
    "all rotary": {
        "head_width": 6,
        "kv_heads": 2,
        "qk_norm": "rms",
        "window": 3,
        "positions": "rotary",
    },
    "all alibi": {
        "head_width": 6,
        "kv_heads": 2,
        "qk_norm": "scale",
        "window": 3,
        "positions": "alibi",
    },
    "all t5": {"head_width": 6, "kv_heads": 1, "qk_norm": "layer", "window": 3, "positions": "t5"},
    "all xl": {
        "head_width": 6,
        "kv_heads": 2,
        "qk_norm": "rms",
        "window": 3,
        "positions": "transformer_xl",
    },
    "all shaw": {"head_width": 6, "kv_heads": 2, "qk_norm": "t5", "window": 3, "positions": "shaw"},
}


def build(name: str) -> EncoderDecoder:
    torch.manual_seed(0)
    values = {
        "encoder": ("transformer*2",),
        "decoder": ("transformer*2",),
        "width": 16,
        "heads": 4,
        "ffn_width": 32,
        "dropout": 0.0,
    }
    config = ModelConfig(**{**values, **VARIANTS[name]})  # type: ignore[arg-type]
    assert not list(config.problems())
    model = build_model(config, src_vocab_size=23, tgt_vocab_size=23).double().eval()
    for path, weight in model.named_parameters():
        # Talking heads start as the identity; rows that still sum to one keep what `record`
        # promises.
        if "mix_" in path:
            torch.nn.init.uniform_(weight)
            weight.data /= weight.data.sum(-1, keepdim=True)
    return model


def batch() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    mask = torch.arange(6) < torch.tensor([[6], [3], [5]])
    return torch.randint(4, 23, (3, 6)) * mask, mask, torch.randint(4, 23, (3, 7))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("cuts", [[0, 7], [0, 1, 2, 3, 4, 5, 6, 7], [0, 2, 3, 7]])
@torch.no_grad()
def test_incremental_decoding_in_any_split_equals_forward(name: str, cuts: list[int]) -> None:
    model = build(name)
    src, mask, tgt = batch()
    state, found = model.start(model.encode(src, mask)), []
    for first, last in pairwise(cuts):
        logits, state = model.extend(tgt[:, first:last], state)
        found.append(logits)
    torch.testing.assert_close(torch.cat(found, 1), model(src, tgt, mask))


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_padding_other_rows_and_future_change_nothing(name: str) -> None:
    model = build(name)
    src, mask, tgt = batch()
    expected = model(src, tgt, mask)
    for row in range(3):
        length = int(mask[row].sum())
        torch.testing.assert_close(
            model(src[row : row + 1, :length], tgt[row : row + 1])[0], expected[row]
        )
    changed = tgt.clone()
    changed[:, 4:] = 4
    torch.testing.assert_close(model(src, changed, mask)[:, :4], expected[:, :4])


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_rows_are_selected_while_decoding(name: str) -> None:
    model = build(name)
    src, mask, tgt = batch()
    expected = model(src, tgt, mask)
    state = model.extend(tgt[:, :2], model.start(model.encode(src, mask))).state
    logits, _ = model.extend(tgt[[2, 1], 2:6], state.select(torch.tensor([2, 1])))
    torch.testing.assert_close(logits, expected[[2, 1], 2:6])


@pytest.mark.parametrize("name", VARIANTS)
def test_recording_changes_nothing_and_every_weight_learns(name: str) -> None:
    model = build(name)
    src, mask, tgt = batch()
    with record(model) as notes:
        recorded = model(src, tgt, mask)
    output = model(src, tgt, mask)
    torch.testing.assert_close(recorded, output)
    for path, note in notes.items():
        torch.testing.assert_close(note.weights @ note.values, note.output)
        sums = note.weights.sum(-1)  # (B, H, T)
        if path.startswith(
            "encoder"
        ):  # a padded position far from all real ones sees nothing through a window
            sums = sums.masked_fill(~mask.unsqueeze(1), 1.0)
        torch.testing.assert_close(sums, torch.ones_like(sums))
    output.log_softmax(-1)[..., 5].sum().backward()
    for path, weight in model.named_parameters():
        assert weight.grad is not None, path
        assert weight.grad.any(), path


@pytest.mark.parametrize("name", VARIANTS)
def test_bfloat16_autocast_stays_close(name: str) -> None:
    model = build(name).float()
    src, mask, tgt = batch()
    exact = model(src, tgt, mask)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        stepped = model.extend(tgt, model.start(model.encode(src, mask))).logits
        half = model(src, tgt, mask)
    assert (stepped.float() - exact).norm() < 0.05 * exact.norm()
    assert (half.float() - exact).norm() < 0.05 * exact.norm()
