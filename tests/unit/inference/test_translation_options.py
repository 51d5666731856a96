"""Options of a translator: n-best, prefixes, scores, alignment, samples, devices; and what is
rejected.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from translator_kit import CONFIG, TEXT

from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.length_penalty import WuLengthPenalty
from dragoman.decoding.sampling import Sampling
from dragoman.errors import ConfigError, DataError
from dragoman.inference import TranslationOptions, Translator
from dragoman.runtime.device import choose_device


@pytest.mark.parametrize(
    "options",
    [
        {"beam": 1},
        {"beam": 4},
        {"beam": 4, "nbest": 3},
        {"sample": True, "seed": 5, "temperature": 0.7},
    ],
)
def test_batch_size_does_not_change_results(translator: Translator, options: dict) -> None:
    """The same text out whatever the batch (OpenNMT-py#2208, #1909, #502, CTranslate2#693,
    fairseq#427).
    """
    lines = [" ".join(TEXT[at % 5].split()[: 1 + at % 3]) + f" {at}" for at in range(40)]
    one = list(translator.stream(lines, batch_size=1, **options))
    many = list(translator.stream(lines, batch_size=64, **options))
    budget = list(translator.stream(lines, buffer_size=5, **options))
    for other in (many, budget):
        assert [each.text for each in other] == [each.text for each in one]
        assert [each.score for each in other] == pytest.approx(
            [each.score for each in one], abs=1e-4
        )
        assert [[a.text for a in each.alternatives] for each in other] == [
            [a.text for a in each.alternatives] for each in one
        ]


def test_n_best_is_in_order_and_holds_the_translation_itself(translator: Translator) -> None:
    [found] = translator.stream(["Ein Mann"], nbest=4)
    assert len(found.alternatives) == 4
    assert found.alternatives[0].text == found.text
    finished = [each.score for each in found.alternatives if len(each.log_probs) > len(each.tokens)]
    assert finished == sorted(finished, reverse=True)


def test_a_wider_list_than_the_models_beam_widens_the_beam(translator: Translator) -> None:
    [found] = translator.stream(["Ein Mann"], nbest=6)
    assert len(found.alternatives) == 6


def test_scores_are_those_of_the_stated_formula(translator: Translator) -> None:
    for alpha in (0.0, 1.0):
        [found] = translator.stream(["Eine Frau"], beam=3, length_penalty=alpha)
        assert found.score == pytest.approx(
            sum(found.log_probs) / ((5 + len(found.log_probs)) / 6) ** alpha, abs=1e-5
        )


def test_a_prefix_begins_every_translation(translator: Translator) -> None:
    for found in translator.stream(["Ein Mann", "Zwei Kinder spielen?"], prefix="Eine Frau"):
        assert found.text.startswith("Eine Frau")


def test_alignment_has_a_row_a_token_and_rows_sum_to_one(translator: Translator) -> None:
    """Every matrix shown is a distribution over the source (sockeye#385, tensor2tensor#540)."""
    lines = ["Ein Mann geht.", "", "Zwei", "Eine Frau steht! 0123456789"]
    for found, line in zip(translator.stream(lines, alignment=True), lines, strict=True):
        if not line:
            assert found.alignment is None
            continue
        assert found.alignment.shape == (len(found.tokens), len(found.src_tokens))
        assert found.src_tokens[-1] == "</s>"
        np.testing.assert_allclose(found.alignment.sum(axis=1), 1.0, atol=1e-5)
    assert all(each.alignment is None for each in translator.stream(lines))


def test_alignment_does_not_depend_on_other_rows(translator: Translator) -> None:
    lines = ["Ein Mann geht.", "Zwei", "Eine Frau steht! 0123456789"]
    together = list(translator.stream(lines, alignment=True))
    for each, line in zip(together, lines, strict=True):
        [alone] = translator.stream([line], alignment=True)
        np.testing.assert_allclose(each.alignment, alone.alignment, atol=1e-5)


def test_explain_shows_what_translate_did(translator: Translator) -> None:
    """Recorded numbers belong to the translation shown (OpenNMT-py#2490, tensor2tensor#917); shapes
    are by head (fairseq#3365).
    """
    explanation = translator.explain("Ein Mann geht.", beam=3)
    [found] = translator.stream(["Ein Mann geht."], beam=3, alignment=True)
    assert explanation.translation == found.text
    assert explanation.log_probs == pytest.approx(found.log_probs, abs=1e-4)
    assert explanation.tgt_tokens[: len(found.tokens)] == found.tokens
    np.testing.assert_allclose(
        explanation.alignment[: len(found.tokens)], found.alignment, atol=1e-5
    )
    sizes = {"src": len(explanation.src_tokens), "tgt": len(explanation.tgt_tokens)}
    for path, weights in explanation.attentions.items():
        rows = sizes["src"] if path.startswith("encoder") else sizes["tgt"]
        columns = (
            sizes["tgt"] if path.endswith("self") and path.startswith("decoder") else sizes["src"]
        )
        assert weights.shape == (2, rows, columns), path
        np.testing.assert_allclose(weights.sum(axis=-1), 1.0, atol=1e-5)
    assert len(explanation.attentions) == 6


def test_sampling_draws_the_same_for_a_seed_and_another_for_another(translator: Translator) -> None:
    lines = ["Ein Mann geht."] * 6
    one = translator.translate(lines, sample=True, seed=1)
    assert one == translator.translate(lines, sample=True, seed=1)
    assert one != translator.translate(lines, sample=True, seed=2)
    assert len(set(one)) > 1  # equal lines are drawn independently


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"beams": 3}, "'beams' for translating; did you mean beam"),
        ({"to": "fr"}, "'to' for translating; did you mean target_language"),
        ({"beam": 0}, "found 0"),
        ({"nbest": 0}, "found 0"),
        ({"batch_size": -1}, "found -1"),
        ({"beam": "4"}, "beam must be an integer; found '4'"),
        ({"beam": True}, "found True"),
        ({"beam": 2.5}, "found 2.5"),
        ({"beam": 1000}, "beam must be at most 256; found 1000"),
        ({"nbest": None}, "nbest must be an integer; found None"),
        ({"length_penalty": "x"}, "length_penalty must be a number; found 'x'"),
        ({"length_penalty": 1000}, "must be at most 5; found 1000"),
        ({"length_penalty": float("nan")}, "must be a finite number; found nan"),
        ({"sample": True, "temperature": "1"}, "found '1'"),
        ({"sample": True, "seed": 1.5}, "found 1.5"),
        ({"prefix": 3}, "prefix must be text; found 3"),
        ({"sample": True, "beam": 4}, "found beam=4"),
    ],
)
def test_wrong_options_are_rejected_before_anything_runs(
    translator: Translator, options: dict, found: str
) -> None:
    with pytest.raises(ConfigError, match=found):
        translator.stream(["a"], **options)


def test_a_prefix_of_spaces_is_none(translator: Translator) -> None:
    assert translator.translate(["0123"], prefix="  ") == translator.translate(["0123"])


def test_a_text_to_explain_must_hold_words(translator: Translator) -> None:
    with pytest.raises(DataError, match="found ' '"):
        translator.explain(" ")


def test_options_become_the_strategy_that_does_the_work() -> None:
    decode = CONFIG.decode
    assert TranslationOptions().strategy(decode) == BeamSearch(
        size=4, nbest=1, penalty=WuLengthPenalty(0.6)
    )
    assert TranslationOptions(beam=1, length_penalty=1.0).strategy(decode) == GreedySearch(
        penalty=WuLengthPenalty(1.0)
    )
    assert TranslationOptions(nbest=7).strategy(decode) == BeamSearch(
        size=7, nbest=7, penalty=WuLengthPenalty(0.6)
    )
    assert TranslationOptions(sample=True, nbest=3, seed=9).strategy(decode) == Sampling(
        seed=9, samples=3, penalty=WuLengthPenalty(0.6)
    )
    assert [
        TranslationOptions().strategy(decode).rows_per_sentence,
        TranslationOptions(nbest=7).strategy(decode).rows_per_sentence,
        TranslationOptions(sample=True, nbest=2).strategy(decode).rows_per_sentence,
    ] == [4, 7, 2]
    with pytest.raises(ConfigError, match="found 5"):
        TranslationOptions(beam=2, nbest=5).strategy(decode)


def test_minimum_bayes_risk_decoding_keeps_equal_samples_or_a_whole_beam() -> None:
    decode, penalty = CONFIG.decode, WuLengthPenalty(0.6)
    assert TranslationOptions(mbr="chrf", nbest=3).strategy(decode) == Sampling(
        seed=1, samples=64, penalty=penalty, epsilon=0.02, distinct=False
    )
    assert TranslationOptions(mbr="bleu", samples=8, epsilon=0.0, seed=0).strategy(
        decode
    ) == Sampling(seed=0, samples=8, penalty=penalty, epsilon=0.0, distinct=False)
    assert TranslationOptions(mbr="chrf", beam=6, nbest=2).strategy(decode) == BeamSearch(
        size=6, nbest=6, penalty=penalty
    )


def test_options_of_sampling_reach_the_draws() -> None:
    options = TranslationOptions(
        sample=True, temperature=0.5, top_k=3, top_p=0.9, epsilon=0.1, length_penalty=0.0
    )
    assert options.strategy(CONFIG.decode) == Sampling(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        seed=1,
        samples=1,
        penalty=WuLengthPenalty(0.0),
        epsilon=0.1,
        distinct=True,
    )


@pytest.mark.parametrize(
    ("options", "nbest"),
    [({}, 2), ({"nbest": 3}, 3), ({"beam": 1}, 1), ({"beam": 2}, 2), ({"sample": True}, 1)],
    ids=str,
)
def test_a_runner_up_is_searched_for_where_a_beam_has_one(options: dict, nbest: int) -> None:
    chosen = TranslationOptions(**options)
    assert chosen.with_runner_up(CONFIG.decode) == dataclasses.replace(chosen, nbest=nbest)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("beam", 1, 256),
        ("nbest", 1, 256),
        ("batch_size", 1, None),
        ("buffer_size", 1, None),
        ("top_k", 0, None),
        ("seed", 0, None),
        ("no_repeat_ngram_size", 0, None),
        ("samples", 2, 1024),
    ],
)
def test_integer_options_include_their_bounds(name: str, least: int, most: int | None) -> None:
    more = {"mbr": "chrf"} if name == "samples" else {}
    assert getattr(TranslationOptions(**{name: least}, **more), name) == least
    with pytest.raises(ConfigError, match=f"{name} must be at least {least}; found {least - 1}"):
        TranslationOptions(**{name: least - 1}, **more)
    if most is None:
        return
    assert getattr(TranslationOptions(**{name: most}, **more), name) == most
    with pytest.raises(ConfigError, match=f"{name} must be at most {most}; found {most + 1}"):
        TranslationOptions(**{name: most + 1}, **more)


def test_lines_are_batched_in_buffers_of_2048_unless_another_size_is_named() -> None:
    assert TranslationOptions().buffer_size == 2048


def test_equal_lines_are_drawn_independently_in_every_buffer(translator: Translator) -> None:
    """Of a stream whose length is not known, which is read in buffers that grow."""
    lines = ["Ein Mann geht."] * 40
    streamed = translator.stream(iter(lines), sample=True, seed=1)
    listed = translator.stream(lines, sample=True, seed=1)
    assert [each.text for each in streamed] == [each.text for each in listed]


@pytest.mark.parametrize("name", ["gpu", "meta"])
def test_a_device_that_is_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match=f"found '{name}'"):
        choose_device(name)


def test_auto_is_a_device_that_works() -> None:
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert choose_device("cpu").type == "cpu"
