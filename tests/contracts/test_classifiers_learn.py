"""Every recipe of classification: its miniature learns generated texts in seconds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dragoman.attention import record
from dragoman.config import read_config
from dragoman.models.factory import count_parameters
from dragoman.recipes.catalogue import recipes_of
from dragoman.recipes.recipe_miniature import mini
from tests.classify_kit import fit_task, make_records, micro_f1, train_steps

SEVERAL_LABELS = ("adhikari2019", "mullenbach2018")


@pytest.mark.parametrize("name", recipes_of("classify"))
def test_recipes_are_consistent(name: str) -> None:
    config = read_config(recipe=name)
    assert config.problems() == []
    assert config.task == "classify"
    assert mini(config).problems() == []


@pytest.mark.parametrize("name", recipes_of("classify"))
def test_the_miniature_learns(name: str) -> None:
    config = read_config(recipe=name, scale=mini)
    several = name in SEVERAL_LABELS
    task = fit_task(config, make_records(300, seed=0, several=several))
    assert task.text.multi_label == several
    model = train_steps(
        task, make_records(300, seed=0, several=several), steps=150 if several else 60
    )
    assert count_parameters(model) < 1_000_000
    assert micro_f1(task, model, make_records(100, seed=1, several=several)) > 0.9


@pytest.mark.parametrize("name", recipes_of("classify"))
def test_texts_do_not_depend_on_their_batch(name: str) -> None:
    config = read_config(recipe=name, scale=mini)
    records = make_records(12, seed=2, several=name in SEVERAL_LABELS)
    task = fit_task(config, records)
    torch.manual_seed(0)
    model = task.build_model().eval()
    store = task.encode_texts(["", *(each.text("text") for each in records)])
    with torch.no_grad():
        together = task.forward(model, task.collate(store, np.arange(13))).logits
        for number in range(13):
            alone = task.forward(model, task.collate(store, np.array([number]))).logits
            torch.testing.assert_close(alone[0], together[number], atol=1e-5, rtol=1e-4)
        with record(model) as records_of:
            task.forward(model, task.collate(store, np.arange(1, 13)))
    expected = {
        "attention": {"pooling"},
        "structured": {"pooling"},
        "labels": {"pooling"},
    }.get(config.classify.pooling, set())
    if config.classify.hierarchical:
        expected = {"words", "sentences"}
    if config.classify.attribute_field:
        expected = {"attributes"}
    assert expected <= set(records_of)
