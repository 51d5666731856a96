"""Classifiers: padding, batch independence, gradients and recorded attention weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dragoman.attention import record
from dragoman.attention.attention_pooling import overlap_penalty
from dragoman.config import ModelConfig
from dragoman.config.classification import ClassifyConfig
from dragoman.models.classifier import (
    ClassifierModel,
    ClassifierSizes,
    NgramFeatures,
    SequenceClassifier,
    build_classifier,
)

VOCABULARY, LABELS = 23, 3
MEMBERS: dict[str, dict[str, Any]] = {
    "attention": {},
    "structured": {"pooling": "structured", "hops": 3, "score_width": 5, "overlap_penalty": 1.0},
    "labels": {"pooling": "labels"},
    "labels with filters": {"pooling": "labels", "score_width": 6, "filter_widths": (2,)},
    "mean": {"pooling": "mean", "feature_gate": True},
    "max": {"pooling": "max", "hidden_width": 7},
    "last": {"pooling": "last"},
    "last_bidirectional": {"pooling": "last_bidirectional"},
    "filters": {"pooling": "none", "filter_widths": (2, 3), "filters": 4},
    "one-hot filters": {
        "pooling": "none",
        "filter_widths": (2, 3),
        "filters": 4,
        "filter_input": "one_hot",
        "ngrams": 2,
    },
    "n-grams": {"pooling": "none", "ngrams": 2},
    "all features": {"filter_widths": (3,), "filters": 4, "ngrams": 2},
    "attributes": {"pooling": "max", "attribute_field": "facts"},
    "auxiliary": {"auxiliary_field": "fine"},
    "documents": {"hierarchical": True},
    "documents by label": {"hierarchical": True, "pooling": "labels", "ngrams": 1},
    "documents, structured": {
        "hierarchical": True,
        "pooling": "structured",
        "hops": 2,
        "sentence_encoder": ("bilstm",),
    },
}


def build(name: str, encoder: str = "", **more: Any) -> ClassifierModel:
    torch.manual_seed(0)
    settings = MEMBERS[name] | more
    encoder = encoder or ("gru" if name == "last" else "bigru")
    classify = ClassifyConfig(**settings)
    assert not list(classify.problems())
    model = ModelConfig(
        encoder=(encoder,), width=8, heads=2, ffn_width=16, embedding_width=6, dropout=0.0
    )
    sizes = ClassifierSizes(
        vocab_size=VOCABULARY,
        labels=LABELS,
        auxiliary_labels=5 if classify.auxiliary_field else 0,
        attributes=4 if classify.attribute_field else 0,
        ngram_features=11,
    )
    classifier = build_classifier(model, classify, sizes).double()
    if classifier.bag is not None:
        torch.nn.init.normal_(classifier.bag.weight)
    return classifier


def inputs(classifier: ClassifierModel) -> tuple[Tensor, Tensor, NgramFeatures]:
    torch.manual_seed(1)
    ngrams = NgramFeatures(torch.tensor([[1, 4, 5], [2, 0, 0], [10, 3, 0]]))
    if isinstance(classifier, SequenceClassifier):
        mask = torch.arange(6) < torch.tensor([6, 3, 5]).unsqueeze(1)
    else:
        sizes = torch.tensor([[4, 2, 3], [3, 0, 0], [1, 4, 0]])  # words of each sentence
        mask = torch.arange(4) < sizes.unsqueeze(2)
    return torch.randint(4, VOCABULARY, mask.shape) * mask, mask, ngrams


@pytest.mark.parametrize("name", MEMBERS)
@torch.no_grad()
def test_padding_and_other_rows_change_nothing(name: str) -> None:
    classifier = build(name).eval()
    tokens, mask, ngrams = inputs(classifier)
    expected = classifier(tokens, mask, ngrams)
    assert expected.shape == (3, LABELS)
    rubbish = torch.randint(4, VOCABULARY, tokens.shape)
    torch.testing.assert_close(
        classifier(torch.where(mask, tokens, rubbish), mask, ngrams), expected
    )
    sides = [(0, 2)] if tokens.dim() == 2 else [(0, 2), (0, 0, 0, 2), (0, 3, 0, 1)]
    for side in sides:  # more words, more sentences, both
        wider = [torch.nn.functional.pad(each, side) for each in (tokens, mask)]
        more = NgramFeatures(torch.nn.functional.pad(ngrams.ids, (0, 2)))
        torch.testing.assert_close(classifier(*wider, more), expected)
    for row in range(3):  # alone, without padding around it
        each = NgramFeatures(ngrams.ids[row : row + 1])
        alone, own = tokens[row : row + 1], mask[row : row + 1]
        if tokens.dim() == 2:
            found = classifier(alone[:, : int(own.sum())], None, each)
        else:
            found = classifier(alone, own, each)
        torch.testing.assert_close(found[0], expected[row])


@pytest.mark.parametrize("name", MEMBERS)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    classifier = build(name)
    tokens, mask, ngrams = inputs(classifier)
    losses: dict[str, Tensor] = {}
    output = classifier.classify(tokens, mask, ngrams, losses=losses)
    parts = [each for each in output if each is not None]
    total = sum((part.square().sum() for part in parts), sum(losses.values(), torch.zeros(())))
    total.backward()  # type: ignore[no-untyped-call]
    without = [
        name
        for name, parameter in classifier.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    ]
    assert not without
    assert ("overlap" in losses) == ("overlap_penalty" in MEMBERS[name])


@pytest.mark.parametrize("name", [name for name in MEMBERS if "filters" not in name])
@torch.no_grad()
def test_recorded_weights_sum_to_one(name: str) -> None:
    classifier = build(name).eval()
    tokens, mask, ngrams = inputs(classifier)
    with record(classifier) as records:
        classifier(tokens, mask, ngrams)
    settings = MEMBERS[name]
    if settings.get("hierarchical"):
        assert list(records) == ["words", "sentences"]
        real = mask.any(dim=2).flatten()
        words = records["words"].weights.sum(dim=-1)
        torch.testing.assert_close(words[real], torch.ones_like(words[real]))
        assert not words[~real].any()
        sentences = records["sentences"].weights
        torch.testing.assert_close(sentences.sum(-1), torch.ones_like(sentences.sum(-1)))
    elif settings.get("pooling", "attention") in ("attention", "structured", "labels"):
        weights = records["pooling"].weights
        rows = {"structured": 3, "labels": LABELS}.get(settings.get("pooling", ""), 1)
        assert weights.shape == (3, 1, rows, 6)
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
        assert not weights[:, 0, 0][~mask].any()
    elif "attribute_field" in settings:
        assert records["attributes"].weights.shape == (3, 1, 4, 6)


@pytest.mark.parametrize(
    "encoder", ["bilstm", "transformer", "conv", "lstm", "transformer(window=1)"]
)
@torch.no_grad()
def test_any_encoder_block_fits(encoder: str) -> None:
    for name in ("attention", "documents"):
        classifier = build(name, encoder).eval()
        tokens, mask, _ = inputs(classifier)
        expected = classifier(tokens, mask)
        wider = [torch.nn.functional.pad(each, (0, 2)) for each in (tokens, mask)]
        torch.testing.assert_close(classifier(*wider), expected)


def test_both_branches_are_reported_and_their_sum_decides() -> None:
    classifier = build("all features").eval()
    tokens, mask, ngrams = inputs(classifier)
    output = classifier.classify(tokens, mask, ngrams)
    assert output.encoder_logits is not None
    assert output.ngram_logits is not None
    torch.testing.assert_close(output.logits, output.encoder_logits + output.ngram_logits)


def test_sentence_dropout_hides_all_words_of_a_sentence() -> None:
    torch.manual_seed(0)
    settings = ClassifyConfig(hierarchical=True, sentence_dropout=0.5)
    model = ModelConfig(encoder=("bigru",), width=8, positions="none", dropout=0.0)
    sizes = ClassifierSizes(vocab_size=VOCABULARY, labels=LABELS)
    classifier = build_classifier(model, settings, sizes)
    tokens = torch.full((20, 10, 4), 7)
    assert classifier.embedding is not None
    unknown, known = classifier.embedding(torch.tensor([3, 7]))
    with torch.no_grad():
        found = classifier.embed(tokens)
        hidden = (found == unknown).all(dim=-1)
        assert ((found == known).all(dim=-1) == ~hidden).all()
        assert (hidden == hidden[..., :1]).all()  # whole sentences
        assert 0.35 < hidden.float().mean() < 0.65
        assert (classifier.eval().embed(tokens) == known).all()


def test_a_gate_with_equal_weights_is_the_identity() -> None:
    classifier, plain = build("mean").eval(), build("mean").eval()
    assert classifier.gate is not None
    for parameter in classifier.gate.parameters():
        torch.nn.init.zeros_(parameter)
    plain.gate = None
    tokens, mask, _ = inputs(classifier)
    plain.load_state_dict(
        {name: value for name, value in classifier.state_dict().items() if "gate" not in name}
    )
    torch.testing.assert_close(classifier(tokens, mask), plain(tokens, mask))


@pytest.mark.parametrize(
    ("name", "deciding"),
    [
        ("attention", "output"),
        ("labels", "label_output"),
        ("labels with filters", "label_output"),
        ("n-grams", "bag"),
        ("all features", "output"),
    ],
)
def test_the_prior_is_the_bias_of_one_layer(name: str, deciding: str) -> None:
    classifier = build(name)
    classifier.set_prior(torch.tensor([-1.0, 2.0, 3.0]))
    layers = ("output", "label_output", "bag")
    biases = {
        layer: part.bias.tolist()
        for layer in layers
        if (part := getattr(classifier, layer)) is not None
    }
    assert biases.pop(deciding) == [-1.0, 2.0, 3.0]
    assert all(bias == [0.0] * LABELS for bias in biases.values())


def test_logits_of_ngrams_have_the_scale_of_their_weighting() -> None:
    ngrams = NgramFeatures(torch.tensor([[1, 4, 0]]), torch.tensor([[0.5, 0.25, 9.0]]))
    found = {}
    for weights in ("naive_bayes", "tf_idf"):
        classify = ClassifyConfig(pooling="none", ngrams=1, ngram_weights=weights)
        sizes = ClassifierSizes(vocab_size=VOCABULARY, labels=1, ngram_features=11)
        classifier = build_classifier(ModelConfig(), classify, sizes).eval()
        assert classifier.bag is not None
        torch.nn.init.ones_(classifier.bag.weight)
        found[weights] = classifier(torch.tensor([[5]]), None, ngrams).item()
    assert found == {"naive_bayes": 0.75 * 5, "tf_idf": 0.75 * 10}


@pytest.mark.parametrize(
    ("embedding_width", "vectors", "frozen", "trained"),
    [
        (0, (), (), [8]),
        (6, (), (), [6]),
        (0, (5,), (), [5]),
        (0, (), (4,), []),
        (6, (5,), (4,), [6, 5]),
    ],
)
def test_word_vectors_replace_the_models_table_unless_its_width_is_set(
    embedding_width: int, vectors: tuple[int, ...], frozen: tuple[int, ...], trained: list[int]
) -> None:
    model = ModelConfig(encoder=("bigru",), width=8, embedding_width=embedding_width)
    sizes = ClassifierSizes(
        vocab_size=VOCABULARY, labels=LABELS, vector_widths=vectors, frozen_widths=frozen
    )
    embedding = build_classifier(model, ClassifyConfig(), sizes).embedding
    assert embedding is not None
    assert [table.size(1) for table in embedding.tables] == trained
    assert [table.size(1) for table in embedding.frozen_tables] == list(frozen)


@torch.no_grad()
def test_the_mean_of_the_attributes_vectors_is_a_feature_of_the_text() -> None:
    classifier = build("attributes").eval()
    assert classifier.attributes is not None
    assert classifier.output is not None
    seen: dict[str, Tensor] = {}
    classifier.attributes.register_forward_hook(
        lambda _module, _inputs, pooled: seen.update(vectors=pooled.vectors)
    )
    classifier.output.register_forward_pre_hook(
        lambda _module, inputs: seen.update(features=inputs[0])
    )
    tokens, mask, _ = inputs(classifier)
    classifier(tokens, mask)
    torch.testing.assert_close(seen["features"][:, 8:], seen["vectors"].mean(dim=1))


@pytest.mark.parametrize("name", ["max", "mean", "labels", "documents by label"])
@torch.no_grad()
def test_dropout_of_pooled_features_leaves_the_biases(name: str) -> None:
    """With a probability of 1 nothing else is left, behind a hidden layer too."""
    classifier = build(name)
    classifier.dropout, classifier.bag = 1.0, None
    output = classifier.output if classifier.label_output is None else classifier.label_output
    for layer in (output, classifier.hidden):
        if layer is not None:
            torch.nn.init.normal_(layer.bias)
    logits = classifier(*inputs(classifier))
    torch.testing.assert_close(logits, output.bias.expand_as(logits))


@torch.no_grad()
def test_attributes_are_predicted_from_dropped_features() -> None:
    classifier = build("attributes")
    classifier.dropout = 1.0
    torch.nn.init.normal_(classifier.attribute_output.bias)
    found = classifier.classify(*inputs(classifier)).attributes
    torch.testing.assert_close(found, classifier.attribute_output.bias.expand_as(found))


@pytest.mark.parametrize(("hierarchical", "path"), [(False, "pooling"), (True, "sentences")])
def test_the_overlap_penalty_is_weighted(hierarchical: bool, path: str) -> None:
    classifier = build("structured", hierarchical=hierarchical, overlap_penalty=0.25)
    losses = dict[str, Tensor]()
    with record(classifier) as notes:
        classifier.classify(*inputs(classifier), losses=losses)
    expected = 0.25 * overlap_penalty(notes[path].weights.squeeze(1)).sum()
    torch.testing.assert_close(losses["overlap"], expected)


def test_settings_of_pooling_and_ngrams_reach_their_layers() -> None:
    classify = ClassifyConfig(score_width=5, ngrams=1, ngram_dropout=0.3)
    model = ModelConfig(encoder=("gru",), width=8, heads=2)
    sizes = ClassifierSizes(vocab_size=VOCABULARY, labels=LABELS, ngram_features=11)
    classifier = build_classifier(model, classify, sizes)
    assert classifier.pooling.hidden.out_features == 5
    assert classifier.bag.dropout == 0.3
