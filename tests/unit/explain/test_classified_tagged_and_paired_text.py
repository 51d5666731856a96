"""Explained texts: classes, tags and pairs, against the model's own numbers and fresh passes."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from task_models_kit import TEXT, Subject, subject_of

from dragoman.attention.attention_weight_hooks import edit, record
from dragoman.errors import ConfigError, DataError
from dragoman.explain.attention_plots import step_text
from dragoman.explain.task_explainers.base import locate_tokens
from dragoman.explain.terminal_report import render_report
from dragoman.explore.notebook_display import table_rows
from dragoman.inference.predictors import tagger as tagger_module


@pytest.fixture(scope="module")
def han() -> Subject:
    return subject_of("yang2016")


@pytest.fixture(scope="module")
def tagger() -> Subject:
    return subject_of("vaswani2017_tagger")


@pytest.fixture(scope="module")
def pairs() -> Subject:
    return subject_of("chen2017")


def test_the_importance_of_words_is_the_product_of_both_levels(han: Subject) -> None:
    found = han.predictor.explain(TEXT)
    importance = found.arrays[found.extras["word_importance"]][0]
    sentences = found.arrays["s0.w"][0, 0]
    ranges = found.arrays[found.extras["sentences"]].tolist()
    assert len(ranges) == len(sentences) == 2
    assert importance.sum() == pytest.approx(1, abs=1e-5)
    with record(han.predictor.model) as records:
        han.predictor.predict([TEXT])
    for number, (start, end) in enumerate(ranges):
        site = found.site(f"w{number}")
        assert (site.kind, site.group, site.key) == ("pool", "encoder", "source")
        assert site.segments == [(f"sentence {number + 1}", start, end)]
        words = records["words"].weights[number, 0, 0, : end - start].numpy()
        np.testing.assert_allclose(found.arrays[site.tensor][0, 0, start:end], words, atol=1e-6)
        np.testing.assert_allclose(importance[start:end], words * sentences[number], atol=1e-6)


@pytest.mark.parametrize(("name", "path"), [("words", "words"), ("sentences", "sentences")])
def test_a_level_that_is_off_is_uniform(han: Subject, name: str, path: str) -> None:
    predictor = han.predictor
    plain, off = predictor.explain(TEXT), predictor.explain(TEXT, off=[name])
    assert plain.model["off_switches"] == ["words", "sentences"]

    def mean(weights: torch.Tensor) -> torch.Tensor:
        support = (weights > 0).float()
        return support / support.sum(dim=-1, keepdim=True)

    with edit(predictor.model, {path: mean}):
        [expected] = predictor.predict([TEXT])
    best = off.steps[0]
    assert best.logprob == pytest.approx(math.log(expected.values[best.id]), abs=1e-5)
    sites = [site for site in off.sites if site.path.split(".")[0] == path]
    for site in sites:
        weights = off.arrays[site.tensor]
        np.testing.assert_allclose(weights[weights > 0], 1 / (weights > 0).sum(), rtol=1e-5)
    heads = [f"{site.id}.0" for site in sites]
    change = predictor.ablate(plain, heads)
    assert change.sum_change == pytest.approx(predictor.ablate(plain, [name]).sum_change, abs=1e-6)
    assert change.steps[0].logprob == pytest.approx(best.logprob, abs=1e-6)


def test_a_label_of_its_own_is_explained() -> None:
    subject = subject_of("mullenbach2018", classify={"multi_label": "on"})
    names = subject.predictor.labels
    found = [subject.predictor.explain(TEXT, label=name) for name in names]
    [prediction] = subject.predictor.predict([TEXT])
    for number, (each, name) in enumerate(zip(found, names, strict=True)):
        assert each.request["label"] == name
        assert each.model["multi_label"]
        [step] = each.steps
        assert step.id == number
        assert math.exp(step.logprob) == pytest.approx(prediction.probabilities[name], abs=1e-6)
        site = each.site("p0")
        assert site.query == "class"
        assert site.query_labels == [token.text for token in each.target.tokens] == list(names)
        np.testing.assert_array_equal(
            each.arrays[each.extras["word_importance"]][0], each.arrays["p0.w"][0, number]
        )
    assert not np.array_equal(found[0].arrays["ixg.s"], found[1].arrays["ixg.s"])


def test_estimates_are_close_to_small_effects(tagger: Subject) -> None:
    found = tagger.predictor.explain(tagger.example)
    exact = dict(tagger.predictor.head_effects(found))
    estimates = {head.name: head.effect_estimate for head in found.heads}
    assert set(estimates) == set(exact)
    values = np.array([(estimates[name], exact[name]) for name in exact])
    assert np.corrcoef(values.T)[0, 1] > 0.8


@pytest.mark.parametrize("recipe", ["vaswani2017_tagger", "plank2016"])
def test_tags_have_the_marginals_of_all_sequences(recipe: str) -> None:
    subject = subject_of(recipe)
    tokens = ["Anna", "walks", "."]
    found = subject.predictor.explain(tokens)
    task, model = subject.predictor.task, subject.predictor.model
    store = task.encode_sentences([subject.predictor._sentence(tokens)])
    batch = task.collate(store, np.array([0]))
    with torch.no_grad():
        emissions = model(batch.words, None, characters=batch.characters, features=batch.features)
        start, moves, end = (part.detach() for part in model.tag_output.scores(emissions))
    count = emissions.size(2)
    totals = {}
    for tags in itertools.product(range(count), repeat=3):
        score = (
            start[tags[0]] + end[tags[-1]] + sum(emissions[0, t, tag] for t, tag in enumerate(tags))
        )
        score += sum(moves[a, b] for a, b in itertools.pairwise(tags))
        totals[tags] = float(score)
    partition = float(torch.tensor(list(totals.values())).double().logsumexp(0))
    for at, step in enumerate(found.steps):
        wanted = [score for tags, score in totals.items() if tags[at] == step.id]
        expected = float(torch.tensor(wanted).double().logsumexp(0)) - partition
        assert step.logprob == pytest.approx(expected, abs=1e-4)
    chosen = tuple(step.id for step in found.steps)
    assert found.score["sequence"] == pytest.approx(totals[chosen] - partition, abs=1e-4)
    assert [token.text.strip() for token in found.target.tokens] == task.text.tags_of(chosen)


@pytest.mark.parametrize(
    ("scheme", "prefixes"), [("iob1", "BI"), ("iob2", "BI"), ("iobes", "BIES")]
)
def test_tags_are_in_the_scheme_of_the_files(scheme: str, prefixes: str) -> None:
    predictor = subject_of("vaswani2017_tagger", tag={"scheme": scheme}).predictor
    tokens = ["Anna", "Meier", "Anna", "Bonn", "Nord", "."]
    found = predictor.explain(tokens)
    [prediction] = predictor.predict([tokens])
    tags = [token.text.strip() for token in found.target.tokens]
    assert tags == list(prediction.tags)
    assert {text[0] for step in found.steps for _, text, _ in step.top} == {"O", *prefixes}
    assert [step_text(step) for step in found.steps] == tags
    given = predictor.task_input(tokens)
    names = predictor.tags
    ids = [names.index(tag) for tag in ("B-PER", "E-PER", "S-PER", "O", "O", "O")]
    asked = [[names.index("S-PER"), names.index("E-PER")]] * len(ids)
    expected = {"iob1": "IIBIBBBBIIII", "iob2": "BBBIBBBBBBBB", "iobes": "SESESESESESE"}[scheme]
    shown = [name for row in given.name_outputs(ids, asked) for name in row]
    assert shown == [f"{prefix}-PER" for prefix in expected]


def test_a_runner_up_of_the_same_name_is_not_shown() -> None:
    found = subject_of("vaswani2017_tagger", tag={"scheme": "iob2"}).predictor.explain(["Anna"])
    [step] = found.steps
    top = [(step.id, "B-PER", -0.5), (8, "B-PER", -1.0), (9, "O", -2.0)]
    changed = replace(found, steps=[replace(step, top=top)])
    report = render_report(changed, width=100).plain
    assert "O 0.135" in report
    assert "B-PER 0.368" not in report
    assert table_rows(changed)[0][2] == "O"


def test_unknown_tokens_are_an_occlusion(tagger: Subject) -> None:
    found = tagger.predictor.explain(tagger.example)
    made, arrays = tagger.predictor.attribute(found, "occlusion")
    changed = tagger.predictor.task_input(tagger.example)
    batch = changed._batch(1)
    batch.words[0, 2] = 3
    for part in (batch.characters, batch.features):
        if part is not None:
            part[0, 2] = 0
    with torch.no_grad():
        log_probs = changed._tag(batch)[0]
    expected = [step.logprob - float(log_probs[t, step.id]) for t, step in enumerate(found.steps)]
    np.testing.assert_allclose(arrays[made.source][:, 2], expected, atol=1e-5)


def test_the_repr_names_the_label(han: Subject, pairs: Subject) -> None:
    """A classifier's output was shown as an empty text, a pair's second sentence as the output."""
    found = han.predictor.explain(TEXT)
    assert f" -> {step_text(found.steps[0])!r}, score=" in repr(found)
    paired = pairs.predictor.explain(pairs.example)
    first, second = map(repr, pairs.example)
    label = step_text(paired.steps[0])
    assert repr(paired).startswith(f"Explanation({first} | {second} -> {label!r}, score=")


def test_a_pair_has_co_attention_in_both_directions(pairs: Subject) -> None:
    found, words = (
        pairs.predictor.explain(pairs.example),
        pairs.predictor.explain_words(pairs.example),
    )
    assert (found.source.text, found.target.text) == pairs.example
    first, second = found.site("x0"), found.site("x0b")
    assert (first.query, first.key, second.query, second.key) == (
        "source",
        "target",
        "target",
        "source",
    )
    np.testing.assert_allclose(found.arrays["x0.w"][0], words.first_weights, atol=1e-6)
    np.testing.assert_allclose(found.arrays["x0b.w"][0], words.second_weights, atol=1e-6)
    [made] = found.attribution
    assert found.arrays[made.source].shape == (1, len(words.first))
    assert found.arrays[made.target].shape == (1, len(words.second))
    made, arrays = pairs.predictor.attribute(found, "occlusion")
    [without] = pairs.predictor.predict([("A man sleeps here.", "He is a man")])
    expected = found.steps[0].logprob - math.log(without.probabilities[found.steps[0].top[0][1]])
    assert arrays[made.target][0, -1] == pytest.approx(expected, abs=1e-4)
    assert found.score["score"] == pytest.approx(
        pairs.predictor.predict([pairs.example])[0].score, abs=1e-4
    )


def test_both_sentences_have_sites_of_their_own() -> None:
    subject = subject_of("chen2017", model={"encoder": ("transformer*2",), "heads": 2})
    found = subject.predictor.explain(("A man sleeps here now.", "He is."))
    sizes = {site.id: found.arrays[site.tensor].shape for site in found.sites}
    assert sizes["e0"] == (2, 6, 6)
    assert sizes["e1b"] == (2, 3, 3)
    changes = [subject.predictor.ablate(found, [head]).sum_change for head in ("e0.1", "e0b.1")]
    assert changes[0] != pytest.approx(changes[1], abs=1e-7)


@pytest.mark.parametrize("recipe", ["zhou2016", "yang2016", "vaswani2017_tagger", "chen2017"])
def test_integrated_gradients_sum_to_the_change(recipe: str) -> None:
    subject = subject_of(recipe)
    found = subject.predictor.explain(subject.example)
    made, arrays = subject.predictor.attribute(found, "integrated_gradients")
    assert made.gap is not None
    assert made.gap < 0.05
    assert np.isfinite(arrays[made.source]).all()


def test_values_of_zero_are_as_if_a_token_were_not_read(tagger: Subject) -> None:
    # With its values zero in every attention, no other token can know a token.
    predictor = tagger.predictor
    found = predictor.explain(tagger.example)
    made, arrays = predictor.attribute(found, "value_zeroing")
    drops = arrays[made.source]
    changed = [*tagger.example]
    changed[3] = "1999"
    hidden, same = [], []
    for tokens in (tagger.example, changed):
        given = predictor.task_input(tokens)
        with torch.no_grad(), edit(predictor.model, given.zero_values(3)):
            hidden.append(given.run()[0])
            # Keys still differ, so the softmax does: compare uniform attention alone.
        uniform = {
            path: lambda weights: torch.full_like(weights, 1 / weights.size(-1))
            for path in given.zero_values(3)
        }
        with (
            torch.no_grad(),
            edit(predictor.model, uniform),
            edit(predictor.model, given.zero_values(3)),
        ):
            encoded = predictor.model.encode(
                given._batch(1).words,
                None,
                characters=given._batch(1).characters,
                features=given._batch(1).features,
            )
            same.append(encoded[0, [0, 1, 2, 4, 5, 6]])
    torch.testing.assert_close(same[0], same[1])
    ids = [step.id for step in found.steps]
    expected = [step.logprob - float(hidden[0][t, ids[t]]) for t, step in enumerate(found.steps)]
    np.testing.assert_allclose(drops[:, 3], expected, atol=1e-5)


def test_a_model_without_embeddings_is_explained_by_leaving_out() -> None:
    subject = subject_of("johnson2015")
    found = subject.predictor.explain("The goal was new today.")
    assert [each.method for each in found.attribution] == ["occlusion"]
    [without] = subject.predictor.predict(["The was new today."])
    [step] = found.steps
    expected = step.logprob - math.log(without.values[step.id])
    assert found.arrays["occ.s"][0, 1] == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ConfigError, match="must be one of occlusion; found 'value_zeroing'"):
        subject.predictor.explain("The goal was new today.", attribution="value_zeroing")
    with pytest.raises(ConfigError, match="must be one of occlusion; found 'input_x_gradient'"):
        subject.predictor.attribute(found, "input_x_gradient")


def test_eight_threads_explain_at_once(han: Subject, tagger: Subject) -> None:
    subjects = [han, tagger] * 4
    expected = [each.predictor.explain(each.example).digest for each in subjects[:2]] * 4
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda each: each.predictor.explain(each.example).digest, subjects))
    assert found == expected


def test_spans_include_characters_that_a_tokenizer_dropped() -> None:
    found = locate_tokens("Ein  Haus, gut", ["Ein", "Haus", "??", ",", "gut"], [4, 5, 3, 6, 7])
    assert [token.span for token in found.tokens] == [(0, 3), (3, 9), (9, 9), (9, 10), (10, 14)]
    assert [token.text for token in found.tokens] == ["Ein", "  Haus", "??", ",", " gut"]
    assert [token.rank for token in found.tokens] == [0, 1, None, 2, 3]


def test_an_explanation_notes_that_a_text_was_cut(
    han: Subject, tagger: Subject, monkeypatch
) -> None:
    longest = han.predictor.config.data.max_length
    found = han.predictor.explain("new " * (longest + 5))
    assert f"first {longest:,} of {longest + 5:,} tokens are explained" in found.missing["text"]
    assert "text" not in han.predictor.explain(TEXT).missing
    monkeypatch.setattr(tagger_module, "MAX_TOKENS", 3)
    found = tagger.predictor.explain(tagger.example)
    assert "first 3 of 7 tokens are explained" in found.missing["text"]
    tokens = tagger.predictor.predict([tagger.example])[0].tokens
    assert [token.text.strip() for token in found.source.tokens[:3]] == list(tokens[:3])


def test_mistakes_are_named(han: Subject, tagger: Subject, pairs: Subject) -> None:
    with pytest.raises(DataError, match="must hold words; found ' '"):
        han.predictor.explain(" ")
    with pytest.raises(DataError, match=r"one of the model's; found 'nice'; choose one of"):
        han.predictor.explain(TEXT, label="nice")
    for method in ("attention_x_gradient", "bogus"):
        with pytest.raises(ConfigError, match=rf"must be one of input_x.*; found '{method}'; "):
            han.predictor.explain(TEXT, attribution=method)
    with pytest.raises(ConfigError, match=r"a head of the model, such as w0\.0; found 'x9\.1'"):
        han.predictor.explain(TEXT, off=["x9.1"])
    with pytest.raises(
        ConfigError, match=r"options of an explanation of the task classify .*found beam"
    ):
        han.predictor.explain(TEXT, beam=4)
    with pytest.raises(DataError, match="must hold tokens; found none"):
        tagger.predictor.explain("")
    with pytest.raises(DataError, match="pair of texts; found 'a'"):
        pairs.predictor.explain("a")
    found = tagger.predictor.explain(tagger.example, beam=None, prefix="")
    with pytest.raises(ConfigError, match=r"found 'gradients'; did you mean"):
        tagger.predictor.attribute(found, "gradients")
