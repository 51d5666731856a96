"""Scores of given pairs: the model's own log-probabilities, whatever the batch."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from translator_kit import CONFIG, TEXT, write_random_bundle

from dragoman.bundle import write_bundle
from dragoman.errors import ConfigError, DataError, DivergedError
from dragoman.inference import Translator, translation_log_probabilities
from dragoman.models.factory import build_model
from dragoman.text.sentencepiece_tokenizer import Tokenizer, Tokenizers, train_tokenizers
from dragoman.text.special_tokens import BOS, EOS

SOURCES = [
    "Ein Mann geht.",
    "Eine Frau steht!",
    "",
    "Zwei Kinder spielen?",
    "Ein Mann geht.",
    "0123456789",
]
TARGETS = [
    "Eine Frau steht!",
    "Ein",
    "Ein Mann geht.",
    "",
    "Zwei Kinder spielen? Ein Mann.",
    "你好。",
]


def by_hand(translator: Translator, source: str, target: str) -> list[float]:
    """Compute the log-probabilities of one pair with the plain model, without batch or padding."""
    src = translator.tokenizers.src.encode(source)
    tgt = translator.tokenizers.tgt.encode(target)
    with torch.no_grad():
        logits = translator.model(torch.tensor([[*src, EOS]]), torch.tensor([[BOS, *tgt]]))[0]
    log_probs = torch.log_softmax(logits.double(), dim=-1)
    return [float(log_probs[position, token]) for position, token in enumerate([*tgt, EOS])]


@pytest.mark.parametrize("batch_size", [None, 1, 2, 64])
def test_scores_equal_a_forward_pass_by_hand(
    translator: Translator, batch_size: int | None
) -> None:
    found = translator.score(SOURCES, TARGETS, batch_size=batch_size)
    assert len(found) == len(SOURCES)
    for one, source, target in zip(found, SOURCES, TARGETS, strict=True):
        expected = by_hand(translator, source, target)
        assert one.log_probs == pytest.approx(expected, abs=1e-4)
        assert one.log_prob == pytest.approx(math.fsum(expected), abs=1e-3)
        assert one.per_token == pytest.approx(one.log_prob / len(expected))
        assert len(one.tokens) == len(expected)
        assert one.tokens[-1] == "</s>", "the end is counted"


def test_scoring_twice_gives_the_same_bits(translator: Translator) -> None:
    assert translator.score(SOURCES, TARGETS) == translator.score(SOURCES, TARGETS)


class SameTokens:
    """A tokenizer that cuts texts into the tokens that a model wrote: a random model writes what no
    tokenizer would.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: dict[str, list[str]]) -> None:
        self._tokenizer = tokenizer
        self._ids = {
            spelt: number for number, spelt in enumerate(tokenizer.tokens(range(len(tokenizer))))
        }
        self._tokens = tokens

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [[self._ids[token] for token in self._tokens[text]] for text in texts]

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("texts", [SOURCES[:2], SOURCES[3:]])
def test_the_models_own_output_scores_as_it_did_when_it_was_written(
    translator: Translator, texts: list[str]
) -> None:
    written = list(translator.stream(texts, beam=1))
    cut = SameTokens(translator.tokenizers.tgt, {each.text: each.tokens for each in written})
    again = Translator(
        translator.model, Tokenizers(translator.tokenizers.src, cut), translator.config
    )  # type: ignore[arg-type]
    for one, each in zip(again.score(texts, [each.text for each in written]), written, strict=True):
        assert one.tokens == [*each.tokens, "</s>"]
        assert one.log_probs[: len(each.log_probs)] == pytest.approx(each.log_probs, abs=1e-4)
        if len(each.log_probs) > len(each.tokens):  # it came to its end
            assert one.log_prob == pytest.approx(sum(each.log_probs), abs=1e-3)


def test_empty_sides_are_scored_and_noted(translator: Translator) -> None:
    found = translator.score(SOURCES, TARGETS)
    assert found[2].notes == ["its source is empty"]
    assert found[3].notes == ["its target is empty"]
    assert found[3].tokens == ["</s>"]
    [both] = translator.score([" "], ["\t"])
    assert both.notes == ["its source and target is empty"]
    assert both.log_prob < 0
    assert translator.score([], []) == []


def test_long_pairs_are_scored_whole_and_noted(translator: Translator) -> None:
    long = " ".join(["Ein Mann geht."] * 10)
    [found] = translator.score(["Ein Mann geht."], [long])
    assert found.log_probs == pytest.approx(by_hand(translator, "Ein Mann geht.", long), abs=1e-4)
    assert "more than the 40 that the model was trained on" in found.notes[0]


def test_pairs_beyond_the_models_positions_are_nan(tmp_path: Path, tokenizers: Tokenizers) -> None:
    config = CONFIG.replace(model={"positions": "learned", "max_positions": 100})
    torch.manual_seed(3)
    model = build_model(
        config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    )
    write_bundle(
        tmp_path / "model",
        config=config,
        tokenizers=tokenizers,
        weights=model.state_dict(),
        golden=TEXT[:2],
    )
    translator = Translator.load(tmp_path / "model")
    long = " ".join(["Ein Mann geht."] * 60)
    first, cut, last = translator.score(["Ein", "Ein", long], ["Mann", long, "Mann"])
    assert math.isfinite(first.log_prob)
    assert math.isnan(cut.log_prob)
    assert math.isnan(last.log_prob)
    assert cut.notes[0].startswith(
        f"not scored: {len(cut.tokens) - 1:,} tokens are more than the limit of 99"
    )


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_pair_may_have_as_many_tokens_as_the_model_has_positions(
    tokenizers: Tokenizers, side: str
) -> None:
    text = "Ein Mann geht. 0123456789"
    count = len(tokenizers.tgt.encode(text))
    pair = (text, "Ein") if side == "source" else ("Ein", text)
    for spare, is_scored in ((0, True), (-1, False)):
        config = CONFIG.replace(model={"positions": "learned", "max_positions": count + 1 + spare})
        model = build_model(
            config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
        ).eval()
        [found] = Translator(model, tokenizers, config).score([pair[0]], [pair[1]])
        assert math.isfinite(found.log_prob) is is_scored
        assert any("not scored" in note for note in found.notes) is not is_scored


def test_only_more_tokens_than_in_training_are_noted(tokenizers: Tokenizers) -> None:
    text = "Ein Mann geht. 0123456789"
    count = len(tokenizers.tgt.encode(text))
    torch.manual_seed(3)
    model = build_model(
        CONFIG.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    ).eval()
    for longest, notes in (
        (count, []),
        (
            count - 1,
            [f"{count} tokens are more than the {count - 1} that the model was trained on"],
        ),
    ):
        config = CONFIG.replace(data={"max_length": longest})
        [found] = Translator(model, tokenizers, config).score([f" {text} "], ["Ein"])
        assert found.notes == notes


def test_the_tag_of_the_target_language_is_a_token_of_the_source() -> None:
    config = CONFIG.replace(data={"directions": ("de-en", "de-zh")}, text={"language_tags": True})
    tagged = train_tokenizers(TEXT, TEXT, config.text, languages=["en", "zh"])
    torch.manual_seed(3)
    model = build_model(
        config.model, src_vocab_size=len(tagged.src), tgt_vocab_size=len(tagged.tgt)
    ).eval()
    source, target = tagged.src.encode("Ein Mann"), tagged.tgt.encode("Ein")
    config = config.replace(data={"max_length": len(source)})
    translator = Translator(model, tagged, config)
    for language in ("en", "zh"):
        [found] = translator.score(["Ein Mann"], ["Ein"], target_language=language)
        src = torch.tensor([[tagged.src.tag_ids[language], *source, EOS]])
        with torch.no_grad():
            log_probs = model(src, torch.tensor([[BOS, *target]]))[0].log_softmax(-1)
        expected = log_probs[range(len(target) + 1), [*target, EOS]].tolist()
        assert found.log_probs == pytest.approx(expected, abs=1e-4)
        assert "trained on" in found.notes[0]

    # The tag lengthens the source alone: a target as long as the model was trained on has no note.
    longest = config.replace(data={"max_length": len(source) + 1})
    [found] = Translator(model, tagged, longest).score(
        ["Ein Mann"], ["Ein Mann"], target_language="en"
    )
    assert len(found.tokens) - 1 <= len(source) + 1
    assert not found.notes
    short = config.replace(data={"max_length": len(found.tokens) - 1})
    [found] = Translator(model, tagged, short).score(["Ein"], ["Ein Mann"], target_language="en")
    assert not found.notes


def test_unknown_tokens_of_the_target_are_noted() -> None:
    config = CONFIG.replace(
        text={"tokenizer": "characters", "byte_fallback": False, "vocab_size": 30}
    )
    plain = train_tokenizers(["abc def"] * 20, ["abc def"] * 20, config.text)
    model = build_model(
        config.model, src_vocab_size=len(plain.src), tgt_vocab_size=len(plain.tgt)
    ).eval()
    translator = Translator(model, plain, config)
    one, two, source = translator.score(["abc", "abc", "ж"], ["aж", "жb ж", "abc"])
    assert one.notes == ["1 of its target tokens is unknown to the model"]
    assert two.notes == ["2 of its target tokens are unknown to the model"]
    assert source.notes == []


def test_a_batch_that_does_not_fit_in_memory_is_halved(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = translator.score(SOURCES, TARGETS)
    plain, sizes = translation_log_probabilities._target_log_probs, list[int]()

    def small(model: object, pairs: list[object]) -> list[list[float]]:
        sizes.append(len(pairs))
        if len(pairs) > 2:
            raise torch.OutOfMemoryError("full")
        return plain(model, pairs)  # type: ignore[arg-type]

    monkeypatch.setattr(translation_log_probabilities, "_target_log_probs", small)
    found = translator.score(SOURCES, TARGETS, batch_size=6)
    assert max(sizes) == 6
    for one, other in zip(found, expected, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


def test_unequal_numbers_of_texts_are_reported(translator: Translator) -> None:
    with pytest.raises(DataError, match="sources and targets must be equally many; found 2 and 1"):
        translator.score(["a", "b"], ["c"])
    with pytest.raises(DataError, match="found one text, 'abc'"):
        translator.score("abc", ["c"])
    with pytest.raises(ConfigError, match="batch_size must be at least 1; found 0"):
        translator.score(["a"], ["b"], batch_size=0)


def test_weights_that_are_not_finite_are_reported(tmp_path: Path, tokenizers: Tokenizers) -> None:
    translator = Translator.load(write_random_bundle(tmp_path / "model", tokenizers))
    with torch.no_grad():
        next(translator.model.decoder.parameters()).fill_(math.nan)
    with pytest.raises(DivergedError, match="log-probabilities must be finite; found nan"):
        translator.score(["a"], ["b"])


def test_a_large_vocabulary_is_projected_in_parts(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = translator.score(SOURCES, TARGETS)
    monkeypatch.setattr(translation_log_probabilities, "_MAX_LOGITS", 700)  # two rows at a time
    for one, other in zip(translator.score(SOURCES, TARGETS), expected, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


def test_reprs_are_short(translator: Translator) -> None:
    """A translator's repr was an address, an explanation's pages of numbers."""
    [each] = translator.stream(["Ein Mann geht."], nbest=2)
    explained = translator.explain("Ein Mann geht.")
    [pair] = translator.score(["Ein"], ["Mann"])
    for value, begins in (
        (translator, "Translator(recipe none, engine native)"),
        (each, "Translation('"),
        (explained, "Explanation('Ein Mann geht.' -> "),
        (pair, "PairScore(log_prob=-"),
        (CONFIG, "Config(text.vocab_size=330, data.max_length=40, model.encoder="),
    ):
        assert repr(value).startswith(begins)
        assert len(repr(value)) < 400
        assert "\n" not in repr(value)
