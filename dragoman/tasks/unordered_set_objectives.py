"""Objectives of set models: regression, classification, counting, clustering."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.tasks.gaussian_mixture_likelihood_and_em import GaussianMixture

Metrics = dict[str, Tensor]  # (B,) of each set; a data set's metric is the mean


class SetObjective(ABC):
    """Loss, metrics and predictions for the outputs of a model of sets."""

    outputs: int = 1  # numbers in a row of the model's output
    vectors: int = 1  # rows of the model's output
    images: ClassVar[bool] = False  # whether elements are images

    @abstractmethod
    def losses(self, outputs: Tensor, targets: Tensor, elements: Tensor, mask: Tensor) -> Tensor:
        """Return the loss (B,) of each set."""

    @abstractmethod
    def metrics(self, outputs: Tensor, targets: Tensor, elements: Tensor, mask: Tensor) -> Metrics:
        """Return the metrics (B,) of each set."""

    @abstractmethod
    def predictions(self, outputs: Tensor, elements: Tensor, mask: Tensor) -> list[dict[str, Any]]:
        """Return the prediction for each set, as JSON values."""


class Regression(SetObjective):
    """A number; the model predicts it with the mean and deviation of the training targets."""

    def __init__(self, *, squared: bool, shift: float, scale: float) -> None:
        self.squared, self.shift, self.scale = squared, shift, scale

    def losses(self, outputs: Tensor, targets: Tensor, elements: Tensor, mask: Tensor) -> Tensor:
        """Return the absolute or squared error in deviations of the training targets."""
        error = outputs.float().squeeze(1) - (targets - self.shift) / self.scale
        return error.square() if self.squared else error.abs()

    def metrics(self, outputs: Tensor, targets: Tensor, elements: Tensor, mask: Tensor) -> Metrics:
        """Return the absolute and the squared error."""
        error = self.values(outputs) - targets
        return {"mae": error.abs(), "mse": error.square()}

    def values(self, outputs: Tensor) -> Tensor:
        """Return the predicted numbers (B,)."""
        return outputs.float().squeeze(1) * self.scale + self.shift

    def predictions(self, outputs: Tensor, elements: Tensor, mask: Tensor) -> list[dict[str, Any]]:
        """Return the predicted numbers."""
        return [{"value": value} for value in self.values(outputs).tolist()]


class SetClassification(SetObjective):
    """One of several labels, by cross-entropy."""

    def __init__(self, labels: tuple[str, ...]) -> None:
        self.labels, self.outputs = labels, len(labels)

    def losses(self, outputs: Tensor, targets: Tensor, elements: Tensor, mask: Tensor) -> Tensor:
        """Return the negative log-likelihood of the labels."""
        return F.cross_entropy(outputs.float(), targets.long(), reduction="none")

    def metrics(self, outputs: Tensor, targets: Tensor, elements: Tensor, mask: Tensor) -> Metrics:
        """Return whether the most probable label is right."""
        return {"accuracy": (outputs.argmax(dim=1) == targets.long()).float()}

    def predictions(self, outputs: Tensor, elements: Tensor, mask: Tensor) -> list[dict[str, Any]]:
        """Return the most probable label, and the probabilities of all."""
        rows = outputs.float().softmax(dim=1).tolist()
        return [
            {
                "label": self.labels[max(range(len(row)), key=row.__getitem__)],
                "probabilities": dict(zip(self.labels, row, strict=True)),
            }
            for row in rows
        ]


class Counting(SetObjective):
    r"""A count, by Poisson regression: Lee et al. (2019), section 5.2.

    .. math:: -\log p(y) = \lambda - y \log \lambda + \log y!

    The prediction is the integer nearest to the rate. The paper takes the distribution's mode,
    the rate rounded down, which a rate of 4.99 brings to 4.
    """

    images = True

    def losses(self, outputs: Tensor, targets: Tensor, elements: Tensor, mask: Tensor) -> Tensor:
        """Return the negative log-likelihood of the counts."""
        rate = self.rates(outputs)
        return rate - targets * rate.log() + torch.lgamma(targets + 1)

    def metrics(self, outputs: Tensor, targets: Tensor, elements: Tensor, mask: Tensor) -> Metrics:
        """Return whether the count is right, and the rate's absolute error."""
        rate = self.rates(outputs)
        return {"accuracy": (rate.round() == targets).float(), "mae": (rate - targets).abs()}

    def rates(self, outputs: Tensor) -> Tensor:
        """Return the Poisson rates (B,)."""
        return F.softplus(outputs.float().squeeze(1)) + 1e-6

    def predictions(self, outputs: Tensor, elements: Tensor, mask: Tensor) -> list[dict[str, Any]]:
        """Return counts and rates."""
        return [{"count": round(rate), "rate": rate} for rate in self.rates(outputs).tolist()]


class Clustering(SetObjective):
    """A mixture of Gaussians, by the likelihood of the points: Lee et al. (2019), section 5.3."""

    def __init__(self, *, components: int, features: int) -> None:
        self.vectors, self.outputs = components, 1 + 2 * features

    def losses(self, outputs: Tensor, targets: Tensor, elements: Tensor, mask: Tensor) -> Tensor:
        """Return the negative mean log-likelihood of each set's points."""
        return -self.mixture(outputs).mean_log_likelihood(elements, mask)

    def mixture(self, outputs: Tensor) -> GaussianMixture:
        """Return the predicted mixtures of outputs (B, K, 1 + 2 d)."""
        return GaussianMixture.from_outputs(outputs.view(-1, self.vectors, self.outputs))

    def metrics(self, outputs: Tensor, targets: Tensor, elements: Tensor, mask: Tensor) -> Metrics:
        """Return the mean log-likelihood per point, after one step of EM, and that of the oracle.

        The oracle knows the parameters (B, K, 1 + 2 d) that the points were drawn from.
        """
        found = self.mixture(outputs)
        likelihood = found.mean_log_likelihood(elements, mask)
        refined = found.em_step(elements, mask).mean_log_likelihood(elements, mask)
        metrics = {"log_likelihood": likelihood, "log_likelihood_em": refined}
        if targets.dim() < 3:  # sets of a file, whose parameters are unknown
            return metrics
        width = elements.size(2)
        oracle = GaussianMixture(
            targets[..., 0], targets[..., 1 : 1 + width], targets[..., 1 + width :]
        ).mean_log_likelihood(elements, mask)
        return {
            **metrics,
            "log_likelihood_oracle": oracle,
            "log_likelihood_gap": oracle - likelihood,
        }

    def predictions(self, outputs: Tensor, elements: Tensor, mask: Tensor) -> list[dict[str, Any]]:
        """Return the components, and the component of each point."""
        found = self.mixture(outputs)
        clusters, sizes = found.assign(elements).tolist(), mask.sum(dim=1).tolist()
        rows = zip(
            found.log_weights.exp().tolist(),
            found.means.tolist(),
            found.deviations.tolist(),
            clusters,
            sizes,
            strict=True,
        )
        return [
            {
                "components": [
                    {"weight": weight, "mean": mean, "deviation": deviation}
                    for weight, mean, deviation in zip(weights, means, deviations, strict=True)
                ],
                "clusters": assigned[:size],
            }
            for weights, means, deviations, assigned, size in rows
        ]
