"""Mixtures of axis-aligned Gaussians: log-likelihood, and expectation maximization (EM)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

MIN_DEVIATION = 1e-3  # keeps a component on a single point from an infinite likelihood
_HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)


class GaussianMixture(NamedTuple):
    r"""A batch of mixtures of K Gaussians with diagonal covariances in d dimensions.

    .. math:: p(x) = \sum_k \pi_k \prod_i \mathcal N(x_i; \mu_{ki}, \sigma_{ki}^2)
    """

    log_weights: Tensor  # (B, K), log of pi
    means: Tensor  # (B, K, d)
    deviations: Tensor  # (B, K, d), sigma

    @classmethod
    def from_outputs(cls, outputs: Tensor) -> GaussianMixture:
        """Return the mixtures that a network's outputs (B, K, 1 + 2 d) parametrize.

        Lee et al. (2019), section 5.3 and released code: a logit, a mean, and a deviation that is
        made positive by softplus.
        """
        outputs = outputs.float()
        width = (outputs.size(-1) - 1) // 2
        return cls(
            outputs[..., 0].log_softmax(dim=-1),
            outputs[..., 1 : 1 + width],
            F.softplus(outputs[..., 1 + width :]) + MIN_DEVIATION,
        )

    def component_log_probs(self, points: Tensor) -> Tensor:
        """Return log pi_k + log N_k of points (B, N, d): (B, N, K)."""
        scaled = (points.unsqueeze(2) - self.means.unsqueeze(1)) / self.deviations.unsqueeze(1)
        log_normal = -0.5 * scaled.square() - (self.deviations.log() + _HALF_LOG_TAU).unsqueeze(1)
        return log_normal.sum(dim=-1) + self.log_weights.unsqueeze(1)

    def log_prob(self, points: Tensor) -> Tensor:
        """Return the log-density of points (B, N, d): (B, N)."""
        return self.component_log_probs(points).logsumexp(dim=-1)

    def mean_log_likelihood(self, points: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the mean log-density over each set's points, real where the mask is True: (B,)."""
        log_probs = self.log_prob(points)
        if mask is None:
            return log_probs.mean(dim=1)
        return log_probs.masked_fill(~mask, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)

    def assign(self, points: Tensor) -> Tensor:
        """Return the most probable component of each point (B, N, d): (B, N)."""
        return self.component_log_probs(points).argmax(dim=-1)

    def em_step(self, points: Tensor, mask: Tensor | None = None) -> GaussianMixture:
        """Return the mixtures after one step of expectation maximization."""
        responsibilities = self.component_log_probs(points).softmax(dim=-1)  # (B, N, K)
        if mask is not None:
            responsibilities = responsibilities.masked_fill(~mask.unsqueeze(2), 0.0)
        counts = responsibilities.sum(dim=1).clamp(min=1e-6)  # (B, K)
        weights = (responsibilities / counts.unsqueeze(1)).transpose(1, 2)  # (B, K, N)
        means = weights @ points
        variances = weights @ points.square() - means.square()
        return GaussianMixture(
            (counts / counts.sum(dim=1, keepdim=True)).log(),
            means,
            variances.clamp(min=MIN_DEVIATION**2).sqrt(),
        )


def fit_by_em(
    points: Tensor,
    mask: Tensor | None = None,
    *,
    components: int,
    iterations: int = 100,
    restarts: int = 1,
    generator: torch.Generator | None = None,
) -> GaussianMixture:
    """Fit mixtures to sets of points (B, N, d) by EM; the best of several restarts of each set.

    The means start at points drawn far from each other, as in k-means++ (Arthur and Vassilvitskii
    2007).
    """
    best = None
    for _ in range(restarts):
        fitted = _initial_mixture(points, mask, components, generator)
        for _ in range(iterations):
            fitted = fitted.em_step(points, mask)
        if best is None:
            best = fitted
            continue
        better = fitted.mean_log_likelihood(points, mask) > best.mean_log_likelihood(points, mask)
        best = GaussianMixture(
            *(
                torch.where(better.view(-1, *[1] * (new.dim() - 1)), new, old)
                for new, old in zip(fitted, best, strict=True)
            )
        )
    assert best is not None, "EM needs at least one restart"
    return best


def _initial_mixture(
    points: Tensor, mask: Tensor | None, components: int, generator: torch.Generator | None
) -> GaussianMixture:
    """Return mixtures with k-means++ means, equal weights and the spread of each set."""
    real = points.new_ones(points.shape[:2]) if mask is None else mask.to(points.dtype)  # (B, N)
    rows = torch.arange(points.size(0), device=points.device)
    probabilities, chosen = real, list[Tensor]()
    for _ in range(components):
        index = torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
        chosen.append(points[rows, index])
        distance = torch.stack(
            [(points - mean.unsqueeze(1)).square().sum(dim=-1) for mean in chosen]
        ).amin(dim=0)
        probabilities = (distance + 1e-12) * real
    means = torch.stack(chosen, dim=1)
    count = real.sum(dim=1).clamp(min=1).view(-1, 1, 1)
    center = (points * real.unsqueeze(2)).sum(dim=1, keepdim=True) / count
    spread = ((points - center).square() * real.unsqueeze(2)).sum(dim=1, keepdim=True) / count
    deviations = (spread.sqrt() / components).clamp(min=MIN_DEVIATION).expand_as(means)
    log_weights = points.new_full(means.shape[:2], -math.log(components))
    return GaussianMixture(log_weights, means, deviations)
