"""Logit lens: the last layer is the model's own, the others its output matrix read early."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from forced_kit import VOCABULARY, tiny_language_model, tiny_model, tiny_pair

from dragoman.attention.recorder import record
from dragoman.explain.explanation_builder import read_logit_lens, token_ranks
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.language_model import NeuralLanguageModel

MODELS = {
    "post-norm": (lambda: tiny_model(decoder="transformer*3"), 3),
    "pre-norm": (lambda: tiny_model(decoder="transformer*3", residual="pre_norm"), 3),
    "factorized": (lambda: tiny_model(embedding_width=8, residual="pre_norm"), 2),
    "prefix LM": (lambda: tiny_model("", architecture="prefix_lm"), 2),
    "RNN": (lambda: tiny_model("bigru", "gru(attention=additive) + lstm"), 2),
    "ConvS2S": (lambda: tiny_model("conv", "conv(layers=3)"), 3),
    "Reformer": (lambda: tiny_model("reformer(attention=full)", "reformer(layers=2, window=4)"), 2),
    "language model": (lambda: tiny_language_model("transformer*2", residual="pre_norm"), 2),
}


def own_logits(model: EncoderDecoder | NeuralLanguageModel, forced: object) -> torch.Tensor:
    """Run the model as it is run while it is recorded."""
    with torch.no_grad(), record(model):
        if isinstance(model, NeuralLanguageModel):
            return model(forced.tgt_in)[0]  # type: ignore[attr-defined]
        return model(forced.src, forced.tgt_in)[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", MODELS)
def test_the_last_layer_is_the_model(name: str) -> None:
    build, layers = MODELS[name]
    model = build()
    forced = tiny_pair(model)
    lens, logits = read_logit_lens(forced), own_logits(model, forced)
    assert torch.equal(lens.final_logits, logits)
    assert lens.layers == [f"d{number}" for number in range(layers)]
    assert lens.skipped == 0
    order = (-logits).argsort(dim=-1, stable=True)
    for position, token in enumerate(forced.tgt_out):
        assert lens.ranks[-1, position] == 1 + order[position].tolist().index(token)
    probabilities = logits.softmax(-1)
    assert np.array_equal(lens.top_ids[-1], order[:, :5].numpy())
    np.testing.assert_allclose(
        lens.top_probs[-1], probabilities.gather(1, order[:, :5]).numpy(), atol=1e-6
    )


@pytest.mark.parametrize("residual", ["post_norm", "pre_norm"])
def test_an_early_layer_is_a_model_that_ends_there(residual: str) -> None:
    model = tiny_model(decoder="transformer*3", residual=residual)
    forced = tiny_pair(model)
    lens = read_logit_lens(forced)
    model.decoder.depth = 2  # the same weights without the third layer, its final norm kept
    logits = own_logits(model, forced)
    assert np.array_equal(lens.ranks[1], token_ranks(logits, forced.tgt_out).numpy())
    np.testing.assert_allclose(
        lens.top_probs[1], logits.softmax(-1).topk(5).values.numpy(), atol=1e-6
    )


def test_layers_of_another_width_are_counted_and_left_out() -> None:
    model = tiny_model("conv", "conv(width=8) + conv(width=24) + conv(width=24)")
    forced = tiny_pair(model)
    lens = read_logit_lens(forced)
    assert (lens.layers, lens.skipped) == (["d1", "d2"], 1)
    assert torch.equal(lens.final_logits, own_logits(model, forced))


def test_equal_logits_share_the_better_rank() -> None:
    logits = torch.tensor([[3.0, 1.0, 3.0, 2.0]])
    assert [int(token_ranks(logits, torch.tensor([token]))) for token in range(4)] == [1, 4, 1, 3]


def test_a_small_vocabulary_has_fewer_than_five_tokens() -> None:
    lens = read_logit_lens(tiny_pair(tiny_model()), top=VOCABULARY + 5)
    assert lens.top_ids.shape == (2, 6, VOCABULARY)
    np.testing.assert_allclose(lens.top_probs.sum(-1), 1.0, atol=1e-5)
