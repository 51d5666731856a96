"""Windowed self-attention by blocks: equals a masked attention, with memory linear in the
length.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dragoman.attention import SelfAttention, masks, record
from dragoman.attention.relative_position_encodings import AlibiBias, RotaryEmbedding
from dragoman.config import ModelConfig
from dragoman.models.factory import build_model
from dragoman.ops import attend
from dragoman.ops.windowed_attention import MIN_BLOCK, attend_windowed, is_faster_windowed


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        self.size = max(
            [self.size, *(leaf.numel() for leaf in tree_leaves(found) if isinstance(leaf, Tensor))]
        )
        return found


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "radius"), [(200, 5), (97, 32), (150, 40), (33, 1), (7, 50)])
def test_blocks_equal_a_mask(length: int, radius: int, causal: bool, padded: bool) -> None:
    torch.manual_seed(0)
    inputs = [
        torch.randn(2, 3, length, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)
    ]
    padding = (
        masks.from_lengths(torch.tensor([length, max(1, length - 30)])).unsqueeze(1)
        if padded
        else None
    )
    by_mask = attend(
        *inputs, mask=masks.combine(padding, masks.local(length, radius=radius)), causal=causal
    )
    by_blocks = attend_windowed(*inputs, radius=radius, mask=padding, causal=causal)
    torch.testing.assert_close(by_blocks, by_mask)
    for ours, theirs in zip(
        *(torch.autograd.grad(out.square().sum(), inputs) for out in (by_blocks, by_mask)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_layer_uses_blocks_with_the_result_of_a_recorded_run(
    causal: bool, rotary: bool, monkeypatch
) -> None:
    torch.manual_seed(0)
    attention = SelfAttention(
        8, 4, kv_heads=2, window=3, relative_position=RotaryEmbedding(2) if rotary else None
    )
    x, mask = torch.randn(2, 200, 8), masks.from_lengths(torch.tensor([200, 181])).unsqueeze(1)
    calls: list[int] = []

    def counted(*args: Tensor, **kwargs: object) -> Tensor:
        calls.append(1)
        return attend_windowed(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("dragoman.ops.windowed_attention.attend_windowed", counted)
    found = attention(x, mask=mask, causal=causal)
    assert len(calls) == 1
    with record(attention):
        torch.testing.assert_close(attention(x, mask=mask, causal=causal), found)
    attention(x[:, :190], causal=causal)  # too short to pay
    attention(x, mask=mask.expand(2, 200, 200), causal=causal)  # a mask for each pair
    SelfAttention(8, 4, window=3, relative_position=AlibiBias(4))(
        x, causal=causal
    )  # a bias for each pair
    SelfAttention(8, 4, window=3, talking_heads=True)(x, causal=causal)
    assert len(calls) == 1


def test_is_faster_windowed() -> None:
    assert not is_faster_windowed(3 * MIN_BLOCK, 1)
    assert is_faster_windowed(3 * MIN_BLOCK + 1, 1)
    assert not is_faster_windowed(300, 100)
    assert is_faster_windowed(301, 100)


def test_memory_grows_linearly_with_the_length() -> None:
    """The largest tensor of forward and backward pass grows linearly; with a mask,
    quadratically.
    """

    def largest(length: int, **more: object) -> int:
        attention, x = SelfAttention(8, 2, window=16, **more), torch.randn(1, length, 8)  # type: ignore[arg-type]
        with Largest() as noted:
            attention(x).sum().backward()
        return noted.size

    assert largest(2048) <= 2.2 * largest(1024)
    assert largest(2048) < 2048 * 3 * MIN_BLOCK * 2
    assert largest(2048, relative_position=AlibiBias(2)) >= 2048 * 2048


def test_decoding_with_a_window_equals_forward() -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        encoder=("transformer",),
        decoder=("transformer*2",),
        width=8,
        heads=2,
        ffn_width=8,
        window=4,
        dropout=0.0,
    )
    model = build_model(config, src_vocab_size=9, tgt_vocab_size=9).double().eval()
    src, tgt = torch.randint(4, 9, (2, 210)), torch.randint(4, 9, (2, 210))
    with torch.no_grad():
        whole = model(src, tgt)
        state = model.start(model.encode(src))
        first, state = model.extend(tgt[:, :195], state)
        second, state = model.extend(tgt[:, 195:209], state)
        third, _ = model.step(tgt[:, 209], state)
    torch.testing.assert_close(torch.cat([first, second, third.unsqueeze(1)], dim=1), whole)


def test_decoding_reads_only_the_window() -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        encoder=("transformer",),
        decoder=("transformer",),
        width=8,
        heads=2,
        ffn_width=8,
        window=4,
        dropout=0.0,
    )
    model = build_model(config, src_vocab_size=9, tgt_vocab_size=9).eval()
    with torch.no_grad():
        state = model.extend(
            torch.randint(4, 9, (1, 40)), model.start(model.encode(torch.randint(4, 9, (1, 3))))
        ).state
        with record(model, ["decoder.0.self"]) as notes:
            model.step(torch.tensor([5]), state)
    weights = notes["decoder.0.self"].weights
    assert weights.shape == (1, 2, 1, 5)
    assert math.isclose(weights.sum().item(), 2.0, rel_tol=1e-5)
