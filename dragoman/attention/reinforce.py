"""Hard attention that learns from reward: REINFORCE."""

from __future__ import annotations

import torch
from torch import Tensor

from dragoman.attention.alignments import Alignment, AlignmentState, HardAlignment
from dragoman.errors import DragomanError
from dragoman.ops import masked_softmax


class ReinforceAlignment(Alignment):
    r"""Look at one key only, and learn from how well the sentence then went; after training the best key is chosen.

    .. math:: \nabla \approx \nabla \log p(y \mid s) + (\log p(y \mid s) - b) \nabla \log p(s) + \lambda \nabla H(p(s)), \quad s \sim p(s)

    Xu et al. (2015), stochastic "hard" attention, with the released code's settings (kelvinxu/arctic-captions, capgen.py): a baseline b
    that follows the log-likelihood by a tenth a batch, a little entropy, and half of the sentences trained with the expected weights.
    `hard` draws the same choices and takes the softmax's gradient for theirs: biased, but far less noisy.

    The reward is known only when the whole model has run: the block that attends leaves with `hold` how probable each row's
    choices were, and the task, which knows each row's log-likelihood, asks `policy_loss` for the term that waited for it.
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
                    f"{name} must be a share",
                    found=f"{name}={value}",
                    fix="give a number from 0 to 1",
                )
        self.entropy, self.soft_probability, self.baseline_decay = (
            entropy,
            soft_probability,
            baseline_decay,
        )
        self.register_buffer(
            "baseline", torch.zeros(())
        )  # b; saved with the weights, and a resumed run goes on with it
        self.stored_log_probs: Tensor | None = None

    def start(self, mask: Tensor) -> AlignmentState:
        """Begin a sentence; in training, draw whether it samples or takes the expected weights."""
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
        """Choose one key for one position; in training, remember how probable that was."""
        mask = state["mask"]
        probabilities = masked_softmax(scores, mask)
        if not self.training:
            return HardAlignment.one_hot_argmax(scores, mask, probabilities), state
        chosen = self.sample_keys(scores.detach(), mask)
        neg_log_probs = -probabilities.clamp_min(
            torch.finfo(probabilities.dtype).tiny
        ).log()  # (B, S)
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
        """Draw keys (B, S), one a row, by their shares."""
        return HardAlignment.one_hot_argmax(HardAlignment.add_gumbel_noise(scores), mask, scores)

    def step_loss(self, weights: Tensor, state: AlignmentState) -> Tensor | None:
        """Reward undecided weights a little, lest the choice be made before anything is known."""
        return -self.entropy * state["entropy"] if self.entropy else None

    def log_prob(self, state: AlignmentState) -> Tensor:
        """Give the logarithm of the last choice's probability (B,); nought where the expected weights were taken."""
        return state["log_prob"]

    def store_log_probs(self, log_probs: Tensor) -> None:
        """Keep how probable all choices of each row were, (B,) in logarithms, until the reward is known."""
        self.stored_log_probs = log_probs

    def discard_log_probs(self) -> None:
        """Drop choices that were never rewarded: those of a pass that failed before its loss."""
        self.stored_log_probs = None

    def policy_loss(self, reward: Tensor) -> Tensor:
        """Sum over the rows what makes rewarded choices more probable; `reward` is each row's log-likelihood, (B,).

        Zero where no choices were made, as in a layer that layer drop left out: it has no part in the reward.
        """
        if self.stored_log_probs is None:
            return reward.new_zeros(())
        stored_log_probs, self.stored_log_probs = self.stored_log_probs, None
        reward = reward.detach().to(self.baseline.dtype)
        # Before the first batch nothing is known, and its own mean is the best guess.
        baseline = torch.where(self.baseline.eq(0), reward.mean(), self.baseline)
        with torch.no_grad():
            self.baseline.copy_(
                self.baseline_decay * baseline + (1 - self.baseline_decay) * reward.mean()
            )
        return -((reward - baseline) * stored_log_probs).sum()
