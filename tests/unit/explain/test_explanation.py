"""Explanations as data, PNG and terminal plots, in any script and without warnings."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from dragoman.config import ModelConfig
from dragoman.explain import Explanation
from dragoman.explain.attention_and_logit_capture import align_batch, record_attention
from dragoman.explain.explanation import (
    AttentionSite,
    Step,
    Token,
    TokenizedText,
    is_cross_attention,
)
from dragoman.models.factory import build_model
from dragoman.text.special_tokens import BOS, EOS

SRC, TGT = ["▁Ein", "▁Mann", "</s>"], ["▁A", "▁man", ".", "</s>"]


def weights(rows: int, columns: int) -> np.ndarray:
    values = np.random.default_rng(0).random((rows, columns)).astype(np.float32)
    return values / values.sum(axis=1, keepdims=True)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    config = ModelConfig(
        width=16, heads=2, ffn_width=32, encoder=("transformer*2",), decoder=("transformer*3",)
    )
    return build_model(config, src_vocab_size=30, tgt_vocab_size=30).eval()


def test_recording_changes_nothing_and_captures_every_head(model) -> None:
    """Recording gives the outputs of fused attention (OpenNMT-py#2490, transformers#31990)."""
    seen = record_attention(model, [5, 6, 7], [8, 9])
    with torch.no_grad():
        plain = model(torch.tensor([[5, 6, 7, EOS]]), torch.tensor([[BOS, 8, 9]])).log_softmax(-1)[
            0
        ]
    assert seen.log_probs == pytest.approx(
        [float(plain[at, token]) for at, token in enumerate([8, 9, EOS])], abs=1e-5
    )
    assert sorted(seen.attentions) == [
        *(f"decoder.{layer}.{kind}" for layer in range(3) for kind in ("cross", "self")),
        *(f"encoder.{layer}.self" for layer in range(2)),
    ]
    assert seen.attentions["decoder.0.cross"].shape == (2, 3, 4)
    assert np.triu(seen.attentions["decoder.0.self"], k=1).max() == 0.0  # nothing sees its future


def test_alignment_is_the_mean_over_layers_and_heads(model) -> None:
    """Averages are called averages, and heads are by head (fairseq#3365)."""
    seen = record_attention(model, [5, 6, 7], [8, 9])
    crosses = np.stack([each for path, each in seen.attentions.items() if is_cross_attention(path)])
    [aligned] = align_batch(model, [[5, 6, 7]], [[8, 9]])
    np.testing.assert_allclose(aligned, crosses.mean(axis=(0, 1))[:2], atol=1e-6)


def test_alignment_of_a_padded_batch_is_that_of_each_row_alone(model) -> None:
    """Padding is never attended to (tensor2tensor#526)."""
    sources, targets = [[5, 6, 7, 8, 9], [5]], [[10], [11, 12, 13]]
    for row, aligned in enumerate(align_batch(model, sources, targets)):
        [alone] = align_batch(model, [sources[row]], [targets[row]])
        assert aligned.shape == (len(targets[row]), len(sources[row]) + 1)
        np.testing.assert_allclose(aligned, alone, atol=1e-6)


def text_of(tokens: list[str]) -> TokenizedText:
    plain = [token.replace("\u2581", " ") for token in tokens]
    return TokenizedText(
        text="".join(plain[:-1]).strip(),
        tokens=[Token(at + 4, token, (0, 0)) for at, token in enumerate(plain)],
    )


def explanation() -> Explanation:
    sites = [
        AttentionSite("e0", "encoder.0.self", "self", "encoder", 0, 2, "source", "source"),
        AttentionSite("d0", "decoder.0.self", "self", "decoder", 0, 2, "target", "target_in"),
        AttentionSite("x0", "decoder.0.cross", "cross", "cross", 0, 2, "target", "source"),
        AttentionSite("x1", "decoder.1.cross", "cross", "cross", 1, 2, "target", "source"),
    ]
    shapes = {"source": 3, "target": 4, "target_in": 4}
    return Explanation(
        model={"task": "translate"},
        request={},
        source=text_of(SRC),
        target=text_of(TGT),
        steps=[Step(at + 4, -0.1 * (at + 1), 1, 0.5) for at in range(4)],
        score={"sum": -1.0, "normalised": -0.5, "penalty": "gnmt 0.6"},
        sites=sites,
        arrays={
            site.tensor: np.stack([weights(shapes[site.query], shapes[site.key])] * 2)
            for site in sites
        },
    )


def test_an_explanation_survives_a_round_trip_through_json() -> None:
    """Every matrix is saved, not only printed (OpenNMT-py#897, #736, #623)."""
    before = explanation()
    after = Explanation.from_json(before.to_json())
    assert after.src_tokens == before.src_tokens == SRC
    assert after.tgt_tokens == TGT
    assert (after.text, after.translation) == ("Ein Mann", "A man.")
    assert after.log_probs == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    assert after.sites == before.sites
    assert [step.rank for step in after.steps] == [1, 1, 1, 1]
    assert after.digest == before.digest
    for path, exact in before.attentions.items():
        np.testing.assert_allclose(after.attentions[path], exact, atol=0.004)
    assert after.alignment is not None
    np.testing.assert_allclose(after.alignment, before.alignment, atol=0.004)


def test_a_model_without_cross_attention_has_no_alignment() -> None:
    bare = Explanation(model={}, request={}, source=text_of(SRC), target=text_of(TGT))
    assert bare.alignment is None
    assert bare.attentions == {}
    assert json.loads(bare.to_json())["sites"] == []
