"""Hard attention trained with REINFORCE (Xu et al. 2015)."""

from __future__ import annotations

import torch
from torch import Tensor

from dragoman.attention.softmax_and_gumbel_alignment import Alignment, AlignmentState, HardAlignment
from dragoman.errors import DragomanError
from dragoman.ops import masked_softmax


class ReinforceAlignment(Alignment):
    r"""Hard attention trained with REINFORCE: one sampled key in training, the best in evaluation.

    .. math:: \nabla \approx \nabla \log p(y \mid s) + (\log p(y \mid s) - b) \nabla \log p(s)
        + \lambda \nabla H(p(s)), \quad s \sim p(s)

    Xu et al. (2015), stochastic "hard" attention, with the settings of the released code
    (kelvinxu/arctic-captions, capgen.py): a baseline b that is a moving average of the
    log-likelihood, a small entropy term, and half of the sentences trained with the expected
    weights. `HardAlignment` samples the same keys with the softmax's gradient: biased, but far less
    noisy.

    The reward is known only after the forward pass: the block calls `store_log_probs` with the
    log-probability of each row's samples, and the task, which knows each row's log-likelihood,
    calls `policy_loss`.
    """

    has_loss = True
    is_discrete = True
    loss_name = "entropy"
    baseline: Tensor

    def __init__(
        self,
        *,
        query_width: int = 0,
        key_width: int = 0,
        score_width: int = 0,
        entropy: float = 0.002,
        soft_probability: float = 0.5,
        baseline_decay: float = 0.9,
    ) -> None:
        super().__init__(query_width=query_width, key_width=key_width, score_width=score_width)
        for name, value in (
            ("soft_probability", soft_probability),
            ("baseline_decay", baseline_decay),
        ):
            if not 0 <= value <= 1:
                raise DragomanError(
                    f"{name} must be from 0 to 1",
                    found=f"{name}={value}",
                    fix="use 0.5 or 0.9, as the released code does",
                )
        self.entropy, self.soft_probability, self.baseline_decay = (
            entropy,
            soft_probability,
            baseline_decay,
        )
        self.register_buffer("baseline", torch.zeros(()))  # b; saved with the weights
        self.stored_log_probs: Tensor | None = None

    def start(self, mask: Tensor) -> AlignmentState:
        """Return the initial state; in training, draw which sentences sample."""
        if not self.training:
            return {"mask": mask}
        return {
            "mask": mask,
            "samples": torch.rand(mask.size(0), device=mask.device) >= self.soft_probability,
        }

    def step(
        self,
        scores: Tensor,
        state: AlignmentState,
        query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Tensor, AlignmentState]:
        """Return the weights of one position; in training the state has their log-probability."""
        mask = state["mask"]
        probabilities = masked_softmax(scores, mask)
        if not self.training:
            return HardAlignment.one_hot_argmax(scores, mask, probabilities), state
        chosen = self.sample_keys(scores.detach(), mask)
        tiny = torch.finfo(probabilities.dtype).tiny
        neg_log_probs = -probabilities.clamp_min(tiny).log()  # (B, S)
        samples = state["samples"]
        log_prob = -(chosen * neg_log_probs).sum(dim=-1) * samples
        weights = torch.where(samples.unsqueeze(1), chosen, probabilities)
        return weights, {
            "mask": mask,
            "samples": samples,
            "log_prob": log_prob,
            "entropy": (probabilities * neg_log_probs).sum(dim=-1),
        }

    def sample_keys(self, scores: Tensor, mask: Tensor) -> Tensor:
        """Sample one key for each row from the softmax: one-hot (B, S)."""
        return HardAlignment.one_hot_argmax(HardAlignment.add_gumbel_noise(scores), mask, scores)

    def step_loss(self, weights: Tensor, state: AlignmentState) -> Tensor | None:
        """Return the entropy term, which keeps the distribution from collapsing early."""
        return -self.entropy * state["entropy"] if self.entropy else None

    def log_prob(self, state: AlignmentState) -> Tensor:
        """Return the log-probability of the last sample (B,); zero where nothing was sampled."""
        return state["log_prob"]

    def store_log_probs(self, log_probs: Tensor) -> None:
        """Store the summed log-probability of each row's samples (B,) until the reward is known."""
        self.stored_log_probs = log_probs

    def discard_log_probs(self) -> None:
        """Drop the stored log-probabilities of a forward pass that failed before its loss."""
        self.stored_log_probs = None

    def policy_loss(self, reward: Tensor) -> Tensor:
        """Return the REINFORCE loss, summed over rows; `reward` (B,) is their log-likelihood.

        It is zero if nothing was sampled, as in a layer that layer drop skipped.
        """
        if self.stored_log_probs is None:
            return reward.new_zeros(())
        stored_log_probs, self.stored_log_probs = self.stored_log_probs, None
        reward = reward.detach().to(self.baseline.dtype)
        # The first batch starts the moving average with its own mean.
        baseline = torch.where(self.baseline.eq(0), reward.mean(), self.baseline)
        with torch.no_grad():
            self.baseline.copy_(
                self.baseline_decay * baseline + (1 - self.baseline_decay) * reward.mean()
            )
        return -((reward - baseline) * stored_log_probs).sum()
