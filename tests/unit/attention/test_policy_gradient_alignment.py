"""Hard attention by REINFORCE, and auxiliary losses of alignments: against enumeration, in the task
and in the trainer.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.attention.attention_weight_hooks import record
from dragoman.attention.location_and_coverage import CoverageAlignment, coverage_loss
from dragoman.attention.policy_gradient_alignment import ReinforceAlignment
from dragoman.config import ModelConfig
from dragoman.data.collate import Batch
from dragoman.errors import DragomanError
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model
from dragoman.tasks.translation import TranslationTask

SOURCE, TARGET = 3, 2


def build(decoder: str) -> EncoderDecoder:
    torch.manual_seed(0)
    config = ModelConfig(
        encoder=("bigru(residual_connection=false)",),
        decoder=(decoder,),
        width=4,
        heads=1,
        positions="none",
        tie_embeddings="none",
        dropout=0.0,
    )
    return build_model(config, src_vocab_size=9, tgt_vocab_size=9).double()


def batch(rows: int = 2) -> Batch:
    """Return two pairs, the second shorter on both sides, or the first alone."""
    sizes = np.array([[SOURCE, TARGET], [SOURCE - 1, TARGET - 1]])[:rows]
    return Batch(
        src=torch.tensor([[4, 5, 6], [7, 8, 0]])[:rows],
        src_lengths=torch.from_numpy(sizes[:, 0]),
        tgt_in=torch.tensor([[1, 7], [1, 0]])[:rows],
        tgt_out=torch.tensor([[7, 8], [5, 0]])[:rows],
        tgt_lengths=torch.from_numpy(sizes[:, 1]),
        examples=np.arange(rows),
        sizes=sizes,
    )


def alignment_of(model: EncoderDecoder) -> ReinforceAlignment:
    (found,) = model.reinforce_alignments()
    return found


def gradients(loss: Tensor, model: EncoderDecoder) -> list[Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [
        torch.zeros_like(weight) if each is None else each
        for weight, each in zip(model.parameters(), found, strict=True)
    ]


def test_the_estimators_mean_is_the_gradient_of_the_expected_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over all choices of one sentence, weighed by their probabilities; whatever the baseline
    is.
    """
    model = build("lstm(attention=reinforce, decoder=bahdanau, residual_connection=false)").train()
    alignment = alignment_of(model)
    alignment.soft_probability, alignment.entropy = 0.0, 0.0
    task = TranslationTask(smoothing=0.0)
    one = batch(1)
    held: list[Tensor] = []
    monkeypatch.setattr(
        alignment,
        "store_log_probs",
        lambda chances: (
            held.append(chances),
            ReinforceAlignment.store_log_probs(alignment, chances),
        ),
    )

    def force(choices: tuple[int, ...]) -> None:
        drawn = iter(F.one_hot(torch.tensor(choices), SOURCE).double())
        monkeypatch.setattr(alignment, "sample_keys", lambda scores, mask: next(drawn).unsqueeze(0))
        alignment.baseline.fill_(-1.7)

    estimated = [torch.zeros_like(weight) for weight in model.parameters()]
    expected_loss = torch.zeros((), dtype=torch.float64)
    for choices in itertools.product(range(SOURCE), repeat=TARGET):
        force(choices)
        loss = task.loss(model, one)
        probability = held.pop().exp().squeeze()
        for sum_, each in zip(estimated, gradients(loss.total, model), strict=True):
            sum_ += probability.detach() * each
        force(
            choices
        )  # from the definition: the probability of these choices times how bad they are
        logits = model(one.src, one.tgt_in)
        nll = F.cross_entropy(logits.flatten(0, 1), one.tgt_out.flatten(), reduction="sum")
        expected_loss = expected_loss + held.pop().exp().squeeze() * nll
    exact = gradients(expected_loss, model)
    assert max(each.abs().max() for each in exact) > 0.01
    for found, wanted in zip(estimated, exact, strict=True):
        torch.testing.assert_close(found, wanted)


def test_the_baseline_follows_the_reward_and_is_saved() -> None:
    alignment = ReinforceAlignment()
    alignment.store_log_probs(torch.tensor([-1.0, -2.0], requires_grad=True))
    loss = alignment.policy_loss(torch.tensor([-10.0, -6.0]))
    assert loss.item() == pytest.approx(
        -(-2 * -1 + 2 * -2)
    )  # the first batch's own mean, -8, is the baseline
    assert alignment.baseline.item() == pytest.approx(-8.0)
    alignment.store_log_probs(torch.zeros(1))
    alignment.policy_loss(torch.tensor([-3.0]))
    assert alignment.baseline.item() == pytest.approx(0.9 * -8 + 0.1 * -3)
    other = ReinforceAlignment()
    other.load_state_dict(alignment.state_dict())
    assert other.baseline.equal(alignment.baseline)


def test_rewards_are_the_rows_log_likelihoods_without_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("lstm(attention=reinforce, decoder=bahdanau, residual_connection=false)").train()
    alignment = alignment_of(model)
    alignment.soft_probability = 1.0  # nothing is drawn, so that a second pass gives the same
    seen: list[Tensor] = []
    monkeypatch.setattr(
        alignment, "policy_loss", lambda reward: (seen.append(reward), torch.zeros(()))[1]
    )
    pairs = batch()
    TranslationTask(smoothing=0.1).loss(model, pairs)
    log_probs = model(pairs.src, pairs.tgt_in, pairs.src_mask).log_softmax(-1)
    wanted = torch.stack([log_probs[0, 0, 7] + log_probs[0, 1, 8], log_probs[1, 0, 5]])
    torch.testing.assert_close(seen[0], wanted.float())


def test_choices_at_padding_add_nothing_to_the_log_probability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("lstm(attention=reinforce, decoder=bahdanau, residual_connection=false)").train()
    alignment = alignment_of(model)
    alignment.soft_probability = 0.0
    held: list[Tensor] = []
    monkeypatch.setattr(alignment, "store_log_probs", held.append)
    monkeypatch.setattr(alignment, "policy_loss", lambda reward: torch.zeros(()))
    monkeypatch.setattr(  # always the first key
        alignment,
        "sample_keys",
        lambda scores, mask: (torch.arange(scores.size(1)) == 0).to(scores).expand_as(scores),
    )
    pairs = batch()
    short = replace(
        pairs,
        src=pairs.src[1:, :2],
        src_lengths=pairs.src_lengths[1:],
        tgt_in=pairs.tgt_in[1:, :1],
        tgt_out=pairs.tgt_out[1:, :1],
        tgt_lengths=pairs.tgt_lengths[1:],
        examples=pairs.examples[1:],
        sizes=pairs.sizes[1:],
    )
    task = TranslationTask(smoothing=0.0)
    for each in (pairs, batch(1), short):
        task.loss(model, each)
    together, first, second = held
    assert (together < -0.1).all()
    torch.testing.assert_close(together, torch.cat([first, second]))


def test_half_of_the_rows_take_the_expected_weights_in_training() -> None:
    torch.manual_seed(0)
    alignment = ReinforceAlignment().train()
    scores = torch.randn(2000, 5)
    weights, state = alignment.step(scores, alignment.start(torch.ones(2000, 5, dtype=torch.bool)))
    sampled = (weights == 1).any(1)
    assert 0.45 < sampled.float().mean() < 0.55
    assert sampled.equal(state["samples"])
    torch.testing.assert_close(weights[~sampled], scores[~sampled].softmax(-1))
    assert not state["log_prob"][~sampled].any()
    torch.testing.assert_close(
        state["log_prob"][sampled], scores[sampled].log_softmax(-1)[weights[sampled].bool()]
    )


def test_after_training_the_best_key_is_chosen() -> None:
    alignment = ReinforceAlignment().eval()
    mask = torch.tensor([[True, True, False]])
    weights, _ = alignment.step(torch.tensor([[0.1, 0.5, 0.9]]), alignment.start(mask))
    assert weights.tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("option", ["soft_probability", "baseline_decay"])
def test_probabilities_outside_0_to_1_are_rejected(option: str) -> None:
    with pytest.raises(DragomanError, match=rf"{option} must be from 0 to 1; found {option}=1\.5"):
        ReinforceAlignment(**{option: 1.5})  # type: ignore[arg-type]


@pytest.mark.parametrize("query", ["luong", "bahdanau"])
def test_the_coverage_loss_reaches_the_total_in_training_alone(query: str) -> None:
    """Its weight times what the recorded weights repeat at real positions; validation's likelihood
    never has it.
    """
    model = build(
        f"lstm(attention=coverage, decoder={query}, coverage_loss_weight=0.5, "
        f"residual_connection=false)"
    )
    pairs, task = batch(), TranslationTask(smoothing=0.0)
    with record(model) as notes:
        plain = task.loss(model.eval(), pairs)
    torch.testing.assert_close(plain.total, plain.nll)
    trained = task.loss(model.train(), pairs)
    (note,) = notes.values()
    repeated = coverage_loss(note.weights.squeeze(1))
    assert pairs.tgt_mask is not None
    assert repeated[1, 1] > 0.01  # what padding repeats is not counted
    torch.testing.assert_close(trained.nll, plain.nll)
    torch.testing.assert_close(trained.total - trained.nll, 0.5 * repeated[pairs.tgt_mask].sum())
    assert any(each.abs().max() > 0 for each in gradients(trained.total - trained.nll, model))


def test_coverage_without_a_weight_adds_no_loss() -> None:
    model = build("lstm(attention=coverage, residual_connection=false)").train()
    loss = TranslationTask(smoothing=0.0).loss(model, batch())
    torch.testing.assert_close(loss.total, loss.nll)
    assert not CoverageAlignment(score_width=2).has_loss


def test_defaults_are_the_settings_of_the_released_code() -> None:
    alignment = ReinforceAlignment()
    assert alignment.entropy == 0.002
    assert alignment.soft_probability == 0.5
    assert alignment.baseline_decay == 0.9


def test_an_undecided_position_lowers_the_loss_by_its_entropy() -> None:
    """The other sign would reward a distribution that collapses."""
    alignment = ReinforceAlignment(entropy=0.5).train()
    mask = torch.tensor([[True, True, False], [True, False, False]])
    weights, state = alignment.step(torch.zeros(2, 3), alignment.start(mask))
    loss = alignment.step_loss(weights, state)
    assert loss is not None
    torch.testing.assert_close(loss, torch.tensor([-0.5 * math.log(2), 0.0]))


def test_log_probabilities_are_rewarded_once() -> None:
    """A layer that layer drop skips next has no samples, and no loss of the batch before."""
    alignment = ReinforceAlignment()
    alignment.store_log_probs(torch.tensor([-1.0, -2.0]))
    assert alignment.policy_loss(torch.tensor([-3.0, -5.0])) != 0
    assert alignment.policy_loss(torch.tensor([-3.0, -5.0])) == 0
