"""Heads switched off, attributions and effects of a translator: fresh runs give the same
numbers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from translator_kit import write_random_bundle

from dragoman.errors import ConfigError, DataError
from dragoman.explain.attribution import METHODS
from dragoman.explain.head_ablation import heads_switched_off
from dragoman.explain.teacher_forced_pass import TeacherForcedPair
from dragoman.inference import Translator
from dragoman.text.sentencepiece_tokenizer import Tokenizers
from dragoman.text.special_tokens import EOS

SENTENCE = "Eine Frau steht!"


def test_an_explanation_has_every_part(translator: Translator) -> None:
    explanation = translator.explain(SENTENCE, beam=2)
    sources, targets = len(explanation.source.tokens), len(explanation.target.tokens)
    assert explanation.lens is not None
    assert explanation.lens["layers"] == ["d0", "d1"]
    ranks = explanation.arrays[explanation.lens["rank"]]
    assert ranks.shape == (2, targets)
    assert ranks[-1].tolist() == [step.rank for step in explanation.steps]
    for step, top in zip(explanation.steps, explanation.lens["top"][-1], strict=True):
        assert [text for text, _ in top] == [text for _, text, _ in step.top[:5]]
        np.testing.assert_allclose(
            [prob for _, prob in top], np.exp([each[2] for each in step.top[:5]]), atol=1e-4
        )
    assert [(each.method, each.signed) for each in explanation.attribution] == [
        ("attention_x_gradient", False),
        ("input_x_gradient", True),
    ]
    for attribution in explanation.attribution:
        assert explanation.arrays[attribution.source].shape == (targets, sources)
        assert explanation.arrays[attribution.target or ""].shape == (targets, targets)
    assert explanation.positions["kind"] == "sinusoidal"
    assert explanation.arrays[explanation.positions["tensor"]].ndim == 2
    assert all(head.effect_estimate is not None for head in explanation.heads)


def test_attribution_is_chosen_or_left_out(translator: Translator) -> None:
    assert translator.explain(SENTENCE, attribution=None).attribution == []
    [found] = translator.explain(SENTENCE, attribution="occlusion").attribution
    assert found.method == "occlusion"
    with pytest.raises(DataError, match="found 'gradient'; did you mean"):
        translator.explain(SENTENCE, attribution="gradient")


def test_no_head_off_changes_nothing(translator: Translator) -> None:
    explanation = translator.explain(SENTENCE, beam=3)
    found = translator.ablate(explanation, [])
    assert found.effect == [0.0] * len(explanation.steps)
    assert found.sum_change == 0.0
    assert found.text == explanation.translation
    assert [step.id for step in found.steps] == [step.id for step in explanation.steps]
    assert found.score["sum"] == pytest.approx(explanation.score["sum"], abs=1e-4)


def test_a_head_off_changes_effect_and_translation_as_a_fresh_run_does(
    translator: Translator,
) -> None:
    explanation = translator.explain(SENTENCE, beam=3)
    heads = ["x1.0", "x1.1", "x0.0", "d1.1", "e0.0"]
    found = translator.ablate(explanation, heads)
    model = translator.model
    off = {
        "decoder.1.cross": [0, 1],
        "decoder.0.cross": [0],
        "decoder.1.self": [1],
        "encoder.0.self": [0],
    }
    ids = [[token.id for token in side.tokens] for side in (explanation.source, explanation.target)]
    pair = TeacherForcedPair.build(model, *ids)
    before = pair.baseline()
    with heads_switched_off(model, off):
        after = pair.baseline()
        fresh = translator.explain(SENTENCE, beam=3)
        text = translator.translate([SENTENCE], beam=3)
    np.testing.assert_allclose(found.effect, after - before, atol=1e-5)
    assert found.sum_change == pytest.approx(float((after - before).sum()), abs=1e-4)
    assert [found.text] == text
    assert found.text == fresh.translation
    assert [step.id for step in found.steps] == [step.id for step in fresh.steps]
    np.testing.assert_allclose([step.logprob for step in found.steps], fresh.log_probs, atol=1e-5)
    assert found.score["normalised"] == pytest.approx(fresh.score["normalised"], abs=1e-5)
    assert [step.id for step in found.steps] != [step.id for step in explanation.steps]
    assert found.to_dict()["off"] == heads


def test_heads_are_off_in_the_whole_explanation(translator: Translator) -> None:
    explanation = translator.explain(SENTENCE, beam=2, off=["x0.1"])
    assert explanation.request["off"] == ["x0.1"]
    weights = explanation.arrays["x0.w"]
    assert not weights[1].any()
    assert weights[0].any()
    base = translator.explain(SENTENCE, beam=2)
    assert translator.ablate(base, ["x0.1"]).text == explanation.translation
    # What is off stays off: the effect of another head is that of a run without both.
    found = translator.ablate(explanation, ["x1.0"])
    both = translator.explain(SENTENCE, beam=2, off=["x0.1", "x1.0"])
    assert found.text == both.translation
    assert found.score["sum"] == pytest.approx(both.score["sum"], abs=1e-4)
    assert translator.ablate(explanation, ["x0.1"]).sum_change == 0.0


def test_effects_of_all_heads_are_those_of_single_ones(translator: Translator) -> None:
    explanation = translator.explain(SENTENCE, off=["d0.0"])
    effects = dict(translator.head_effects(explanation))
    assert sorted(effects) == sorted(head.name for head in explanation.heads)
    for name in ("e1.1", "d1.0", "x1.1"):
        single = translator.ablate(explanation, [name])
        assert effects[name] == pytest.approx(single.sum_change, abs=1e-4)
    assert effects["d0.0"] == pytest.approx(0.0, abs=1e-5)  # it is off already


def test_effects_leave_the_model_alone_while_they_are_read(translator: Translator) -> None:
    explanation = translator.explain(SENTENCE, off=["d0.0"])
    expected = translator.translate([SENTENCE])
    effects = translator.head_effects(explanation)
    next(effects)
    assert translator.translate([SENTENCE]) == expected
    effects.close()
    assert translator.translate([SENTENCE]) == expected


@pytest.mark.parametrize("method", METHODS)
def test_attributions_on_demand_are_those_of_an_explanation(
    translator: Translator, method: str
) -> None:
    explanation = translator.explain(SENTENCE, attribution=None)
    found, arrays = translator.attribute(explanation, method)
    again = translator.explain(SENTENCE, attribution=method)
    assert again.attribution == [found]
    assert found.source in arrays
    for name, array in arrays.items():
        np.testing.assert_allclose(again.arrays[name], array, atol=1e-6)


def test_stored_explanation_supports_counterfactuals(translator: Translator) -> None:
    explanation = translator.explain(SENTENCE, beam=2, prefix="Ein")
    again = type(explanation).from_json(explanation.to_json())
    found, stored = (translator.ablate(each, ["x0.0"]) for each in (explanation, again))
    assert stored.text == found.text
    assert stored.effect == found.effect
    assert [step.forced for step in stored.steps] == [step.forced for step in found.steps]
    assert stored.steps[0].forced


def test_counterfactuals_keep_the_length_penalty_of_their_explanation(
    translator: Translator,
) -> None:
    explanation = translator.explain(SENTENCE, beam=3, length_penalty=2.0)
    assert translator.ablate(explanation, []).score == pytest.approx(explanation.score, abs=1e-4)
    step = explanation.steps[0]
    token = next(token for token, _, _ in step.top if token not in (step.id, EOS))
    branch = translator.branch(explanation, 0, token)
    assert branch.request["length_penalty"] == 2.0
    assert branch.request["beam"] == 3
    other = translator.branch(explanation, 0, token, beam=2, length_penalty=0.0)
    assert (other.request["beam"], other.request["length_penalty"]) == (2, 0.0)


def test_a_text_in_two_segments_is_explained_by_its_first(translator: Translator) -> None:
    found = translator.explain(f"{SENTENCE}\nEin Mann geht.")
    assert found.missing["text"].startswith("Segment 1 of 2 is explained")
    assert found.translation == translator.explain(SENTENCE).translation
    assert "text" not in translator.explain(SENTENCE).missing


def test_sampling_is_repeated_with_its_seed(translator: Translator) -> None:
    explanation = translator.explain(SENTENCE, sample=True, seed=7)
    assert translator.ablate(explanation, []).text == explanation.translation


def test_gradients_work_after_searches_on_a_fresh_model(bundle: Path) -> None:
    translator = Translator.load(bundle, device="cpu", engine="native")
    translator.translate([SENTENCE])
    with torch.inference_mode():
        explanation = translator.explain(SENTENCE)
    assert np.abs(explanation.arrays["ixg.s"]).max() > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x9.0", r"such as e0\.0; found 'x9\.0'; the sites are e0, e1, d0, d1, x0, x1"),
        ("x0", r"such as e0\.0; found 'x0'"),
        ("x0.²", r"found 'x0\.²'"),
        ("x0.2", r"x0 has 2 heads, x0\.0 to x0\.1; found 'x0\.2'; heads are counted from 0"),
    ],
)
def test_heads_that_do_not_exist_are_named(translator: Translator, name: str, message: str) -> None:
    explanation = translator.explain(SENTENCE)
    with pytest.raises(DataError, match=message):
        translator.ablate(explanation, [name])
    with pytest.raises(DataError, match=message):
        translator.explain(SENTENCE, off=[name])


def test_an_explanation_of_another_model_is_rejected(
    translator: Translator, tmp_path: Path, tokenizers: Tokenizers
) -> None:
    explanation = translator.explain(SENTENCE)
    other = Translator.load(write_random_bundle(tmp_path / "model", tokenizers), device="cpu")
    with torch.no_grad():
        next(other.model.parameters()).add_(1.0)
    with pytest.raises(DataError, match="must be of this model; found one of another"):
        other.ablate(explanation, ["x0.0"])


def test_an_unknown_option_of_a_new_search_is_named(translator: Translator) -> None:
    with pytest.raises(ConfigError, match="no option 'beams'"):
        translator.ablate(translator.explain(SENTENCE), ["x0.0"], beams=3)
