"""Masked and permuted language models: what is predicted is not seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dragoman.config import ModelConfig
from dragoman.data.masked_and_permuted_inputs import choose_positions, factorization_ranks
from dragoman.models.bert_and_xlnet_language_model import (
    MaskedLM,
    build_masked_lm,
    gather_positions,
)

VOCABULARY, LENGTH = 20, 9


def model_of(**changes: object) -> MaskedLM:
    torch.manual_seed(0)
    settings = {
        "decoder": ("transformer*2",),
        "width": 16,
        "heads": 2,
        "ffn_width": 32,
        "dropout": 0.0,
    }
    config = ModelConfig(**(settings | changes))  # type: ignore[arg-type]
    return build_masked_lm(config, vocab_size=VOCABULARY, sentence_order=True).eval()


def embedded_input(model: MaskedLM) -> list[Tensor]:
    """Return a list that gets the stack's input, which gradients are taken with respect to."""
    found: list[Tensor] = []

    def keep(_module: object, _args: object, output: Tensor) -> Tensor:
        found.append(output.detach().requires_grad_())
        return found[-1]

    model.stack_input.register_forward_hook(keep)
    return found


def test_the_mask_is_the_last_token() -> None:
    model = model_of()
    assert model.mask_token == VOCABULARY
    assert model.output_weight.size(0) == VOCABULARY + 1


def test_both_directions_are_seen() -> None:
    model = model_of()
    inputs = embedded_input(model)
    hidden = model.decode(torch.randint(4, VOCABULARY, (1, LENGTH)))
    (grad,) = torch.autograd.grad((hidden[0, 4] @ torch.randn(16)).sum(), inputs[0])
    assert (grad[0].abs().sum(1) > 0).all()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("residual", ["pre_norm", "post_norm"])
def test_a_prediction_depends_on_lower_ranks_and_on_nothing_else(seed: int, residual: str) -> None:
    """Over random orders the gradient is exactly zero for what must not be seen."""
    model = model_of(residual=residual)
    positions = choose_positions(np.arange(LENGTH), 3, 4, seed)
    ranks = torch.from_numpy(factorization_ranks(LENGTH, positions))
    tokens = torch.randint(4, VOCABULARY, (3, LENGTH))
    inputs = embedded_input(model)
    hidden = model.permuted(tokens, ranks, torch.from_numpy(positions))
    assert hidden.shape == (3, 4, 16)
    for row in range(3):
        for number, position in enumerate(positions[row]):
            output = hidden[row, number] @ torch.randn(16)
            (grad,) = torch.autograd.grad(output, inputs[0], retain_graph=True)
            depends = grad.abs().sum(2) != 0  # (3, L + P)
            allowed = torch.zeros_like(depends)
            allowed[row, :LENGTH] = ranks[row] < ranks[row, position]
            allowed[row, LENGTH + number] = True  # its own query: the mask and the position
            assert torch.equal(depends, allowed)
            assert not depends[row, position]


def test_a_permuted_prediction_equals_one_of_the_masked_sequence() -> None:
    """The first in the order sees what is given: the same as the stack on the given tokens
    alone.
    """
    model = model_of(positions="learned", max_positions=16)
    tokens = torch.randint(4, VOCABULARY, (1, LENGTH))
    positions = torch.tensor([[5, 2]])
    ranks = torch.from_numpy(factorization_ranks(LENGTH, positions.numpy()))
    found = model.permuted(tokens, ranks, positions)[0, 0]
    given = torch.tensor([0, 1, 3, 4, 6, 7, 8])
    unseen = torch.tensor([model.mask_token, model.mask_token])  # the second fills the row
    sequence = torch.cat([tokens[0, given], unseen])[None]
    position_ids_ = torch.cat([given, torch.tensor([0, 5])])[None]
    mask = torch.ones(1, 9, 9, dtype=torch.bool)
    mask[:, :, 7:] = False  # no position attends to the query
    expected = model.decode(sequence, attention_mask=mask, position_ids=position_ids_)[0, -1]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_positions_are_gathered() -> None:
    hidden = torch.arange(24.0).view(2, 3, 4)
    found = gather_positions(hidden, torch.tensor([[2, 0], [1, 1]]))
    assert torch.equal(found[0], hidden[0, [2, 0]])
    assert torch.equal(found[1], hidden[1, [1, 1]])


def test_the_order_head_reads_the_first_position() -> None:
    model = model_of()
    assert model.order is not None
    hidden = torch.randn(3, LENGTH, 16, requires_grad=True)
    logits = model.order(hidden)
    assert logits.shape == (3, 2)
    logits.sum().backward()
    assert hidden.grad is not None
    assert not hidden.grad[:, 1:].any()


def test_training_reads_no_tensor_on_the_host() -> None:
    """On the meta device a read raises, as it would while a CUDA graph is captured."""
    model = model_of().train().to("meta")
    assert model.order is not None
    tokens, positions, ranks = (
        torch.zeros(3, size, dtype=torch.long, device="meta") for size in (LENGTH, 2, LENGTH)
    )
    permuted = model.permuted(tokens, ranks, positions)
    hidden = model.decode(tokens)
    masked = model.project(gather_positions(hidden, positions))
    (masked.sum() + permuted.sum() + model.order(hidden).sum()).backward()
    assert all(weight.grad is not None for weight in model.parameters())
