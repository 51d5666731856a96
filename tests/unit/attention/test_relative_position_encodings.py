"""Relative positions against golden values and other implementations."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from dragoman.attention import SelfAttention
from dragoman.attention.relative_position_encodings import (
    AlibiBias,
    RotaryEmbedding,
    ShawRelativeKeys,
    T5Positions,
    T5RelativeBias,
    TransformerXLBias,
    alibi_slopes,
)
from dragoman.config import Config, ModelConfig
from dragoman.models.factory import build_model
from dragoman.ops import attend, attend_reference


def test_rotation_of_one_to_four_at_position_three() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).view(1, 1, 1, 4)
    golden = torch.tensor([-1.272233, -1.838865, 2.878668, 4.088187], dtype=torch.float64)
    torch.testing.assert_close(
        RotaryEmbedding(4).double().rotate(x, None, first=3).flatten(), golden, atol=1e-6, rtol=0
    )


def test_rotation_of_adjacent_features_is_gptjs_and_of_halves_llamas() -> None:
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama

    torch.manual_seed(0)
    x = torch.randn(2, 3, 7, 8)  # (B, H, T, Dh)
    sinusoids = RotaryEmbedding(8).sinusoids.vectors(0, 7)
    sine, cosine = sinusoids[:, 0::2].expand(2, 7, 4), sinusoids[:, 1::2].expand(2, 7, 4)
    ours = RotaryEmbedding(8).rotate(x, None)
    torch.testing.assert_close(ours, gptj(x.transpose(1, 2), sine, cosine).transpose(1, 2))

    def halves(x: Tensor) -> Tensor:
        return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)

    theirs, _ = llama(
        halves(x), halves(x), torch.cat([cosine, cosine], -1), torch.cat([sine, sine], -1)
    )
    torch.testing.assert_close(halves(ours), theirs)


def test_rotated_dot_products_depend_on_the_distance_alone() -> None:
    torch.manual_seed(0)
    query, key, rotate = (
        torch.randn(1, 1, 1, 8).double(),
        torch.randn(1, 1, 1, 8).double(),
        RotaryEmbedding(8).double().rotate,
    )
    near = rotate(query, None, first=9) @ rotate(key, None, first=4).mT
    far = rotate(query, None, first=1009) @ rotate(key, None, first=1004).mT
    torch.testing.assert_close(near, far, atol=1e-5, rtol=0)  # the table is kept in float32


def test_rotation_at_given_positions() -> None:
    torch.manual_seed(0)
    x, rotation = torch.randn(2, 3, 2, 4), RotaryEmbedding(4, max_positions=4)
    turned = rotation.rotate(x, torch.tensor([[0, 1], [5, 6]]), first=5)
    torch.testing.assert_close(turned[0], rotation.rotate(x, None)[0])
    torch.testing.assert_close(turned[1], rotation.rotate(x, None, first=5)[1])


def test_layers_share_one_table_until_they_are_moved() -> None:
    with torch.device("meta"):
        first, second = RotaryEmbedding(4), RotaryEmbedding(4)
    assert first.sinusoids.table.data_ptr() == second.sinusoids.table.data_ptr()
    assert first.sinusoids.table.device.type == "cpu"
    first.double()
    assert (first.sinusoids.table.dtype, second.sinusoids.table.dtype) == (
        torch.float64,
        torch.float32,
    )
    assert not first.state_dict()


def test_slopes_are_the_papers() -> None:
    assert alibi_slopes(8) == [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(4) == [0.25, 0.0625, 0.015625, 0.00390625]


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16])
def test_linear_bias_is_blooms(heads: int) -> None:
    """BLOOM adds slope times key position, which differs from minus slope times distance by a
    constant per query: the softmax is the same.
    """
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    position_ids = torch.arange(5)
    ours = AlibiBias(heads).bias(
        position_ids - position_ids.unsqueeze(1), torch.empty(0)
    )  # (H, T, S)
    theirs = build_alibi_tensor(torch.ones(1, 5), heads, torch.float32)  # (H, 1, S)
    torch.manual_seed(0)
    scores = torch.randn(heads, 5, 5).masked_fill(
        ~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf
    )
    torch.testing.assert_close((scores + ours).softmax(-1), (scores + theirs).softmax(-1))


def test_slopes_of_later_positions_lie_halfway_to_the_next_heads() -> None:
    for heads in (4, 8):
        slopes = alibi_slopes(heads)
        [later] = AlibiBias(heads).bias(torch.tensor([[3]]), torch.empty(0)).view(1, heads).tolist()
        between = [-3 * math.sqrt(one * two) for one, two in itertools.pairwise(slopes)]
        assert later[:-1] == pytest.approx(between)
        assert later[-1] == pytest.approx(-3 * slopes[-1] * math.sqrt(slopes[1] / slopes[0]))


def test_buckets_are_the_golden_ones() -> None:
    both = {
        0: 0,
        -1: 1,
        -7: 7,
        -8: 8,
        -11: 8,
        -12: 9,
        -16: 10,
        -32: 12,
        -64: 14,
        -128: 15,
        -500: 15,
    }
    both |= {1: 17, 7: 23, 8: 24, 16: 26, 64: 30, 128: 31}
    past = {-1: 1, -15: 15, -16: 16, -20: 17, -32: 21, -64: 26, -113: 31, -4000: 31, 3: 0}
    for causal, golden in ((False, both), (True, past)):
        found = T5RelativeBias(2, causal=causal).bucket(torch.tensor(list(golden)))
        assert dict(zip(golden, found.tolist(), strict=True)) == golden


@pytest.mark.parametrize("causal", [False, True])
def test_buckets_are_those_of_transformers(causal: bool) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    # Theirs are computed in single precision: at the exact borders they may fall one bucket low.
    distance = torch.tensor([d for d in range(-300, 301) if abs(d) not in (16, 32, 64, 128)])
    theirs = T5Attention._relative_position_bucket(
        distance, bidirectional=not causal, num_buckets=32, max_distance=128
    )
    assert torch.equal(T5RelativeBias(1, causal=causal).bucket(distance), theirs)


def test_bucket_bias_reads_its_table() -> None:
    bias = T5RelativeBias(2, causal=True)
    torch.nn.init.normal_(bias.weight)
    found = bias.bias(torch.tensor([[-1, 0]]), torch.empty(0))
    assert found.shape == (2, 1, 2)
    torch.testing.assert_close(found[:, 0], bias.weight[[1, 0]].T)


def test_relative_keys_are_those_of_transformers() -> None:
    from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import (
        Wav2Vec2BertConfig,
        Wav2Vec2BertSelfAttention,
    )

    torch.manual_seed(0)
    config = Wav2Vec2BertConfig(
        hidden_size=8,
        num_attention_heads=2,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=3,
        right_max_position_embeddings=3,
        attention_dropout=0.0,
    )
    theirs = Wav2Vec2BertSelfAttention(config).eval()
    relative_position = ShawRelativeKeys(4, max_distance=3)
    ours = SelfAttention(8, 2, relative_position=relative_position)
    linears = (theirs.linear_q, theirs.linear_k, theirs.linear_v)
    with torch.no_grad():
        ours.query_key_value.weight.copy_(torch.cat([linear.weight for linear in linears]))
        ours.query_key_value.bias.copy_(torch.cat([linear.bias for linear in linears]))
        ours.output.load_state_dict(theirs.linear_out.state_dict())
        relative_position.weight.copy_(theirs.distance_embedding.weight)
    x = torch.randn(2, 9, 8)
    torch.testing.assert_close(ours(x), theirs(x)[0])


def sinusoid(distance: int, width: int) -> Tensor:
    """Compute R of the paper for one distance, in the layout of its released code."""
    angles = torch.tensor(
        [distance / 10_000 ** (2 * i / width) for i in range(width // 2)], dtype=torch.float64
    )
    return torch.cat([angles.sin(), angles.cos()])


@pytest.mark.parametrize("causal", [False, True])
def test_sinusoid_keys_are_the_papers_four_terms(causal: bool) -> None:
    """Against a loop over pairs: content, position, content bias, position bias (Dai et al.,
    2019).
    """
    torch.manual_seed(0)
    heads, size, length = 2, 4, 6
    relative_position = TransformerXLBias(heads, size, causal=causal).double()
    for weight in relative_position.parameters():
        torch.nn.init.normal_(weight)
    query, key = torch.randn(2, 1, heads, length, size, dtype=torch.float64)
    u, v = (
        relative_position.content_bias.view(heads, size),
        relative_position.position_bias.view(heads, size),
    )
    position_ids = torch.arange(length)
    found = relative_position.shift_query(query) @ key.mT * size**-0.5 + relative_position.bias(
        position_ids - position_ids.unsqueeze(1), query
    )
    for head in range(heads):
        for t in range(length):
            for s in range(t + 1 if causal else length):
                far = (relative_position.proj.weight @ sinusoid(t - s, heads * size)).view(
                    heads, size
                )[head]
                q, k = query[0, head, t], key[0, head, s]
                expected = (q @ k + q @ far + u[head] @ k + v[head] @ far) / size**0.5
                torch.testing.assert_close(
                    found[0, head, t, s], expected, atol=1e-6, rtol=1e-6
                )  # the table is kept in float32


def test_attention_with_sinusoid_keys_is_xlnets() -> None:
    """XLNet kept Transformer-XL's attention, shift and all; its segments are left out."""
    from transformers.models.xlnet.modeling_xlnet import XLNetConfig, XLNetModel

    torch.manual_seed(0)
    model = XLNetModel(
        XLNetConfig(vocab_size=9, d_model=8, n_layer=1, n_head=2, d_inner=8, dropout=0.0)
    ).eval()
    theirs, relative_position = model.layer[0].rel_attn, TransformerXLBias(2, 4, causal=False)
    ours = SelfAttention(8, 2, relative_position=relative_position, bias=False)
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.normal_()
        ours.query_key_value.weight.copy_(
            torch.cat([part.flatten(1).T for part in (theirs.q, theirs.k, theirs.v)])
        )
        ours.output.weight.copy_(theirs.o.flatten(1))
        relative_position.proj.weight.copy_(theirs.r.flatten(1).T)
        relative_position.content_bias.copy_(theirs.r_w_bias.flatten())
        relative_position.position_bias.copy_(theirs.r_r_bias.flatten())
    x = torch.randn(2, 7, 8)
    h = x.transpose(0, 1)
    distances = model.relative_positional_encoding(7, 7, bsz=2)
    query, key, value = (
        torch.einsum("ibh,hnd->ibnd", h, part) for part in (theirs.q, theirs.k, theirs.v)
    )
    context = theirs.rel_attn_core(
        query, key, value, torch.einsum("ibh,hnd->ibnd", distances, theirs.r)
    )
    expected = torch.einsum("ibnd,hnd->bih", context, theirs.o)
    torch.testing.assert_close(ours(x), expected, atol=1e-5, rtol=1e-5)


def test_sinusoid_keys_need_an_even_width() -> None:
    (problem,) = (
        Config().replace(model={"width": 15, "heads": 3, "positions": "transformer_xl"}).problems()
    )
    assert "even width for transformer_xl positions; found 3 heads of 5" in problem


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_adds_the_bias(causal: bool, padded: bool) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, length, 4, requires_grad=True) for length in (4, 6, 6))
    bias = torch.randn(3, 4, 6, requires_grad=True)
    mask = torch.tensor([[[True] * 6], [[False] * 3 + [True] * 3]]) if padded else None
    fused = attend(query, key, value, mask=mask, causal=causal, bias=bias)
    plain = attend_reference(query, key, value, mask=mask, causal=causal, bias=bias).context
    torch.testing.assert_close(fused, plain)
    for ours, theirs in zip(
        *(
            torch.autograd.grad(out.square().sum(), [query, key, value, bias])
            for out in (fused, plain)
        ),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_query_that_sees_nothing_gets_zeros_with_a_bias_too() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    mask = torch.ones(1, 3, 5, dtype=torch.bool)
    mask[0, 1] = False
    found = attend(query, key, key, mask=mask, bias=torch.randn(2, 3, 5))
    assert not found[:, :, 1].any()
    assert found[:, :, 0].any()


@pytest.mark.parametrize("positions", ["rotary", "alibi", "t5", "shaw", "transformer_xl"])
def test_encoder_output_depends_on_token_order(positions: str) -> None:
    """A symmetric bias cannot distinguish a sentence from its reversal: who bites whom."""
    torch.manual_seed(0)
    config = ModelConfig(
        encoder=("transformer",),
        decoder=("transformer",),
        width=8,
        heads=2,
        ffn_width=16,
        dropout=0.0,
        positions=positions,
    )
    model = build_model(config, src_vocab_size=9, tgt_vocab_size=9).eval()
    src = torch.tensor([[4, 5, 6, 7]])
    turned = model.encode(src.flip(1)).values.flip(1)
    assert (turned - model.encode(src).values).abs().max() > 1e-4


def test_rotation_needs_pairs() -> None:
    config = Config().replace(model={"width": 30, "heads": 6, "positions": "rotary"})
    (problem,) = config.problems()
    assert "must be even for rotary positions; found 5, model.width=30 by model.heads=6" in problem


def test_biases_start_small_and_relative_keys_as_large_as_embeddings() -> None:
    torch.manual_seed(0)
    trained = TransformerXLBias(8, 32, causal=True)
    for weight in (
        T5RelativeBias(16, causal=True).weight,
        trained.content_bias,
        trained.position_bias,
    ):
        assert weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert ShawRelativeKeys(64).weight.shape == (33, 64)
    assert ShawRelativeKeys(64).weight.std().item() == pytest.approx(0.125, rel=0.1)


@pytest.mark.parametrize("causal", [False, True])
def test_t5_positions_know_whether_their_layer_is_causal(causal: bool) -> None:
    """A decoder spends all buckets on earlier positions."""
    bias = T5Positions.build_relative_position(heads=2, head_width=4, causal=causal)
    assert len(bias.bucket(torch.arange(-200, 1)).unique()) == (32 if causal else 16)


def test_talking_heads_do_not_mix_later_positions_into_scores_by_distance() -> None:
    """A masked score times a negative weight would be the largest of its row."""
    torch.manual_seed(0)
    attention = SelfAttention(
        8,
        2,
        talking_heads=True,
        relative_position=TransformerXLBias(2, 4, causal=True),
    ).double()
    assert attention.mix_scores is not None
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    changed = x.clone()
    changed[:, 3:] += 1.0
    with torch.no_grad():
        attention.mix_scores.copy_(torch.tensor([[-1.0, 0.2], [0.3, -1.0]]))
        before, after = (attention(each, causal=True) for each in (x, changed))
    torch.testing.assert_close(before[:, :3], after[:, :3])
