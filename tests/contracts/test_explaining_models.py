"""Every architecture can be explained and asked for alignments: the miniature of every recipe, and decoders without cross-attention."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch

from dragoman.cli.translate import to_plain_dict
from dragoman.config import Config, read_config
from dragoman.errors import DataError
from dragoman.explain import Explanation
from dragoman.explain.attention_plot import save_attention_map
from dragoman.explain.terminal_plot import render_attention
from dragoman.inference import Translator
from dragoman.models.factory import build_model
from dragoman.recipes.catalogue import recipes_of
from dragoman.recipes.mini import mini
from dragoman.text.tokenizer import Tokenizers, train_tokenizers

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


@pytest.mark.parametrize("name", recipes_of("translate"))
def test_the_miniature_of_every_recipe_has_alignments_and_explanations(name: str) -> None:
    twin = next(
        other for other in miniatures() if miniatures()[other].model == miniatures()[name].model
    )
    if twin != name:
        pytest.skip(f"in miniature it is {twin}, which is tested")
    translator = translator_of(miniatures()[name])
    found = list(translator.stream(TEXTS, alignment=True))
    crosses = any(each.alignment is not None for each in found)
    for each in found:
        json.dumps(to_plain_dict(each))
        if crosses and each.text:
            assert each.alignment is not None
            assert each.alignment.shape == (len(each.tokens), len(each.src_tokens))
            assert np.isfinite(each.alignment).all()
    explanation = translator.explain(TEXTS[0])
    assert (explanation.alignment is not None) == crosses
    assert Explanation.from_json(explanation.to_json()).tgt_tokens == explanation.tgt_tokens


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
    assert json.loads(json.dumps(to_plain_dict(found[0])))["alignment"] is None
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


def test_decoders_with_some_cross_attention_align_by_what_they_have() -> None:
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
