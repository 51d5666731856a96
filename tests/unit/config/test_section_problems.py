"""Inconsistencies within the sections: what is rejected, and the nearest values that are not."""

from __future__ import annotations

from typing import Any

import pytest

from dragoman.config.device_engine_and_precision_names import device_problem, utility_problem
from dragoman.config.language_model import LanguageConfig
from dragoman.config.model import ModelConfig
from dragoman.config.root_config import Config, TextConfig
from dragoman.config.sentence_pair_classification import PairsConfig
from dragoman.config.tagging import TagConfig
from dragoman.config.train import TrainConfig
from dragoman.config.unordered_set_input_task import SetsConfig

SEGMENTS = {"segmentation": True, "characters": "none"}


@pytest.mark.parametrize(
    ("section", "values", "found"),
    [
        (TextConfig, {"vocab_size": 261}, "at least 262 with text.byte_fallback"),
        (TextConfig, {"vocab_size": 261, "tokenizer": "unigram"}, "found 261"),
        (TextConfig, {"bpe_dropout": 0.1, "tokenizer": "words"}, "found text.tokenizer=words"),
        (TrainConfig, {"average_checkpoints": 4}, "raise train.keep_checkpoints"),
        (TrainConfig, {"extend_vocabulary": 9}, "found 9 without a model"),
        (TrainConfig, {"r_drop": 1.0, "simcut": 2.0}, "found 1 and 2"),
        (TrainConfig, {"optimizer": "adafactor", "fsdp": "on"}, "train.optimizer=adafactor"),
        (TrainConfig, {"optimizer": "muon", "fsdp": "on"}, "train.optimizer=muon"),
        (TrainConfig, {"best_metric": "bleu", "validate_sentences": 0}, "best_metric=bleu"),
        (TrainConfig, {"target_exact": 0.5, "validate_sentences": 0}, "train.target_exact=0.5"),
        (TrainConfig, {"device": "gpu"}, "found 'gpu'"),
        (LanguageConfig, {"objective": "masked", "memory": 1}, "found language.memory=1"),
        (LanguageConfig, {"objective": "permuted", "memory": 1}, "found language.memory=1"),
        (LanguageConfig, {"sentence_order": True}, "found language.objective=causal"),
        (
            LanguageConfig,
            {"sentence_order": True, "objective": "masked", "segment": 3},
            "found language.segment=3",
        ),
        (LanguageConfig, {"eval_stride": 129}, "found 129 and 128"),
        (LanguageConfig, {"eval_memory": 5}, "found language.eval_memory=5"),
        (PairsConfig, {"min_score": 5}, "found 5 and 5"),
        (PairsConfig, {"first_field": "a", "score_field": "a"}, "found 'a', 'a'"),
        (PairsConfig, {"swap": True}, "found co_attention"),
        (SetsConfig, {"pooling": "mean", "seeds": 2}, "sets.pooling=mean and sets.seeds=2"),
        (SetsConfig, {"problem": "clustering", "seeds": 3}, "found 3 and 4"),
        (SetsConfig, {"set_field": "a", "target_field": "a"}, "found 'a' for both"),
        (TagConfig, {"features": ("shap",)}, "did you mean shape"),
        (TagConfig, {"features": ("shape", "shape")}, "found shape, shape"),
        (TagConfig, {"word_width": 0, "characters": "none"}, "a token needs an input"),
        (TagConfig, {"word_width": 0, "vectors": "a.vec"}, "tag.word_width=0 with 'a.vec'"),
        (TagConfig, {"character_features": 51}, "found 51; try 52"),
        (TagConfig, {"segmentation": True}, "needs tag.characters=none; found lstm"),
        (TagConfig, {**SEGMENTS, "scheme": "iobes"}, "found iobes"),
        (TagConfig, {**SEGMENTS, "input_field": "pos"}, "tag.input_field is for tagged tokens"),
        (TagConfig, {**SEGMENTS, "auxiliary_fields": ("xpos",)}, "tag.auxiliary_fields is for"),
        (ModelConfig, {"embedding_width": 512}, "found 512 and 512"),
        (ModelConfig, {"width": 15}, "must be even for sinusoidal positions; found 15"),
        (ModelConfig, {"width": 15, "positions": "sinusoidal_halves"}, "sinusoidal_halves"),
        (
            ModelConfig,
            {"initialization": "t_fixup", "share_layers": "all"},
            "model.share_layers=all",
        ),
    ],
)
def test_inconsistent_settings_are_reported(
    section: Any, values: dict[str, Any], found: str
) -> None:
    (problem,) = section(**values).problems()
    assert found in problem


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (TextConfig, {"vocab_size": 262}),
        (TextConfig, {"vocab_size": 100, "byte_fallback": False}),
        (TextConfig, {"vocab_size": 100, "tokenizer": "characters"}),
        (TrainConfig, {"average_checkpoints": 3, "keep_checkpoints": 3}),
        (TrainConfig, {"extend_vocabulary": 9, "init_from": "model"}),
        (TrainConfig, {"optimizer": "adamw", "fsdp": "on"}),
        (TrainConfig, {"optimizer": "muon", "fsdp": "auto"}),
        (TrainConfig, {"best_metric": "loss", "validate_sentences": 0}),
        (LanguageConfig, {"sentence_order": True, "objective": "masked", "segment": 4}),
        (LanguageConfig, {"eval_stride": 128}),
        (LanguageConfig, {"memory": 4, "eval_memory": 5}),
        (PairsConfig, {"min_score": 4}),
        (PairsConfig, {"first_field": "a", "second_field": "b"}),
        (PairsConfig, {"swap": True, "interaction": "sequence"}),
        (SetsConfig, {"problem": "clustering", "seeds": 4}),
        (SetsConfig, {"problem": "clustering", "seeds": 1}),
        (SetsConfig, {"problem": "maximum", "seeds": 3}),
        (TagConfig, {**SEGMENTS, "scheme": "bmes"}),
        (TagConfig, SEGMENTS),
        (TagConfig, {"word_width": 0, "characters": "none", "features": ("shape",)}),
        (TagConfig, {"characters": "cnn", "character_features": 51}),
        (ModelConfig, {"embedding_width": 511}),
        (ModelConfig, {"width": 15, "positions": "none"}),
        (ModelConfig, {"share_layers": "all"}),
    ],
)
def test_settings_at_the_limit_are_accepted(section: Any, values: dict[str, Any]) -> None:
    assert list(section(**values).problems()) == []


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"kv_heads": 3}, "model.kv_heads must divide model.heads; found 3 and 8"),
        ({"heads": 7}, "try model.heads=4 or 8"),
        ({"width": 9, "heads": 12}, "found 12 and 9; try model.heads=9"),
        ({"width": 24, "heads": 8, "positions": "rotary"}, "found 3, model.width=24 by"),
        ({"head_width": 5, "positions": "rotary"}, "found 5, model.head_width=5"),
        ({"heads": 1, "head_width": 5, "positions": "transformer_xl"}, "found 1 heads of 5"),
    ],
)
def test_inconsistent_heads_are_reported(values: dict[str, Any], found: str) -> None:
    (problem,) = ModelConfig(**values).head_problems()
    assert found in problem


@pytest.mark.parametrize(
    "values",
    [
        {"kv_heads": 2},
        {"heads": 7, "head_width": 64},
        {"heads": 2, "head_width": 5, "positions": "transformer_xl"},
        {"width": 24, "heads": 8, "head_width": 4, "positions": "rotary"},
    ],
)
def test_consistent_heads_are_accepted(values: dict[str, Any]) -> None:
    assert list(ModelConfig(**values).head_problems()) == []


def test_evaluation_takes_its_own_memory_and_stride_or_those_of_training() -> None:
    assert LanguageConfig(memory=4, eval_memory=9).resolved_eval_memory == 9
    assert LanguageConfig(memory=4).resolved_eval_memory == 4
    assert LanguageConfig(segment=10, eval_stride=7).resolved_eval_stride == 7
    assert LanguageConfig(segment=11).resolved_eval_stride == 5


@pytest.mark.parametrize(
    ("task", "changes", "found"),
    [
        ("translate", {"data": {"train": "a.jsonl"}}, "data.train is for other tasks"),
        ("translate", {"data": {"valid": "a.jsonl"}}, "data.valid is for other tasks"),
        ("translate", {"text": {"tokenizer": "words"}}, "text.tokenizer=words is for other"),
        ("translate", {"text": {"tokenizer": "bytes"}}, "text.tokenizer=bytes is for other"),
        ("translate", {"text": {"lowercase": True}}, "text.lowercase=true is for other tasks"),
        ("translate", {"train": {"best_metric": "accuracy"}}, "must be one of loss, bleu;"),
        ("translate", {"classify": {"hops": 3}}, "settings of classify are for --task classify"),
        ("classify", {"tag": {"crf": False}}, "found task classify"),
        ("classify", {"train": {"best_metric": "bleu"}}, "must be one of loss, accuracy,"),
        ("classify", {"train": {"init_from": "m"}}, "fine-tunes a translation model"),
        (
            "translate",
            {"model": {"positions": "learned", "max_positions": 200}},
            "found 200 and 200; set data.max_length=199",
        ),
    ],
)
def test_settings_of_another_task_are_reported(
    task: str, changes: dict[str, dict[str, object]], found: str
) -> None:
    (problem,) = Config(task=task).replace(**changes).problems()
    assert found in problem


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("classify", {"classify": {"hops": 3}, "data": {"train": "a", "valid": "b"}}),
        ("classify", {"text": {"tokenizer": "words", "lowercase": True}}),
        ("classify", {"train": {"best_metric": "macro_f1"}}),
        ("translate", {"train": {"best_metric": "bleu", "init_from": "m"}}),
        ("translate", {"model": {"positions": "learned", "max_positions": 201}}),
    ],
)
def test_settings_of_the_own_task_are_accepted(
    task: str, changes: dict[str, dict[str, object]]
) -> None:
    assert Config(task=task).replace(**changes).problems() == []


def test_an_unknown_task_is_reported_with_the_nearest() -> None:
    (problem,) = Config(task="clasify").problems()
    assert "found 'clasify'; did you mean classify" in problem


def test_a_configuration_shows_up_to_eight_changes() -> None:
    names = ("steps", "batch_tokens", "seed", "warmup_steps", "patience", "threads")
    changed = Config(recipe="tiny").replace(train=dict.fromkeys(names, 17), model={"dropout": 0.25})
    shown = repr(changed)
    assert "recipe='tiny'" in shown
    assert "train.patience=17)" in shown
    assert "more" not in shown
    assert repr(changed.replace(decode={"beam": 9})).endswith("train.patience=17, 1 more)")
    assert repr(Config()) == "Config()"


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:12", "mps", "mps:0"])
def test_names_of_devices(name: str) -> None:
    assert device_problem(name) == ""


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:01", "cuda:1000", "auto:0", "cuda:-1"])
def test_other_names_are_no_devices(name: str) -> None:
    assert f"found {name!r}; try auto" in device_problem(name)


def test_names_of_utilities() -> None:
    assert utility_problem("chrf") == utility_problem("bleu") == ""
    assert "found 'ter'; try chrf" in utility_problem("ter")
