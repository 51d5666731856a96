"""Language model recipes: the papers' sizes, equal comparisons, miniatures that learn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from language_kit import lines_of, records_of, trainer_of

from dragoman.config import read_config
from dragoman.recipes.recipe_miniature import mini
from dragoman.tasks.language_model import LanguageTask
from dragoman.training.bf16_mixed_precision import choose_precision
from dragoman.training.progress_display import QuietProgress

RECIPES = (
    "dai2019_lm",
    "dai2019_bytes",
    "merity2018",
    "vaswani2017_lm",
    "vaswani2017_bytes",
    "radford2018",
    "kitaev2020_lm",
)
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", RECIPES)
def test_settings_fit_each_other(name: str) -> None:
    config = read_config(recipe=name, task="language")
    assert config.problems() == []
    assert mini(config).problems() == []
    assert config.train.label_smoothing == 0.0  # perplexity is of the model's distribution


def test_transformer_xl_has_the_sizes_of_wikitext_2() -> None:
    config = read_config(recipe="dai2019_lm", task="language")
    model, language = config.model, config.language
    assert model.decoder == ("transformer*10",)
    assert (model.width, model.heads, model.ffn_width) == (400, 10, 900)
    assert (language.segment, language.memory) == (128, 128)
    assert config.train.batch_tokens == 64 * 128
    # Distances of training: up to a segment and a memory, less one.
    assert language.clamp_distance == language.segment + language.memory - 1


def test_transformer_xl_has_the_dropouts_of_the_replications() -> None:
    config = read_config(recipe="dai2019_lm", task="language")
    language, train = config.language, config.train
    assert (language.embedding_dropout, language.input_dropout) == (0.0, 0.6)
    assert (language.output_dropout, language.locked_dropout) == (0.5, True)
    assert (train.learning_rate, train.schedule, train.warmup_steps) == (4e-4, "cosine", 3000)
    assert (train.optimizer, train.weight_decay, train.beta2) == ("adamw", 0.05, 0.99)
    assert (train.max_grad_norm, train.steps) == (0.25, 50_000)


def test_bytes_are_scored_with_a_memory_four_times_as_long() -> None:
    config = read_config(recipe="dai2019_bytes", task="language")
    model, language, train = config.model, config.language, config.train
    assert (model.decoder, model.width, model.heads) == (("transformer*8",), 512, 8)
    assert (language.segment, language.memory) == (512, 512)
    assert language.eval_memory == 4 * language.memory
    assert language.clamp_distance == language.segment + language.memory - 1
    assert (train.learning_rate, train.max_grad_norm) == (5e-4, 0.25)
    assert train.batch_tokens == 32 * language.segment


def test_awd_lstm_has_the_papers_regularization() -> None:
    config = read_config(recipe="merity2018", task="language")
    model, language, train = config.model, config.language, config.train
    layer = "residual_connection=false, weight_dropout=0.5, locked_dropout=true"
    assert model.decoder == (f"lstm({layer}, dropout=0.2)*2", f"lstm({layer}, dropout=0.0)")
    assert (model.width, model.embedding_width) == (1152, 400)
    assert (language.embedding_dropout, language.input_dropout) == (0.1, 0.65)
    assert (language.output_dropout, language.locked_dropout) == (0.4, True)
    assert (language.activation_penalty, language.temporal_penalty) == (2.0, 1.0)
    assert train.batch_tokens == 80 * language.segment == 5600
    assert (train.beta1, train.beta2, train.max_grad_norm) == (0.8, 0.99, 0.25)


def test_gpt_has_the_papers_numbers() -> None:
    config = read_config(recipe="radford2018", task="language")
    model, language, train = config.model, config.language, config.train
    assert (model.decoder, model.width, model.heads) == (("transformer*12",), 768, 12)
    assert (model.ffn_width, model.activation, model.residual) == (3072, "gelu", "post_norm")
    assert (model.positions, model.max_positions, language.segment) == ("learned", 512, 512)
    assert (model.dropout, model.attention_dropout, language.input_dropout) == (0.1, 0.1, 0.1)
    assert (train.learning_rate, train.schedule, train.warmup_steps) == (2.5e-4, "cosine", 2000)
    assert (train.weight_decay, train.max_grad_norm) == (0.01, 1.0)
    assert train.batch_tokens == 64 * 512


def test_the_reformer_has_twice_as_many_buckets_as_windows() -> None:
    config = read_config(recipe="kitaev2020_lm", task="language")
    (block,) = config.model.decoder
    assert block == "reformer(layers=6, rounds=4, buckets=128, window=64, ffn_chunks=4)"
    assert config.language.segment == config.model.max_positions == 64 * 128 // 2
    assert config.language.eval_stride == config.language.segment // 2


@pytest.mark.parametrize(
    ("xl", "plain"), [("dai2019_lm", "vaswani2017_lm"), ("dai2019_bytes", "vaswani2017_bytes")]
)
def test_the_plain_transformer_is_as_large_and_has_equal_context(xl: str, plain: str) -> None:
    one, other = (read_config(recipe=name, task="language") for name in (xl, plain))
    for name in ("decoder", "width", "heads", "ffn_width", "dropout"):
        assert getattr(one.model, name) == getattr(other.model, name)
    assert one.train == other.train
    assert other.language.segment == one.language.segment + one.language.memory
    assert other.language.segment - other.language.eval_stride == one.language.memory


@pytest.mark.parametrize("name", RECIPES)
def test_the_miniature_learns(name: str, tmp_path: Path) -> None:
    config = mini(read_config(recipe=name, task="language"))
    # As many steps as a test affords; a subword model of eight letters has few merges.
    config = config.replace(
        train={
            "steps": 60,
            "learning_rate": 1e-2,
            "batch_tokens": 512,
            "warmup_steps": 6,
            "checkpoint_every": 999,
            "validate_every": 999,
            "precision": "float32",
        },
        text={"vocab_size": min(config.text.vocab_size, 270)},
    )
    lines = lines_of(400)
    trainer = trainer_of(tmp_path / "run", config, lines)
    task = trainer._step.task
    assert isinstance(task, LanguageTask)
    store = task.encode(records_of(lines_of(30, seed=1)))

    def perplexity() -> float:
        found = task.evaluate(
            trainer.model.eval(),
            store,
            device=CPU,
            precision=choose_precision("float32", CPU),
            progress=QuietProgress(),
        )
        return found["perplexity"]

    before = perplexity()
    with trainer._run:
        trainer.fit()
    assert perplexity() < 0.35 * before
