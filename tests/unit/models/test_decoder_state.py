"""DecoderState: selecting rows, reordering and growing caches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dragoman.models.decoder_state import MIN_CACHE_GROWTH, DecoderState
from dragoman.models.forward_context import ForwardContext, Memory


def cached(rows: int = 4, sentences: int = 2, length: int = 3, width: int = 2) -> DecoderState:
    """Return a state whose cached numbers encode row and position."""
    state = DecoderState(
        recurrent={"last": torch.arange(rows).float().unsqueeze(1)},
        cache={"key": torch.empty(rows, 1, 0, width)},
        memory={
            "key": torch.arange(sentences).float().view(sentences, 1, 1).expand(sentences, 5, width)
        },
    )
    for slot in range(length):
        state = state.append("key", filled(rows, slot, width))
    return state


def filled(rows: int, slot: int, width: int = 2) -> torch.Tensor:
    return (torch.arange(rows).float() * 100 + slot).view(rows, 1, 1, 1).expand(rows, 1, 1, width)


def test_a_cache_contains_the_appended_positions() -> None:
    state = cached(length=30)
    assert state.length == 30
    assert state.filled("key").shape == (4, 1, 30, 2)
    assert state.filled("key")[2, 0, :, 0].tolist() == [200.0 + slot for slot in range(30)]
    assert (
        state.filled("key").size(-2)
        <= state.cache["key"].size(-2)
        <= 30 + 30 // 4 + MIN_CACHE_GROWTH
    )


def test_caches_grow_in_place_while_capacity_lasts() -> None:
    state = cached(length=1)
    pointers = []
    for slot in range(1, 100):
        state = state.append("key", filled(4, slot))
        pointers.append(state.cache["key"].data_ptr())
    assert len(set(pointers)) < 20  # a few growths, not one a step
    assert state.filled("key")[1, 0, :, 1].tolist() == [100.0 + slot for slot in range(100)]


def test_several_positions_at_once() -> None:
    new = torch.randn(4, 1, 9, 2)
    state = cached(length=2).append("key", new)
    assert state.length == 11
    torch.testing.assert_close(state.filled("key")[:, :, 2:], new)


def test_rows_and_sentences_are_counted() -> None:
    state = cached(rows=6, sentences=3)
    assert (state.rows, state.sentences, state.device.type) == (6, 3, "cpu")
    nested = DecoderState(children={"decoder": DecoderState(children={"0": state})})
    assert (nested.rows, nested.sentences, nested.device.type) == (6, 3, "cpu")
    assert (DecoderState().rows, DecoderState().sentences) == (0, 0)
    assert cached(rows=3, sentences=3).select(torch.tensor([0])).rows == 1


def test_select_takes_any_rows_with_their_sentences() -> None:
    state = cached().select(torch.tensor([3, 0, 0]))
    assert state.recurrent["last"].flatten().tolist() == [3, 0, 0]
    assert state.filled("key")[:, 0, 1, 0].tolist() == [301, 1, 1]
    assert state.memory["key"][:, 0, 0].tolist() == [1, 0, 0]


def test_reorder_leaves_the_memory_where_it_is() -> None:
    before = cached()
    state = before.reorder(torch.tensor([1, 1, 3, 2]))
    assert state.recurrent["last"].flatten().tolist() == [1, 1, 3, 2]
    assert state.memory["key"] is before.memory["key"]


def test_keep_drops_sentences_with_all_their_rows() -> None:
    state = cached().keep(torch.tensor([1]))
    assert state.recurrent["last"].flatten().tolist() == [2, 3]
    assert state.memory["key"][:, 0, 0].tolist() == [1]


def test_shared_tensor_is_selected_once() -> None:
    mask = torch.ones(2, 5, dtype=torch.bool)
    state = DecoderState(
        children={
            str(n): DecoderState(recurrent={"x": torch.zeros(2, 1)}, memory={"mask": mask})
            for n in range(3)
        }
    )
    chosen = state.select(torch.tensor([1, 0]))
    assert len({id(part.memory["mask"]) for part in chosen.children.values()}) == 1


def test_a_selected_state_is_independent_of_the_old_one() -> None:
    old = cached(length=2)
    kept = old.select(torch.arange(4))
    old.append("key", filled(4, 77))
    after = kept.append("key", filled(4, 55))
    assert after.filled("key")[:, 0, 2, 0].tolist() == [55, 155, 255, 355]


def test_a_state_without_memory_works_too() -> None:
    """A language model has the same verbs."""
    state = DecoderState(recurrent={"hidden": torch.arange(3).float().unsqueeze(1)})
    assert state.sentences == 3
    assert state.reorder(torch.tensor([2, 2])).recurrent["hidden"].flatten().tolist() == [2, 2]
    assert state.keep(torch.tensor([1])).recurrent["hidden"].flatten().tolist() == [1]


def test_gradients_pass_through_a_cache() -> None:
    new = torch.randn(1, 1, 1, 2, requires_grad=True)
    state = (
        DecoderState(cache={"key": torch.empty(1, 1, 0, 2)})
        .append("key", new)
        .append("key", new * 2)
    )
    state.filled("key").sum().backward()
    assert new.grad.tolist() == [[[[3.0, 3.0]]]]  # type: ignore[union-attr]


@pytest.mark.parametrize("mask", [None, torch.tensor([[True, True], [True, False]])])
def test_memory_rows_are_selected_with_all_that_belongs_to_them(mask: torch.Tensor | None) -> None:
    memory = Memory(torch.arange(4.0).view(2, 2, 1), mask, torch.zeros(2, 2, 1))
    chosen = memory.select(torch.tensor([1, 1, 0]))
    assert chosen.rows == 3
    assert chosen.values[:, 0, 0].tolist() == [2, 2, 0]
    assert (chosen.mask is None) == (mask is None)
    assert chosen.embeddings is not None
    assert chosen.embeddings.shape == (3, 2, 1)


def test_added_losses_are_summed_by_name() -> None:
    context = ForwardContext()
    context.add_loss("coverage", torch.tensor(1.0))
    context.add_loss("coverage", torch.tensor(2.0))
    assert {name: value.item() for name, value in context.losses.items()} == {"coverage": 3.0}
    assert context.memory_mask() is None


def test_rows_are_chosen_with_the_limit_and_the_dropped_positions() -> None:
    state = replace(cached(length=0), limit=2)
    for slot in range(10):
        state = state.append("key", filled(4, slot))
    assert state.dropped > 0
    rows, sentences = torch.arange(4), torch.arange(2)
    for chosen in (state.select(rows), state.reorder(rows), state.keep(sentences)):
        assert (chosen.length, chosen.limit) == (10, 2)
        assert chosen.dropped == state.dropped
        assert torch.equal(chosen.filled("key"), state.filled("key"))


def test_the_shorter_of_limit_and_window_is_read() -> None:
    state = cached(length=10)
    assert state.recent("key", 1).size(-2) == 10
    assert state.recent("key", 1, window=4).size(-2) == 5
    assert replace(state, limit=4).recent("key", 1).size(-2) == 5
    assert replace(state, limit=4).recent("key", 1, window=2)[1, 0, :, 0].tolist() == [
        107.0,
        108.0,
        109.0,
    ]
    assert replace(state, limit=2).recent("key", 3, window=4).size(-2) == 5


def test_selected_beams_keep_the_source_of_their_sentence() -> None:
    state = DecoderState(
        recurrent={"row": torch.arange(6.0).unsqueeze(1)},  # three beams of two sentences
        memory={"key": torch.tensor([[[10.0]], [[20.0]]])},
    )
    found = state.select(torch.tensor([1, 2, 5]))
    assert found.recurrent["row"].flatten().tolist() == [1, 2, 5]
    assert found.memory["key"].flatten().tolist() == [10, 10, 20]
