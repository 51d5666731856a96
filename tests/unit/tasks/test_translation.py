"""The translation task: its loss against the definition, and validation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from training_kit import VOCABULARY, Corpus, tiny_model

from dragoman.config import TrainConfig
from dragoman.data.collate import make_batch
from dragoman.errors import ConfigError, StoppedError
from dragoman.runtime import signals
from dragoman.tasks.translation import (
    MultilingualValidator,
    Regularization,
    TranslationTask,
    TranslationValidator,
    ValidationSample,
    cut_tokens,
    drop_words,
)
from dragoman.training.bf16_mixed_precision import choose_precision

CPU = torch.device("cpu")


def batch_of(first: int, last: int):
    corpus = Corpus()
    return make_batch(corpus.src[first:last], corpus.tgt[first:last])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_its_definition(smoothing) -> None:
    model, batch = tiny_model().eval(), batch_of(0, 12)
    found = TranslationTask(smoothing=smoothing).loss(model, batch)
    log_probs = model(batch.src, batch.tgt_in, batch.src_mask, batch.tgt_mask).log_softmax(-1)
    total = nll = count = 0.0
    for row in range(12):
        for position in range(int(batch.tgt_lengths[row])):
            target = int(batch.tgt_out[row, position])
            others = smoothing / (VOCABULARY - 1)
            wanted = [others] * VOCABULARY
            wanted[target] = 1 - smoothing
            total -= sum(
                w * p for w, p in zip(wanted, log_probs[row, position].tolist(), strict=True)
            )
            nll -= log_probs[row, position, target].item()
            count += 1
    assert int(found.count) == count
    assert found.nll.item() == pytest.approx(nll, rel=1e-5)
    assert found.total.item() == pytest.approx(total, rel=1e-5)


def test_padding_changes_nothing() -> None:
    """Masks come from lengths (Kyubyong/transformer#33, #3, #69)."""
    model, corpus = tiny_model().eval(), Corpus()
    task = TranslationTask(smoothing=0.1)
    together = task.loss(model, batch_of(0, 8))
    alone = [task.loss(model, make_batch([corpus.src[i]], [corpus.tgt[i]])) for i in range(8)]
    assert together.total.item() == pytest.approx(
        sum(loss.total.item() for loss in alone), rel=1e-5
    )
    assert int(together.count) == sum(int(loss.count) for loss in alone)


def test_a_batch_without_padding_gives_the_same() -> None:
    model, corpus = tiny_model().eval(), Corpus()
    same = [i for i, ids in enumerate(corpus.src) if len(ids) == 5][:3]
    batch = make_batch([corpus.src[i] for i in same], [corpus.tgt[i] for i in same])
    assert batch.tgt_mask is None
    logits = model(batch.src, batch.tgt_in)
    expected = F.cross_entropy(logits.flatten(0, 1), batch.tgt_out.flatten(), reduction="sum")
    assert TranslationTask(smoothing=0.0).loss(model, batch).total.item() == pytest.approx(
        expected.item(), rel=1e-5
    )


def test_auxiliary_losses_are_part_of_the_total_only() -> None:
    model, batch = tiny_model().eval(), batch_of(0, 4)
    plain = TranslationTask(smoothing=0.1).loss(model, batch)
    decode = model.decode_embedded

    def with_auxiliary_loss(*arguments, losses, **options):
        losses["coverage"] = torch.tensor(3.5)
        return decode(*arguments, losses=losses, **options)

    model.decode_embedded = with_auxiliary_loss
    added = TranslationTask(smoothing=0.1).loss(model, batch)
    assert added.total.item() == pytest.approx(plain.total.item() + 3.5, rel=1e-5)
    assert added.nll.item() == plain.nll.item()


def validation(**changes):
    batches = [batch_of(first, first + 8) for first in range(0, 32, 8)]
    return TranslationValidator(
        batches=lambda: batches,
        count=4,
        device=CPU,
        precision=choose_precision("float32", CPU),
        **changes,
    )


def test_validation_returns_loss_and_perplexity_per_token() -> None:
    model = tiny_model().eval()
    metrics = validation()(model)
    found = TranslationTask(smoothing=0.0).loss(model, batch_of(0, 32))
    assert metrics["loss"] == pytest.approx(found.nll.item() / int(found.count), rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    assert set(metrics) == {"loss", "perplexity"}


def test_perplexity_of_a_huge_loss_is_finite(monkeypatch) -> None:
    monkeypatch.setattr(TranslationValidator, "_loss", lambda self, model: 1e6)
    assert validation()(tiny_model())["perplexity"] == pytest.approx(math.exp(80))


def test_a_sample_is_translated_and_scored() -> None:
    """Training and evaluation use one scorer on raw text (facebookresearch/fairseq#3245, #637)."""
    seen = []

    def score(texts, references):
        seen.append((list(texts), list(references)))
        return 42.0

    check = validation(
        sample=ValidationSample(["ab", "c"], ["x", "y"]),
        translate=lambda model, texts: [text.upper() for text in texts],
        score=score,
    )
    assert check(tiny_model().eval())["bleu"] == 42.0
    assert seen == [(["AB", "C"], ["x", "y"])]


def test_the_exact_fraction_counts_whole_sentences() -> None:
    sample = ValidationSample(["a", "b", "c", "d"], ["A b", "B", "x", ""])
    hypotheses = ["A  b ", "B", "X", ""]  # spaces do not matter, letters do
    check = validation(
        sample=sample, translate=lambda model, texts: hypotheses, score=lambda *_: 0.0
    )
    assert check(tiny_model().eval())["exact"] == 0.75


def test_an_empty_sample_is_not_scored() -> None:
    check = validation(
        sample=ValidationSample([], []),
        translate=lambda model, texts: pytest.fail("translated"),
        score=lambda *_: 0.0,
    )
    assert "bleu" not in check(tiny_model().eval())


def test_stop_request_interrupts_validation() -> None:
    signals.request_stop("SIGTERM")
    try:
        with pytest.raises(StoppedError, match="stopped by SIGTERM"):
            validation()(tiny_model().eval())
    finally:
        signals.uninstall_handlers()


def loss_in_training(dropout: float = 0.1, decoder: str = "transformer*1", **settings: float):
    model = tiny_model(dropout=dropout, decoder=(decoder,)).train()
    torch.manual_seed(4)
    regularization = Regularization(**settings)
    found = TranslationTask(smoothing=0.1, regularization=regularization).loss(
        model, batch_of(0, 12)
    )
    found.total.backward()
    return model, found


@pytest.mark.parametrize(
    "decoder", ["transformer*1", "lstm(attention=coverage, coverage_loss_weight=5.0)"]
)
@pytest.mark.parametrize("settings", [{"r_drop": 5.0}, {"simcut": 3.0, "simcut_probability": 0.0}])
def test_two_equal_forward_passes_have_the_plain_loss(settings, decoder: str) -> None:
    """Without dropout both passes are the same, and their divergence is zero."""
    plain_model, plain = loss_in_training(dropout=0.0, decoder=decoder)
    model, found = loss_in_training(dropout=0.0, decoder=decoder, **settings)
    torch.testing.assert_close(found.total, plain.total)
    torch.testing.assert_close(found.nll, plain.nll)
    for one, two in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [{"r_drop": 5.0}, {"simcut": 3.0}, {"word_dropout": 0.3}, {"simcut": 3.0, "word_dropout": 0.2}],
)
def test_a_regularized_loss_is_larger_and_differentiable(settings) -> None:
    _, plain = loss_in_training()
    model, found = loss_in_training(**settings)
    assert found.total > plain.total
    assert int(found.count) == int(plain.count)
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())
    evaluated = TranslationTask(smoothing=0.1, regularization=Regularization(**settings)).loss(
        model.eval(), batch_of(0, 12)
    )
    expected = TranslationTask(smoothing=0.1).loss(model, batch_of(0, 12))
    assert torch.equal(evaluated.total, expected.total)  # only training is regularized


@pytest.mark.parametrize(
    "settings",
    [
        {"r_drop": 5.0, "word_dropout": 0.3},
        {"simcut": 3.0, "simcut_probability": 0.2},
    ],
)
def test_the_training_settings_decide_on_the_regularization(settings: dict[str, float]) -> None:
    assert Regularization.of(TrainConfig(**settings)) == Regularization(**settings)


def test_simcut_spares_the_tags_of_a_multilingual_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every token cut, only tags and special tokens reach the second pass."""
    model = tiny_model(dropout=0.0).train()
    seen = []
    whole = model.hidden_embedded

    def watched(src_embedded: Tensor, tgt_embedded: Tensor, *masks: Tensor, **rest: object):
        seen.extend((src_embedded, tgt_embedded))
        return whole(src_embedded, tgt_embedded, *masks, **rest)

    monkeypatch.setattr(model, "hidden_embedded", watched)
    regularization = Regularization(simcut=3.0, simcut_probability=1.0)
    task = TranslationTask(smoothing=0.1, regularization=regularization, num_tags=2)
    batch = batch_of(0, 12)
    task.loss(model, batch)
    for embedded, ids in zip(seen, (batch.src, batch.tgt_in), strict=True):
        clean, cut = embedded.chunk(2)
        stays = (ids < 3) | (ids == 4) | (ids == 5)
        assert stays.any()
        assert (~stays).any()
        assert torch.equal(cut, clean * stays.unsqueeze(-1))


def test_dropped_words_and_cut_tokens() -> None:
    torch.manual_seed(0)
    ids = torch.tensor([[1, 5, 6, 7, 2, 0]] * 2000)
    dropped = drop_words(ids, 0.25)
    changed = dropped != ids
    assert not changed[:, [0, 4, 5]].any()  # <s>, </s> and padding stay
    assert dropped[changed].eq(3).all()
    assert changed[:, 1:4].float().mean().item() == pytest.approx(0.25, abs=0.02)
    tagged = drop_words(torch.tensor([[4, 5, 6, 2]] * 200), 0.5, num_tags=2)
    assert tagged[:, :2].eq(torch.tensor([4, 5])).all()  # language tags stay
    assert tagged[:, 2].eq(3).any()
    cut = cut_tokens(torch.ones(2000, 6, 4), ids, 0.25)
    assert set(cut.sum(dim=-1).unique().tolist()) == {0.0, 4.0}  # whole tokens, not scaled
    assert not cut[:, [0, 4, 5]].eq(0).any()  # <s>, </s> and padding stay
    assert cut[:, 1:4].eq(0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    tagged = cut_tokens(torch.ones(200, 4, 1), torch.tensor([[4, 5, 6, 2]] * 200), 0.5, num_tags=2)
    assert tagged[:, :2].all()  # language tags stay
    assert not tagged[:, 2].all()


def test_hard_attention_is_not_computed_twice() -> None:
    model = tiny_model(encoder=("bigru",), decoder=("gru(attention=reinforce)",)).train()
    task = TranslationTask(smoothing=0.1, regularization=Regularization(r_drop=1.0))
    with pytest.raises(ConfigError, match="found alignments that are sampled"):
        task.loss(model, batch_of(0, 4))


def test_directions_are_averaged_and_the_perplexity_is_that_of_the_mean_loss() -> None:
    validators: Any = {
        "de-en": lambda model: {"loss": 1.0, "perplexity": math.e, "bleu": 10.0, "exact": 0.5},
        "en-de": lambda model: {"loss": 3.0, "perplexity": math.e**3, "bleu": 30.0, "exact": 0.0},
    }
    found = MultilingualValidator(validators=validators)(tiny_model())
    assert found == pytest.approx(
        {
            "loss": 2.0,
            "perplexity": math.e**2,
            "bleu": 20.0,
            "exact": 0.25,
            "loss_de-en": 1.0,
            "bleu_de-en": 10.0,
            "loss_en-de": 3.0,
            "bleu_en-de": 30.0,
        }
    )
    validators["en-de"] = lambda model: {"loss": 3.0, "perplexity": math.e**3}
    found = MultilingualValidator(validators=validators)(tiny_model())
    assert "bleu" not in found, "a mean is of all directions"
    assert found["bleu_de-en"] == 10.0
