"""Multi-head attention against PyTorch's own, and its two paths against each other."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dragoman.attention import (
    AlibiBias,
    CrossAttention,
    RotaryEmbedding,
    ScaledDotScore,
    SelfAttention,
    record,
)
from dragoman.attention.multi_head import _warn_not_fused
from dragoman.config import ModelConfig
from dragoman.errors import DragomanError
from dragoman.exchange.transformer_export_spec import _read_stack
from dragoman.inference.cpu.packed_weight_torch_transformer import torch_unsupported_reason
from dragoman.layers.norms_and_residuals import RMSNorm
from dragoman.models.factory import build_model


def build_torch_reference(attention: SelfAttention | CrossAttention) -> nn.MultiheadAttention:
    """Return torch.nn.MultiheadAttention with the same weights."""
    theirs = nn.MultiheadAttention(attention.width, attention.heads, batch_first=True)
    if isinstance(attention, SelfAttention):
        weight, bias = attention.query_key_value.weight, attention.query_key_value.bias
    else:
        weight = torch.cat([attention.query.weight, attention.key_value.weight])
        bias = torch.cat([attention.query.bias, attention.key_value.bias])
    with torch.no_grad():
        theirs.in_proj_weight.copy_(weight)
        theirs.in_proj_bias.copy_(bias)
        theirs.out_proj.weight.copy_(attention.output.weight)
        theirs.out_proj.bias.copy_(attention.output.bias)
    return theirs


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_self_attention_equals_pytorchs(padded: bool, causal: bool) -> None:
    torch.manual_seed(0)
    ours = SelfAttention(12, 3)
    nn.init.normal_(ours.query_key_value.bias)
    x = torch.randn(2, 5, 12)
    mask = torch.tensor([[True] * 5, [True, True, True, False, False]]) if padded else None
    theirs, weights = build_torch_reference(ours)(
        x,
        x,
        x,
        key_padding_mask=None if mask is None else ~mask,
        attn_mask=torch.ones(5, 5, dtype=torch.bool).triu(1) if causal else None,
        average_attn_weights=False,
    )
    with record(ours) as notes:
        plain = ours(x, mask=None if mask is None else mask.unsqueeze(1), causal=causal)
    torch.testing.assert_close(
        ours(x, mask=None if mask is None else mask.unsqueeze(1), causal=causal), theirs
    )
    torch.testing.assert_close(plain, theirs)
    torch.testing.assert_close(notes[""].weights, weights)


def test_cross_attention_equals_pytorchs() -> None:
    torch.manual_seed(0)
    ours = CrossAttention(12, 4)
    x, memory = torch.randn(2, 3, 12), torch.randn(2, 6, 12)
    mask = torch.tensor([[True] * 6, [True, True, False, False, False, False]])
    theirs, _ = build_torch_reference(ours)(
        x, memory, memory, key_padding_mask=~mask, need_weights=False
    )
    torch.testing.assert_close(ours(x, memory, mask=mask.unsqueeze(1)), theirs)


@pytest.mark.parametrize("watched", [False, True])
def test_rows_that_share_a_sentence_read_it_as_if_each_had_its_own(watched: bool) -> None:
    torch.manual_seed(0)
    cross = CrossAttention(8, 2)
    memory, x = torch.randn(2, 5, 8), torch.randn(6, 2, 8)  # 3 rows a sentence
    mask = torch.tensor([[[True] * 5], [[True, True, False, False, False]]])
    expected = cross(x, memory.repeat_interleave(3, 0), mask=mask.repeat_interleave(3, 0))
    if watched:
        with record(cross) as notes:
            found = cross.attend_prepared(x, cross.prepare(memory), mask=mask)
        assert notes[""].weights.shape == (6, 2, 2, 5)  # by row, not by sentence
    else:
        found = cross.attend_prepared(x, cross.prepare(memory), mask=mask)
    torch.testing.assert_close(found, expected)


def test_memory_may_have_another_width() -> None:
    assert CrossAttention(8, 2, memory_width=6)(
        torch.randn(1, 2, 8), torch.randn(1, 3, 6)
    ).shape == (1, 2, 8)


def test_heads_that_do_not_divide_are_rejected() -> None:
    with pytest.raises(DragomanError, match="found 3 heads and width 8; use 2 or 4 heads"):
        SelfAttention(8, 3)
    with pytest.raises(DragomanError, match="found 7 heads and width 8; use 4 or 8 heads"):
        SelfAttention(8, 7)
    with pytest.raises(DragomanError, match="found 9 heads and width 8; use 8 heads"):
        SelfAttention(8, 9)
    with pytest.raises(DragomanError, match="found 6 heads and kv_heads=4; use kv_heads=3 or 6"):
        CrossAttention(12, 6, kv_heads=4)
    with pytest.raises(DragomanError, match="found 2 heads and kv_heads=4; use kv_heads=2"):
        CrossAttention(12, 2, kv_heads=4)
    with pytest.raises(DragomanError, match="a width and at least one head"):
        SelfAttention(8, 0)


class SlowDot(ScaledDotScore):
    """The same numbers without a fused kernel."""

    fused = False


def test_other_scores_take_the_unfused_path_with_one_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _warn_not_fused.cache_clear()
    torch.manual_seed(0)
    with caplog.at_level(logging.WARNING):
        slow = SelfAttention(8, 2, score=SlowDot(query_width=4, key_width=4))
        SelfAttention(8, 2, score=SlowDot(query_width=4, key_width=4))
    assert [record.getMessage().split(" ")[0] for record in caplog.records] == ["SlowDot"]
    fast = SelfAttention(8, 2)
    fast.load_state_dict(slow.state_dict())
    x = torch.randn(2, 4, 8)
    torch.testing.assert_close(slow(x, causal=True), fast(x, causal=True))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((SelfAttention, each) for each in ({}, {"kv_heads": 1}, {"window": 2})),
        *((CrossAttention, each) for each in ({}, {"kv_heads": 1}, {"talking_heads": True})),
    ],
)
def test_dropout_acts_in_training_only(kind: type[nn.Module], options: dict[str, int]) -> None:
    torch.manual_seed(0)
    attention = kind(8, 2, dropout=0.5, **options)
    x = torch.randn(1, 6, 8)
    memory = [x] if kind is CrossAttention else []

    def differ() -> Tensor:
        return (attention(x, *memory) - attention(x, *memory)).abs().max()

    assert differ() > 0
    attention.eval()
    assert differ() == 0


@pytest.mark.parametrize("value_width", [2, 7])
@pytest.mark.parametrize("kv_heads", [0, 2])
@torch.no_grad()
def test_values_may_have_a_width_of_their_own(value_width: int, kv_heads: int) -> None:
    """Section 3.2.2 of Vaswani et al. (2017) with d_v apart from d_k, head by head; cached
    and not.
    """
    torch.manual_seed(0)
    options = {"head_width": 5, "value_width": value_width, "kv_heads": kv_heads}
    own = SelfAttention(12, 4, **options).double()
    cross = CrossAttention(12, 4, memory_width=10, **options).double()
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    memory = torch.randn(2, 9, 10, dtype=torch.float64)
    groups = kv_heads or 4

    def by_hand(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        heads = []
        for head in range(4):
            group = head // (4 // groups)
            q = query[..., 5 * head : 5 * head + 5]
            k = key[..., 5 * group : 5 * group + 5]
            v = value[..., value_width * group : value_width * (group + 1)]
            scores = q @ k.mT / 5**0.5
            if causal:
                scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
            heads.append(scores.softmax(-1) @ v)
        return torch.cat(heads, -1)

    sizes = [20, 5 * groups, value_width * groups]
    for causal in (False, True):
        expected = own.output(by_hand(*own.query_key_value(x).split(sizes, -1), causal))
        torch.testing.assert_close(own(x, causal=causal), expected)
    expected = cross.output(
        by_hand(cross.query(x), *cross.key_value(memory).split(sizes[1:], -1), False)
    )
    torch.testing.assert_close(cross(x, memory), expected)
    prepared = cross.prepare(memory)
    assert prepared.shape == (2, 2, groups, 9, max(5, value_width))
    torch.testing.assert_close(cross.attend_prepared(x, prepared), expected)


def test_other_engines_do_not_take_values_of_another_width() -> None:
    config = ModelConfig(
        encoder=("transformer",),
        decoder=("transformer",),
        width=16,
        heads=2,
        value_width=4,
        ffn_width=16,
    )
    model = build_model(config, src_vocab_size=9, tgt_vocab_size=9)
    assert "another kind of attention heads" in torch_unsupported_reason(model)
    problems: list[str] = []
    positions = model.src_input.positions
    assert _read_stack(model.encoder, positions, "encoder", "ONNX", problems) is None
    assert "values as wide as its keys; found model.value_width=4" in problems[0]


@torch.no_grad()
def test_recorded_weights_have_the_dropout_of_training() -> None:
    torch.manual_seed(0)
    attention, x = SelfAttention(8, 2, dropout=0.5), torch.randn(2, 6, 8)
    with record(attention) as notes:
        attention(x)
        attention.eval()
        attention(x)
    dropped, whole = (call.weights for call in notes.calls(""))
    assert (whole > 0).all()
    torch.testing.assert_close(dropped, 2 * whole * (dropped != 0))
    assert 0.3 < (dropped == 0).float().mean() < 0.7


SEGMENT_OPTIONS: dict[str, dict[str, object]] = {
    "rotary": {"relative_position": RotaryEmbedding(4)},
    "alibi": {"relative_position": AlibiBias(2)},
    "norms": {"norms": (RMSNorm(4), RMSNorm(4))},
    "grouped": {"kv_heads": 1, "value_width": 3, "bias": False},
    "window": {"window": 2},
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", SEGMENT_OPTIONS)
@torch.no_grad()
def test_a_segment_attends_to_earlier_ones_as_in_one_sequence(name: str, padded: bool) -> None:
    torch.manual_seed(0)
    attention = SelfAttention(8, 2, **SEGMENT_OPTIONS[name])  # type: ignore[arg-type]
    for weight in attention.parameters():
        nn.init.normal_(weight)
    x = torch.randn(2, 7, 8)
    mask = torch.ones(2, 1, 7, dtype=torch.bool)
    mask[1, :, :2] = not padded  # a memory that is not filled yet
    whole = attention(x, mask=mask, causal=True)
    found = attention(x[:, 4:], previous=x[:, :4], mask=mask, causal=True)
    torch.testing.assert_close(found, whole[:, 4:])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norms": True},
        {"relative_position": RotaryEmbedding(4)},
        {"norms": True, "relative_position": RotaryEmbedding(4), "kv_heads": 1},
        {"relative_position": AlibiBias(2), "window": 2},
        {"value_width": 3, "window": 2},
    ],
)
@torch.no_grad()
def test_a_segment_after_its_memory_equals_the_whole_sequence(options: dict[str, Any]) -> None:
    """With biases and norms that are not those of the start."""
    torch.manual_seed(0)
    norms = (RMSNorm(4), RMSNorm(4)) if options.get("norms") else None
    attention = SelfAttention(8, 2, **options | {"norms": norms}).double()
    for name, parameter in attention.named_parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=float("norm" in name))
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    found = attention(x[:, 4:], previous=x[:, :4], causal=True)
    torch.testing.assert_close(found, attention(x, causal=True)[:, 4:])
