"""Simulated int8 against integer arithmetic and against a real int8 engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dragoman.config import Config
from dragoman.data.inference_batches import pad_batch, pad_sources
from dragoman.doctor.fake_quantization import SimulatedInt8, fake_quantize
from dragoman.models.factory import build_model
from dragoman.text.sentencepiece_tokenizer import train_tokenizers
from dragoman.text.special_tokens import BOS, EOS


def whole_numbers(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Multiply as an int8 kernel does: integers with a scale a row, added up in int32."""
    scales = [
        np.abs(each).max(axis=-1, keepdims=True).astype(np.float64) / 127 for each in (x, weight)
    ]
    levels = [
        np.rint(each / scale).astype(np.int32)
        for each, scale in zip((x, weight), scales, strict=True)
    ]
    return (levels[0] @ levels[1].T) * scales[0] * scales[1].T


def test_a_fake_quantized_layer_equals_integer_arithmetic() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(48, 20), torch.randn(7, 48) * torch.logspace(-3, 3, 7).unsqueeze(1)
    with torch.no_grad(), SimulatedInt8():
        found = layer(x)
    expected = whole_numbers(x.numpy(), layer.weight.detach().numpy()) + layer.bias.detach().numpy()
    np.testing.assert_allclose(found.numpy(), expected, rtol=2e-5, atol=2e-5)
    assert (found - layer(x)).abs().max() > 1e-4, "it is not float32's product"


def test_there_are_255_levels_and_zero_stays_zero() -> None:
    x = torch.cat([torch.linspace(-2.0, 2.0, 4001), torch.zeros(1)]).unsqueeze(0)
    found = fake_quantize(x)
    assert len(found.unique()) == 255
    assert (found - x).abs().max() <= 1 / 127 + 1e-6  # half a step
    assert found[0, -1] == 0
    assert torch.equal(fake_quantize(torch.zeros(2, 3)), torch.zeros(2, 3))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_kernels_get_rounded_weights(kind: type[nn.LSTM] | type[nn.GRU]) -> None:
    torch.manual_seed(0)
    kernel, x = kind(6, 5, batch_first=True), torch.randn(2, 4, 6)
    with torch.no_grad(), SimulatedInt8():
        found = kernel(x)[0]
    with torch.no_grad():
        for weight in kernel.parameters():
            if weight.dim() > 1:
                weight.copy_(fake_quantize(weight))
        torch.testing.assert_close(found, kernel(x)[0])


def test_nothing_is_left_behind_and_a_parameter_is_rounded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 8), torch.randn(3, 8)
    before, weight = layer(x), layer.weight.clone()
    mode = SimulatedInt8()
    with torch.no_grad(), mode:
        layer(x)
        layer(x)
        F.linear(x, layer.weight * 2)
    assert len(mode._cache) == 1
    assert torch.equal(layer.weight, weight)
    assert torch.equal(layer(x), before)


def test_log_probabilities_are_about_those_of_an_int8_engine(tmp_path: Path) -> None:
    """CTranslate2 rounds at other points; against float32 both errors are of the same order."""
    pytest.importorskip("ctranslate2")
    from dragoman.exchange.ctranslate2_export import save_ctranslate2
    from dragoman.inference.ctranslate2_engine import CTranslate2Engine

    lines = ["ein mann geht", "eine frau geht schnell", "zwei hunde"]
    model_settings = {
        "encoder": ["transformer*2"],
        "decoder": ["transformer*2"],
        "width": 64,
        "heads": 4,
        "ffn_width": 128,
        "dropout": 0.0,
    }
    config = Config().replace(model=model_settings, text={"vocab_size": 300})
    tokenizers = train_tokenizers(lines * 3, [line.upper() for line in lines] * 3, config.text)
    torch.manual_seed(0)
    model = (
        build_model(config.model, src_vocab_size=300, tgt_vocab_size=300)
        .eval()
        .requires_grad_(False)
    )
    save_ctranslate2(model, tokenizers, config, tmp_path, quantization="int8")
    sources, targets = ([side.encode(line) for line in lines] for side in tokenizers)
    theirs = CTranslate2Engine(tmp_path, tokenizers, name="it", longest=512, workers=1).log_probs(
        sources, targets
    )

    def ours() -> list[float]:
        with torch.inference_mode():
            given, mask = pad_batch([[BOS, *target] for target in targets])
            log_probs = model.project(
                model.decode(given, model.encode(*pad_sources(sources)), mask)
            ).log_softmax(-1)
        return [
            float(log_probs[row, at, token])
            for row, target in enumerate(targets)
            for at, token in enumerate([*target, EOS])
        ]

    exact = np.array(ours())
    with SimulatedInt8():
        off = np.abs(np.array(ours()) - exact)
    real = np.abs(np.array([each for row in theirs for each in row]) - exact)
    assert 0 < off.mean() < 4 * real.mean()
    assert 0 < real.mean() < 4 * off.mean()
