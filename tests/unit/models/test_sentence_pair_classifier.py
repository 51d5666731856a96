"""Sentence-pair models: padding, batch independence, order of the sentences, gradients."""

import pytest
import torch

from dragoman.attention import record
from dragoman.config import ModelConfig
from dragoman.config.sentence_pair_classification import PairsConfig
from dragoman.models.sentence_pair_classifier import (
    POOLINGS,
    SECOND_SENTENCE,
    ComparedAlignment,
    FeedForwardReLU,
    MLPHead,
    build_pair_model,
)

KINDS = {
    "co_attention": {"interaction": "co_attention", "composition": ("bilstm",)},
    "decomposable": {"interaction": "decomposable", "pooling": "sum"},
    "none": {"interaction": "none", "pooling": "max"},
    "sequence": {"interaction": "sequence", "pooling": "mean"},
}


def build(kind: str, *, encoder: str = "bilstm", **settings):
    torch.manual_seed(0)
    model = ModelConfig(
        encoder=(encoder,), width=8, heads=2, ffn_width=16, dropout=0.0, positions="none"
    )
    pairs = PairsConfig(**KINDS[kind], classifier_width=6, **settings)
    return build_pair_model(model, pairs, vocab_size=20, labels=3, score_bins=5)


def inputs(kind: str):
    sides = 1 if kind == "sequence" else 2
    tokens = torch.randint(4, 20, (3, sides, 6))
    flags = torch.randint(0, 4, (3, sides, 6))
    lengths = torch.tensor([[6, 4], [2, 6], [1, 3]])[:, :sides]
    return tokens, flags, lengths


@pytest.mark.parametrize("encoder", ["bilstm", "transformer", "ffn"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_other_rows_change_nothing(kind, encoder):
    model = build(kind, encoder=encoder).eval()
    tokens, flags, lengths = inputs(kind)
    with torch.no_grad():
        together = model(tokens, flags, lengths)
        padding = torch.arange(6) >= lengths.unsqueeze(2)
        changed = model(tokens.masked_fill(padding, 7), flags.masked_fill(padding, 1), lengths)
        for part, other in zip(together, changed, strict=True):
            torch.testing.assert_close(part, other)
        for row in range(3):
            width = int(lengths[row].max())
            alone = model(
                tokens[row : row + 1, :, :width],
                flags[row : row + 1, :, :width],
                lengths[row : row + 1],
            )
            for part, other in zip(together, alone, strict=True):
                torch.testing.assert_close(part[row], other[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["co_attention", "decomposable", "none"])
def test_the_score_does_not_depend_on_the_order_but_the_label_does(kind):
    model = build(kind).eval()
    tokens, flags, lengths = inputs(kind)
    with torch.no_grad():
        plain = model(tokens, flags, lengths)
        swapped = model(tokens.flip(1), flags.flip(1), lengths.flip(1))
    torch.testing.assert_close(plain.score, swapped.score, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(plain.labels, swapped.labels)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_has_a_gradient(kind):
    model = build(kind).train()
    tokens, flags, lengths = inputs(kind)
    output = model(tokens, flags, lengths)
    (output.labels.square().sum() + output.score.square().sum()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_esim_compares_words_with_their_aligned_vectors():
    model = build("co_attention").eval()
    interaction = model.interaction
    assert isinstance(interaction, ComparedAlignment)
    states, mask = torch.randn(2, 3, 8), torch.ones(2, 3, dtype=torch.bool)
    a, b = states
    scores = a @ b.T
    found = torch.stack([scores.softmax(1) @ b, scores.softmax(0).T @ a])
    linear = interaction.compare.linears[0]
    joined = torch.cat([states, found, states - found, states * found], dim=-1)
    seen = []
    interaction.composition.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    interaction(states, mask)
    torch.testing.assert_close(seen[0], torch.relu(joined @ linear.weight.T + linear.bias))


def test_co_attention_is_recorded():
    model = build("co_attention").eval()
    with record(model) as records, torch.no_grad():
        model(*inputs("co_attention"))
    assert list(records) == ["interaction.cross.a", "interaction.cross.b"]
    weights = records["interaction.cross.a"].weights
    assert weights.shape == (3, 1, 6, 6)
    assert not weights[0, :, :, 4:].any()


def test_flags_and_sentence_matter_and_word_dropout_only_in_training():
    model = build("sequence", word_dropout=0.9)
    tokens, flags, lengths = inputs("sequence")
    with torch.no_grad():
        model.eval()
        plain = model(tokens, flags, lengths).labels
        torch.testing.assert_close(model(tokens, flags, lengths).labels, plain)
        assert not torch.allclose(model(tokens, flags + SECOND_SENTENCE, lengths).labels, plain)
        model.train()
        assert not torch.allclose(model(tokens, flags, lengths).labels, plain)


@pytest.mark.parametrize("name", POOLINGS)
def test_pooling_sees_real_positions_only(name):
    torch.manual_seed(0)
    states, mask = torch.randn(2, 4, 3), torch.arange(4) < torch.tensor([[4], [2]])
    rows = [states[0], states[1, :2]]
    reductions = {
        "mean": lambda x: x.mean(0),
        "max": lambda x: x.amax(0),
        "sum": lambda x: x.sum(0),
    }
    expected = torch.stack(
        [torch.cat([reductions[part](row) for part in name.split("_")]) for row in rows]
    )
    torch.testing.assert_close(POOLINGS[name](states, mask), expected)


def test_a_word_without_flags_starts_as_its_embedding():
    weight = build("sequence").flag_embedding.weight
    assert not weight[0].any()
    assert weight[1:].any(dim=1).all()


@torch.no_grad()
def test_dropout_comes_before_every_linear_layer():
    """With a probability of 1 each reads zeros."""
    model = build("decomposable").train()
    read = []
    for module in model.modules():
        if isinstance(module, FeedForwardReLU | MLPHead):
            module.dropout = 1.0
            for linear in module.modules():
                if isinstance(linear, torch.nn.Linear):
                    torch.nn.init.ones_(linear.bias)
                    linear.register_forward_pre_hook(lambda _, given: read.append(given[0].any()))
    model(*inputs("decomposable"))
    assert len(read) == 2 * 2 + 2 + 2 * 2  # F of both sentences, G of all, two classifiers
    assert not any(read)


@pytest.mark.parametrize(("is_scaled", "scale"), [(True, 8**0.5), (False, 1.0)])
def test_flags_are_scaled_like_words(is_scaled, scale):
    config = ModelConfig(encoder=("ffn",), width=8, scale_embeddings=is_scaled)
    pairs = PairsConfig(interaction="none")
    model = build_pair_model(config, pairs, vocab_size=20, labels=3, score_bins=0)
    assert model.embedding.scale == model.flag_embedding.scale == pytest.approx(scale)
