"""Constraints through the translator: every strategy, tokenizer and recipe, notes and errors."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch

from dragoman.config import Config, read_config
from dragoman.data.inference_batches import pad_sources
from dragoman.decoding.constraint_automaton import ConstraintError
from dragoman.decoding.output_constraint_definitions import (
    Constraint,
    EqualLength,
    Forbid,
    Mirror,
    NoCopy,
    Punctuation,
    Regex,
    Require,
)
from dragoman.errors import ConfigError, DataError
from dragoman.inference import NativeEngine, Translator
from dragoman.models.factory import build_model
from dragoman.recipes.catalogue import RECIPES
from dragoman.recipes.recipe_miniature import mini
from dragoman.text.sentencepiece_tokenizer import Tokenizers, train_tokenizers
from dragoman.text.special_tokens import BOS, EOS

LINES = [
    "春风又绿江南岸",
    "明月何时照我还",
    "处处山，家家水",
    "天地人和，日月星辰",
    "一帆风顺年年好",
]
LINES += ["国泰民安百业兴", "万事如意，心想事成", "鸟语花香！", "云开见日", "高山流水觅知音"]
COUPLET = (EqualLength(), Mirror(), NoCopy(), Punctuation())
SIZES = {
    "width": 16,
    "heads": 2,
    "ffn_width": 32,
    "encoder": ("transformer*1",),
    "decoder": ("transformer*1",),
}


def make(algorithm: str = "characters", size: int = 400) -> Translator:
    """Build a translator with random weights."""
    config = Config().replace(text={"tokenizer": algorithm, "vocab_size": size}, model=SIZES)
    tokenizers = train_tokenizers(LINES * 5, LINES * 5, config.text)
    return Translator(random_model(config, tokenizers), tokenizers, config)


def random_model(config: Config, tokenizers: Tokenizers) -> Any:
    torch.manual_seed(3)
    model = build_model(
        config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)  # so that logits differ
    return model


@pytest.fixture(scope="module")
def translator() -> Translator:
    return make()


@pytest.fixture(scope="module")
def subword_translator() -> Translator:
    return make("bpe", 330)


OPTIONS = [
    {"beam": 1},
    {"beam": 4},
    {"beam": 4, "nbest": 3},
    {"sample": True, "nbest": 2, "seed": 3},
    {"sample": True, "top_k": 3, "top_p": 0.7},
    {"beam": 2, "return_scores": False},
]


def check(translator: Translator, constraints: tuple[Constraint, ...], **options: Any) -> None:
    found = translator.stream(LINES, constraints=constraints, **options)
    for line, translation in zip(LINES, found, strict=True):
        for each in (translation, *translation.alternatives):
            broken = [rule.label for rule in constraints if not rule.holds(line, each.text)]
            assert not broken, (line, each.text)
        assert list(translation.constraints) == [rule.label for rule in constraints]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_no_couplet_violates_a_constraint(translator: Translator, options: dict[str, Any]) -> None:
    check(translator, (*COUPLET, Forbid(["月", "风"])), **options)


@pytest.mark.parametrize(
    "constraints",
    [
        (EqualLength(), Forbid(["月"])),
        (Require(["江南"]), Forbid(["风", "好"])),
        (Regex("[山水日月，]{3,9}(?:春|好)"),),
        (Punctuation(), Require(["春"])),
        COUPLET,
    ],
    ids=["length", "words", "regex", "punctuation", "couplet"],
)
@pytest.mark.parametrize("options", [{"beam": 1}, {"beam": 3}, {"sample": True}], ids=str)
def test_subwords_and_bytes_violate_nothing(
    subword_translator: Translator, constraints: tuple[Constraint, ...], options: dict[str, Any]
) -> None:
    check(subword_translator, constraints, **options)


@pytest.mark.parametrize(
    "name", [name for name in RECIPES if read_config(recipe=name).task == "translate"]
)
def test_every_recipe_decodes_under_constraints(name: str) -> None:
    config = read_config(recipe=name, scale=mini)
    tokenizers = train_tokenizers(LINES * 5, LINES * 5, config.text)
    translator = Translator(random_model(config, tokenizers), tokenizers, config)
    check(translator, (*COUPLET, Forbid(["月"])), beam=2, batch_size=4)


def test_batching_does_not_change_results(translator: Translator) -> None:
    for options in OPTIONS[:5]:
        together = translator.translate(LINES, constraints=COUPLET, **options)
        apart = translator.translate(LINES, constraints=COUPLET, batch_size=3, **options)
        assert together == apart


def test_scores_are_the_log_probabilities_of_the_model(translator: Translator) -> None:
    """Not renormalized over what the constraints allow."""
    tokenizer = translator.tokenizers.tgt
    ids = {token: number for number, token in enumerate(tokenizer.tokens(range(len(tokenizer))))}
    for options in ({"beam": 1}, {"beam": 2}, {"sample": True}):
        found = translator.stream(LINES, constraints=COUPLET, length_penalty=0.0, **options)
        for line, translation in zip(LINES, found, strict=True):
            tokens = [ids[token] for token in translation.tokens]
            source = pad_sources([tokenizer.encode(line)]).ids
            with torch.no_grad():
                logits = translator.model(source, torch.tensor([[BOS, *tokens]]))[0]
            log_probs = logits.log_softmax(-1)[range(len(tokens) + 1), [*tokens, EOS]]
            assert translation.score == pytest.approx(float(log_probs.sum()), abs=1e-3)
            assert translation.log_probs == pytest.approx(log_probs.tolist(), abs=1e-3)


def test_a_prefix_and_constraints_agree_or_are_an_error(translator: Translator) -> None:
    line, rules = LINES[0], (EqualLength(), Forbid(["好"]))
    [found] = translator.translate([line], constraints=rules, prefix="明月")
    assert found.startswith("明月")
    assert all(rule.holds(line, found) for rule in rules)
    with pytest.raises(ConstraintError, match="the prefix must agree with the constraints"):
        translator.translate([line], constraints=rules, prefix="好")


def test_line_without_a_possible_output_is_named(translator: Translator) -> None:
    rules = (EqualLength(), Require(["春风又绿"]))
    with pytest.raises(ConstraintError) as caught:
        translator.translate(["明月何时照我还", "云开"], constraints=rules)
    message = str(caught.value)
    assert "equal_length (2 characters) and require 春风又绿" in message
    assert "'云开' (line 2)" in message


def test_a_line_in_several_segments_is_an_error(translator: Translator) -> None:
    with pytest.raises(DataError, match=r"constraints need lines .* segments on line 1"):
        translator.translate(["春风。" * 200], constraints=COUPLET)


def test_blank_lines_stay_blank(translator: Translator) -> None:
    found = translator.translate(["", LINES[0], " "], constraints=[Require(["春"])])
    assert found[0] == found[2] == ""
    assert "春" in found[1]


def test_an_empty_output_is_searched_again_unless_nothing_else_is_allowed(
    translator: Translator,
) -> None:
    nothing, something = Regex(""), Regex("|春|月")
    assert translator.translate(LINES[:2], constraints=[nothing]) == ["", ""]
    assert all(translator.translate(LINES, constraints=[something]))


def test_options_must_be_constraints(translator: Translator) -> None:
    with pytest.raises(ConfigError, match="constraints must be a list of constraints; found 'x'"):
        translator.translate(LINES, constraints="x")
    with pytest.raises(ConfigError, match=r"found \['mirror'\]"):
        translator.translate(LINES, constraints=["mirror"])
    with pytest.raises(ConfigError, match="must be a list of constraints; found 5; write"):
        translator.translate(LINES, constraints=5)


@dataclasses.dataclass
class _OtherEngine:
    """An engine that must not be called under constraints."""

    name: str = "other"
    workers: int = 1
    client_threads: int = 1
    batch_tokens: int | None = None

    def unsupported_reason(self, strategy: Any, longest: int = 0) -> str:
        return ""

    def generate(self, request: Any) -> Any:
        raise AssertionError("asked")


def test_another_engine_falls_back_to_the_native_one(
    translator: Translator, caplog: pytest.LogCaptureFixture
) -> None:
    native = NativeEngine(lambda: translator.model)
    other = Translator(native, translator.tokenizers, translator.config, engine=_OtherEngine())
    with caplog.at_level(logging.INFO):
        found = other.translate(LINES[:3], constraints=COUPLET)
    assert all(rule.holds(*pair) for rule in COUPLET for pair in zip(LINES, found, strict=False))
    assert "the engine other has no constrained decoding: the native engine is used" in caplog.text
