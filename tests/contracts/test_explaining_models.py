"""Every architecture can be explained and asked for alignments: the miniature of every recipe, and
decoders without cross-attention.
"""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch

from dragoman.config import Config, read_config
from dragoman.errors import DataError
from dragoman.explain import Explanation
from dragoman.explain.attention_plots import save_attention_map
from dragoman.explain.explanation_consistency_checks import (
    check_against_model,
    check_explanation,
    check_wire_form,
)
from dragoman.explain.terminal_attention_map import render_attention
from dragoman.inference import Translator
from dragoman.models.factory import build_model
from dragoman.recipes.catalogue import recipes_of
from dragoman.recipes.recipe_miniature import mini
from dragoman.text.sentencepiece_tokenizer import Tokenizers, train_tokenizers
from tests.explanation_kit import check_report

LINES = ["das haus", "ein hund", "a", "hund und haus"]
TEXTS = ["hund und haus", "", "a", "ein haus"]
WITHOUT = (
    "lstm",
    "gru(layers=2)",
    "lstm,ffn",
    "gru*2",
)  # decoders that see only a summary, if that


@functools.cache
def tokenizers_of(text: object) -> Tokenizers:
    """Learn the tokenizers of some settings once."""
    return train_tokenizers(LINES * 9, [line.upper() for line in LINES] * 9, text)  # type: ignore[arg-type]


def translator_of(config: Config) -> Translator:
    """Build a translator with random weights."""
    tokenizers = tokenizers_of(config.text)
    torch.manual_seed(5)
    model = build_model(
        config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    ).eval()
    return Translator(model, tokenizers, config)


@functools.cache
def miniatures() -> dict[str, Config]:
    """Read the miniature of every recipe; outputs that are not trained to end are cut short."""
    return {
        name: read_config(recipe=name, scale=mini).replace(
            decode={"max_length_ratio": 1.0, "max_length_extra": 2}
        )
        for name in recipes_of("translate")
    }


@functools.cache
def miniature(name: str) -> Translator:
    """Build the miniature of a recipe once for all tests; skip one that is the same as another."""
    twin = next(
        other for other in miniatures() if miniatures()[other].model == miniatures()[name].model
    )
    if twin != name:
        pytest.skip(f"in miniature it is {twin}, which is tested")
    return translator_of(miniatures()[name])


@functools.cache
def explanation_of(name: str) -> Explanation:
    """Explain one text with the miniature of a recipe, by beam search."""
    return miniature(name).explain(TEXTS[0], beam=2)


@pytest.mark.parametrize("name", recipes_of("translate"))
def test_the_miniature_of_every_recipe_has_alignments_and_explanations(name: str) -> None:
    translator = miniature(name)
    found = list(translator.stream(TEXTS, alignment=True))
    crosses = any(each.alignment is not None for each in found)
    for each in found:
        json.dumps(each.to_dict())
        if crosses and each.text:
            assert each.alignment is not None
            assert each.alignment.shape == (len(each.tokens), len(each.src_tokens))
            assert np.isfinite(each.alignment).all()
    assert (explanation_of(name).alignment is not None) == crosses


# Recipes whose rows do not sum to one: talking heads mix distributions, the others may stop short.
SUMS = {
    "shazeer2020": {"none"},
    "luong2015_local_p": {"sub"},
    "raffel2017": {"sub"},
    "chiu2018": {"sub"},
    "dong2019": {"one", "sub"},
}
FAMILIES = {
    "tiny": "transformer",
    "dong2019": "prefix_lm",
    "kitaev2020": "reformer",
    "bahdanau2015": "rnn",
    "sutskever2014": "rnn",
    "chorowski2015": "location",
    "raffel2017": "monotonic",
    "chiu2018": "monotonic",
    "gehring2017": "convs2s",
    "domhan2018_cnn": "convs2s",
}
EXTRAS = {
    "raffel2017": {"p_choose", "path"},
    "chiu2018": {"p_choose", "path"},
    "chorowski2015": {"covered", "energy"},
    "see2017": {"covered"},
}


@pytest.mark.parametrize("name", recipes_of("translate"))
def test_every_explanation_matches_its_model(name: str) -> None:
    """See tensor2tensor#540, #917, OpenNMT-py#2490."""
    translator, explanation = miniature(name), explanation_of(name)
    assert check_explanation(explanation) == []
    assert check_against_model(explanation, translator.model) == []
    assert explanation.checks["capture"] < 1e-4
    assert explanation.checks["output"] < 1e-4
    assert explanation.checks["row_sum"] < 1e-5
    assert explanation.checks["score"] < 1e-4
    assert {site.sum for site in explanation.sites} <= SUMS.get(name, {"one"})
    assert explanation.model["family"] == FAMILIES.get(name, explanation.model["family"])
    assert EXTRAS.get(name, set()) <= set(explanation.extras)


@pytest.mark.parametrize("name", recipes_of("translate"))
def test_sites_have_the_axes_of_their_groups(name: str) -> None:
    explanation = explanation_of(name)
    axes = {
        "encoder": ("self", "source", "source", False),
        "decoder": ("self", "target", "target_in", True),
        "cross": ("cross", "target", "source", False),
    }
    for site in explanation.sites:
        assert (site.kind, site.query, site.key, site.causal) == axes[site.group], site.id
        assert site.id[0] == {"encoder": "e", "decoder": "d", "cross": "x"}[site.group]
        assert site.ordered
    assert len({site.id for site in explanation.sites}) == len(explanation.sites)
    assert {f"{head.site}.{head.head}" for head in explanation.heads} == {
        f"{site.id}.{head}" for site in explanation.sites for head in range(site.heads)
    }
    if not explanation.sites:
        assert "no attention" in explanation.missing["heads"]


@pytest.mark.parametrize("name", recipes_of("translate"))
def test_every_explanation_is_reported_in_the_terminal(name: str) -> None:
    check_report(explanation_of(name))


@pytest.mark.parametrize("budget", [None, 2_000_000, 40_000])
@pytest.mark.parametrize("name", recipes_of("translate"))
def test_every_explanation_fits_its_budget_as_json(name: str, budget: int | None) -> None:
    assert check_wire_form(explanation_of(name), budget) == []


@pytest.mark.parametrize("decoder", WITHOUT)
def test_a_model_without_cross_attention_has_no_alignment(decoder: str) -> None:
    overrides = [
        "model.width=16",
        "model.heads=2",
        "model.encoder=[bilstm]",
        f"model.decoder=[{decoder}]",
        "text.vocab_size=300",
    ]
    translator = translator_of(
        read_config(
            overrides=[*overrides, "decode.max_length_ratio=1.0", "decode.max_length_extra=2"]
        )
    )
    found = list(translator.stream(TEXTS, alignment=True, nbest=2))
    assert [each.alignment for each in found] == [None] * len(TEXTS)
    assert json.loads(json.dumps(found[0].to_dict()))["alignment"] is None
    explanation = translator.explain(TEXTS[0])
    assert explanation.alignment is None
    assert explanation.attentions == {}
    assert json.loads(explanation.to_json())["sites"] == []
    labels = {"src_tokens": explanation.src_tokens, "tgt_tokens": explanation.tgt_tokens}
    for draw in (render_attention, functools.partial(save_attention_map, "never.png")):
        with pytest.raises(
            DataError,
            match="found None, the alignment of a model without cross-attention; draw one of",
        ):
            draw(explanation.alignment, **labels)  # type: ignore[operator]


def test_decoders_with_some_cross_attention_align_by_those_layers() -> None:
    overrides = [
        "model.width=16",
        "model.heads=2",
        "model.encoder=[transformer]",
        "model.decoder=[lstm,cross_attention,ffn]",
        "text.vocab_size=300",
    ]
    translator = translator_of(
        read_config(
            overrides=[*overrides, "decode.max_length_ratio=1.0", "decode.max_length_extra=2"]
        )
    )
    [found] = translator.stream(TEXTS[:1], alignment=True)
    assert found.alignment is not None
    np.testing.assert_allclose(found.alignment.sum(axis=1), 1.0, atol=1e-5)
