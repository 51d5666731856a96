"""How an explained translation was found: beam trace, forced prefixes, branches, references;
hostile requests; threads.
"""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from beam_kit import check_trace
from translator_kit import CONFIG, TEXT, load_translator_that_ends

from dragoman.decoding.constraint_automaton import ConstraintError
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import WuLengthPenalty
from dragoman.decoding.no_repeat_ngram import repeated_tokens
from dragoman.decoding.output_constraint_definitions import Regex
from dragoman.errors import ConfigError, DataError
from dragoman.explain import Explanation
from dragoman.explain.translation_explanation_builder import diagnose
from dragoman.inference import Translator
from dragoman.inference.forced_token_branches_and_head_ablation import compare_outputs
from dragoman.models.factory import build_model
from dragoman.text.sentencepiece_tokenizer import Tokenizers
from dragoman.text.special_tokens import BOS, EOS, PAD, UNK

SOURCE = "Ein Mann geht."
FIELDS = ("parent", "token", "logprob", "cum", "step", "reason", "cut")


@pytest.fixture(scope="module")
def translator(bundle: Path) -> Translator:
    return load_translator_that_ends(bundle)


def hypotheses_of(explanation: Explanation) -> list[Hypothesis]:
    """Return the n best of an explanation as hypotheses."""
    trace = explanation.beam
    assert trace is not None
    return [
        Hypothesis(
            entry.tokens,
            [float(trace.logprob[node]) for node in trace.path(leaf)],
            entry.normalised,
            finished=trace.token[leaf] == EOS,
        )
        for entry, leaf in zip(explanation.nbest, trace.leaves, strict=True)
    ]


def make_forbidden_reason(prefix: list[int], ngram: int = 0, *, retried: bool = False) -> Any:
    """Return which tokens the search forbids; none ends at once if it was retried."""

    def forbidden_reason(words: tuple[int, ...], token: int) -> str | None:
        if len(words) < len(prefix):
            return None if token == prefix[len(words)] else "constraint"
        if ngram and token in repeated_tokens(words, ngram):
            return "no_repeat"
        never = (PAD, BOS, UNK, EOS) if retried and not words else (PAD, BOS, UNK)
        return "constraint" if token in never else None

    return forbidden_reason


def was_retried(explanation: Explanation) -> bool:
    """Whether the first search found an empty output: then the end may not come first."""
    trace = explanation.beam
    assert trace is not None
    at_once = np.flatnonzero((trace.step == 0) & (trace.token == EOS))
    return any(trace.reason_name(node) == "constraint" for node in at_once)


@pytest.mark.parametrize(
    ("beam", "options"),
    [
        (1, {}),
        (2, {"nbest": 2}),
        (4, {"length_penalty": 0.0}),
        (4, {"length_penalty": 2.0, "nbest": 3}),
        (6, {"prefix": "Eine Frau"}),
        (3, {"no_repeat_ngram_size": 2}),
        (64, {}),
    ],
)
def test_the_trace_of_an_explanation_holds(
    translator: Translator, beam: int, options: dict[str, Any]
) -> None:
    found = translator.explain(SOURCE, beam=beam, **options)
    trace = found.beam
    assert trace is not None
    assert trace.width == beam
    alpha = options.get("length_penalty", CONFIG.decode.length_penalty)
    check_trace(
        trace,
        hypotheses_of(found),
        nbest=found.request["nbest"],
        limit=found.request["max_len"],
        penalty=WuLengthPenalty(alpha),
        forbidden_reason=make_forbidden_reason(
            found.request["prefix"],
            options.get("no_repeat_ngram_size", 0),
            retried=was_retried(found),
        ),
    )
    assert found.request["nbest"] == options.get("nbest", min(2, beam))
    assert [entry.leaf for entry in found.nbest] == list(trace.leaves)
    assert found.nbest[0].text == found.translation
    assert found.nbest[0].sum == pytest.approx(found.score["sum"], abs=1e-4)
    assert found.nbest[0].normalised == pytest.approx(found.score["normalised"], abs=1e-4)
    assert {int(token) for token in trace.token[1:]} <= set(found.token_texts)
    [plain] = translator.translate([SOURCE], beam=beam, **options)
    assert found.translation == plain


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("prefix", ["Eine", "Zwei Kinder", "你好", "🜨 ⟁", "x" * 40])
def test_forced_tokens_have_the_models_probability_and_the_rest_is_translated(
    translator: Translator, prefix: str, beam: int
) -> None:
    found = translator.explain(SOURCE, beam=beam, prefix=prefix)
    ids = translator.tokenizers.tgt.encode(prefix)
    assert found.request["prefix"] == ids
    assert [step.id for step in found.steps][: len(ids)] == ids
    assert [step.forced for step in found.steps] == [
        at < len(ids) for at in range(len(found.steps))
    ]
    assert all(step.logprob < -0.01 for step in found.steps[: len(ids)]), "not certain"
    score = translator.score([SOURCE], [found.translation])[0]
    if score.tokens == found.tgt_tokens:
        assert found.log_probs == pytest.approx(score.log_probs, abs=1e-4)
    vocabulary = len(translator.tokenizers.tgt)
    for step in found.steps:
        assert step.masked == (vocabulary - 1 if step.forced else 3)
    assert [found.translation] == translator.translate([SOURCE], beam=beam, prefix=prefix)
    by_ids = translator.explain(SOURCE, beam=beam, prefix_ids=ids)
    assert by_ids.digest == found.digest


def test_a_branch_keeps_the_prefix_and_takes_the_alternative(
    translator: Translator,
) -> None:
    """Fifty branches, each against a translation with the same prefix."""
    whole = translator.explain(SOURCE, beam=3)
    target = [step.id for step in whole.steps]
    choices = [
        (at, other)
        for at, step in enumerate(whole.steps)
        for other, _, _ in step.top
        if other != step.id and other not in (PAD, BOS)
    ]
    for at, other in choices[:50]:
        branch = translator.explain(SOURCE, beam=3, prefix_ids=[*target[:at], other])
        got = [step.id for step in branch.steps]
        assert got[: at + 1] == [*target[:at], other]
        assert branch.steps[at].logprob == pytest.approx(
            next(value for token, _, value in whole.steps[at].top if token == other), abs=1e-4
        )
        if other == EOS:
            assert got == [*target[:at], EOS]
        [expected] = translator.translate([SOURCE], beam=3, prefix_ids=[*target[:at], other])
        assert branch.translation == expected
        changes = compare_outputs(whole, branch)
        assert changes.states[:at] == ["kept"] * at
        assert "score" in changes.summary


def test_a_reference_is_the_target_and_is_compared(translator: Translator) -> None:
    reference = "Eine Frau steht!"
    found = translator.explain(SOURCE, beam=4, reference=reference)
    assert found.translation == reference
    assert all(step.forced for step in found.steps)
    [pair] = translator.score([SOURCE], [reference])
    assert found.score["sum"] == pytest.approx(pair.log_prob, abs=1e-4)
    assert found.score["reference"]["sum"] == found.score["sum"]
    own = translator.explain(SOURCE, beam=4)
    assert found.score["own"]["normalised"] == pytest.approx(own.score["normalised"], abs=1e-4)
    assert found.nbest == own.nbest
    assert found.score["reference"]["verdict"] == "model_error"
    assert found.request["reference"] == reference
    assert Explanation.from_json(found.to_json()).score["reference"]["verdict"] == "model_error"


def test_a_forced_output_has_the_score_with_which_a_search_ranked_it(
    translator: Translator,
) -> None:
    """So that any two outputs can be compared: what the search ranked lower is a model error."""
    compared = 0
    for text in dict.fromkeys(TEXT):
        found = translator.explain(text, beam=8, nbest=8)
        assert found.beam is not None
        best = found.nbest[0]
        for entry, leaf in zip(found.nbest, found.beam.leaves, strict=True):
            if found.beam.reason_name(leaf) != "finished":
                continue
            forced = translator.explain(text, beam=1, prefix_ids=[*entry.tokens, EOS])
            assert forced.score["sum"] == pytest.approx(entry.sum, abs=1e-4)
            assert forced.score["normalised"] == pytest.approx(entry.normalised, abs=1e-4)
            if entry.normalised < best.normalised - 1e-3:
                compared += 1
                scores = forced.score["normalised"], best.normalised
                assert diagnose(reference=scores[0], found=scores[1]).verdict == "model_error"
                assert diagnose(reference=scores[1], found=scores[0]).verdict == "search_error"
    assert compared


HOSTILE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"reference": ""}, DataError, "a reference must be a text with words; found ''"),
    ({"reference": "  \n"}, DataError, "a reference must be a text with words"),
    ({"reference": 5}, DataError, "a reference must be a text with words; found 5"),
    ({"reference": "a", "prefix": "b"}, ConfigError, "prefix and reference exclude each other"),
    ({"prefix": "a", "prefix_ids": [5]}, ConfigError, "prefix and prefix_ids exclude each other"),
    ({"prefix_ids": [5, BOS]}, DataError, "prefix_ids must be tokens of the target, 3 to 329"),
    ({"prefix_ids": [EOS, 5]}, DataError, "or end with 2; found 2"),
    ({"prefix_ids": [330]}, DataError, "found 330"),
    ({"prefix_ids": [-1]}, DataError, "found -1"),
    ({"prefix_ids": "56"}, ConfigError, "prefix_ids must be a list of token ids; found '56'"),
    ({"prefix_ids": [5.0]}, ConfigError, "prefix_ids must be integers; found 5.0"),
    ({"prefix_ids": [True]}, ConfigError, "prefix_ids must be integers; found True"),
    ({"no_repeat_ngram_size": -1}, ConfigError, "no_repeat_ngram_size must be at least 0"),
    (
        {"no_repeat_ngram_size": 2, "constraints": [Regex("a+")]},
        ConfigError,
        "no_repeat_ngram_size and constraints exclude each other; found no_repeat_ngram_size=2",
    ),
    ({"constraints": [Regex("[Ω]{3}x{400}")]}, ConstraintError, "found"),
]


@pytest.mark.parametrize(("options", "error", "words"), HOSTILE)
def test_an_impossible_request_is_rejected_in_one_line(
    translator: Translator, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as raised:
        translator.explain(SOURCE, beam=2, **options)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["", "   ", "\n"])
def test_an_empty_source_is_rejected(translator: Translator, text: str) -> None:
    with pytest.raises(DataError, match="a text to explain must hold words"):
        translator.explain(text, beam=2)


def test_a_prefix_longer_than_the_limit_raises_it(translator: Translator) -> None:
    ids = [300 + at % 20 for at in range(60)]
    found = translator.explain(SOURCE, beam=2, prefix_ids=ids)
    assert [step.id for step in found.steps][:60] == ids
    whole = translator.explain(SOURCE, beam=2, prefix_ids=[*ids, EOS])
    assert [step.id for step in whole.steps] == [*ids, EOS]
    assert all(step.forced for step in whole.steps)


def test_prefixes_and_references_must_fit_learned_positions(tokenizers: Tokenizers) -> None:
    config = CONFIG.replace(model={"positions": "learned", "max_positions": 12})
    model = build_model(
        config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    ).eval()
    translator = Translator(model, tokenizers, config)
    for options in ({"prefix_ids": [300] * 12}, {"reference": "Zwei Kinder spielen? " * 5}):
        with pytest.raises(DataError, match=r"must have at most 11 tokens, .*; found \d+"):
            translator.explain("Ein Mann", beam=2, **options)
    fits = translator.explain("Ein Mann", beam=2, prefix_ids=[300] * 11)
    assert [step.id for step in fits.steps][:11] == [300] * 11


def test_a_sampled_output_has_no_beam(translator: Translator) -> None:
    found = translator.explain(SOURCE, sample=True, seed=5)
    assert found.beam is None
    assert found.missing["beam"].startswith("Sampling")
    assert [entry.leaf for entry in found.nbest] == [None]


def test_an_output_that_would_be_empty_is_searched_again_as_in_translation(
    translator: Translator,
) -> None:
    retried = 0
    for text, beam in itertools.product(dict.fromkeys(TEXT), (1, 3)):
        found = translator.explain(text, beam=beam)
        assert [found.translation] == translator.translate([text], beam=beam)
        assert found.steps[0].id != EOS
        retried += was_retried(found)
    assert retried


def test_explanations_of_many_threads_are_equal(translator: Translator) -> None:
    texts = [text for text in dict.fromkeys(TEXT) for _ in range(4)]

    def explain(text: str) -> Explanation:
        return translator.explain(text, beam=3, nbest=2)

    expected = {text: explain(text) for text in dict.fromkeys(texts)}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(explain, texts))
    for text, explanation in zip(texts, found, strict=True):
        for name in FIELDS:
            np.testing.assert_array_equal(
                getattr(explanation.beam, name), getattr(expected[text].beam, name)
            )
        assert explanation.nbest == expected[text].nbest
        assert explanation.digest == expected[text].digest


def test_a_trace_survives_json(translator: Translator) -> None:
    found = translator.explain(SOURCE, beam=4, nbest=2)
    read = Explanation.from_json(found.to_json())
    assert read.beam is not None
    assert found.beam is not None
    assert read.beam.leaves == found.beam.leaves
    for name in FIELDS:
        np.testing.assert_allclose(
            getattr(read.beam, name), getattr(found.beam, name), rtol=1e-6, equal_nan=True
        )
    assert read.digest == found.digest
    assert math.isnan(read.beam.cut[0])
