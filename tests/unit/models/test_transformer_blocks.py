"""Head sizes, grouped heads, norms and windows against other implementations and definitions."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dragoman.attention import CrossAttention, SelfAttention, masks, record
from dragoman.attention.relative_position_encodings import AlibiBias
from dragoman.config import Config, ModelConfig
from dragoman.errors import ConfigError, DragomanError
from dragoman.layers.norms_and_residuals import RMSNorm
from dragoman.models.factory import build_model
from dragoman.models.forward_context import Memory


def test_grouped_heads_are_pytorchs() -> None:
    torch.manual_seed(0)
    attention, x = SelfAttention(12, 6, kv_heads=2), torch.randn(2, 5, 12)
    assert attention.query_key_value.out_features == 12 + 2 * 4
    query, key, value = (
        part.unflatten(-1, (-1, 2)).transpose(1, 2)
        for part in attention.query_key_value(x).split([12, 4, 4], -1)
    )
    theirs = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(
        attention(x, causal=True), attention.output(theirs.transpose(1, 2).flatten(2))
    )


def test_grouped_rotary_attention_with_norms_is_qwen3s() -> None:
    """Norms on heads, then rotation, then groups: the order of transformers' Qwen3, whose rotation
    pairs halves.
    """
    from transformers.models.qwen3.modeling_qwen3 import (
        Qwen3Attention,
        Qwen3Config,
        Qwen3RotaryEmbedding,
    )

    from dragoman.attention import RotaryEmbedding

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        attn_implementation="eager",
    )
    theirs = Qwen3Attention(config, layer_idx=0).eval()
    norms = (RMSNorm(6, config.rms_norm_eps), RMSNorm(6, config.rms_norm_eps))
    ours = SelfAttention(
        12,
        4,
        head_width=6,
        kv_heads=2,
        norms=norms,
        relative_position=RotaryEmbedding(6),
        bias=False,
    )
    # Our rotary pairs are adjacent features, theirs are halves: the same layer, with the features
    # of each query and key in another order.
    order = torch.tensor([0, 3, 1, 4, 2, 5])

    def reordered(weight: torch.Tensor) -> torch.Tensor:
        return weight.unflatten(0, (-1, 6))[:, order].flatten(0, 1)

    with torch.no_grad():
        for norm in (theirs.q_norm, theirs.k_norm):
            norm.weight.normal_()
        ours.query_key_value.weight.copy_(
            torch.cat(
                [
                    reordered(theirs.q_proj.weight),
                    reordered(theirs.k_proj.weight),
                    theirs.v_proj.weight,
                ]
            )
        )
        ours.output.weight.copy_(theirs.o_proj.weight)
        norms[0].weight.copy_(theirs.q_norm.weight[order])
        norms[1].weight.copy_(theirs.k_norm.weight[order])
    x = torch.randn(2, 5, 12)
    cosine_and_sine = Qwen3RotaryEmbedding(config)(x, torch.arange(5).unsqueeze(0))
    hidden = torch.full((5, 5), torch.finfo(x.dtype).min).triu(1).view(1, 1, 5, 5)
    expected = theirs(x, position_embeddings=cosine_and_sine, attention_mask=hidden)[0]
    torch.testing.assert_close(ours(x, causal=True), expected, atol=1e-5, rtol=1e-5)


def test_heads_of_a_size_of_their_own() -> None:
    attention = CrossAttention(8, 3, head_width=5, memory_width=6)
    assert (
        attention.query.out_features,
        attention.key_value.out_features,
        attention.output.in_features,
    ) == (15, 30, 15)
    assert attention(torch.randn(1, 2, 8), torch.randn(1, 3, 6)).shape == (1, 2, 8)


def test_norms_are_applied_to_queries_and_keys_of_cross_attention() -> None:
    torch.manual_seed(0)
    norms = (RMSNorm(4), RMSNorm(4))
    for norm in norms:
        nn.init.normal_(norm.weight)
    attention = CrossAttention(8, 2, norms=norms)
    x, memory = torch.randn(1, 3, 8), torch.randn(1, 5, 8)
    query = norms[0](attention.query(x).unflatten(-1, (2, 4)).transpose(1, 2))
    key, value = (
        part.unflatten(-1, (2, 4)).transpose(1, 2)
        for part in attention.key_value(memory).chunk(2, -1)
    )
    expected = (
        F.scaled_dot_product_attention(query, norms[1](key), value).transpose(1, 2).flatten(2)
    )
    torch.testing.assert_close(attention(x, memory), attention.output(expected))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_window_hides_positions_outside(causal: bool, has_bias: bool) -> None:
    torch.manual_seed(0)
    bias = AlibiBias(2) if has_bias else None
    near, whole = (SelfAttention(8, 2, window=window, relative_position=bias) for window in (1, 0))
    x = torch.randn(1, 6, 8)
    near.load_state_dict(whole.state_dict())
    torch.testing.assert_close(
        near(x, causal=causal), whole(x, mask=masks.local(6, radius=1), causal=causal)
    )
    with record(near) as notes:
        near(x, causal=causal)
    assert notes[""].weights[0, 0].count_nonzero(dim=-1).tolist() == (
        [1, 2, 2, 2, 2, 2] if causal else [2, 3, 3, 3, 3, 2]
    )


def test_defaults_add_no_weights_and_blocks_may_differ() -> None:
    config = ModelConfig(
        encoder=("transformer(window=1)", "transformer(kv_heads=1, qk_norm=rms)"),
        decoder=("transformer",),
        width=8,
        heads=2,
        ffn_width=8,
    )
    first, second = (
        block
        for _, block in build_model(config, src_vocab_size=9, tgt_vocab_size=9).encoder.blocks()
    )
    assert (first.self.window, second.self.window, second.self.kv_heads) == (1, 0, 1)  # type: ignore[union-attr]
    assert not any("norm" in name for name, _ in first.self.named_parameters())  # type: ignore[union-attr]
    assert isinstance(second.self.key_norm, nn.Module)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"kv_heads": 3},
            "model.kv_heads must divide model.heads; found 3 and 8; try model.kv_heads=2",
        ),
        ({"kv_heads": 16}, "found 16 and 8; try model.kv_heads=8"),
        (
            {"head_width": 5, "positions": "rotary"},
            "must be even for rotary positions; found 5, model.head_width=5",
        ),
        ({"qk_norm": "batch"}, "found 'batch'"),
        (
            {"encoder": ("lstm",), "decoder": ("lstm",), "window": 4},
            "model.window=4 acts in self-attention and needs a transformer block; found lstm",
        ),
        (
            {"encoder": ("lstm",), "decoder": ("lstm",), "positions": "alibi"},
            "model.positions=alibi acts in self-attention",
        ),
    ],
)
def test_mismatched_sizes_raise(values: dict[str, object], message: str) -> None:
    problems = Config().replace(model=values).problems()
    assert any(message in problem for problem in problems), problems


def test_heads_need_not_divide_when_their_size_is_set() -> None:
    assert not Config().replace(model={"width": 100, "heads": 8, "head_width": 16}).problems()


def test_window_is_rejected_for_a_block_without_one() -> None:
    config = ModelConfig(
        encoder=("gru(window=3)",), decoder=("transformer",), width=8, heads=2, ffn_width=8
    )
    with pytest.raises(ConfigError, match=r"found 'window' in 'gru\(window=3\)'"):
        build_model(config, src_vocab_size=9, tgt_vocab_size=9)


def test_groups_must_be_equal() -> None:
    with pytest.raises(DragomanError, match="found 4 heads and kv_heads=3"):
        SelfAttention(8, 4, kv_heads=3)


@torch.no_grad()
def test_cross_attention_alone_ignores_padding_of_the_source_in_steps_too() -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        encoder=("transformer",), decoder=("cross_attention",), width=8, heads=2, ffn_width=8
    )
    model = build_model(config, src_vocab_size=9, tgt_vocab_size=9).eval()
    values, tgt = torch.randn(1, 5, 8), torch.tensor([[4, 5, 6]])
    short = Memory(values[:, :3])
    padded = Memory(values, torch.tensor([[True, True, True, False, False]]))
    expected = model.project(model.decode(tgt, short))
    torch.testing.assert_close(model.project(model.decode(tgt, padded)), expected)
    torch.testing.assert_close(model.extend(tgt, model.start(padded)).logits, expected)
