"""The checks notice errors in the capture: each seeded error is reported by one of them.

The errors are those of other tools (OpenNMT-py#2490, tensor2tensor#526, #540, #917, fairseq#3365).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from explain_kit import TEXT, explained_translator
from torch import Tensor

from dragoman.attention.multi_head import MultiHead
from dragoman.attention.score_functions import ScaledDotScore
from dragoman.decoding.length_penalty import WuLengthPenalty
from dragoman.explain import (
    Explanation,
    attention_and_logit_capture,
    token_spans,
    translation_explanation_builder,
)
from dragoman.explain.attention_and_logit_capture import CapturedSite, PairCapture
from dragoman.explain.explanation_consistency_checks import (
    check_against_model,
    check_explanation,
    check_wire_form,
)
from dragoman.ops import build_attention_mask, masked_softmax
from dragoman.text.special_tokens import EOS


def problems_of(explanation: Explanation, name: str) -> list[str]:
    return [
        *check_explanation(explanation),
        *check_against_model(explanation, explained_translator(name).model),
        *check_wire_form(explanation, 2_000_000),
    ]


@pytest.mark.parametrize("name", ["transformer", "shaw", "convs2s", "rnn"])
def test_nothing_is_wrong_without_an_error(name: str) -> None:
    assert problems_of(explained_translator(name).explain(TEXT, beam=2), name) == []


SENTENCES = [
    "hund", "a", "das haus", "ein hund und a", "HUND", "haus.", "1, 2", "haus haus haus haus",
    "hund  und   haus", " hund", "今天", "سلام", "שלום", "नमस्ते", "สวัสดี", "👨‍👩‍👧 und 🇩🇪",
    "e\u0301\u0323a", "<script>", "a\u202eb", "a \u2581 b",
]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["transformer", "prefix_lm", "reformer", "convs2s", "rnn", "monotonic", "location", "summary"],
)
def test_every_family_holds_for_twenty_sentences(name: str) -> None:
    """All checks hold for beams of 1 and 4 and two budgets."""
    own = explained_translator(name)
    for at, text in enumerate(SENTENCES):
        explanation = own.explain(text, beam=1 if at % 2 else 4, attribution=None)
        assert check_explanation(explanation) == []
        assert check_against_model(explanation, own.model) == []
        for budget in (2_000_000, 200_000):
            assert check_wire_form(explanation, budget) == []


Capture = Callable[..., list[PairCapture]]


def change_sites(change: Callable[[list[CapturedSite]], list[CapturedSite]]) -> Any:
    """Return an error that changes what was captured of the attention sites."""

    def seed(monkeypatch: pytest.MonkeyPatch) -> None:
        whole = attention_and_logit_capture.capture_batch

        def capture_batch(*given: Any) -> list[PairCapture]:
            return [each._replace(sites=change(each.sites)) for each in whole(*given)]

        monkeypatch.setattr(attention_and_logit_capture, "capture_batch", capture_batch)

    return seed


def change_weights(change: Callable[[np.ndarray], np.ndarray]) -> Any:
    """Return an error that changes the weights of every site."""
    return change_sites(
        lambda sites: [
            each._replace(weights=np.ascontiguousarray(change(each.weights))) for each in sites
        ]
    )


def change_logits(change: Callable[[Tensor], Tensor]) -> Any:
    """Return an error that changes the logits."""

    def seed(monkeypatch: pytest.MonkeyPatch) -> None:
        whole = attention_and_logit_capture.capture_batch

        def capture_batch(*given: Any) -> list[PairCapture]:
            return [each._replace(logits=change(each.logits)) for each in whole(*given)]

        monkeypatch.setattr(attention_and_logit_capture, "capture_batch", capture_batch)

    return seed


def swap_layers(sites: list[CapturedSite]) -> list[CapturedSite]:
    """Swap the weights of the first two sites of a group."""
    first, second, *rest = sites
    return [
        first._replace(weights=second.weights),
        second._replace(weights=first.weights),
        *rest,
    ]


def missing_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record weights of scores that were not divided by the root of the width."""
    emit = MultiHead.emit_record

    def emit_record(self: Any, record: Any) -> None:
        scores = record.weights.clamp_min(1e-30).log() * self.head_width**0.5
        emit(self, record._replace(weights=scores.softmax(-1)))

    monkeypatch.setattr(MultiHead, "emit_record", emit_record)


def unmasked_future(weights: np.ndarray) -> np.ndarray:
    """Weights to all positions, later ones too."""
    return np.full_like(weights, 1 / weights.shape[2])


def stale_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return what was captured of the sentence before."""
    whole, kept = attention_and_logit_capture.capture_batch, list[Any]()

    def capture_batch(model: Any, sources: Any, targets: Any) -> list[PairCapture]:
        found = whole(model, [[*sources[0][::-1]]], targets)
        kept.append(found)
        return kept[0]

    monkeypatch.setattr(attention_and_logit_capture, "capture_batch", capture_batch)


def dropped_relative_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record weights without the term of relative positions."""
    attend, emit = MultiHead._attend_with_weights, MultiHead.emit_record

    def attend_with_weights(self: Any, query: Tensor, key: Tensor, *given: Any) -> Tensor:
        _, mask, causal, _ = given
        visible = build_attention_mask(query.size(2), key.size(2), mask, causal, query.device)
        wrong = masked_softmax(self.score(query, self.score.prepare(key)), visible)
        monkeypatch.setattr(
            MultiHead,
            "emit_record",
            lambda self, record: emit(self, record._replace(weights=wrong)),
        )
        return attend(self, query, key, *given)

    monkeypatch.setattr(MultiHead, "_attend_with_weights", attend_with_weights)


def no_output_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of weight times value, without the output matrix."""
    monkeypatch.setattr(attention_and_logit_capture, "output_matrix", lambda module: None)


def no_output_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contributions of ConvS2S without the root of the source length."""
    monkeypatch.setattr(attention_and_logit_capture, "output_scale", lambda module, sources: 1.0)


def forgotten_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A penalty that does not count the last token."""
    score = WuLengthPenalty.score
    monkeypatch.setattr(
        WuLengthPenalty, "score", lambda self, total, length: score(self, total, length - 1)
    )


def raw_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with logits instead of log-probabilities."""
    monkeypatch.setattr(torch.Tensor, "log_softmax", lambda self, dim: self)


def shifted_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token with the distribution of the position before it."""
    build = translation_explanation_builder.build_steps
    monkeypatch.setattr(
        translation_explanation_builder,
        "build_steps",
        lambda logits, *rest: build(logits.roll(1, dims=0), *rest),
    )


def shifted_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans that begin one character late."""
    find = token_spans.find_token_spans
    monkeypatch.setattr(
        token_spans,
        "find_token_spans",
        lambda *given: [(start + (start > 0), end) for start, end in find(*given)],
    )


ERRORS: dict[str, tuple[str, Any, str]] = {
    "wrong layer": ("transformer", change_sites(swap_layers), "outputs"),
    "missing scale": ("transformer", missing_scale, "outputs"),
    "unmasked future": ("transformer", change_weights(unmasked_future), "weights"),
    "weight lost to padding": (
        "transformer",
        change_weights(lambda weights: weights * 0.9),
        "row sums",
    ),
    "averaged heads": (
        "transformer",
        change_weights(lambda weights: np.repeat(weights.mean(0, keepdims=True), 2, axis=0)),
        "outputs",
    ),
    "swapped heads": (
        "transformer",
        change_weights(lambda weights: weights[::-1]),
        "outputs",
    ),
    "shifted target": (
        "transformer",
        change_weights(lambda each: np.roll(each, 1, 1)),
        "outputs",
    ),
    "shifted source": ("rnn", change_weights(lambda each: np.roll(each, 1, 2)), "outputs"),
    "transposed matrix": (
        "transformer",
        change_weights(lambda each: each.swapaxes(1, 2)),
        "row sums",
    ),
    "one head for all": ("transformer", change_weights(lambda weights: weights[:1]), "weights"),
    "stale capture": ("transformer", stale_records, ""),
    "dropped relative bias": ("shaw", dropped_relative_bias, "outputs"),
    "dropped output bias": (
        "transformer",
        change_logits(lambda logits: logits - torch.linspace(0, 1, logits.size(1))),
        "steps",
    ),
    "logits of another temperature": ("rnn", change_logits(lambda logits: logits * 1.01), "steps"),
    "shifted distributions": ("transformer", shifted_steps, "steps"),
    "logits for log-probabilities": ("convs2s", raw_logits, "steps"),
    "no output matrix": ("transformer", no_output_matrix, "contributions"),
    "no output scale": ("convs2s", no_output_scale, "contributions"),
    "penalty of another length": ("transformer", forgotten_end, "score"),
    "shifted spans": ("transformer", shifted_spans, "token spans"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_every_seeded_error_is_noticed(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, seed, check = ERRORS[error]
    own = explained_translator(name)
    assert problems_of(own.explain(TEXT, beam=1), name) == []
    with monkeypatch.context() as patch:
        seed(patch)
        explanation = own.explain(TEXT, beam=1)
    found = problems_of(explanation, name)
    assert any(problem.startswith(check) for problem in found), found


def test_padding_that_is_attended_to_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose mask is forgotten gives other numbers than each row alone."""
    model = explained_translator("transformer").model
    sources, targets = [[5, 6, 7, 8, 9], [5, 6]], [[8, EOS], [9, 10, EOS]]
    alone = attention_and_logit_capture.capture_pair(model, sources[1], targets[1])
    pad = attention_and_logit_capture.pad_sources
    monkeypatch.setattr(
        attention_and_logit_capture, "pad_sources", lambda *given: pad(*given)._replace(mask=None)
    )
    together = attention_and_logit_capture.capture_batch(model, sources, targets)[1]
    sums = [each.weights.sum(-1).min() for each in together.sites if each.site.key == "source"]
    assert min(sums) < 0.999
    assert not torch.allclose(together.logits, alone.logits, atol=1e-3)


def test_a_score_without_its_scale_changes_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale of the explicit path must be that of the fused kernel."""
    own = explained_translator("transformer")
    forward = ScaledDotScore.forward

    def unscaled(self: Any, query: Tensor, *given: Any) -> Tensor:
        return forward(self, query, *given) * query.size(-1) ** 0.5

    monkeypatch.setattr(ScaledDotScore, "forward", unscaled)
    explanation = own.explain(TEXT, beam=1)
    assert explanation.checks["capture"] > 1e-3
    assert any(problem.startswith("steps") for problem in problems_of(explanation, "transformer"))
