"""Masked and permuted language models and sentence order: batches, losses, metrics, filling in."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from language_kit import config_of, lines_of, records_of, task_of, trainer_of
from torch.nn import functional as F
from training_kit import assert_same_run

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.config import Config
from dragoman.config.language_model import LanguageConfig
from dragoman.data.batch_plan import Cursor
from dragoman.data.in_memory_examples import InMemoryExamples
from dragoman.data.labeled_records import Record
from dragoman.errors import DataError
from dragoman.inference.predictors.language_model import EMPTY_NOTE, LanguageModel
from dragoman.inference.predictors.masked_language_model import NO_MASK_NOTE, MaskFilling
from dragoman.models.bert_and_xlnet_language_model import MaskedLM
from dragoman.tasks.bert_and_xlnet_language_modeling import (
    MaskedBatch,
    MaskedLanguageTask,
    _crosses_documents,
)
from dragoman.tasks.language_model import LanguageTask
from dragoman.text.special_tokens import BOS, EOS
from dragoman.training.bf16_mixed_precision import choose_precision
from dragoman.training.progress_display import QuietProgress
from dragoman.training.trainer import Trainer

CPU = torch.device("cpu")
OBJECTIVES: dict[str, dict[str, Any]] = {
    "masked": {"objective": "masked"},
    "permuted": {"objective": "permuted"},
    "order": {"objective": "masked", "sentence_order": True},
}


def masked_config(name: str, **language: Any) -> Config:
    return config_of("transformer", language={"segment": 16, **OBJECTIVES[name], **language})


def masked_task(name: str, lines: list[str], **language: Any) -> MaskedLanguageTask:
    task = task_of(masked_config(name, **language), lines)
    assert isinstance(task, MaskedLanguageTask)
    return task


def batch_of(task: LanguageTask, records: list[Record], seed: int = 3) -> MaskedBatch:
    store = task.encode(records)
    plan = task.plan(store, batch_tokens=10**6, seed=7)
    return task.collate(store, plan.batch(Cursor(0, 0)), seed=seed, training=True)


def evaluate(task: LanguageTask, model: torch.nn.Module, lines: list[str]) -> dict[str, float]:
    return evaluate_store(task, model, task.encode(records_of(lines)))


def evaluate_store(
    task: LanguageTask, model: torch.nn.Module, store: InMemoryExamples
) -> dict[str, float]:
    with torch.no_grad():
        return task.evaluate(
            model.eval(),
            store,
            device=CPU,
            precision=choose_precision("float32", CPU),
            progress=QuietProgress(),
        )


def test_the_objective_chooses_the_task() -> None:
    assert type(task_of(config_of("transformer"), ["a b"])) is LanguageTask
    assert type(masked_task("masked", ["a b"])) is MaskedLanguageTask


@pytest.mark.parametrize("name", OBJECTIVES)
def test_batches_are_functions_of_the_seed(name: str) -> None:
    lines = lines_of(40)
    task = masked_task(name, lines)
    first, again, other = (batch_of(task, records_of(lines), seed) for seed in (3, 3, 4))
    for one, two in zip(first.tensors(), again.tensors(), strict=True):
        assert torch.equal(one, two)
    assert not torch.equal(first.positions, other.positions)
    assert first.positions.shape == first.targets.shape == (len(first), 2)  # 15 % of 16
    special = first.inputs.gather(1, first.positions) if name == "permuted" else first.targets
    assert not (special == BOS).any()


def test_masked_rows_hide_their_targets_and_permuted_rows_rank_them_last() -> None:
    lines = lines_of(60)
    masked = masked_task("masked", lines)
    batch = batch_of(masked, records_of(lines))
    seen = batch.inputs.gather(1, batch.positions)
    assert (seen == masked.mask_token).float().mean() > 0.6
    assert (batch.inputs == masked.mask_token).sum() == (seen == masked.mask_token).sum()
    permuted = batch_of(masked_task("permuted", lines), records_of(lines))
    assert permuted.ranks is not None
    assert torch.equal(permuted.inputs.gather(1, permuted.positions), permuted.targets)
    ranks = permuted.ranks.gather(1, permuted.positions)
    assert torch.equal(ranks, torch.tensor([1, 2]).expand_as(ranks))
    assert (permuted.ranks > 0).sum() == permuted.positions.numel()


def test_rows_that_cross_documents_have_no_order() -> None:
    lines = lines_of(30)
    task = masked_task("order", lines)
    batch = batch_of(task, records_of(lines))
    assert batch.in_order is not None
    assert (batch.inputs[:, 0] == BOS).all()
    assert (batch.inputs[:, [9, 18]] == EOS).all()
    assert set(batch.in_order.tolist()) <= {0, 1, -100}
    assert (batch.in_order == -100).sum() <= 1  # the end of the stream is not its beginning
    books = [Record(Path("b.jsonl"), n, {"text": " ".join("abcdef"[:5])}) for n in range(1, 30)]
    crossing = batch_of(task, books)  # documents of 6 tokens
    assert crossing.in_order is not None
    assert (crossing.in_order == -100).all()
    torch.manual_seed(0)
    model = task.build_model()
    loss = task.loss(model, crossing)
    torch.testing.assert_close(loss.total, loss.nll)  # no pair of segments is classified


def test_segments_within_one_document_have_an_order() -> None:
    """Documents of alternately 16 and 8 tokens, and segments of 8 from each position."""
    documents, total = [0, 16, 24, 40, 48, 64], 72
    starts = np.arange(2 * total)  # the stream wraps around
    inside = []
    for start in starts % total:
        owners = {sum(each <= at for each in documents) for at in range(start, start + 8)}
        inside.append(len(owners) == 1 and start + 8 <= total)
    assert sum(inside[:total]) == 3 * (9 + 1)  # at 0 to 8 and at 16, and so on
    found = _crosses_documents(np.array(documents), starts, 8, total)
    assert found.tolist() == [not each for each in inside]


@pytest.mark.parametrize(("words", "segments"), [(7, 4), (6, 1), (8, 2), (3, 0)])
def test_sentence_order_loss_skips_segments_of_two_documents(
    words: int, segments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four documents of `words` and an EOS token, in segments of 8 tokens."""
    task = masked_task("order", ["a b c d e f g h"], segment=8)
    documents = [
        Record(Path("books.jsonl"), number, {"text": " ".join("abcdefgh"[:words])})
        for number in range(1, 5)
    ]
    store = task.encode(documents)
    assert len(task.stream(store).targets) == 4 * (words + 1)
    seen = []

    def count_right(model: MaskedLM, tokens: np.ndarray, device: torch.device) -> int:
        seen.append(len(tokens))
        return len(tokens)  # of each segment in order and swapped, one

    monkeypatch.setattr(task, "_count_right", count_right)
    metrics = evaluate_store(task, task.build_model(), store)
    assert sum(seen) == segments
    assert metrics.get("order_accuracy") == (0.5 if segments else None)


def test_the_loss_is_the_mean_over_masked_tokens_and_rows() -> None:
    lines = lines_of(30)
    task = masked_task("order", lines)
    batch = batch_of(task, records_of(lines))
    torch.manual_seed(0)
    model = task.build_model().eval()
    loss = task.loss(model, batch)
    hidden = model.decode(batch.inputs)
    logits = model.project(hidden)
    rows = torch.arange(len(batch)).unsqueeze(1)
    tokens = F.cross_entropy(
        logits[rows, batch.positions].flatten(0, 1), batch.targets.flatten(), reduction="mean"
    )
    assert batch.in_order is not None
    assert model.order is not None
    order = F.cross_entropy(
        model.order(hidden), batch.in_order, ignore_index=-100, reduction="sum"
    ) / len(batch)
    torch.testing.assert_close(loss.nll / loss.count, tokens)
    torch.testing.assert_close(loss.total / loss.count, tokens + order)


def test_pseudo_perplexity_masks_one_token_at_a_time() -> None:
    """Salazar et al. (2020): the sum of log P(w_t | all others), by brute force."""
    lines = lines_of(9)
    task = masked_task("masked", lines, eval_masked="one")
    torch.manual_seed(0)
    model = task.build_model().eval()
    tokens = torch.from_numpy(task.stream(task.encode(records_of(lines))).targets.astype(np.int64))
    nll = 0.0
    for first in range(0, len(tokens), 16):
        segment = tokens[first : first + 16]
        for position in range(len(segment)):
            masked = segment.clone()
            masked[position] = task.mask_token
            log_probs = model(masked[None])[0, position].detach().log_softmax(0)
            nll -= float(log_probs[segment[position]])
    found = evaluate(task, model, lines)
    assert found["loss"] == pytest.approx(nll / len(tokens), rel=1e-4)
    assert found["pseudo_perplexity"] == pytest.approx(math.exp(nll / len(tokens)), rel=1e-4)
    faster = evaluate(masked_task("masked", lines), model, lines)
    assert faster["loss"] == pytest.approx(found["loss"], rel=0.2)  # 2 of 16 at a time


@pytest.mark.parametrize("name", OBJECTIVES)
def test_resuming_mid_epoch_is_bit_identical(name: str, tmp_path: Path) -> None:
    config, lines = masked_config(name), lines_of(60)
    whole = trainer_of(tmp_path / "whole", config, lines)
    with whole._run:
        whole.fit()
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")  # after step 8
    for step in RunDirectory(tmp_path / "killed").steps():
        if step > 8:
            shutil.rmtree(tmp_path / "killed" / f"step-{step:08d}")
    resumed = trainer_of(tmp_path / "killed", config, lines)
    with resumed._run:
        resumed.fit(resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def trained(tmp_path: Path, config: Config, lines: list[str], **train: Any) -> Trainer:
    """Train a small model."""
    config = config.replace(
        train={"batch_tokens": 512, "learning_rate": 5e-3, "warmup_steps": 30, **train},
        model={"width": 32, "dropout": 0.0, "residual": "pre_norm", "decoder": ("transformer",)},
        language={"input_dropout": 0.0},
    )
    trainer = trainer_of(tmp_path, config, lines)
    with trainer._run:
        trainer.fit()
    return trainer


@pytest.mark.parametrize("name", ["masked", "permuted"])
def test_it_learns_from_both_sides(name: str, tmp_path: Path) -> None:
    """A word is determined by its context; 2.3 nats is the loss of a uniform model."""
    config, lines = masked_config(name), lines_of(200)
    trainer = trained(tmp_path, config, lines, steps=300)
    loss = evaluate(task_of(config, lines), trainer.model, lines_of(30, seed=1))["loss"]
    assert loss < 1.0


def test_order_objective_learns_the_order_of_letters(tmp_path: Path) -> None:
    config, lines = masked_config("order", segment=8), [" ".join("abcdefghijklmnopqrst")] * 40
    trainer = trained(tmp_path, config, lines, steps=150)
    metrics = evaluate(task_of(config, lines), trainer.model, lines[:9])
    assert metrics["order_accuracy"] > 0.9
    assert set(metrics) == {"loss", "pseudo_perplexity", "order_accuracy"}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_masks_are_filled_in(name: str) -> None:
    lines = ["the cat sat", "the dog sat"]
    task = masked_task(name, lines)
    torch.manual_seed(0)
    model = task.build_model().eval()
    texts = ["the <mask> sat [MASK]", "<mask>", "<mask> cat <MASK> sat the dog sat"]
    filled, *others = task.fill_masks(model, texts, top=3)
    assert len(filled.guesses) == 2
    words = filled.text.split()
    assert (words[0], words[2]) == ("the", "sat")
    assert [words[1], words[3]] == [guesses[0].token for guesses in filled.guesses]
    for guesses in filled.guesses:
        probabilities = [guess.probability for guess in guesses]
        assert probabilities == sorted(probabilities, reverse=True)
        assert len(guesses) == 3
        assert all(guess.token in {"the", "cat", "dog", "sat"} for guess in guesses)
    for text, together in zip(texts[1:], others, strict=True):  # padding changes nothing
        (alone,) = task.fill_masks(model, [text], top=3)
        assert together.text == alone.text
        for one, two in zip(together.guesses, alone.guesses, strict=True):
            assert [each.token for each in one] == [each.token for each in two]
            assert one[0].probability == pytest.approx(two[0].probability, abs=1e-5)
    (everything,) = task.fill_masks(model, ["<mask>"], top=99)[0].guesses
    assert sum(guess.probability for guess in everything) == pytest.approx(1.0, abs=1e-5)


def test_a_mask_has_five_guesses_and_in_predictions_ten() -> None:
    task = masked_task("masked", [" ".join("abcdefghijkl")])
    model = LanguageModel(task.build_model(), task)
    text = "a <mask> c <mask>"
    filled = model.fill_mask(text)
    assert [len(guesses) for guesses in filled.guesses] == [5, 5]
    found, plain = model.predict([text, "a b c"])
    assert isinstance(found, MaskFilling)
    assert [len(guesses) for guesses in found.masks] == [10, 10]
    assert found.to_line() == found.filled == filled.text
    assert found.to_line(top=2) == " | ".join(
        " ".join(f"{token} {probability:.4f}" for token, probability in guesses[:2])
        for guesses in found.masks
    )
    assert plain.notes == (NO_MASK_NOTE,)


def test_an_empty_text_has_no_pseudo_log_likelihood() -> None:
    task = masked_task("masked", ["the cat sat"])
    model = LanguageModel(task.build_model(), task)
    empty, other = model.score(["", "the cat"])
    assert (empty.log_prob, empty.tokens, empty.notes) == (0.0, 0, (EMPTY_NOTE,))
    assert other.log_prob < 0
    assert other.notes == ()


def test_texts_that_cannot_be_filled_in_are_named() -> None:
    task = masked_task("masked", ["the cat sat"])
    model = task.build_model()
    with pytest.raises(DataError, match="must have a <mask>; found 'the cat'"):
        task.fill_masks(model, ["the cat"])
    with pytest.raises(DataError, match=r"at most 15 tokens.*found 40"):
        task.fill_masks(model, ["<mask> " * 40])
    with pytest.raises(DataError, match=r"at most 15 tokens.*found 16"):
        task.fill_masks(model, ["<mask> " * 16])
    [longest] = task.fill_masks(model, ["<mask> " * 15])
    assert len(longest.guesses) == 15


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"language": {"objective": "masked", "memory": 4}}, "found language.memory=4"),
        ({"language": {"sentence_order": True}}, "found language.objective=causal"),
        (
            {"language": {"objective": "masked", "sentence_order": True, "segment": 3}},
            "found language.segment=3",
        ),
        (
            {"language": {"objective": "masked"}, "model": {"decoder": ("lstm",)}},
            "found lstm in model.decoder",
        ),
        (
            {"language": {"objective": "permuted"}, "model": {"positions": "rotary"}},
            "found model.positions=rotary",
        ),
    ],
)
def test_settings_that_do_not_fit_are_named(settings: dict[str, Any], found: str) -> None:
    config = Config(task="language", language=LanguageConfig(**settings.pop("language")))
    problems = config.replace(**settings).problems() if settings else config.problems()
    assert any(found in problem for problem in problems), problems


def test_golden_outputs_are_pseudo_log_likelihoods() -> None:
    task = masked_task("masked", lines_of(9), eval_masked="one")
    torch.manual_seed(0)
    model = task.build_model().eval()
    (found,) = task.golden_outputs(model, ["a b c"])
    assert found["tokens"] == 4
    assert found["log_prob"] < 0
    assert isinstance(model, MaskedLM)
    with pytest.raises(TypeError):
        task.golden_outputs(model, [3])


def test_a_guess_without_letters_is_shown_by_its_name() -> None:
    config = masked_config("masked").replace(
        text={"tokenizer": "bpe", "vocab_size": 290, "byte_fallback": True}
    )
    task = task_of(config, ["the cat sat.", "a dog sat, and a cat ran!"] * 30)
    assert isinstance(task, MaskedLanguageTask)
    names = task.text.tokenizer.tokens(list(range(len(task.text))))
    assert task._token_text(names.index("\u2581")) == "␣"
    assert task._token_text(names.index("<0xE9>")) == "<0xE9>"
    assert task._token_text(names.index("\u2581sat")) == "sat"


@pytest.mark.parametrize("tokenizer", ["bpe", "unigram", "characters"])
def test_text_after_a_mask_is_encoded_as_within_a_text(tokenizer: str) -> None:
    """Masking the tokens of a word in a text gives what the text with a mask is encoded to."""
    lines = ["the cat (old) sat.", "a dog sat, and a cat ran!", "the old man said: no."] * 30
    config = masked_config("masked").replace(text={"tokenizer": tokenizer, "vocab_size": 290})
    task = task_of(config, lines)
    assert isinstance(task, MaskedLanguageTask)
    for text, masked in (("the cat sat.", "the cat sat<mask>"), ("a cat, ran", "a cat<mask> ran")):
        whole, found = task.text.encode(text).tolist(), task._encode_with_masks(masked)
        assert len(found) == len(whole)
        wrong = [place for place in range(len(whole)) if whole[place] != found[place]]
        assert [found[place] for place in wrong] == [task.mask_token]
    stop = task.text.encode("the cat sat.").tolist()[-2:]
    found = task._encode_with_masks("the <mask> <mask>.")
    assert found[-2:] == stop
    spaces = 1 if tokenizer == "characters" else 0  # subwords hold the space before them
    assert found.index(task.mask_token, found.index(task.mask_token) + 1) == (
        found.index(task.mask_token) + 1 + spaces
    )
