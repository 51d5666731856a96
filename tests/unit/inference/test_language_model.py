"""LanguageModel: generation by seed, independent of the number of samples; scores of texts."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from language_kit import config_of, lines_of, task_of

from dragoman.data.labeled_records import Record
from dragoman.decoding.constraint_automaton import ConstraintError
from dragoman.decoding.output_constraint_definitions import (
    EqualLength,
    Forbid,
    Mirror,
    Regex,
    Require,
)
from dragoman.decoding.sampling import Sampling
from dragoman.decoding.search_interface import search
from dragoman.errors import ConfigError, DataError
from dragoman.inference.predictors.language_model import (
    EMPTY_NOTE,
    MAX_PROMPT_CHARS,
    LanguageModel,
    TextScore,
)
from dragoman.tasks.language_model import LanguageTask
from dragoman.text.special_tokens import BOS, EOS, PAD, SPECIAL_TOKENS, UNK


def predictor_of(name: str, tokenizer: str = "words", **changes: Any) -> LanguageModel:
    text = {"tokenizer": tokenizer, "vocab_size": 270}
    task = task_of(config_of(name, text=text, **changes), lines_of(50))
    torch.manual_seed(1)
    return LanguageModel(task.build_model(), task)


@pytest.mark.parametrize("name", ["transformer_xl", "lstm", "transformer", "reformer"])
def test_generation_is_reproducible_and_independent_of_n(name: str) -> None:
    model = predictor_of(name)
    one = "".join(model.generate("a b", max_tokens=20, seed=5))
    assert one == "".join(model.generate("a b", max_tokens=20, seed=5))
    assert one != "".join(model.generate("a b", max_tokens=20, seed=6))
    three = model.complete("a b", max_tokens=20, seed=5, n=3)
    assert [each.tokens for each in three] == [20, 20, 20]
    assert three[0].text == one
    assert three[1].text == model.complete("a b", max_tokens=20, seed=5, n=2)[1].text
    assert three[1].text != one


@pytest.mark.parametrize("tokenizer", ["words", "bytes", "bpe"])
def test_decoded_tokens_are_the_text_after_the_prompt(tokenizer: str) -> None:
    model = predictor_of("lstm", tokenizer)
    for prompt in ("", "a b", "a b\n"):
        ids = model.task.text.encode_prompt(prompt)
        decoder = model.task.text.decoder(ids)
        ahead = model.task.text.encode_prompt("c d\nb\n")
        text = "".join(decoder.push(token) for token in ahead)
        assert text.lstrip(" ") == "c d\nb\n"
        assert text.startswith(" ") == (prompt == "a b" and tokenizer != "bytes")


def test_a_byte_model_waits_for_whole_characters() -> None:
    text = predictor_of("lstm", "bytes").task.text
    decoder = text.decoder([])
    stream = [decoder.push(token) for token in text.encode_prompt("é€")]
    assert stream == ["", "é", "", "", "€"]


def test_greedy_generation_equals_the_most_probable_tokens_of_the_whole_text() -> None:
    """Against logits computed without a cache; the memory covers the whole text."""
    model = predictor_of("transformer_xl", language={"memory": 4, "eval_memory": 60})
    text = model.task.text
    ids = [BOS, *text.encode_prompt("a b")]
    expected, log_probs = list[int](), list[float]()
    with torch.no_grad():
        for _ in range(15):
            logits = model.model(torch.tensor([ids]))[0, -1]
            normalizer = float(logits.logsumexp(-1))
            logits[[0, 1, 3]] = -math.inf
            ids.append(int(logits.argmax()))
            expected.append(ids[-1])
            log_probs.append(float(logits.max()) - normalizer)
    decoder = text.decoder(text.encode_prompt("a b"))
    wanted = "".join(decoder.push(token) for token in expected)
    chunks = list(model.generate("a b", max_tokens=15, temperature=0))
    assert "".join(chunks) == wanted
    assert [chunk.log_prob for chunk in chunks] == pytest.approx(log_probs, abs=1e-4)
    assert "".join(model.generate("a b", max_tokens=15, top_k=1)) == wanted


def test_a_prompt_longer_than_the_memory_is_read_as_in_validation() -> None:
    """Segment by segment: the next token has the log-probability that scoring gives it."""
    model = predictor_of("transformer_xl", language={"memory": 4, "eval_memory": 4})
    prompt = "a b c d e f g h a c e g b d f h a a b"  # more than two segments of 8 tokens
    ids = model.task.text.encode_prompt(prompt)
    for seed in range(3):
        (chunk,) = model.generate(prompt, max_tokens=1, seed=seed)
        token = model.task.text.vocabulary.id(chunk.strip()) if chunk.strip() else EOS
        rows = [np.array(row, np.int32) for row in (ids, [*ids, token])]
        before, after = model.task.scorer(model.model, model.device).documents(rows)
        assert chunk.log_prob == pytest.approx(before - after, abs=1e-4)


@pytest.mark.parametrize("sampling", [None, Sampling(seed=3)], ids=["greedy", "sampling"])
@pytest.mark.parametrize(
    ("tokenizer", "never"), [("words", {PAD, BOS, UNK}), ("bytes", {PAD, BOS, UNK, EOS})]
)
def test_tokens_that_are_no_text_are_never_written(
    tokenizer: str, never: set[int], sampling: Sampling | None
) -> None:
    model = predictor_of("lstm", tokenizer)
    logits = torch.zeros(4, len(SPECIAL_TOKENS) + 5)
    logits[:, : len(SPECIAL_TOKENS)] = 20.0
    tokens, log_probs = model._choose(logits, sampling, 0)
    assert never.isdisjoint(tokens)
    assert EOS in never or set(tokens) == {EOS}
    expected = logits.double().log_softmax(-1)[range(4), tokens].tolist()
    assert log_probs == pytest.approx(expected)


def test_sampling_equals_the_search_of_translation() -> None:
    """The same draws as `search` with the sampling strategy, until the first line ends."""
    model = predictor_of("lstm")
    found = search(model.model, 1, limits=[12], strategy=Sampling(seed=9), sample_ids=[0])[0][0]
    stream = list(model.generate("", max_tokens=12, seed=9))
    decoder = model.task.text.decoder([])
    tokens = [*found.tokens, *([EOS] if found.finished else [])]
    wanted = [decoder.push(token) for token in tokens]
    assert [str(token) for token in stream[: len(wanted)]] == wanted
    assert [token.log_prob for token in stream[: len(wanted)]] == pytest.approx(
        found.log_probs, abs=1e-5
    )


@pytest.mark.parametrize("name", ["transformer", "reformer"])
def test_a_model_without_memory_reads_the_recent_text_anew(name: str) -> None:
    model = predictor_of(name)  # segments of 8 tokens
    assert model.complete("a b c d a b c d a b", max_tokens=40)[0].tokens == 40


@pytest.mark.parametrize("prompt", ["a b", "a b c d e f g", "d c b a h g f e a b c c d"])
def test_no_position_past_the_segment_is_used(prompt: str) -> None:
    """The end of a prompt is read, and a whole segment before the last half of it anew."""
    model = predictor_of("transformer", model={"positions": "learned", "max_positions": 8})
    text = model.task.text
    written = [BOS, *text.encode_prompt(prompt)]
    context, expected = written[-8:], list[int]()
    with torch.no_grad():
        for _ in range(30):
            logits = model.model(torch.tensor([context]))[0, -1]
            logits[[0, 1, 3]] = -math.inf
            expected.append(int(logits.argmax()))
            written.append(expected[-1])
            context = written[-4:] if len(context) == 8 else [*context, expected[-1]]
    decoder = text.decoder(text.encode_prompt(prompt))
    wanted = "".join(decoder.push(token) for token in expected)
    assert "".join(model.generate(prompt, max_tokens=30, temperature=0)) == wanted


def test_an_input_that_is_not_text_is_not_scored() -> None:
    with pytest.raises(DataError, match="text 2 must be a text; found None"):
        predictor_of("lstm").score(["a", None, "b"])  # type: ignore[list-item]


def test_scores_equal_a_hand_computation_in_any_batch() -> None:
    model = predictor_of("lstm")
    texts = ["a b c", "", "d e f g h a", "b"]
    scores = model.score(texts)
    assert scores[1].notes == (EMPTY_NOTE,)
    assert scores[1].log_prob == 0.0
    for text, score in zip(texts, scores, strict=True):
        if not text:
            continue
        ids = [BOS, *model.task.text.encode(text).tolist()]
        with torch.no_grad():
            log_probs = model.model(torch.tensor([ids[:-1]])).log_softmax(-1)[0]
        expected = float(log_probs.gather(1, torch.tensor(ids[1:])[:, None]).sum())
        assert score.log_prob == pytest.approx(expected, rel=1e-5)
        assert score.perplexity == pytest.approx(math.exp(-expected / score.tokens), rel=1e-5)
        assert model.score([text])[0].log_prob == pytest.approx(score.log_prob, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be an integer from 1 to 1,000,000; found 0"),
        ({"n": 0}, "n must be an integer from 1 to 1,024; found 0"),
        ({"temperature": -1.0}, "temperature must be a finite number above 0; found -1.0"),
        ({"top_p": 0.0}, "found 0.0"),
        ({"top_k": -2}, "found -2"),
        ({"top_k": 2.5}, "top_k must be an integer of at least 1, or 0 for all tokens; found 2.5"),
        ({"seed": 1.5}, "seed must be an integer from 0 to 2**63 - 1; found 1.5; try 1"),
        ({"seed": -1}, "found -1"),
    ],
)
def test_bad_options_are_reported(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        predictor_of("lstm").generate("a", **options)
    assert message in str(error.value)


def test_a_prompt_must_be_text() -> None:
    with pytest.raises(DataError, match="found int 3"):
        predictor_of("lstm").generate(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokenizer", ["words", "bytes", "bpe", "characters"])
@pytest.mark.parametrize("options", [{"temperature": 0}, {"n": 3, "top_p": 0.9}], ids=str)
def test_a_constrained_continuation_is_a_line_that_fulfils_everything(
    tokenizer: str, options: dict[str, Any]
) -> None:
    model = predictor_of("lstm", tokenizer)
    for constraints in (
        [Require(["b"]), Forbid(["c", "d"])],
        [Regex("[abc ]{3,9}")],
        [EqualLength(), Mirror(), Forbid(["e"])],
    ):
        found = model.complete("a b a", max_tokens=30, constraints=constraints, **options)
        for each in found:
            text = each.text.removeprefix(" ")
            assert all(rule.holds("a b a", text) for rule in constraints), (text, constraints)
            assert "\n" not in each.text
    assert len(found) == options.get("n", 1)
    free = model.complete("a b a", max_tokens=10)
    assert free[0].text == model.complete("a b a", max_tokens=10, constraints=())[0].text


def test_constraints_that_no_continuation_fulfils_are_an_error() -> None:
    model = predictor_of("lstm", "bytes")
    with pytest.raises(ConstraintError, match="none under require b and forbid b, for 'a'"):
        model.generate("a", constraints=[Require(["b"]), Forbid(["b"])])
    with pytest.raises(
        ConstraintError, match=r"none of at most 3 tokens under require abcd.*; raise max_tokens, "
    ):
        model.generate("a", max_tokens=4, constraints=[Require(["abcd"])])


@pytest.mark.parametrize("constraints", [["mirror"], "", EqualLength(), 5, None])
def test_options_must_be_constraints(constraints: Any) -> None:
    model = predictor_of("lstm", "bytes")
    message = rf"must be a list of constraints; found {re.escape(repr(constraints))}; write \[Equal"
    with pytest.raises(ConfigError, match=message):
        model.complete("a", constraints=constraints)


def test_white_space_around_a_prompt_is_not_counted_by_constraints() -> None:
    model = predictor_of("lstm", "bytes")
    for prompt in ("a b a", " a b a\n"):
        [found] = model.complete(prompt, max_tokens=30, constraints=[EqualLength()])
        assert len(found.text.removeprefix(" ")) == 5


def test_a_constrained_continuation_has_space_for_its_end() -> None:
    model = predictor_of("lstm", "bytes")
    found = model.complete("a", max_tokens=4, n=24, constraints=[Regex("abcd?")])
    assert {each.text for each in found} == {"abc"}
    longer = model.complete("a", max_tokens=5, n=24, constraints=[Regex("abcd?")])
    assert {each.text.removeprefix(" ") for each in longer} == {"abc", "abcd"}


def test_constrained_samples_are_independent_of_n() -> None:
    model = predictor_of("lstm", "bpe")
    options: dict[str, Any] = {"max_tokens": 20, "seed": 4, "constraints": [Regex("[abc ]{3,9}")]}
    texts = [each.text for each in model.complete("a b", n=6, **options)]
    assert len(set(texts)) > 1
    for n in (1, 2, 4):
        assert [each.text for each in model.complete("a b", n=n, **options)] == texts[:n]


@pytest.mark.parametrize(("name", "most"), [("max_tokens", 1_000_000), ("n", 1024)])
def test_generation_is_bounded(name: str, most: int) -> None:
    model = predictor_of("lstm")
    model.generate("a", **{name: most})
    for wrong in (most + 1, True):
        with pytest.raises(ConfigError, match=f"{name} must be an integer from 1 to {most:,}"):
            model.generate("a", **{name: wrong})


def test_the_perplexity_of_impossible_text_is_finite() -> None:
    assert TextScore(text="a", log_prob=-8.0, tokens=4).perplexity == pytest.approx(math.e**2)
    assert TextScore(text="", log_prob=0.0, tokens=0).perplexity == 1.0
    assert math.isfinite(TextScore(text="a", log_prob=-1e9, tokens=1).perplexity)


def test_a_prompt_must_be_valid_and_of_bounded_length() -> None:
    model = predictor_of("lstm")
    with pytest.raises(DataError, match=r"text must be valid Unicode; found U\+DCE9"):
        model.generate("a\udce9b")
    with pytest.raises(DataError, match="at most 1,048,576 characters; found 1,048,577 or more"):
        model.generate("a" * (MAX_PROMPT_CHARS + 1))


def test_texts_are_read_from_the_field_of_training() -> None:
    base = predictor_of("lstm")
    config = base.config.replace(data={"text_field": "body"})
    model = LanguageModel(base.model, LanguageTask(config, base.task.text))
    record = Record(Path("a.jsonl"), 1, {"text": "one", "body": "two", "title": "three"})
    assert model.read_record(record) == "two"
    assert model.read_record(record, text_field="title") == "three"
    assert model.read_record(Record(Path("a.txt"), 1, {"text": "one"})) == "one"
