"""The native engine: copies for one worker, and conversions of weights that were changed."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from model_kit import perturb_weights

from dragoman.config import Config
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.search_interface import non_finite_error
from dragoman.errors import DivergedError
from dragoman.inference import NativeEngine, SearchRequest
from dragoman.inference.cpu.cpp_transformer import CppTransformer
from dragoman.inference.cpu.cpu_engine_conversion import INT8, convert_model
from dragoman.inference.cpu.lexical_shortlist import Shortlist
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model

SOURCES = [[5, 6, 7], [9, 8]]
VOCABULARY = 30
REQUEST = SearchRequest(
    sources=SOURCES,
    limits=[8] * 2,
    prefixes=[[]] * 2,
    strategy=GreedySearch(),
    sample_ids=range(2),
    return_scores=True,
)


def make() -> EncoderDecoder:
    torch.manual_seed(0)
    shape = {
        "encoder": ["transformer"],
        "decoder": ["transformer"],
        "width": 32,
        "heads": 4,
        "ffn_width": 48,
    }
    model = build_model(
        Config().replace(model=shape).model, src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY
    )
    return perturb_weights(model).eval().requires_grad_(False)


def test_an_engine_for_one_worker_has_the_precision_and_shortlist_of_the_other() -> None:
    model = make()
    shortlist = Shortlist(
        np.arange(9), np.zeros(VOCABULARY + 1, np.int64), np.empty(0, np.int64), VOCABULARY
    )
    engine = NativeEngine(lambda: model, precision=INT8, workers=3, shortlist=shortlist)
    alone = engine.single_worker()
    assert (alone.name, alone.workers, alone.client_threads) == ("native-int8", 1, 1)
    assert alone.shortlist is shortlist
    assert alone.model is model


def test_a_model_that_is_loaded_by_a_search_can_have_gradients() -> None:
    """Attribution needs them, and weights of inference mode have none."""
    engine = NativeEngine(make)
    engine.generate(REQUEST)
    assert not any(weight.is_inference() for weight in engine.model.parameters())


def test_a_model_whose_weights_were_repaired_is_converted_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make()
    engine, weight = NativeEngine(lambda: model), model.get_parameter("decoder.0.ffn.outer.bias")
    expected = engine.generate(REQUEST)
    original = weight.clone()
    weight.fill_(torch.nan)
    with pytest.raises(DivergedError):
        engine.generate(REQUEST)
    weight.copy_(original)
    with caplog.at_level(logging.WARNING):
        assert engine.generate(REQUEST) == expected
    assert not caplog.records
    assert engine.inference_model(GreedySearch()).model is not model


def test_int8_is_tried_again_after_weights_have_changed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def overflow(*_: Any) -> None:
        raise non_finite_error(0)

    model = make()
    if not isinstance(convert_model(model, INT8).model, CppTransformer):
        pytest.skip("int8 needs VNNI and a C++ compiler")
    engine = NativeEngine(lambda: model, precision=INT8)
    monkeypatch.setattr(CppTransformer, "start", overflow)
    found = []
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            engine.generate(REQUEST)
            engine.generate(REQUEST)
        found.append([each.getMessage().split(":")[0] for each in caplog.records])
        model.get_parameter("decoder.0.ffn.outer.bias").add_(0.1)
    int8, float32 = (
        "int8 overflows for this model",
        "packed weights overflow where the model does not",
    )
    assert found == [[int8, float32]] * 2
