"""Factorized and unit-norm embeddings, tied to the output projection or not."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from dragoman.config import Config, ModelConfig
from dragoman.layers.embedding_and_output_projection import Embedding, OutputProjection
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model, count_parameters, summarize_model

TIES = ["all", "target", "none"]


def build(**more: object) -> EncoderDecoder:
    torch.manual_seed(0)
    values = {
        "encoder": ("transformer",),
        "decoder": ("transformer",),
        "width": 8,
        "heads": 2,
        "ffn_width": 16,
        "dropout": 0.0,
        **more,
    }
    return build_model(ModelConfig(**values), src_vocab_size=11, tgt_vocab_size=11).double().eval()  # type: ignore[arg-type]


def test_factors_are_multiplied() -> None:
    torch.manual_seed(0)
    embedding, ids = Embedding(11, 8, scale=3.0, embedding_width=4), torch.tensor([[4, 9]])
    assert embedding.up_proj is not None
    one_hot = F.one_hot(ids, 11).float()
    torch.testing.assert_close(
        embedding(ids), one_hot @ embedding.weight @ embedding.up_proj.weight.T * 3.0
    )


@pytest.mark.parametrize("tie_embeddings", TIES)
def test_factorised_weights_are_counted_and_used_at_the_output(tie_embeddings: str) -> None:
    model, whole = (
        build(tie_embeddings=tie_embeddings, embedding_width=4),
        build(tie_embeddings=tie_embeddings),
    )
    tables = {"all": 1, "target": 2, "none": 3}[tie_embeddings]
    wide = 1 if tie_embeddings == "all" else 2
    assert count_parameters(whole) - count_parameters(model) == tables * 11 * 4 - (wide + 1) * 4 * 8
    assert model.output_weight.shape == (11, 4)
    src, tgt = torch.randint(4, 11, (2, 5)), torch.randint(4, 11, (2, 6))
    hidden = model.decoder(model.tgt_input(model._embedding("tgt")(tgt)), context(model, src))
    assert model.output.down_proj is not None
    expected = hidden @ model.output.down_proj.weight.T @ model.output_weight.T
    torch.testing.assert_close(model(src, tgt), expected)
    torch.testing.assert_close(model.extend(tgt, model.start(model.encode(src))).logits, expected)


def context(model: EncoderDecoder, src: torch.Tensor):  # type: ignore[no-untyped-def]
    from dragoman.models.forward_context import ForwardContext

    return ForwardContext(memory=model.encode(src))


@pytest.mark.parametrize("tie_embeddings", TIES)
@pytest.mark.parametrize("inner", [0, 4])
def test_embeddings_of_unit_norm(tie_embeddings: str, inner: int) -> None:
    """FixNorm: only the direction of the weights matters, for embeddings and logits."""
    model = build(
        tie_embeddings=tie_embeddings,
        embedding_width=inner,
        fix_norm=True,
        norm="scale",
        residual="pre_norm",
    )
    src, tgt = torch.randint(4, 11, (2, 5)), torch.randint(4, 11, (2, 6))
    before = model(src, tgt)
    torch.testing.assert_close(
        model.output_weight.norm(dim=-1), torch.ones(11, dtype=torch.float64)
    )
    table = model._embedding("src")
    assert table.length is not None
    torch.testing.assert_close(table.length, torch.full((1,), 8**0.5, dtype=torch.float32).double())
    if not inner:
        torch.testing.assert_close(table(src).norm(dim=-1), table.length.expand(2, 5))
    with torch.no_grad():
        lengths = torch.rand(11, 1, dtype=torch.float64) + 0.5
        for name, weight in model.named_parameters():
            if name in (
                "embeddings.shared.weight",
                "embeddings.src.weight",
                "embeddings.tgt.weight",
                "output.weight",
            ):
                weight *= lengths
    torch.testing.assert_close(model(src, tgt), before)
    with torch.no_grad():
        table.length *= 2.0
    assert (model(src, tgt) - before).abs().max() > 1e-3


def test_logits_of_scale_norm_and_fix_norm_are_cosines() -> None:
    """The paper's pair: the last norm's one number times the cosine of the angle between state and
    word.
    """
    model = build(fix_norm=True, norm="scale", residual="pre_norm")
    src, tgt = torch.randint(4, 11, (2, 5)), torch.randint(4, 11, (2, 6))
    hidden = model.decode(tgt, model.encode(src))
    assert model.decoder.norm is not None
    cosines = F.cosine_similarity(hidden.unsqueeze(2), model.embeddings["shared"].weight, dim=-1)  # type: ignore[union-attr]
    torch.testing.assert_close(model(src, tgt), model.decoder.norm.weight * cosines)


def test_a_row_of_zeros_stays_finite() -> None:
    embedding = Embedding(3, 4, fix_norm=True)
    with torch.no_grad():
        embedding.weight.zero_()
    embedding(torch.tensor([[1]])).sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.isfinite().all()
    assert torch.equal(embedding.matrix, torch.zeros(3, 4))


def test_an_output_of_its_own() -> None:
    output = OutputProjection(5, 4, tied=False, embedding_width=2, fix_norm=True)
    assert output.matrix is not None
    assert output(torch.randn(1, 3, 4)).shape == (1, 3, 2)
    torch.testing.assert_close(output.matrix.norm(dim=-1), torch.ones(5))


def test_the_drawing_shows_both_factors() -> None:
    config = ModelConfig(
        encoder=("transformer",),
        decoder=("transformer",),
        width=8,
        heads=2,
        ffn_width=16,
        embedding_width=4,
    )
    rows = {row.path: row for row in summarize_model(config, src_vocab_size=11, tgt_vocab_size=11)}
    assert rows["embeddings.shared"].shapes == "weight 11x4, up_proj.weight 8x4"
    assert rows["output"].shapes == "down_proj.weight 4x8"


def test_an_embedding_as_wide_as_the_model_is_rejected() -> None:
    (problem,) = Config().replace(model={"embedding_width": 512}).problems()
    assert (
        "model.embedding_width must be below model.width, because factorized embeddings save "
        "weights only then; found 512 and 512" in problem
    )


def test_an_output_matrix_of_its_own_has_the_width_of_the_embedding() -> None:
    torch.manual_seed(0)
    for narrow, width in ((0, 64), (16, 16)):
        output = OutputProjection(999, 64, tied=False, embedding_width=narrow)
        assert output.weight is not None
        assert output.weight.shape == (999, width)
        assert output.weight.std().item() == pytest.approx(width**-0.5, rel=0.05)
        assert output(torch.ones(2, 64)).shape == (2, width)


def test_vectors_start_with_the_variance_of_their_own_width() -> None:
    torch.manual_seed(0)
    table = Embedding(500, 64, embedding_width=16).weight
    output = OutputProjection(500, 64, tied=False, embedding_width=16).weight
    assert output is not None
    assert table.std().item() == pytest.approx(0.25, rel=0.05)
    assert output.std().item() == pytest.approx(0.25, rel=0.05)
