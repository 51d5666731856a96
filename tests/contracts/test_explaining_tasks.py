"""Explanations of every recipe that is no translator: its numbers are the model's."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from task_models_kit import Subject, subject_of
from torch import nn

from dragoman.attention.attention_weight_hooks import find_attentions, record
from dragoman.explain.explanation import Explanation
from dragoman.explain.explanation_consistency_checks import (
    check_explanation,
    check_spans,
    check_wire_form,
)
from dragoman.inference.predictors.classifier import Classifier
from dragoman.inference.predictors.language_model import LanguageModel
from dragoman.inference.predictors.sentence_pair_classifier import PairClassifier
from dragoman.inference.predictors.tagger import Tagger
from dragoman.recipes.catalogue import RECIPES
from tests.explanation_kit import check_report

NAMES = [name for name, entry in RECIPES.items() if entry.task != "translate"]


@pytest.fixture(scope="module", params=NAMES)
def subject(request: pytest.FixtureRequest) -> Subject:
    return subject_of(request.param)


@pytest.fixture(scope="module")
def explained(subject: Subject) -> Explanation:
    return subject.predictor.explain(subject.example)


def test_rows_sum_to_one_and_masked_keys_are_zero(explained: Explanation) -> None:
    for site in explained.sites:
        weights = explained.arrays[site.tensor]
        assert weights.shape == explained.arrays[site.contribution].shape
        assert weights.shape[0] == site.heads
        assert (weights >= 0).all()
        assert (explained.arrays[site.contribution] >= 0).all()
        if site.sum == "one":
            np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
        if site.causal:
            assert np.array_equal(weights, np.tril(weights))
        for axis, labels, size in (
            (site.query, site.query_labels, weights.shape[1]),
            (site.key, site.key_labels, weights.shape[2]),
        ):
            tokens = {"source": explained.source.tokens, "target": explained.target.tokens}
            expected = tokens.get(axis.removesuffix("_in"), labels)
            assert expected is not None, f"{site.id} names no {axis}"
            assert len(labels or expected) == size


def test_recording_changes_nothing(explained: Explanation) -> None:
    # A posterior far from every component magnifies rounding.
    bound = 1e-3 if explained.model.get("problem") == "clustering" else 1e-5
    assert explained.checks["capture"] < bound
    assert explained.checks["row_sum"] < 1e-5
    assert explained.checks["output"] < 1e-4


def test_every_attention_of_the_model_is_a_site(subject: Subject, explained: Explanation) -> None:
    paths = {site.path for site in explained.sites}
    for path in find_attentions(subject.predictor.model):
        assert any(each == path or each.startswith(f"{path}.") for each in paths), path
    assert bool(explained.sites) != ("heads" in explained.missing)


def predicted_log_prob(subject: Subject) -> float | None:
    """Return the predictor's log-probability of the explained output; None for a regression
    value.
    """
    predictor = subject.predictor
    [found] = predictor.predict([subject.example])
    if isinstance(predictor, (Classifier, PairClassifier)):
        return math.log(max((found.probabilities or {}).values()))
    if isinstance(predictor, Tagger):
        return sum(map(math.log, found.probabilities))
    if isinstance(predictor, LanguageModel):
        return predictor.score([subject.example])[0].log_prob
    return None


def test_probabilities_are_those_of_predictions(subject: Subject, explained: Explanation) -> None:
    expected = predicted_log_prob(subject)
    if expected is None:
        [found] = subject.predictor.predict([subject.example])
        if found.value is not None:
            assert explained.score["value"] == pytest.approx(found.value, rel=1e-5)
            assert explained.steps == []
        elif found.count is not None:
            assert explained.steps[0].id == found.count
        else:
            assert [step.id for step in explained.steps] == found.clusters
        return
    if subject.predictor.config.language.eval_masked == "rate" and expected is not None:
        masked = subject.predictor.config.language.objective != "causal"
        if masked and subject.predictor.task_name == "language":
            pytest.skip("the score masks several tokens at once, the explanation one")
    assert explained.score["sum"] == pytest.approx(expected, abs=1e-4)
    assert sum(step.logprob for step in explained.steps) == pytest.approx(expected, abs=1e-4)
    for step in explained.steps:
        values = [value for _, _, value in step.top]
        assert values == sorted(values, reverse=True)
        assert step.rank >= 1
        if step.rank <= len(step.top):
            assert step.top[step.rank - 1][0] == step.id


def test_the_invariants_of_all_explanations_hold(explained: Explanation) -> None:
    assert check_explanation(explained) == []
    for text in (explained.source, explained.target):
        if text.text:  # classes have no text
            assert check_spans(text) == []
    for budget in (2_000_000, 100_000):
        assert check_wire_form(explained, budget) == []


def test_a_head_that_is_off_is_a_fresh_run(subject: Subject, explained: Explanation) -> None:
    again = subject.predictor.explain(subject.example, off=[])
    assert again.digest == explained.digest
    if not explained.heads:
        return
    chosen = [explained.heads[0].name, explained.heads[-1].name]
    effects = dict(subject.predictor.head_effects(explained))
    assert list(effects) == [head.name for head in explained.heads]
    for head in chosen:
        found = subject.predictor.ablate(explained, [head])
        assert found.sum_change == pytest.approx(effects[head], abs=1e-6)
        assert found.sum_change == pytest.approx(sum(found.effect), abs=1e-6)
        off = subject.predictor.explain(subject.example, off=[head], attribution=None)
        assert off.request["off"] == [head]
        if [step.id for step in off.steps] == [step.id for step in explained.steps]:
            before = explained.score.get("sum", explained.score.get("value"))
            after = off.score.get("sum", off.score.get("value"))
            assert found.sum_change == pytest.approx(after - before, abs=1e-4)
        json.dumps(found.to_dict())


def test_it_is_reported_in_the_terminal(explained: Explanation) -> None:
    check_report(explained)


def test_attributions_have_a_row_per_output(subject: Subject, explained: Explanation) -> None:
    [found] = explained.attribution
    rows = max(1, len(explained.steps))
    columns = explained.arrays[found.source].shape[1]
    assert explained.arrays[found.source].shape[0] == rows
    if found.target is not None:
        columns += explained.arrays[found.target].shape[1]
    total = len(explained.source.tokens)
    if explained.model["task"] in ("pairs", "language") and found.target is not None:
        total += len(explained.target.tokens)
    assert columns == total
    methods = explained.model["attributions"]
    assert "occlusion" in methods
    assert ("value_zeroing" in methods) == bool(explained.sites)
    for method in ("occlusion", "value_zeroing"):
        if method in methods:
            made, arrays = subject.predictor.attribute(explained, method)
            assert made.method == method
            assert arrays[made.source].shape == explained.arrays[found.source].shape
            assert all(np.isfinite(array).all() for array in arrays.values())


def test_heads_sum_to_the_modules_output(subject: Subject) -> None:
    predictor = subject.predictor
    attentions = {
        path: module
        for path, module in find_attentions(predictor.model).items()
        if isinstance(getattr(module, "output", None), nn.Linear)
    }
    written: dict[str, list[torch.Tensor]] = {path: [] for path in attentions}
    handles = [
        module.output.register_forward_hook(
            lambda _, inputs, output, path=path: written[path].append(output)
        )
        for path, module in attentions.items()
    ]
    given = predictor.task_input(subject.example)
    try:
        with torch.no_grad(), record(predictor.model) as records:
            given.run()
    finally:
        for handle in handles:
            handle.remove()
    for path, module in attentions.items():
        for call, output in zip(records.calls(path), written[path], strict=True):
            heads = (call.weights @ call.values).transpose(1, 2).flatten(2)
            torch.testing.assert_close(module.output(heads), output, rtol=1e-4, atol=1e-5)
