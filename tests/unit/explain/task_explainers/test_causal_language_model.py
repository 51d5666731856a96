"""Explained texts of language models: segments, memories, continuations, the logit lens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from language_kit import config_of
from task_models_kit import Subject, build_subject

from dragoman.errors import ConfigError, DataError
from dragoman.explain.task_explainers.causal_language_model import _windows, spell_tokens
from dragoman.text.language_model_tokenizer import ByteTokenizer
from dragoman.text.special_tokens import UNK

TEXT = "It was the old team today .\nSome bank was new .\nThe goal was of the team ."


def model_of(name: str) -> Subject:
    """Return a model whose segments are 8 tokens long."""
    return build_subject(config_of(name))


@pytest.mark.parametrize("name", ["transformer_xl", "lstm", "transformer", "reformer"])
def test_a_text_of_several_segments_has_the_probabilities_of_its_score(name: str) -> None:
    predictor = model_of(name).predictor
    found = predictor.explain(TEXT)
    assert len(found.steps) > 16
    assert found.score["sum"] == pytest.approx(predictor.score([TEXT])[0].log_prob, abs=1e-4)
    assert all(step.forced for step in found.steps)
    for site in found.sites:
        weights = found.arrays[site.tensor]
        np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
        assert np.array_equal(weights, np.tril(weights))


def test_a_memory_is_a_segment_of_the_keys() -> None:
    predictor = model_of("transformer_xl").predictor
    found = predictor.explain(TEXT)
    total = len(found.steps)
    current = (total - 1) // 8 * 8
    for site in found.sites:
        assert site.kind == "memory"
        assert site.segments == [("memory", 0, current), ("current", current, total)]
        assert site.key_labels is not None
        assert site.key_labels[0] == "<s>"
        assert len(site.key_labels) == total
        weights = found.arrays[site.tensor]
        assert weights[:, current:, :current].sum() > 0.1
        assert (weights[:, current, : max(0, current - 16)] == 0).all()  # eval_memory is 16
    assert found.positions["reach"] == 8 + 16
    assert found.model["off_switches"] == ["memory"]


def test_without_its_memory_each_segment_is_read_alone() -> None:
    predictor = model_of("transformer_xl").predictor
    plain, off = predictor.explain(TEXT), predictor.explain(TEXT, off=["memory"])
    ids = [step.id for step in plain.steps]
    inputs = torch.tensor([[1, *ids[:-1]]])
    assert inputs[0, 0] == 1
    expected = []
    with torch.no_grad():
        for start in range(0, len(ids), 8):
            log_probs = predictor.model(inputs[:, start : start + 8]).log_softmax(-1)[0]
            expected += [
                float(log_probs[t, token]) for t, token in enumerate(ids[start : start + 8])
            ]
    np.testing.assert_allclose([step.logprob for step in off.steps], expected, atol=1e-5)
    for site in off.sites:
        weights = off.arrays[site.tensor]
        assert all((weights[:, t, : t // 8 * 8] == 0).all() for t in range(len(ids)))
    change = predictor.ablate(plain, ["memory"])
    assert change.sum_change == pytest.approx(sum(expected) - plain.score["sum"], abs=1e-4)
    assert change.effect[:8] == pytest.approx([0.0] * 8, abs=1e-5)


@pytest.mark.parametrize("name", ["transformer_xl", "lstm", "transformer", "reformer"])
def test_a_continuation_is_that_of_generate(name: str) -> None:
    predictor = model_of(name).predictor
    prompt = "The goal was new . Some"
    chunks = list(predictor.generate(prompt, max_tokens=9, temperature=0.0))
    found = predictor.explain(prompt, max_tokens=9)
    given = len(predictor.task.text.encode_prompt(prompt))
    assert [step.forced for step in found.steps] == [True] * given + [False] * 9
    assert found.target.text == prompt + "".join(chunks)
    np.testing.assert_allclose(
        [step.logprob for step in found.steps[given:]],
        [chunk.log_prob for chunk in chunks],
        atol=1e-4,
    )
    again = predictor.explain(
        prompt, prefix_ids=[step.id for step in found.steps[:given]], max_tokens=9
    )
    assert again.target.text == found.target.text
    if found.heads:
        change = predictor.ablate(found, [found.heads[0].name])
        assert len(change.steps) == len(found.steps)
        off = predictor.explain(prompt, max_tokens=9, off=[found.heads[0].name])
        assert change.text == off.target.text


def test_a_continuation_has_no_unknown_words() -> None:
    predictor = build_subject(config_of("lstm", model={"output_bias": True})).predictor
    with torch.no_grad():
        predictor.model.output_bias[UNK] += 20.0
    prompt = "The goal was new . Some"
    chunks = list(predictor.generate(prompt, max_tokens=5, temperature=0.0))
    found = predictor.explain(prompt, max_tokens=5)
    assert UNK not in [step.id for step in found.steps if not step.forced]
    assert found.target.text == prompt + "".join(chunks)


def test_windows_cover_every_position_once() -> None:
    for known, total, segment, stride in [
        (5, 5, 8, 4),
        (20, 20, 8, 3),
        (8, 15, 8, 4),
        (3, 30, 6, 2),
    ]:
        reads = list(_windows(known, total, segment, stride))
        scored = [at for read in reads for at in range(read.scored, read.end)]
        assert scored == list(range(total))
        assert all(read.end - read.begin <= segment for read in reads)


@pytest.mark.parametrize("name", ["transformer_xl", "lstm", "transformer", "reformer"])
def test_the_last_layer_of_the_lens_is_the_model(name: str) -> None:
    found = model_of(name).predictor.explain(TEXT)
    assert found.lens is not None
    ranks = found.arrays[found.lens["rank"]]
    assert ranks.shape == (len(found.lens["layers"]), len(found.steps)) == (2, len(found.steps))
    assert ranks[-1].tolist() == [step.rank for step in found.steps]
    for step, top in zip(found.steps, found.lens["top"][-1], strict=True):
        assert [text for text, _ in top] == [text for _, text, _ in step.top[:5]]
        assert top[0][1] == pytest.approx(math.exp(step.top[0][2]), abs=1e-5)


@pytest.mark.parametrize("name", ["transformer_xl", "lstm", "transformer"])
def test_a_token_is_attributed_to_earlier_ones(name: str) -> None:
    predictor = model_of(name).predictor
    found = predictor.explain(TEXT)
    [made] = found.attribution
    assert found.arrays[made.source].shape == (len(found.steps), 0)
    values = found.arrays[made.target]
    assert np.array_equal(values, np.tril(values))
    assert np.abs(values[9, :8]).max() > 0  # through the memory, the state or the window
    made, arrays = predictor.attribute(found, "occlusion")
    drops = arrays[made.target]
    np.testing.assert_allclose(drops, np.tril(drops), atol=1e-5)
    ids = [step.id for step in found.steps]
    ids[3] = 3  # <unk>, which is read at position 4
    changed = predictor.task_input("", prefix_ids=ids, max_tokens=0)
    with torch.no_grad():
        log_probs = changed.run()[0]
    expected = [step.logprob - float(log_probs[t, step.id]) for t, step in enumerate(found.steps)]
    np.testing.assert_allclose(drops[4:, 4], expected[4:], atol=1e-4)


@pytest.mark.parametrize("name", ["transformer_xl", "transformer", "reformer"])
def test_values_of_zero_reach_later_tokens_only(name: str) -> None:
    predictor = model_of(name).predictor
    found = predictor.explain(TEXT)
    made, arrays = predictor.attribute(found, "value_zeroing")
    drops = arrays[made.target]
    np.testing.assert_allclose(drops, np.tril(drops), atol=1e-6)
    seen = sum(found.arrays[site.tensor].sum(axis=0) for site in found.sites) > 0
    if name == "transformer_xl":
        assert np.abs(drops[9, :8]).max() > 0  # through the memory
        assert (np.abs(drops[seen.sum(axis=1) > 1].sum(axis=1)) > 0).all()


def test_bytes_of_a_character_share_its_span() -> None:
    text = ByteTokenizer()
    found = spell_tokens(text, text.encode("aé\n"))
    assert found.text == "aé\n"
    assert [token.span for token in found.tokens] == [(0, 1), (1, 1), (1, 2), (2, 3)]
    assert [token.text for token in found.tokens] == ["a", "<0xC3>", "é", "\n"]


def test_mistakes_are_named() -> None:
    predictor = model_of("transformer").predictor
    with pytest.raises(DataError, match="must have tokens; found ''; pass a text"):
        predictor.explain("")
    with pytest.raises(DataError, match="must be text; found int 3"):
        predictor.explain(3)
    with pytest.raises(ConfigError, match="from 0 to 1,024; found -1; try 20"):
        predictor.explain("a", max_tokens=-1)
    with pytest.raises(DataError, match="at most 1,024 tokens; found 2,001"):
        predictor.explain("was " * 2000)
    with pytest.raises(ConfigError, match="found 'memory'"):
        predictor.explain("a", off=["memory"])
