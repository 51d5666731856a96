"""Set Transformer blocks against the paper's equations, and their symmetries."""

import math

import pytest
import torch

from dragoman.attention import record
from dragoman.attention.multi_head import MultiHead
from dragoman.config import ModelConfig
from dragoman.config.unordered_set_input_task import SetsConfig
from dragoman.layers.feed_forward import FeedForward
from dragoman.layers.norms_and_residuals import Residual
from dragoman.models.forward_context import ForwardContext
from dragoman.models.set_transformer_and_deep_sets import build_set_transformer
from dragoman.models.set_transformer_blocks import (
    InducedSetAttentionBlock,
    MultiheadAttentionBlock,
    PoolingByMultiheadAttention,
    SetAttentionBlock,
)

MODEL = ModelConfig(width=16, heads=4, ffn_width=24, dropout=0.0, positions="none")
VARIANTS = {
    "sab": {"encoder": "sab"},
    "isab": {"encoder": "isab", "inducing_points": 3},
    "seeds": {"encoder": "isab", "seeds": 4, "decoder_layers": 1},
    "mean": {"encoder": "mlp", "pooling": "mean", "decoder_layers": 1},
    "sum": {"encoder": "sab", "pooling": "sum"},
    "max": {"encoder": "mlp", "pooling": "max", "decoder_layers": 2},
}


def build(variant: str, *, residual: str = "post_norm", vectors: int = 1):
    torch.manual_seed(0)
    config = ModelConfig(
        width=16, heads=4, ffn_width=24, dropout=0.0, positions="none", residual=residual
    )
    return build_set_transformer(
        config, SetsConfig(**VARIANTS[variant]), features=2, outputs=3, vectors=vectors
    ).eval()


def paper_mab(block: MultiheadAttentionBlock, x, y, mask=None):
    """MAB from equations 3 to 7, head by head."""
    query_weight, query_bias = block.cross.query.weight, block.cross.query.bias
    key_weight, value_weight = block.cross.key_value.weight.chunk(2)
    key_bias, value_bias = block.cross.key_value.bias.chunk(2)
    heads = []
    for head in range(4):
        rows = slice(4 * head, 4 * head + 4)
        q = x @ query_weight[rows].T + query_bias[rows]
        k = y @ key_weight[rows].T + key_bias[rows]
        v = y @ value_weight[rows].T + value_bias[rows]
        scores = q @ k.transpose(-1, -2) / math.sqrt(4)
        if mask is not None:
            scores = scores + torch.where(mask, 0.0, -torch.inf).unsqueeze(1)
        heads.append(scores.softmax(-1) @ v)
    attended = torch.cat(heads, -1) @ block.cross.output.weight.T + block.cross.output.bias

    def norm(value, layer):
        centered = value - value.mean(-1, keepdim=True)
        deviation = (centered.square().mean(-1, keepdim=True) + layer.eps).sqrt()
        return centered / deviation * layer.weight + layer.bias

    hidden = norm(x + attended, block.cross_residual.norm)
    inner = (hidden @ block.ffn.inner.weight.T + block.ffn.inner.bias).clamp(min=0)
    return norm(
        hidden + inner @ block.ffn.outer.weight.T + block.ffn.outer.bias, block.ffn_residual.norm
    )


def test_blocks_are_those_of_the_paper():
    torch.manual_seed(0)
    x, y = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    block = MultiheadAttentionBlock(MODEL).eval()
    torch.testing.assert_close(block(x, y, mask=mask), paper_mab(block, x, y, mask))
    context = ForwardContext(mask=mask)
    induced = InducedSetAttentionBlock(MODEL, inducing_points=3).eval()
    points = induced.points.expand(2, -1, -1)
    hidden = paper_mab(induced.gather, points, y, mask)
    torch.testing.assert_close(induced(y, context), paper_mab(induced.spread, y, hidden))
    pooling = PoolingByMultiheadAttention(MODEL, seeds=2).eval()
    seeds = pooling.seeds.expand(2, -1, -1)
    torch.testing.assert_close(pooling(y, context), paper_mab(pooling.pool, seeds, y, mask))


def test_sab_is_mab_of_a_set_with_itself():
    torch.manual_seed(0)
    block, same = SetAttentionBlock(MODEL).eval(), MultiheadAttentionBlock(MODEL).eval()
    query, key_value = block.self.query_key_value.weight.split([16, 32])
    same.cross.query.weight.data, same.cross.key_value.weight.data = query, key_value
    query, key_value = block.self.query_key_value.bias.split([16, 32])
    same.cross.query.bias.data, same.cross.key_value.bias.data = query, key_value
    same.cross.output = block.self.output
    same.ffn = block.ffn
    x = torch.randn(2, 6, 16)
    mask = torch.arange(6) < torch.tensor([[6], [3]])
    ours = block(x, ForwardContext(mask=mask))
    torch.testing.assert_close(ours[0], paper_mab(same, x, x, mask)[0])
    torch.testing.assert_close(ours[1, :3], paper_mab(same, x, x, mask)[1, :3])


@pytest.mark.parametrize("residual", ["post_norm", "pre_norm", "no_norm"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_permuting_a_set_changes_nothing_but_the_order(variant, residual):
    model = build(variant, residual=residual)
    elements = torch.randn(3, 9, 2)
    mask = torch.arange(9) < torch.tensor([[9], [5], [1]])
    order = torch.stack(
        [torch.cat([torch.randperm(size), torch.arange(size, 9)]) for size in (9, 5, 1)]
    )
    permuted = elements.gather(1, order.unsqueeze(2).expand_as(elements))
    with torch.no_grad():
        encoded, moved = model.encode(elements, mask), model.encode(permuted, mask)
        expected = encoded.gather(1, order.unsqueeze(2).expand_as(encoded))
        real = mask.unsqueeze(2)
        torch.testing.assert_close(moved * real, expected * real, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            model(permuted, mask), model(elements, mask), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_and_other_rows_change_nothing(variant):
    model = build(variant)
    elements = torch.randn(3, 6, 2)
    sizes = torch.tensor([6, 4, 1])
    mask = torch.arange(6) < sizes.unsqueeze(1)
    with torch.no_grad():
        together = model(elements, mask)
        elements[~mask] = 1e4
        torch.testing.assert_close(model(elements, mask), together)
        for row, size in enumerate(sizes):
            alone = model(elements[row : row + 1, :size])
            torch.testing.assert_close(alone[0], together[row], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_has_a_gradient_and_it_is_right(variant):
    model = build(variant, residual="no_norm").double().train()
    elements = torch.randn(2, 4, 2, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(4) < torch.tensor([[4], [2]])
    model(elements, mask).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not elements.grad[~mask].any()
    assert torch.autograd.gradcheck(lambda x: model(x, mask), elements.detach().requires_grad_())


def test_vectors_come_from_seeds_or_from_one_vector():
    assert build("seeds", vectors=4)(torch.randn(2, 5, 2)).shape == (2, 4, 3)
    assert build("mean", vectors=4)(torch.randn(2, 5, 2)).shape == (2, 4, 3)


def test_attention_of_all_blocks_is_recorded():
    model = build("seeds")
    elements, mask = torch.randn(2, 5, 2), torch.arange(5) < torch.tensor([[5], [3]])
    with torch.no_grad():
        expected = model(elements, mask)
        with record(model) as records:
            torch.testing.assert_close(model(elements, mask), expected)
    assert set(records) == {
        "encoder.0.gather.cross",
        "encoder.0.spread.cross",
        "encoder.1.gather.cross",
        "encoder.1.spread.cross",
        "pooling.pool.cross",
        "decoder.0.self",
    }
    pooling = records["pooling.pool.cross"]
    assert pooling.weights.shape == (2, 4, 4, 5)
    assert not pooling.weights[1, :, :, 3:].any()
    torch.testing.assert_close(pooling.weights @ pooling.values, pooling.output)


@pytest.mark.parametrize("variant", ["sab", "seeds"])
def test_layers_have_the_settings_of_the_model(variant):
    config = ModelConfig(
        width=16,
        heads=4,
        ffn_width=24,
        positions="none",
        dropout=0.1,
        attention_dropout=0.2,
        ffn_dropout=0.3,
        norm_epsilon=1e-3,
        attention_bias=False,
        ffn_bias=False,
    )
    model = build_set_transformer(config, SetsConfig(**VARIANTS[variant]), features=2, outputs=3)
    for path, module in model.named_modules():
        if isinstance(module, MultiHead):
            assert module.dropout == 0.2, path
        if isinstance(module, FeedForward):
            assert module.dropout == 0.3, path
        if isinstance(module, Residual):
            assert (module.dropout, module.norm.eps) == (0.1, 1e-3), path
        if isinstance(module, MultiHead | FeedForward):
            assert not [name for name, _ in module.named_parameters() if "bias" in name], path


@torch.no_grad()
def test_pre_norm_pooling_without_a_decoder_ends_in_a_norm():
    model, encoded = build("sab", residual="pre_norm"), torch.randn(2, 5, 16)
    pooled = model.pooling(encoded, ForwardContext())
    torch.testing.assert_close(model.pool(encoded), torch.nn.functional.layer_norm(pooled, (16,)))
