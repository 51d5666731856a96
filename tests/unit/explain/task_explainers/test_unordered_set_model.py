"""Explained sets: no order, seeds and inducing points, and every kind of prediction."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from task_models_kit import Subject, subject_of

from dragoman.attention.attention_weight_hooks import edit
from dragoman.errors import DataError

ORDER = [3, 0, 4, 2, 1]


@pytest.mark.parametrize("recipe", ["lee2019", "lee2019_isab", "lee2019_clustering"])
def test_permuting_the_elements_permutes_columns_and_nothing_else(recipe: str) -> None:
    subject = subject_of(recipe)
    plain = subject.predictor.explain(subject.example)
    moved = subject.predictor.explain([subject.example[at] for at in ORDER])
    assert [token.text.strip() for token in moved.source.tokens] == [
        plain.source.tokens[at].text.strip() for at in ORDER
    ]
    for site in plain.sites:
        assert not site.ordered
        expected = plain.arrays[site.tensor]
        expected = expected[:, ORDER] if site.query == "element" else expected
        expected = expected[:, :, ORDER] if site.key == "element" else expected
        np.testing.assert_allclose(moved.arrays[site.tensor], expected, atol=1e-5)
        if site.key == "element":
            labels = site.key_labels or []
            assert moved.site(site.id).key_labels == [labels[at] for at in ORDER]
    if recipe != "lee2019_clustering":
        assert moved.score["value"] == pytest.approx(plain.score["value"], rel=1e-4)
        np.testing.assert_allclose(
            moved.arrays["ixg.s"], plain.arrays["ixg.s"][:, ORDER], rtol=1e-4, atol=1e-4
        )
    assert "order" in plain.missing["positions"]
    assert all(head.distance is None for head in plain.heads)


def test_a_seed_that_is_off_reads_nothing() -> None:
    subject = subject_of("lee2019_isab", sets={"seeds": 2})
    predictor = subject.predictor
    plain = predictor.explain(subject.example)
    assert plain.model["off_switches"] == ["seed.0", "seed.1"]
    assert plain.arrays["x0.w"].shape == (4, 2, 5)
    assert plain.site("x0").query_labels == ["seed 1", "seed 2"]

    def no_seed(weights: torch.Tensor) -> torch.Tensor:
        kept = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1)
        return weights * kept

    with edit(predictor.model, {"pooling.pool.cross": no_seed}):
        [expected] = predictor.predict([subject.example])
    off = predictor.explain(subject.example, off=["seed.1"])
    assert off.score["value"] == pytest.approx(expected.value, rel=1e-5)
    assert (off.arrays["x0.w"][:, 1] == 0).all()
    assert off.target.text == f"{off.score['value']:g}"
    change = predictor.ablate(plain, ["seed.1"])
    assert change.sum_change == pytest.approx(expected.value - plain.score["value"], abs=1e-4)


def test_all_heads_off_leave_the_bias() -> None:
    subject = subject_of("lee2019")
    predictor = subject.predictor
    heads = [f"x0.{head}" for head in range(4)]
    off = predictor.explain(subject.example, off=heads)
    other = predictor.explain([1.0, 2.0, 3.0, 4.0, 5.0], off=heads)
    assert off.score["value"] == pytest.approx(other.score["value"], rel=1e-5)


def test_a_count_has_a_poisson_distribution() -> None:
    subject = subject_of("lee2019_unique")
    found = subject.predictor.explain(subject.example)
    [prediction] = subject.predictor.predict([subject.example])
    [step] = found.steps
    rate, count = prediction.rate, prediction.count
    expected = count * math.log(rate) - rate - math.lgamma(count + 1)
    assert step.id == count
    assert step.logprob == pytest.approx(expected, abs=1e-4)
    assert [token.text for token in found.source.tokens] == ["image 1", " image 2", " image 3"]


def test_points_have_the_posterior_of_their_components() -> None:
    subject = subject_of("lee2019_clustering")
    found = subject.predictor.explain(subject.example)
    [prediction] = subject.predictor.predict([subject.example])
    assert [step.id for step in found.steps] == prediction.clusters
    for step in found.steps:
        assert sum(math.exp(value) for _, _, value in step.top) == pytest.approx(1, abs=1e-5)
    assert found.source.text.startswith("[0.5, 1] [2, -1.5]")
    made, arrays = subject.predictor.attribute(found, "occlusion")
    assert (np.diag(arrays[made.source]) == 0).all()


def test_leaving_an_element_out_is_a_prediction_without_it() -> None:
    subject: Subject = subject_of("zaheer2017_max")
    found = subject.predictor.explain(subject.example)
    assert found.missing["heads"] == "This model has no attention."
    made, arrays = subject.predictor.attribute(found, "occlusion")
    for at in range(len(subject.example)):
        kept = [each for place, each in enumerate(subject.example) if place != at]
        [without] = subject.predictor.predict([kept])
        expected = found.score["value"] - without.value
        assert arrays[made.source][0, at] == pytest.approx(expected, abs=1e-4)
    made, arrays = subject.predictor.attribute(found, "integrated_gradients")
    assert made.gap < 0.05


def test_text_is_read_as_a_list_and_mistakes_are_named() -> None:
    predictor = subject_of("lee2019").predictor
    assert predictor.explain("[1, 2.5]").source.text == "1 2.5"
    with pytest.raises(DataError, match="JSON list of numbers"):
        predictor.explain("one")
