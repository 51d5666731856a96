"""Mixtures of Gaussians against torch.distributions, and EM."""

import numpy as np
import torch
from torch import distributions

from dragoman.data.synthetic_unordered_sets import ClusteringProblem
from dragoman.tasks.gaussian_mixture_likelihood_and_em import (
    MIN_DEVIATION,
    GaussianMixture,
    fit_by_em,
)


def points_and_oracle(count: int):
    arrays = ClusteringProblem(1, part="valid").generate(np.arange(count), 500)
    points, targets = torch.from_numpy(arrays.elements), torch.from_numpy(arrays.targets)
    mask = torch.arange(500) < torch.from_numpy(arrays.sizes).unsqueeze(1)
    return points, mask, GaussianMixture(targets[..., 0], targets[..., 1:3], targets[..., 3:])


def test_log_likelihood_is_that_of_torch_distributions():
    torch.manual_seed(0)
    mixture = GaussianMixture.from_outputs(torch.randn(2, 3, 5))
    points = torch.randn(2, 7, 2)
    reference = distributions.MixtureSameFamily(
        distributions.Categorical(logits=mixture.log_weights),
        distributions.Independent(distributions.Normal(mixture.means, mixture.deviations), 1),
    )
    expected = torch.stack([reference.log_prob(points[:, i]) for i in range(7)], dim=1)
    torch.testing.assert_close(mixture.log_prob(points), expected)
    mask = torch.arange(7) < torch.tensor([[7], [2]])
    means = torch.stack([expected[0].mean(), expected[1, :2].mean()])
    torch.testing.assert_close(mixture.mean_log_likelihood(points, mask), means)


def test_em_never_lowers_the_likelihood_and_reaches_the_oracle():
    points, mask, oracle = points_and_oracle(20)
    fitted = fit_by_em(
        points, mask, components=4, iterations=1, generator=torch.Generator().manual_seed(0)
    )
    before = fitted.mean_log_likelihood(points, mask)
    for _ in range(40):
        fitted = fitted.em_step(points, mask)
        after = fitted.mean_log_likelihood(points, mask)
        assert bool((after >= before - 1e-4).all())
        before = after
    best = fit_by_em(
        points,
        mask,
        components=4,
        iterations=40,
        restarts=3,
        generator=torch.Generator().manual_seed(0),
    )
    gap = oracle.mean_log_likelihood(points, mask) - best.mean_log_likelihood(points, mask)
    assert float(gap.mean()) < 0.05


def test_em_draws_its_first_means_from_the_given_generator_alone():
    points, mask, _ = points_and_oracle(4)
    fits = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        generator = torch.Generator().manual_seed(0)
        fits.append(fit_by_em(points, mask, components=4, iterations=1, generator=generator))
        assert torch.equal(torch.get_rng_state(), before)
    for one, other in zip(*fits, strict=True):
        assert torch.equal(one, other)


def test_outputs_are_a_logit_means_and_deviations():
    torch.manual_seed(0)
    outputs = torch.randn(2, 3, 5)
    mixture = GaussianMixture.from_outputs(outputs)
    torch.testing.assert_close(mixture.log_weights.exp().sum(-1), torch.ones(2))
    torch.testing.assert_close(mixture.means, outputs[..., 1:3])
    assert mixture.deviations.shape == (2, 3, 2)
    assert torch.equal(mixture.deviations.argsort(1), outputs[..., 3:].argsort(1))


def test_every_set_keeps_the_best_of_its_restarts():
    points, mask, _ = points_and_oracle(20)
    settings = {"components": 4, "iterations": 5}
    generator = torch.Generator().manual_seed(0)
    best = fit_by_em(points, mask, **settings, restarts=3, generator=generator)
    generator.manual_seed(0)
    single = [fit_by_em(points, mask, **settings, generator=generator) for _ in range(3)]
    likelihoods = torch.stack([each.mean_log_likelihood(points, mask) for each in single])
    torch.testing.assert_close(best.mean_log_likelihood(points, mask), likelihoods.amax(dim=0))


def test_first_means_are_real_points_and_all_different():
    points = torch.tensor([[0.0], [1.0], [10.0], [99.0], [99.0]]).expand(50, -1, -1)
    mask = torch.tensor([True, True, True, False, False]).expand(50, -1)
    generator = torch.Generator().manual_seed(0)
    first = fit_by_em(points, mask, components=3, iterations=0, generator=generator)
    means = first.means.squeeze(-1).sort(dim=1).values
    assert torch.equal(means, torch.tensor([0.0, 1.0, 10.0]).expand(50, -1))


def test_a_component_on_a_single_point_keeps_the_least_deviation():
    fitted = fit_by_em(torch.ones(1, 4, 2), components=1, iterations=3)
    torch.testing.assert_close(fitted.deviations, torch.full((1, 1, 2), MIN_DEVIATION))
