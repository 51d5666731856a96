"""Padding and causal masks, and absolute position encodings."""

from __future__ import annotations

import pytest
import torch

from dragoman.attention import (
    LearnedPositions,
    SinusoidalHalvesPositions,
    SinusoidalPositions,
    masks,
)
from dragoman.attention.absolute_position_encodings import MAX_TABLE_ELEMENTS, NoPositions
from dragoman.errors import DragomanError


def test_padding_masks_come_from_lengths() -> None:
    """Never from values: a mask made of embeddings that positions were added to hides nothing
    (Kyubyong/transformer#33).
    """
    assert masks.from_lengths(torch.tensor([2, 0, 3])).tolist() == [
        [True, True, False],
        [False] * 3,
        [True] * 3,
    ]
    assert masks.from_lengths(torch.tensor([1]), 4).tolist() == [[True, False, False, False]]


def test_causal_masks_put_the_queries_last() -> None:
    assert masks.causal(2).tolist() == [[True, False], [True, True]]
    assert masks.causal(2, 4).tolist() == [[True, True, True, False], [True] * 4]


def test_a_local_window_reaches_as_far_as_its_radius() -> None:
    assert masks.local(4, radius=1).int().tolist() == [
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [0, 1, 1, 1],
        [0, 0, 1, 1],
    ]
    assert masks.local(1, 4, radius=1).int().tolist() == [[0, 0, 1, 1]]
    assert masks.local(3, radius=0).int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


def test_combining_masks_is_a_logical_and() -> None:
    mask = torch.tensor([True, False])
    assert masks.combine(None, None) is None
    assert masks.combine(mask, None) is mask
    assert masks.combine(None, mask) is mask
    assert masks.combine(mask, torch.tensor([True, True])).tolist() == [True, False]  # type: ignore[union-attr]


def test_sinusoids_are_the_papers() -> None:
    golden = torch.tensor(
        [0.841471, 0.540302, 0.099833, 0.995004, 0.010000, 0.999950, 0.001000, 1.000000]
    )
    torch.testing.assert_close(
        SinusoidalPositions(width=8).vectors(1, 1)[0], golden, atol=5e-7, rtol=0
    )


def test_halves_are_the_same_numbers_in_marians_order() -> None:
    pairs, halves = (
        SinusoidalPositions(width=8).vectors(0, 50),
        SinusoidalHalvesPositions(width=8).vectors(0, 50),
    )
    torch.testing.assert_close(halves, torch.cat([pairs[:, 0::2], pairs[:, 1::2]], dim=1))


def test_positions_past_the_table_are_computed() -> None:
    short, long = (
        SinusoidalPositions(width=6, max_positions=8),
        SinusoidalPositions(width=6, max_positions=40),
    )
    torch.testing.assert_close(short.vectors(5, 30), long.vectors(5, 30))
    torch.testing.assert_close(short.vectors(5, 4), long.vectors(5, 4))  # one past the last row
    torch.testing.assert_close(short.vectors(1_000_000, 1), long.vectors(1_000_000, 1))


def test_an_absurd_width_makes_no_huge_table() -> None:
    """It took a hostile run directory seconds to be rejected."""
    positions = SinusoidalPositions(width=1 << 16, max_positions=1024)
    assert positions.table.numel() <= MAX_TABLE_ELEMENTS
    past = positions.vectors(len(positions.table) - 1, 2)
    assert torch.equal(past[0], positions.table[-1])
    torch.testing.assert_close(past, positions.compute(len(positions.table) - 1, 2).float())
    assert len(SinusoidalPositions(width=8192, max_positions=1024).table) == 1024


def test_rows_of_the_table_are_read_up_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing them copies from the CPU, which a CUDA graph cannot capture."""
    positions = SinusoidalPositions(width=6, max_positions=8)
    monkeypatch.setattr(positions, "compute", None)
    assert torch.equal(positions.vectors(5, 3), positions.table[5:])


def test_positions_past_the_learned_table_raise() -> None:
    """Too long is an error with the numbers, not an index error from the depths
    (huggingface/transformers#11958).
    """
    learned = LearnedPositions(width=4, max_positions=8)
    assert learned.vectors(6, 2).shape == (2, 4)
    with pytest.raises(DragomanError, match="fit the 8 learned positions; found 9 tokens"):
        learned.vectors(6, 3)
    with pytest.raises(DragomanError, match="found 12 tokens"):
        learned(torch.zeros(1, 2, 4), first=10, position_ids=torch.tensor([[0, 1]]))


@pytest.mark.parametrize("kind", [SinusoidalPositions, SinusoidalHalvesPositions, LearnedPositions])
def test_given_positions_are_looked_up(kind: type[SinusoidalPositions]) -> None:
    torch.manual_seed(0)
    positions = kind(width=4, max_positions=16)
    x = torch.randn(2, 3, 4)
    placed = positions(x, first=4, position_ids=torch.tensor([[0, 1, 2], [4, 5, 6]]))
    torch.testing.assert_close(placed[0], positions(x)[0])
    torch.testing.assert_close(placed[1], positions(x, first=4)[1])


def test_none_positions_add_nothing() -> None:
    x = torch.randn(2, 3, 4)
    assert NoPositions(width=4)(x, first=7) is x
    assert NoPositions(width=4)(x, position_ids=torch.zeros(2, 3, dtype=torch.long)) is x


def test_tables_are_real_on_the_meta_device_and_follow_the_model() -> None:
    with torch.device("meta"):
        positions = SinusoidalPositions(width=4, max_positions=4)
    assert positions.table.device.type == "cpu"
    assert positions.double().table.dtype is torch.float64
    assert positions.vectors(2, 9).dtype is torch.float64  # computed ones too
    assert not positions.state_dict()


@pytest.mark.parametrize("kind", [SinusoidalPositions, LearnedPositions])
def test_embeddings_keep_their_dtype(kind: type[SinusoidalPositions]) -> None:
    """Positions are float32; a stack in half precision must not become float32 by adding them."""
    positions = kind(width=4, max_positions=8)
    x = torch.zeros(1, 3, 4, dtype=torch.bfloat16)
    assert positions(x).dtype is torch.bfloat16
    assert positions(x, position_ids=torch.tensor([[2, 0, 1]])).dtype is torch.bfloat16


def test_learned_positions_start_as_large_as_token_embeddings() -> None:
    torch.manual_seed(0)
    weight = LearnedPositions(width=64, max_positions=512).weight
    assert weight.std().item() == pytest.approx(64**-0.5, rel=0.05)
