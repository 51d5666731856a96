"""Recipes of text classifiers: the papers' numbers, and the training that they share."""

from __future__ import annotations

from typing import Any

import pytest

from dragoman.config import read_config, to_dict
from dragoman.recipes.catalogue import recipes_of
from dragoman.recipes.recipe_miniature import mini

PAPERS: dict[str, dict[str, Any]] = {
    "yang2016": {
        "text.min_count": 5,
        "classify.hierarchical": True,
        "classify.pooling": "attention",
        "classify.score_width": 100,
        "classify.max_sentence_words": 50,
        "model.width": 200,
        "train.batch_tokens": 50_000,
    },
    "kim2014": {
        "classify.pooling": "none",
        "classify.filter_widths": [3, 4, 5],
        "classify.filters": 100,
        "classify.dropout": 0.5,
        "model.width": 300,
        "train.batch_tokens": 1200,
    },
    "wang2012": {
        "classify.ngrams": 3,
        "classify.ngram_weights": "naive_bayes",
        "classify.ngram_min_count": 1,
        "classify.branch_loss": 1.0,
    },
    "zhou2016": {
        "text.lowercase": False,
        "classify.pooling": "attention",
        "classify.dropout": 0.5,
        "model.width": 200,
        "model.dropout": 0.3,
    },
    "li2002": {
        "text.lowercase": False,
        "data.label_field": "coarse",
        "classify.auxiliary_field": "fine",
        "classify.auxiliary_weight": 1.0,
        "classify.ngram_weights": "naive_bayes",
    },
    "lin2017": {
        "classify.pooling": "structured",
        "classify.hops": 30,
        "classify.score_width": 350,
        "classify.overlap_penalty": 1.0,
        "classify.hidden_width": 2000,
        "classify.dropout": 0.5,
        "model.width": 600,
        "model.embedding_width": 100,
        "train.batch_tokens": 16_000,
        "train.max_grad_norm": 0.5,
    },
    "bai2018": {
        "classify.pooling": "max",
        "model.encoder": [
            f"tcn(kernel_size=3, dilation={dilation}, dropout=0.2)"
            for dilation in (1, 2, 4, 8, 16, 32)
        ],
        "model.dropout": 0.5,
    },
    "yu2016": {
        "model.encoder": [
            f"conv(kernel_size=3, dilation={dilation}, activation=relu, dropout=0.2)"
            for dilation in (1, 2, 4, 8, 16)
        ],
        "model.residual": "pre_norm",
    },
    "vaswani2017_classifier": {
        "data.max_length": 1024,
        "model.encoder": ["transformer*2"],
        "model.positions": "sinusoidal",
        "model.scale_embeddings": True,
        "train.warmup_steps": 500,
        "train.learning_rate": 5e-4,
    },
    "johnson2015": {
        "text.vocab_size": 30_000,
        "classify.filter_input": "one_hot",
        "classify.filter_widths": [2, 3],
        "classify.filters": 1000,
        "classify.dropout": 0.5,
        "classify.ngram_weights": "naive_bayes",
        "classify.branch_loss": 1.0,
    },
    "adhikari2019": {
        "classify.pooling": "max",
        "classify.tune_threshold": "global",
        "classify.embedding_dropout": 0.1,
        "classify.dropout": 0.5,
        "model.width": 1024,
        "model.embedding_width": 300,
        "train.epochs": 30.0,
        "train.ema_decay": 0.99,
        "train.best_metric": "micro_f1",
    },
    "mullenbach2018": {
        "classify.pooling": "labels",
        "classify.label_names": True,
        "train.epochs": 30.0,
        "train.best_metric": "micro_f1",
    },
    "hu2018": {
        "data.max_length": 500,
        "classify.attribute_field": "attributes",
        "classify.attribute_weight": 1.0,
        "classify.pooling": "max",
        "classify.dropout": 0.5,
        "train.epochs": 16.0,
    },
}


def settings(name: str) -> dict[str, Any]:
    """Return the settings of a recipe by their full names."""
    sections = to_dict(read_config(recipe=name))
    return {
        f"{section}.{setting}": value
        for section, values in sections.items()
        if isinstance(values, dict)
        for setting, value in values.items()
    }


def test_every_recipe_is_listed() -> None:
    assert sorted(PAPERS) == sorted(recipes_of("classify"))


@pytest.mark.parametrize("name", PAPERS)
def test_the_papers_numbers(name: str) -> None:
    found = settings(name)
    assert {setting: found[setting] for setting in PAPERS[name]} == PAPERS[name]


@pytest.mark.parametrize("name", PAPERS)
def test_settings_fit_each_other(name: str) -> None:
    config = read_config(recipe=name)
    assert config.problems() == []
    assert mini(config).problems() == []


@pytest.mark.parametrize("name", PAPERS)
def test_all_are_trained_alike_on_words(name: str) -> None:
    found = settings(name)
    assert found["text.tokenizer"] == "words"
    assert (found["train.optimizer"], found["train.schedule"]) == ("adamw", "linear")
    assert (found["train.beta2"], found["train.epsilon"]) == (0.999, 1e-8)
    assert found["train.label_smoothing"] == 0.0, "a label is no distribution"
    assert found["train.final_checkpoint"] == "best", "the validation set chooses the epoch"
    assert found["train.best_metric"] == PAPERS[name].get("train.best_metric", "accuracy")
    assert 0.0 < found["train.ema_decay"] < 1.0


def test_shared_numbers_of_training() -> None:
    found = settings("hu2018")
    assert (found["train.learning_rate"], found["train.weight_decay"]) == (1e-3, 0.01)
    assert (found["train.warmup_steps"], found["train.max_grad_norm"]) == (100, 5.0)
    assert settings("kim2014")["train.weight_decay"] == 0.05, "filters overfit few sentences"
    assert settings("johnson2015")["train.weight_decay"] == 0.1
