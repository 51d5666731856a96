"""Attention weights of a prefix LM, named as an encoder-decoder's; contributions and extras."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dragoman.attention.attention_weight_hooks import edit
from dragoman.config import ModelConfig
from dragoman.explain.attention_and_logit_capture import (
    align_batch,
    capture_batch,
    capture_pair,
    record_attention,
)
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model

SOURCE, TARGET = [5, 6, 7], [8, 9]


def prefix_lm() -> EncoderDecoder:
    torch.manual_seed(0)
    config = ModelConfig(
        architecture="prefix_lm",
        encoder=(),
        decoder=("transformer*2",),
        width=16,
        heads=2,
        ffn_width=32,
    )
    return build_model(config, src_vocab_size=12, tgt_vocab_size=12).eval()


def test_one_stack_has_the_maps_of_two() -> None:
    maps = record_attention(prefix_lm(), SOURCE, TARGET)
    shapes = {path: weights.shape for path, weights in maps.attentions.items()}
    assert shapes == {
        f"{path.format(layer)}": shape
        for layer in (0, 1)
        for path, shape in {
            "encoder.{}.self": (2, 4, 4),
            "decoder.{}.cross": (2, 3, 4),
            "decoder.{}.self": (2, 3, 3),
        }.items()
    }
    np.testing.assert_allclose(maps.attentions["encoder.1.self"].sum(-1), 1, atol=1e-5)
    target = maps.attentions["decoder.1.cross"].sum(-1) + maps.attentions["decoder.1.self"].sum(-1)
    np.testing.assert_allclose(target, 1, atol=1e-5)
    assert not np.triu(maps.attentions["decoder.0.self"], 1).any()


def test_alignments_are_the_weights_on_the_source() -> None:
    model = prefix_lm()
    alignments = align_batch(model, [SOURCE, [5]], [TARGET, [8, 9, 10]])
    assert alignments is not None
    maps = record_attention(model, SOURCE, TARGET)
    expected = np.stack(
        [maps.attentions[f"decoder.{layer}.cross"].mean(0) for layer in (0, 1)]
    ).mean(0)
    np.testing.assert_allclose(alignments[0], expected[:2], atol=1e-5)
    assert alignments[1].shape == (3, 2)


def test_read_path_of_monotonic_attention_has_the_keys_it_attends_to() -> None:
    """Past the last key, where the head finds no stop, it attends to nothing."""
    torch.manual_seed(1)
    config = ModelConfig(
        encoder=("bigru",), decoder=("gru(attention=monotonic)",), width=16, heads=1
    )
    model = build_model(config, src_vocab_size=30, tgt_vocab_size=30).eval()
    for path, weight in model.named_parameters():
        torch.nn.init.constant_(weight, -1) if path.endswith("offset") else weight.data.normal_()
    sources = [list(range(4, 16)), list(range(20, 28))]
    targets = [list(range(16, 26)), list(range(5, 9))]
    visited = set[int]()
    for source, captured in zip(sources, capture_batch(model, sources, targets), strict=True):
        (weights,) = captured.sites[-1].weights
        expected = [int(row.argmax()) if row.any() else len(source) + 1 for row in weights]
        assert captured.extras["x0.path"].tolist() == expected
        (p_choose,) = captured.extras["x0.p_choose"]
        for row, first, stop in zip(p_choose, [0, *expected], expected, strict=False):
            assert (row[first:stop] < 0.5).all()
            assert (row[stop : stop + 1] > 0.5).all()
        visited |= {*expected}
    assert len(visited) > 3


def test_coverage_at_a_position_is_the_attention_before_it() -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        encoder=("bigru",), decoder=("gru(attention=coverage)",), width=16, heads=1
    )
    model = build_model(config, src_vocab_size=12, tgt_vocab_size=12).eval()
    [captured] = capture_batch(model, [SOURCE], [[8, 9, 10]])
    (weights,), (covered,) = captured.sites[-1].weights, captured.extras["x0.covered"]
    expected = [np.zeros(4), weights[0], weights[0] + weights[1]]
    np.testing.assert_allclose(covered, expected, atol=1e-6)


def test_captures_of_a_prefix_lm_do_not_depend_on_padding() -> None:
    model, pairs = prefix_lm(), [(SOURCE, TARGET), ([5], [8, 9, 10])]
    for pair, captured in zip(pairs, capture_batch(model, *zip(*pairs, strict=True)), strict=True):
        alone = capture_pair(model, *pair)
        for found, expected in zip(captured.sites, alone.sites, strict=True):
            np.testing.assert_allclose(found.weights, expected.weights, atol=1e-5)
            np.testing.assert_allclose(found.contributions, expected.contributions, atol=1e-5)


@pytest.mark.parametrize("block", ["transformer", "conv"])
@torch.no_grad()
def test_contributions_are_the_norms_of_a_heads_terms(block: str) -> None:
    """With all other weights zero, the attention's output is that much longer than its bias."""
    torch.manual_seed(0)
    config = ModelConfig(encoder=(block,), decoder=(block,), width=16, heads=2, ffn_width=32)
    model = build_model(config, src_vocab_size=12, tgt_vocab_size=12).eval()
    captured = capture_pair(model, SOURCE, TARGET)
    (site,) = (each for each in captured.sites if each.site.group == "cross")
    outputs = list[torch.Tensor]()
    model.get_submodule(site.site.path).register_forward_hook(
        lambda module, given, output: outputs.append(output[0])
    )

    def output_of(head: int, key: int, factor: float) -> torch.Tensor:
        kept = torch.zeros(site.weights.shape)
        kept[head, :, key] = factor
        with edit(model, {site.site.path: lambda weights: weights * kept}):
            capture_pair(model, SOURCE, TARGET)
        return outputs.pop()

    bias = output_of(0, 0, factor=0.0)
    for head, key in np.ndindex(len(site.weights), len(SOURCE) + 1):
        added = (output_of(head, key, factor=1.0) - bias).norm(dim=-1)
        np.testing.assert_allclose(site.contributions[head, :, key], added, atol=1e-5)
