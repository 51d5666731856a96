r"""Output layers of taggers: a linear-chain conditional random field, and independent softmaxes.

Both take emissions (B, T, K), the scores of K tags at each position, and a mask (B, T) that is
True at real tokens, or None without padding; padding comes last and every row has a token. Both
compute in float32 or wider, also under autocast.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dragoman.layers.rnn import last_state, reverse_padded
from dragoman.ops import IGNORE_INDEX

# Added to the score of a forbidden transition. Finite, so that a sentence for which every sequence
# is forbidden is still tagged, by the sequence with the fewest violations.
FORBIDDEN_SCORE = -1e5


class AllowedTransitions(NamedTuple):
    """Which tags may start a sentence, follow each other and end it; all boolean."""

    start: Tensor  # (K,)
    transitions: Tensor  # (K, K), from row to column
    end: Tensor  # (K,)


class TagOutput(nn.Module):
    """Base class: a distribution over tag sequences, given emissions."""

    def __init__(self, tags: int) -> None:
        super().__init__()
        self.tags = tags  # K

    def nll(
        self, emissions: Tensor, tags: Tensor, mask: Tensor | None, *, smoothing: float = 0.0
    ) -> TagLoss:
        """Return the negative log-likelihood of tags (B, T), summed over the batch."""
        raise NotImplementedError

    def marginals(self, emissions: Tensor, mask: Tensor | None) -> Tensor:
        """Return the probability of each tag at each position, (B, T, K); zero at padding."""
        raise NotImplementedError

    def log_marginals(self, emissions: Tensor, mask: Tensor | None) -> Tensor:
        """Return the logarithms (B, T, K) of `marginals`, with gradients; padding means nothing."""
        raise NotImplementedError

    def scores(self, emissions: Tensor) -> TransitionScores:
        """Return the scores of a start, a transition and an end, in the emissions' wide dtype."""
        raise NotImplementedError

    @torch.no_grad()
    def decode(
        self, emissions: Tensor, mask: Tensor | None, allowed: AllowedTransitions | None = None
    ) -> Tensor:
        """Return the best tag sequences (B, T), by the Viterbi algorithm; zero at padding."""
        scores = self.scores(emissions)
        if allowed is not None:
            scores = TransitionScores(
                *(
                    part.masked_fill(~may.to(part.device), FORBIDDEN_SCORE)
                    for part, may in zip(scores, allowed, strict=True)
                )
            )
        return viterbi(emissions.to(_wide(emissions)), mask, scores)


class TransitionScores(NamedTuple):
    """Scores of the first tag, of each tag after another, and of the last tag."""

    start: Tensor  # (K,)
    transitions: Tensor  # (K, K), from row to column
    end: Tensor  # (K,)


class TagLoss(NamedTuple):
    """Training objective and negative log-likelihood, summed over a batch; equal if unsmoothed."""

    total: Tensor  # ()
    nll: Tensor  # ()


class LinearChainCRF(TagOutput):
    r"""Linear-chain conditional random field: Lafferty, McCallum and Pereira (2001).

    .. math:: \log p(y \mid x) = a_{y_1} + \sum_t e_{t y_t} + \sum_t A_{y_{t-1} y_t} + z_{y_T}
        - \log Z(x)

    As the output of a neural tagger: Collobert et al. (2011), Huang, Xu and Yu (2015).
    """

    def __init__(self, tags: int) -> None:
        super().__init__(tags)
        self.start = nn.Parameter(torch.empty(tags))  # a
        self.transitions = nn.Parameter(torch.empty(tags, tags))  # A
        self.end = nn.Parameter(torch.empty(tags))  # z
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)

    def scores(self, emissions: Tensor) -> TransitionScores:
        """Return the learned scores."""
        dtype = _wide(emissions)
        return TransitionScores(
            self.start.to(dtype), self.transitions.to(dtype), self.end.to(dtype)
        )

    def nll(
        self, emissions: Tensor, tags: Tensor, mask: Tensor | None, *, smoothing: float = 0.0
    ) -> TagLoss:
        """Return log Z less the score of tags (B, T), summed; the loss is never smoothed."""
        scores = self.scores(emissions)
        emissions = emissions.to(_wide(emissions))
        partition = log_partition(emissions, mask, scores)
        nll = (partition - sequence_score(emissions, tags, mask, scores)).sum()
        return TagLoss(nll, nll.detach())

    @torch.no_grad()
    def marginals(self, emissions: Tensor, mask: Tensor | None) -> Tensor:
        """Return the marginal probabilities (B, T, K), by the forward-backward algorithm."""
        scores = self.scores(emissions)
        emissions = emissions.to(_wide(emissions))
        chains = _run_chains(emissions, mask, scores, directions=2)
        return _node_marginals(emissions, mask, chains)

    def log_marginals(self, emissions: Tensor, mask: Tensor | None) -> Tensor:
        """Return the logarithms of the marginal probabilities, with gradients."""
        scores = self.scores(emissions)
        emissions = emissions.to(_wide(emissions))
        chains = _run_chains(emissions, mask, scores, directions=2)
        return (chains[0] + chains[1] - emissions).log_softmax(dim=-1)


class TokenSoftmax(TagOutput):
    """A softmax at each position, independent of the others: a tagger without a CRF."""

    def scores(self, emissions: Tensor) -> TransitionScores:
        """Return zeros: all transitions are equally good."""
        zeros = emissions.new_zeros(self.tags, self.tags, dtype=_wide(emissions))
        return TransitionScores(zeros[0], zeros, zeros[0])

    def nll(
        self, emissions: Tensor, tags: Tensor, mask: Tensor | None, *, smoothing: float = 0.0
    ) -> TagLoss:
        """Return the cross-entropy of tags (B, T), summed, with label smoothing."""
        return token_cross_entropy(emissions, tags, mask, smoothing=smoothing)

    def marginals(self, emissions: Tensor, mask: Tensor | None) -> Tensor:
        """Return the softmax of the emissions, (B, T, K)."""
        return _zero_padding(emissions.to(_wide(emissions)).softmax(dim=-1), mask)

    def log_marginals(self, emissions: Tensor, mask: Tensor | None) -> Tensor:
        """Return the log-softmax of the emissions, (B, T, K)."""
        return emissions.to(_wide(emissions)).log_softmax(dim=-1)


def token_cross_entropy(
    logits: Tensor, tags: Tensor, mask: Tensor | None, *, smoothing: float = 0.0
) -> TagLoss:
    """Return the cross-entropy of tags (B, T) under logits (B, T, K), summed over real tokens."""
    targets = tags if mask is None else tags.masked_fill(~mask, IGNORE_INDEX)
    flat = logits.to(_wide(logits)).flatten(0, 1)
    loss = nn.functional.cross_entropy
    nll = loss(flat, targets.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)
    if not smoothing:
        return TagLoss(nll, nll.detach())
    smoothed = loss(
        flat,
        targets.flatten(),
        reduction="sum",
        ignore_index=IGNORE_INDEX,
        label_smoothing=smoothing,
    )
    return TagLoss(smoothed, nll.detach())


def sequence_score(
    emissions: Tensor, tags: Tensor, mask: Tensor | None, scores: TransitionScores
) -> Tensor:
    """Return the unnormalized log-probability (B,) of tag sequences (B, T)."""
    rows, length, count = emissions.shape
    emitted = emissions.gather(2, tags.unsqueeze(2)).squeeze(2)  # (B, T)
    pairs = (tags[:, :-1] * count + tags[:, 1:]).flatten()
    moved = scores.transitions.flatten().index_select(0, pairs).view(rows, length - 1)
    if mask is None:
        last = tags[:, -1]
    else:
        emitted = emitted.masked_fill(~mask, 0.0)
        moved = moved.masked_fill(~mask[:, 1:], 0.0)
        last = tags.gather(1, (mask.sum(dim=1, keepdim=True) - 1)).squeeze(1)
    ends = scores.start.index_select(0, tags[:, 0]) + scores.end.index_select(0, last)
    return emitted.sum(dim=1) + moved.sum(dim=1) + ends


def log_partition(emissions: Tensor, mask: Tensor | None, scores: TransitionScores) -> Tensor:
    r"""Return log Z (B,): the log-sum-exp of the scores of all tag sequences.

    The forward algorithm. Its gradient with respect to an emission is the marginal probability of
    that tag, and the forward and backward recursions run side by side in one loop over T: half as
    many kernel launches as differentiating the loop, and nothing but the marginals is saved.
    """
    result: Tensor = _LogPartition.apply(emissions, mask, *scores)  # type: ignore[no-untyped-call]
    return result


class _LogPartition(torch.autograd.Function):
    """log Z with its gradient in closed form: node and edge marginals."""

    @staticmethod
    def forward(
        ctx: Any,
        emissions: Tensor,
        mask: Tensor | None,
        start: Tensor,
        transitions: Tensor,
        end: Tensor,
    ) -> Tensor:
        """Run the recursions; save the inputs of the marginals if a gradient is needed."""
        scores = TransitionScores(start, transitions, end)
        trains = any(ctx.needs_input_grad)
        chains = _run_chains(emissions, mask, scores, directions=2 if trains else 1)
        if trains:
            ctx.has_mask = mask is not None
            kept = () if mask is None else (mask,)
            ctx.save_for_backward(emissions, transitions, end, chains, *kept)
        return torch.logsumexp(_final_scores(chains[0], mask, end), dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the marginals, weighted by the gradient (B,) of each row."""
        emissions, transitions, end, chains, *kept = ctx.saved_tensors
        mask = kept[0] if ctx.has_mask else None
        forward, backward = chains  # (B, T, K) each
        rows = grad[:, None, None]  # (B, 1, 1)
        nodes = _node_marginals(emissions, mask, chains) * rows
        # Edge t: tag i at t, tag j at t + 1. The edges' sum over b and t is the gradient of A.
        edges = forward[:, :-1, :, None] + transitions + backward[:, 1:, None, :]
        edges = edges.flatten(2).softmax(dim=-1)  # (B, T - 1, K K)
        weight = rows if mask is None else rows * mask[:, 1:, None]
        edges = (edges * weight).sum(dim=(0, 1)).view_as(transitions)
        last = _final_scores(forward, mask, end).softmax(dim=-1) * grad.unsqueeze(1)
        return nodes, None, nodes[:, 0].sum(dim=0), edges, last.sum(dim=0)


def _run_chains(
    emissions: Tensor, mask: Tensor | None, scores: TransitionScores, *, directions: int
) -> Tensor:
    r"""Return the forward log-scores, and with two directions the backward ones: (2, B, T, K).

    .. math:: \alpha_{tj} = e_{tj} + \log \sum_i \exp(\alpha_{t-1, i} + A_{ij}), \quad
        \gamma_{ti} = e_{ti} + \log \sum_j \exp(A_{ij} + \gamma_{t+1, j})

    Both include the emission of their own position. The second is the first over the reversed
    sentence with transposed transitions. Scores of padding are finite and mean nothing.
    """
    start, transitions, end = scores
    if directions == 2:
        inputs = torch.stack([emissions, reverse_padded(emissions, mask)])  # (2, B, T, K)
        first = torch.stack([start, end]).unsqueeze(1)  # (2, 1, K)
        # [.., j, i]: into row j from column i, so that the sum is over the last, contiguous axis.
        into = torch.stack([transitions.t(), transitions]).unsqueeze(1)  # (2, 1, K, K)
    else:
        inputs, first, into = emissions.unsqueeze(0), start, transitions.t()
    state = first + inputs[:, :, 0]  # (2, B, K)
    states = [state]
    for position in range(1, emissions.size(1)):
        moved = into + state.unsqueeze(2)  # (2, B, K, K)
        # log-sum-exp as x - log_softmax(x), of any element x: one kernel instead of nine
        total = moved[..., 0] - moved.log_softmax(dim=-1)[..., 0]
        state = total + inputs[:, :, position]
        states.append(state)
    chains = torch.stack(states, dim=2)  # (2, B, T, K)
    if directions == 2:
        chains = torch.stack([chains[0], reverse_padded(chains[1], mask)])
    return chains


def _final_scores(forward: Tensor, mask: Tensor | None, end: Tensor) -> Tensor:
    """Return the scores (B, K) of sentences by their last tag, from forward scores (B, T, K)."""
    return last_state(forward, mask) + end


def _node_marginals(emissions: Tensor, mask: Tensor | None, chains: Tensor) -> Tensor:
    """Return the marginal probabilities (B, T, K); zero at padding."""
    joint = chains[0] + chains[1] - emissions  # each chain has the position's own emission
    # The sum over tags is Z at every position: a softmax needs no log Z, whose rounding error in a
    # long sentence would be the same for all tags.
    return _zero_padding(joint.softmax(dim=-1), mask)


def viterbi(emissions: Tensor, mask: Tensor | None, scores: TransitionScores) -> Tensor:
    """Return the tag sequences (B, T) with the highest scores; zero at padding."""
    rows, length, count = emissions.shape
    stay = torch.arange(count, device=emissions.device).expand(rows, count)
    into = scores.transitions.t()  # [j, i]: from i to j
    state = scores.start + emissions[:, 0]  # (B, K)
    pointers = []  # of positions 1 to T - 1: (B, K) each
    for position in range(1, length):
        best, previous = (into + state.unsqueeze(1)).max(dim=-1)  # (B, K)
        after = best + emissions[:, position]
        if mask is not None:
            real = mask[:, position, None]
            after = torch.where(real, after, state)
            previous = torch.where(real, previous, stay)
        state = after
        pointers.append(previous)
    tags = [(state + scores.end).argmax(dim=-1, keepdim=True)]  # (B, 1)
    for previous in reversed(pointers):
        tags.append(previous.gather(1, tags[-1]))
    sequences = torch.cat(tags[::-1], dim=1)
    return sequences if mask is None else sequences.masked_fill(~mask, 0)


def _zero_padding(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return values (B, T, K) with zeros at padding."""
    return values if mask is None else values.masked_fill(~mask.unsqueeze(2), 0.0)


def _wide(tensor: Tensor) -> torch.dtype:
    """Return float32 for narrower dtypes, the tensor's dtype otherwise."""
    return torch.promote_types(tensor.dtype, torch.float32)
