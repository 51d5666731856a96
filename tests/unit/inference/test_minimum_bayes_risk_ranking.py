"""Minimum Bayes risk decoding: the expected utility by hand, weights, batches, long lines."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from translator_kit import CONFIG, TEXT, CopyModel

from dragoman.decoding.hypothesis import Hypothesis
from dragoman.errors import ConfigError
from dragoman.evaluate.minimum_bayes_risk_utility import pairwise_chrf
from dragoman.inference import NativeEngine, SearchRequest, TranslationOptions, Translator
from dragoman.inference.minimum_bayes_risk_ranking import rank_candidates
from dragoman.text.sentencepiece_tokenizer import Tokenizer, train_tokenizers

LINES = [" ".join(TEXT[at % 5].split()[: 1 + at % 3]) + f" {at}" for at in range(6)]


def hypothesis(total: float, *, finished: bool = True) -> Hypothesis:
    return Hypothesis([7], [total], total, finished)


def test_samples_weigh_as_often_as_they_were_drawn() -> None:
    texts = ["ein Hund", "eine Katze", "eine Katze"]
    ranked = rank_candidates([hypothesis(-1.0)] * 3, texts, pairwise_chrf, sampled=True)
    between = CHRF().sentence_score("eine Katze", ["ein Hund"]).score
    assert ranked.texts == ["eine Katze", "ein Hund"]
    assert ranked.utilities[0] == pytest.approx((2 * 100 + between) / 3)


def test_hypotheses_of_a_beam_weigh_by_their_probability() -> None:
    texts, totals = ["ein Hund", "eine Katze"], [-1.0, -3.0]
    ranked = rank_candidates(
        [hypothesis(total) for total in totals], texts, pairwise_chrf, sampled=False
    )
    weights = [math.exp(total) / sum(map(math.exp, totals)) for total in totals]
    between = CHRF().sentence_score("ein Hund", ["eine Katze"]).score
    assert ranked.texts == texts
    assert ranked.utilities[0] == pytest.approx(weights[0] * 100 + weights[1] * between)


def test_a_length_penalty_does_not_change_the_weights() -> None:
    """The score of the longer one is higher, and its probability is lower."""
    texts = ["ein Hund", "eine Katze"]
    found = [Hypothesis([7], [-1.0], -1.0, True), Hypothesis([7] * 4, [-0.5] * 4, -0.5, True)]
    ranked = rank_candidates(found, texts, pairwise_chrf, sampled=False)
    weight = math.exp(-1.0) / (math.exp(-1.0) + math.exp(-2.0))
    between = CHRF().sentence_score("ein Hund", ["eine Katze"]).score
    assert ranked.texts == texts
    assert ranked.utilities[0] == pytest.approx(weight * 100 + (1 - weight) * between, rel=1e-3)


def test_truncated_candidates_come_last() -> None:
    found = [hypothesis(-1.0), hypothesis(-2.0, finished=False)]
    ranked = rank_candidates(
        [found[0], found[1], found[1]], ["a b c", "x y", "x y"], pairwise_chrf, sampled=True
    )
    assert ranked.texts == ["a b c", "x y"]
    assert ranked.utilities[0] < ranked.utilities[1]


@pytest.mark.parametrize("metric", ["chrf", "bleu"])
def test_the_choice_has_the_highest_expected_utility(translator: Translator, metric: str) -> None:
    """Against sacreBLEU's score of each sample with each, one by one."""
    scorer: Any = CHRF() if metric == "chrf" else BLEU(effective_order=True)
    [found] = translator.stream([LINES[2]], mbr=metric, samples=12, seed=4, nbest=12)
    drawn = TranslationOptions(mbr=metric, samples=12, seed=4).strategy(translator.config.decode)
    batches = translator._batch_translator
    segment, *_ = translator._first_segment(LINES[2], TranslationOptions())
    request = batches.build_request([segment], TranslationOptions(), drawn)
    [texts] = batches.detokenize(batches.native.generate(request))
    counts = Counter(texts)
    assert counts.total() == 12, "equal samples are kept"
    expected = {
        text: sum(scorer.sentence_score(text, [other]).score for other in texts) / 12
        for text in counts
    }
    assert found.utility == pytest.approx(max(expected.values()))
    assert {each.text: pytest.approx(each.utility) for each in found.alternatives} == expected


@pytest.mark.parametrize(
    "options", [{"samples": 8}, {"samples": 8, "epsilon": 0.0, "seed": 3}, {"beam": 4}]
)
def test_other_rows_in_the_batch_change_nothing(
    translator: Translator, options: dict[str, Any]
) -> None:
    one = list(translator.stream(LINES, mbr="chrf", batch_size=1, **options))
    many = list(translator.stream(LINES, mbr="chrf", batch_size=64, **options))
    assert [each.text for each in many] == [each.text for each in one]
    assert [each.utility for each in many] == pytest.approx([each.utility for each in one])
    assert translator.translate(LINES, mbr="chrf", **options) == [each.text for each in one]


def test_seeds_differ_and_repeat(translator: Translator) -> None:
    first, again, other = (
        translator.translate(LINES, mbr="chrf", samples=4, epsilon=0.0, seed=seed)
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_long_lines_have_the_mean_utility_of_their_segments(translator: Translator) -> None:
    line = " ".join(TEXT[at % 3] for at in range(12))
    [found, blank] = translator.stream([line, ""], mbr="bleu", samples=4)
    assert any("segments" in note for note in found.notes)
    assert found.utility is not None
    assert 0 < found.utility <= 100
    assert (blank.text, blank.utility) == ("", None)


class FixedEngine:
    """Draws the same texts for every source; a `silent` one empty texts where it may."""

    name = "fixed"
    workers = client_threads = 1
    batch_tokens = None

    def __init__(self, tokenizer: Tokenizer, texts: list[str], *, silent: bool = False) -> None:
        self.tokenizer, self.texts, self.silent = tokenizer, texts, silent

    def unsupported_reason(self, strategy: Any, longest: int = 0) -> str:
        return ""

    def generate(self, request: SearchRequest) -> list[list[Hypothesis]]:
        is_empty = self.silent and not request.min_length
        drawn = [[] if is_empty else self.tokenizer.encode(text) for text in self.texts]
        return [
            [Hypothesis(tokens, [-1.0], -1.0, finished=True) for tokens in drawn]
            for _ in request.sources
        ]


def expected_utility(texts: list[str], tokenize: str) -> float:
    """Return the utility of the best of texts that were drawn once each."""
    bleu = BLEU(effective_order=True, tokenize=tokenize)
    return max(
        sum(bleu.sentence_score(text, [other]).score for other in texts) / len(texts)
        for text in texts
    )


def test_bleu_splits_words_as_the_language_of_each_output_needs() -> None:
    """Whether the language is an option, that of the translator, or the only one of a source."""
    config = CONFIG.replace(
        data={"directions": ("de-en", "de-zh", "en-zh")}, text={"language_tags": True}
    )
    tokenizers = train_tokenizers(TEXT, TEXT, config.text, languages=["en", "zh"])
    texts = ["你好。世界", "你好。你好", "世界你好"]
    engine = FixedEngine(tokenizers.tgt, texts)
    native = NativeEngine(lambda: CopyModel(len(tokenizers.tgt)))  # type: ignore[arg-type,return-value]
    chinese, spaced = (expected_utility(texts, each) for each in ("zh", "13a"))
    assert chinese > spaced + 1

    def utility(default: str | None = None, **languages: str) -> float | None:
        translator = Translator(native, tokenizers, config, engine=engine, target_language=default)
        [found] = translator.stream(["7"], mbr="bleu", **languages)
        return found.utility

    assert utility(source_language="de", target_language="en") == pytest.approx(spaced)
    assert utility(source_language="de", target_language="zh") == pytest.approx(chinese)
    assert utility("zh", source_language="de") == pytest.approx(chinese)
    assert utility(source_language="en") == pytest.approx(chinese)
    both = Translator(native, tokenizers, config, engine=engine)
    for language, expected in (("en", spaced), ("zh", chinese), ("en", spaced)):
        [found] = both.stream(["7"], mbr="bleu", source_language="de", target_language=language)
        assert found.utility == pytest.approx(expected)


def test_a_repeated_search_has_its_own_utilities() -> None:
    """All samples of the first search were empty, of utility 0."""
    tokenizers = train_tokenizers(TEXT, TEXT, CONFIG.text)
    texts = ["Ein Mann", "Ein Mann geht", "Eine Frau"]
    native = NativeEngine(lambda: CopyModel(len(tokenizers.tgt)))  # type: ignore[arg-type,return-value]
    translator = Translator(
        native, tokenizers, CONFIG, engine=FixedEngine(tokenizers.tgt, texts, silent=True)
    )
    for nbest in (1, 4):
        [found] = translator.stream(["7"], mbr="bleu", nbest=nbest)
        assert any("first output was empty" in note for note in found.notes)
        assert found.text in texts
        assert found.utility == pytest.approx(expected_utility(texts, "13a"))
        assert len(found.alternatives) == min(nbest, 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mbr": "comet"}, "mbr must be one of chrf, bleu; found 'comet'"),
        ({"samples": 9}, "found samples=9 without mbr"),
        ({"mbr": "chrf", "sample": True}, "sample and mbr exclude each other"),
        ({"mbr": "chrf", "beam": 4, "samples": 8}, "found samples=8 with beam=4"),
        ({"mbr": "chrf", "samples": 1}, "samples must be at least 2; found 1"),
        ({"mbr": "chrf", "nbest": 65}, "number of candidates, 64; found 65; raise samples"),
        ({"mbr": "chrf", "samples": 4, "nbest": 5}, "number of candidates, 4; found 5"),
        ({"mbr": "chrf", "beam": 2, "nbest": 3}, "number of candidates, 2; found 3; raise beam"),
        ({"mbr": "chrf", "nbest": "x"}, "nbest must be an integer; found 'x'"),
        ({"mbr": "chrf", "epsilon": "x"}, "epsilon must be a number; found 'x'"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TranslationOptions(**options)


def test_an_explanation_is_of_one_search(translator: Translator) -> None:
    with pytest.raises(ConfigError, match="found mbr='chrf'"):
        translator.explain("Ein Mann", mbr="chrf")


def test_a_translation_without_it_has_no_utility(translator: Translator, tmp_path: Path) -> None:
    [found] = translator.stream(LINES[:1])
    assert found.utility is None
