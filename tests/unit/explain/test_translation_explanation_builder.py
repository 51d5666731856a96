"""Explanations of translations: steps, score, logit lens, search errors and model errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from explain_kit import TEXT, explained_translator
from teacher_forcing_kit import VOCABULARY, tiny_language_model, tiny_model, tiny_pair

from dragoman.attention.attention_weight_hooks import record
from dragoman.decoding.length_penalty import WuLengthPenalty
from dragoman.explain import translation_explanation_builder
from dragoman.explain.attention_and_logit_capture import capture_batch, capture_pair, locate_sites
from dragoman.explain.explanation_schema_validation import find_problems
from dragoman.explain.translation_explanation_builder import (
    TOP_TOKENS,
    ExplainedTarget,
    build_steps,
    describe_penalty,
    diagnose,
    model_digest,
    plain_logits,
    read_logit_lens,
    token_ranks,
)
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.language_model import NeuralLanguageModel
from dragoman.text.special_tokens import EOS

FAMILIES = ["transformer", "shaw", "convs2s", "rnn"]
SOURCES = [[5, 6, 7, 8, 9], [7, 5], [8, 8, 9]]
TARGETS = [[10, EOS], [9, 10, 8, 7, EOS], [6, 5, EOS]]


@pytest.mark.parametrize("name", FAMILIES)
def test_capture_changes_nothing(name: str) -> None:
    """The same tokens, and equal logits (OpenNMT-py#2490)."""
    own = explained_translator(name)
    for source, target in zip(SOURCES, TARGETS, strict=True):
        captured = capture_pair(own.model, source, target)
        torch.testing.assert_close(
            captured.logits, plain_logits(own.model, source, target), atol=1e-5, rtol=1e-5
        )
    explanation = own.explain(TEXT, beam=3)
    [found] = own.stream([TEXT], beam=3)
    assert explanation.translation == found.text
    assert explanation.log_probs == pytest.approx(found.log_probs, abs=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_order_and_other_rows_change_nothing(name: str) -> None:
    """See tensor2tensor#526."""
    model = explained_translator(name).model
    alone = [capture_pair(model, *pair) for pair in zip(SOURCES, TARGETS, strict=True)]
    more = [[6] * 12, *SOURCES], [[7] * 9, *TARGETS]
    batches = [
        (capture_batch(model, SOURCES, TARGETS), [0, 1, 2]),
        (capture_batch(model, SOURCES[::-1], TARGETS[::-1]), [2, 1, 0]),
        (capture_batch(model, *more)[1:], [0, 1, 2]),
    ]
    for batch, numbers in batches:
        for found, number in zip(batch, numbers, strict=True):
            expected = alone[number]
            torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-5)
            for left, right in zip(found.sites, expected.sites, strict=True):
                assert left.site == right.site
                np.testing.assert_allclose(left.weights, right.weights, atol=1e-5)
                np.testing.assert_allclose(left.contributions, right.contributions, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_request_has_the_same_digest(name: str) -> None:
    own = explained_translator(name)
    first, again, other = own.explain(TEXT), own.explain(TEXT), own.explain(f"{TEXT} a")
    assert first.digest == again.digest != other.digest
    assert first.to_json() == again.to_json()
    assert first.model["digest"] == model_digest(own.model, own.tokenizers)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_long_text_is_attributed_on_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Effects of heads are estimated from one backward pass; a named method is computed at once."""
    own = explained_translator(name)
    short = own.explain(TEXT)
    monkeypatch.setattr(translation_explanation_builder, "MAX_GRADIENT_WORK", 0)
    long = own.explain(TEXT)
    if "attribution" in short.missing:  # the model's choice of positions has no gradient
        assert long.digest == short.digest
        return
    assert long.attribution == []
    assert "once the page of `dragoman explore` selects it" in long.missing["attribution"]
    assert len(long.heads) == len(short.heads)
    assert all(np.isfinite(head.effect_estimate) for head in long.heads)
    assert [step.id for step in long.steps] == [step.id for step in short.steps]
    assert find_problems(long.to_dict()) == []
    for method in (each.method for each in short.attribution):
        assert [each.method for each in own.explain(TEXT, attribution=method).attribution] == [
            method
        ]
        _, whole = own.attribute(long, method)
        fields, found = own.attribute(long, method, step=1)
        np.testing.assert_allclose(found[fields.source][1], whole[fields.source][1], atol=1e-5)
        assert not np.delete(found[fields.source], 1, axis=0).any()


def test_forced_tokens_show_the_probability_of_the_model() -> None:
    """A prefix is flagged, and what follows is what `translate` writes after it."""
    own = explained_translator("transformer")
    prefix = "HA"
    explanation = own.explain(TEXT, prefix=prefix, beam=2)
    ids = own.tokenizers.tgt.encode(prefix)
    assert [token.id for token in explanation.target.tokens[: len(ids)]] == ids
    assert [step.forced for step in explanation.steps] == [
        at < len(ids) for at in range(len(explanation.steps))
    ]
    logits = plain_logits(
        own.model,
        [token.id for token in explanation.source.tokens[:-1]],
        [token.id for token in explanation.target.tokens],
    )
    for at, step in enumerate(explanation.steps[: len(ids)]):
        assert step.logprob == pytest.approx(float(logits[at].log_softmax(-1)[ids[at]]), abs=1e-4)
        assert step.logprob < -0.01
    assert explanation.translation == own.translate([TEXT], prefix=prefix, beam=2)[0]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_the_score_is_the_sum_under_the_stated_penalty(alpha: float) -> None:
    own = explained_translator("transformer")
    explanation = own.explain(TEXT, beam=2, length_penalty=alpha)
    total, length = math.fsum(explanation.log_probs), len(explanation.steps)
    assert explanation.score["sum"] == pytest.approx(total, abs=1e-4)
    assert explanation.score["normalised"] == pytest.approx(
        total / ((5 + length) / 6) ** alpha, abs=1e-4
    )
    assert explanation.score["penalty"] == ("none" if not alpha else f"gnmt {alpha:g}")
    assert describe_penalty(WuLengthPenalty(alpha)) == explanation.score["penalty"]


def test_steps_have_ranks_entropies_and_runners_up() -> None:
    logits = torch.full((2, 300), -50.0)
    logits[0, 10:30] = torch.arange(20.0)
    logits[1] = 0.0
    tokenizer = explained_translator("transformer").tokenizers.tgt
    first, second = build_steps(logits, ExplainedTarget([28, EOS], "", 1, [299, 3]), tokenizer)
    assert first.rank == 2
    assert [number for number, _, _ in first.top] == list(range(29, 29 - TOP_TOKENS, -1))
    assert first.top[1][2] == pytest.approx(first.logprob)
    assert (first.forced, first.masked) == (True, 299)
    assert (second.forced, second.masked) == (False, 3)
    assert second.rank == 1  # equal logits share the best rank
    assert second.entropy == pytest.approx(math.log(300), abs=1e-4)


def test_spans_words_and_model_are_there() -> None:
    explanation = explained_translator("transformer").explain(TEXT)
    source = explanation.source
    assert "".join(source.text[slice(*token.span)] for token in source.tokens) == TEXT
    assert len(explanation.source.words) == 3
    assert explanation.model["layers"] == {"encoder": 2, "decoder": 2}
    assert explanation.model["family"] == "transformer"
    assert explanation.request["text"] == TEXT
    assert {head.name for head in explanation.heads} >= {"e0.0", "d1.1", "x1.0"}
    assert all(head.entropy is not None for head in explanation.heads)


def test_layers_of_nested_blocks_are_numbered_through() -> None:
    sites = [each.site for each in locate_sites(explained_translator("nested").model)]
    assert [(site.id, site.path) for site in sites] == [
        ("e0", "encoder.0.0.self"),
        ("e1", "encoder.0.1.self"),
        ("e2", "encoder.1.self"),
        ("d2", "decoder.2.self"),
        ("x1", "decoder.1.cross"),
        ("x2", "decoder.2.cross"),
    ]


def test_targets_may_end_early() -> None:
    """A target without its end, and one that is nothing but its end."""
    model = explained_translator("rnn").model
    unfinished = capture_pair(model, [5, 6], [7, 8])
    assert unfinished.sites[0].weights.shape == (1, 2, 3)
    empty = capture_pair(model, [5, 6], [EOS])
    assert empty.logits.shape[0] == 1


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


def own_logits(model: EncoderDecoder | NeuralLanguageModel, pair: object) -> torch.Tensor:
    """Run the model as it is run while it is recorded."""
    with torch.no_grad(), record(model):
        if isinstance(model, NeuralLanguageModel):
            return model(pair.tgt_in)[0]  # type: ignore[attr-defined]
        return model(pair.src, pair.tgt_in)[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", MODELS)
def test_the_last_layer_is_the_model(name: str) -> None:
    build, layers = MODELS[name]
    model = build()
    pair = tiny_pair(model)
    lens, logits = read_logit_lens(pair), own_logits(model, pair)
    assert torch.equal(lens.final_logits, logits)
    assert lens.layers == [f"d{number}" for number in range(layers)]
    assert lens.skipped == 0
    order = (-logits).argsort(dim=-1, stable=True)
    for position, token in enumerate(pair.tgt_out):
        assert lens.ranks[-1, position] == 1 + order[position].tolist().index(token)
    probabilities = logits.softmax(-1)
    assert np.array_equal(lens.top_ids[-1], order[:, :5].numpy())
    np.testing.assert_allclose(
        lens.top_probs[-1], probabilities.gather(1, order[:, :5]).numpy(), atol=1e-6
    )


@pytest.mark.parametrize("residual", ["post_norm", "pre_norm"])
def test_an_early_layer_is_a_model_that_ends_there(residual: str) -> None:
    model = tiny_model(decoder="transformer*3", residual=residual)
    pair = tiny_pair(model)
    lens = read_logit_lens(pair)
    model.decoder.depth = 2  # the same weights without the third layer, its final norm kept
    logits = own_logits(model, pair)
    assert np.array_equal(lens.ranks[1], token_ranks(logits, pair.tgt_out).numpy())
    np.testing.assert_allclose(
        lens.top_probs[1], logits.softmax(-1).topk(5).values.numpy(), atol=1e-6
    )


def test_layers_of_another_width_are_counted_and_left_out() -> None:
    model = tiny_model("conv", "conv(width=8) + conv(width=24) + conv(width=24)")
    pair = tiny_pair(model)
    lens = read_logit_lens(pair)
    assert (lens.layers, lens.skipped) == (["d1", "d2"], 1)
    assert torch.equal(lens.final_logits, own_logits(model, pair))


def test_equal_logits_share_the_better_rank() -> None:
    logits = torch.tensor([[3.0, 1.0, 3.0, 2.0]])
    assert [int(token_ranks(logits, torch.tensor([token]))) for token in range(4)] == [1, 4, 1, 3]


def test_a_small_vocabulary_has_fewer_than_five_tokens() -> None:
    lens = read_logit_lens(tiny_pair(tiny_model()), top=VOCABULARY + 5)
    assert lens.top_ids.shape == (2, 6, VOCABULARY)
    np.testing.assert_allclose(lens.top_probs.sum(-1), 1.0, atol=1e-5)


@pytest.mark.parametrize(
    ("reference", "found", "options", "verdict", "words"),
    [
        (-1.0, -2.0, {}, "search_error", "higher than its own output, -1.00 against -2.00"),
        (-2.0, -1.0, {}, "model_error", "lower than its own output, -2.00 against -1.00"),
        (-1.0, -1.00001, {}, "equal", "-1.00 against -1.00"),
        (-1.0, -1.00001, {"same_tokens": True}, "same", "The search found the reference"),
        (-9.0, -1.0, {"finished": False}, "search_error", "cut at its maximum length"),
        (-9.0, -1.0, {"finished": False}, "search_error", "-9.00 for the reference, -1.00 for the"),
    ],
)
def test_a_reference_is_a_search_error_if_the_model_prefers_it(
    reference: float, found: float, options: dict[str, bool], verdict: str, words: str
) -> None:
    diagnosis = diagnose(reference=reference, found=found, **options)
    assert diagnosis.verdict == verdict
    assert words in diagnosis.sentence
    assert diagnosis.sentence.endswith(".")
