"""Objectives: which metric, in which direction, and a loss that compares tokenizers."""

from __future__ import annotations

from pathlib import Path

import pytest

from dragoman.config import read_config
from dragoman.text.sentencepiece_tokenizer import save_tokenizers, train_tokenizers
from dragoman.tune.objective_metric import (
    Objective,
    choose_metric,
    choose_objective,
    count_tokens_per_character,
)
from dragoman.tune.search_space import parse_search

BASE = read_config(recipe="small")


def test_the_metric_is_the_recipes_unless_given() -> None:
    assert choose_metric(BASE, "") == BASE.train.best_metric
    assert choose_metric(BASE, "bleu") == "bleu"
    assert Objective("loss").lower
    assert not Objective("bleu").lower


def test_a_loss_is_per_character_only_where_tokenizers_differ() -> None:
    with_vocabulary, without = parse_search((), BASE), parse_search(["dropout"], BASE)
    assert choose_objective(BASE, "loss", with_vocabulary) == Objective("loss", per_character=True)
    assert choose_objective(BASE, "bleu", with_vocabulary) == Objective("bleu")
    assert choose_objective(BASE, "loss", without) == Objective("loss")


@pytest.mark.parametrize("lines", [["ab ab", "abab", "b a"], ["aaaa bbbb"] * 20])
def test_with_characters_every_character_and_the_end_is_a_token(
    tmp_path: Path, lines: list[str]
) -> None:
    for name in ("a", "v"):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    files = [f"data.{key}={tmp_path / 'a'}" for key in ("src", "tgt")]
    files += [f"data.valid_{key}={tmp_path / 'v'}" for key in ("src", "tgt")]
    config = read_config(
        recipe="tiny",
        overrides=[*files, "text.tokenizer=characters", "text.byte_fallback=false"],
    )
    tokenizers = train_tokenizers(iter(lines), iter(lines), config.text)
    save_tokenizers(tokenizers, tmp_path / "text")
    tokens = sum(len(tokenizers.tgt.encode(line)) + 1 for line in lines)
    characters = sum(len(line) + 1 for line in lines)
    found = count_tokens_per_character(config, tmp_path / "text")
    assert found == tokens / characters
    assert found == pytest.approx(1.0, abs=0.25)  # SentencePiece adds a space in front
