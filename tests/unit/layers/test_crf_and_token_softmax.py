"""Tag outputs: the CRF against enumeration of all tag sequences, and the token softmax."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dragoman.layers.crf_and_token_softmax import (
    AllowedTransitions,
    LinearChainCRF,
    TagOutput,
    TokenSoftmax,
    TransitionScores,
    log_partition,
    viterbi,
)

OUTPUTS = (LinearChainCRF, TokenSoftmax)


def random_scores(tags: int, *, scale: float = 2.0) -> TransitionScores:
    """Draw scores in float64, with gradients."""
    return TransitionScores(
        *(
            (scale * torch.randn(*shape, dtype=torch.float64)).requires_grad_()
            for shape in ((tags,), (tags, tags), (tags,))
        )
    )


def enumerate_scores(emissions: Tensor, scores: TransitionScores) -> dict[tuple[int, ...], Tensor]:
    """Return the score of every tag sequence of one sentence (T, K)."""
    found = {}
    for tags in itertools.product(range(emissions.size(1)), repeat=len(emissions)):
        total = scores.start[tags[0]] + scores.end[tags[-1]]
        total = total + sum(emissions[at, tag] for at, tag in enumerate(tags))
        found[tags] = total + sum(scores.transitions[a, b] for a, b in itertools.pairwise(tags))
    return found


def random_batch(tags: int, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Return emissions (B, T, K) in float64, and their mask."""
    emissions = 3 * torch.randn(len(lengths), max(lengths), tags, dtype=torch.float64)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    return emissions.requires_grad_(), mask


@pytest.mark.parametrize("tags", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_log_partition_its_gradients_and_viterbi_equal_enumeration(tags: int, seed: int) -> None:
    torch.manual_seed(100 * tags + seed)
    lengths = [int(each) for each in torch.randint(1, 6, (4,))]
    emissions, mask = random_batch(tags, lengths)
    scores = random_scores(tags)
    partition = log_partition(emissions, mask, scores)
    expected, best = [], []
    for row, length in enumerate(lengths):
        all_scores = enumerate_scores(emissions[row, :length], scores)
        expected.append(torch.logsumexp(torch.stack(list(all_scores.values())), dim=0))
        best.append(max(all_scores, key=lambda each: float(all_scores[each].detach())))
    torch.testing.assert_close(partition, torch.stack(expected))
    weights = torch.randn(len(lengths), dtype=torch.float64)
    ours = torch.autograd.grad((partition * weights).sum(), (emissions, *scores))
    theirs = torch.autograd.grad((torch.stack(expected) * weights).sum(), (emissions, *scores))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
    found = viterbi(emissions.detach(), mask, TransitionScores(*(s.detach() for s in scores)))
    for row, length in enumerate(lengths):
        assert tuple(found[row, :length].tolist()) == best[row]
        assert not found[row, length:].any()


def test_without_a_mask_every_position_is_real() -> None:
    torch.manual_seed(1)
    emissions, mask = random_batch(3, [4, 4])
    scores = random_scores(3)
    assert mask.all()
    for function in (log_partition, viterbi):
        torch.testing.assert_close(
            function(emissions, None, scores), function(emissions, mask, scores)
        )
    crf = LinearChainCRF(3).double()
    tags = torch.randint(3, (2, 4))
    torch.testing.assert_close(
        crf.nll(emissions, tags, None).nll, crf.nll(emissions, tags, mask).nll
    )
    torch.testing.assert_close(crf.marginals(emissions, None), crf.marginals(emissions, mask))


def test_gradcheck_of_the_log_partition() -> None:
    torch.manual_seed(2)
    emissions, mask = random_batch(3, [5, 2, 1])
    scores = random_scores(3)
    assert torch.autograd.gradcheck(
        lambda emissions, *parts: log_partition(emissions, mask, TransitionScores(*parts)),
        (emissions, *scores),
    )


def test_probabilities_of_all_sequences_sum_to_one_and_give_the_marginals() -> None:
    torch.manual_seed(3)
    crf = LinearChainCRF(3).double()
    emissions = torch.randn(1, 4, 3, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    marginals = torch.zeros(4, 3, dtype=torch.float64)
    for tags in itertools.product(range(3), repeat=4):
        probability = (-crf.nll(emissions, torch.tensor([tags]), None).nll).exp()
        total += probability
        marginals[torch.arange(4), torch.tensor(tags)] += probability
    torch.testing.assert_close(total, torch.ones((), dtype=torch.float64))
    torch.testing.assert_close(crf.marginals(emissions, None)[0], marginals)


@pytest.mark.parametrize("kind", OUTPUTS)
def test_padding_and_other_rows_change_nothing(kind: type[TagOutput]) -> None:
    torch.manual_seed(4)
    output = kind(4).double()
    emissions, mask = random_batch(4, [5, 3])
    tags = torch.randint(4, (2, 5))
    alone, own = emissions[1:, :3].detach(), tags[1:, :3]
    loss = output.nll(emissions[1:].detach(), tags[1:], mask[1:]).nll
    torch.testing.assert_close(loss, output.nll(alone, own, None).nll)
    together = output.nll(emissions.detach(), tags, mask).nll
    first = output.nll(emissions[:1].detach(), tags[:1], None).nll
    torch.testing.assert_close(together, loss + first)
    for function in (output.marginals, output.decode):
        both = function(emissions.detach(), mask)
        torch.testing.assert_close(both[1, :3], function(alone, None)[0])
        assert not both[1, 3:].any()


@pytest.mark.parametrize("kind", OUTPUTS)
def test_decoding_obeys_the_allowed_transitions(kind: type[TagOutput]) -> None:
    torch.manual_seed(5)
    output = kind(3)
    start, end = torch.tensor([True, False, True]), torch.tensor([True, True, False])
    transitions = torch.tensor([[True, False, True], [True, True, False], [False, True, True]])
    allowed = AllowedTransitions(start, transitions, end)
    emissions = 5 * torch.randn(20, 6, 3)
    mask = torch.arange(6) < torch.randint(2, 7, (20, 1))
    decoded = output.decode(emissions, mask, allowed)
    for tags, real in zip(decoded.tolist(), mask, strict=True):
        tags = tags[: int(real.sum())]
        assert start[tags[0]]
        assert end[tags[-1]]
        assert all(transitions[a, b] for a, b in itertools.pairwise(tags))
    free = output.decode(emissions, mask)
    assert not torch.equal(free, decoded)


def test_a_sentence_without_an_allowed_sequence_is_tagged_anyway() -> None:
    none = AllowedTransitions(
        *(torch.zeros(*shape, dtype=torch.bool) for shape in ((2,), (2, 2), (2,)))
    )
    emissions = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    assert TokenSoftmax(2).decode(emissions, None, none).tolist() == [[1, 0]]


def test_extreme_scores_stay_finite_and_exact() -> None:
    """Transitions a hundred nats apart, which probabilities in float32 would lose."""
    torch.manual_seed(6)
    emissions = (60 * torch.randn(3, 7, 4)).double().requires_grad_()
    scores = random_scores(4, scale=80.0)
    mask = torch.arange(7) < torch.tensor([[7], [3], [1]])
    wide = log_partition(emissions, mask, scores)
    narrow_scores = TransitionScores(*(part.detach().float().requires_grad_() for part in scores))
    narrow_emissions = emissions.detach().float().requires_grad_()
    narrow = log_partition(narrow_emissions, mask, narrow_scores)
    torch.testing.assert_close(narrow.double(), wide, rtol=1e-6, atol=1e-4)
    narrow.sum().backward()
    assert narrow_emissions.grad is not None
    sums = narrow_emissions.grad.sum(dim=-1)  # of each position's marginals
    torch.testing.assert_close(sums, mask.float())
    assert narrow_scores.transitions.grad is not None
    moves = narrow_scores.transitions.grad.sum()  # six in the first row, two in the second
    torch.testing.assert_close(moves, torch.tensor(8.0))


def test_marginals_of_a_long_sentence_are_accurate_in_float32() -> None:
    """The log-scores grow to thousands, where float32 has a resolution of 2e-4."""
    torch.manual_seed(9)
    crf = LinearChainCRF(5)
    emissions = 5 * torch.randn(1, 1500, 5)
    wide = crf.double().marginals(emissions.double(), None)
    narrow = crf.float().marginals(emissions, None)
    torch.testing.assert_close(narrow.double(), wide, atol=2e-3, rtol=0)
    torch.testing.assert_close(narrow.sum(dim=-1), torch.ones(1, 1500))


def test_the_crf_computes_in_float32_under_autocast() -> None:
    torch.manual_seed(7)
    crf = LinearChainCRF(4)
    emissions, tags = torch.randn(2, 5, 4).bfloat16(), torch.randint(4, (2, 5))
    with torch.autocast("cpu", torch.bfloat16):
        loss = crf.nll(emissions, tags, None)
        loss.total.backward()
    assert loss.total.dtype == torch.float32
    expected = crf.nll(emissions.float(), tags, None).total
    torch.testing.assert_close(loss.total, expected)


def test_token_softmax_is_the_cross_entropy_of_torch() -> None:
    torch.manual_seed(8)
    emissions, mask = random_batch(4, [3, 1])
    tags = torch.randint(4, (2, 3))
    output = TokenSoftmax(4)
    expected = -emissions.log_softmax(-1).gather(2, tags.unsqueeze(2)).squeeze(2)[mask].sum()
    torch.testing.assert_close(output.nll(emissions, tags, mask).total, expected)
    smoothed = output.nll(emissions, tags, mask, smoothing=0.2)
    torch.testing.assert_close(smoothed.nll, expected.detach())
    uniform = -emissions.log_softmax(-1).mean(-1)[mask].sum()
    torch.testing.assert_close(smoothed.total, 0.8 * expected + 0.2 * uniform)


@pytest.mark.parametrize("output", OUTPUTS)
def test_log_marginals_are_the_logarithms_of_marginals_and_have_gradients(output: type) -> None:
    torch.manual_seed(4)
    tag_output = output(3).double()
    emissions, mask = random_batch(3, [4, 2])
    log_marginals = tag_output.log_marginals(emissions, mask)
    expected = tag_output.marginals(emissions, mask)
    torch.testing.assert_close(log_marginals.exp()[mask], expected[mask])
    assert torch.autograd.gradcheck(
        lambda each: tag_output.log_marginals(each, mask)[mask], (emissions,)
    )


def test_transitions_start_small_and_different() -> None:
    torch.manual_seed(0)
    crf = LinearChainCRF(30)
    assert all(parameter.abs().max() <= 0.1 for parameter in crf.parameters())
    assert crf.transitions.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.1)
