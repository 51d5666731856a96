"""The prefix LM: one stack whose mask makes it a translator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dragoman.attention import masks
from dragoman.attention.attention_weight_hooks import record
from dragoman.config import ModelConfig
from dragoman.errors import ConfigError
from dragoman.layers.embedding_and_output_projection import SegmentInput
from dragoman.models.block_validation import stack_problems
from dragoman.models.factory import build_model, count_parameters, summarize_model
from dragoman.models.forward_context import ForwardContext
from dragoman.models.prefix_language_model import PrefixLM

VOCABULARY = 16


def config(**changes: object) -> ModelConfig:
    settings = {
        "architecture": "prefix_lm",
        "encoder": (),
        "decoder": ("transformer*2",),
        "width": 16,
        "heads": 2,
        "ffn_width": 32,
        "dropout": 0.0,
        **changes,
    }
    return ModelConfig(**settings)  # type: ignore[arg-type]


def model_of(**changes: object) -> PrefixLM:
    torch.manual_seed(0)
    model = build_model(config(**changes), src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY)
    assert isinstance(model, PrefixLM)
    return model.eval()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Return sources (3, 5) with their mask, and targets (3, 4)."""
    generator = torch.Generator().manual_seed(1)
    src, tgt = (torch.randint(4, VOCABULARY, (3, size), generator=generator) for size in (5, 4))
    return src, torch.arange(5) < torch.tensor([[5], [3], [1]]), tgt


def plain_attention(x: Tensor, layer: torch.nn.Module, mask: Tensor) -> Tensor:
    """Compute multi-head attention with torch's own module, from the layer's weights."""
    attention = layer.self
    own = torch.nn.MultiheadAttention(attention.width, attention.heads, batch_first=True)
    with torch.no_grad():
        own.in_proj_weight.copy_(attention.query_key_value.weight)
        own.in_proj_bias.copy_(attention.query_key_value.bias)
        own.out_proj.weight.copy_(attention.output.weight)
        own.out_proj.bias.copy_(attention.output.bias)
    return own(x, x, x, attn_mask=~mask, need_weights=False)[0]


def test_the_mask_is_that_of_the_paper() -> None:
    drawn = ["".join("x" if seen else "." for seen in row) for row in masks.prefix(2, 4)]
    assert drawn == ["xx..", "xx..", "xxx.", "xxxx"]


@pytest.mark.parametrize("residual", ["pre_norm", "post_norm"])
def test_it_equals_a_bert_layer_of_torch_under_the_mask(residual: str) -> None:
    """One layer of torch.nn.MultiheadAttention on the concatenation, with the mask as a matrix."""
    model = model_of(decoder=("transformer",), residual=residual)
    src, _, tgt = batch()
    layer = model.decoder.get_submodule("0")
    table = model.embeddings["shared"]
    x = torch.cat([model.src_input(table(src)), model.tgt_input(table(tgt))], dim=1)
    attended = layer.self_residual.add_output(
        x,
        plain_attention(layer.self_residual.prepare_input(x), layer, masks.prefix(5, 9)),
    )
    expected = layer.ffn_residual.add_output(
        attended, layer.ffn(layer.ffn_residual.prepare_input(attended))
    )
    expected = expected if model.decoder.norm is None else model.decoder.norm(expected)
    torch.testing.assert_close(model.hidden(src, tgt), expected[:, 5:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("is_scaled", "scale"), [(True, 4.0), (False, 1.0)])
@torch.no_grad()
def test_segment_embeddings_are_scaled_like_those_of_tokens(is_scaled: bool, scale: float) -> None:
    model = model_of(scale_embeddings=is_scaled)
    src, _, _ = batch()
    table = model.embeddings["shared"]
    torch.testing.assert_close(table(src), table.weight[src] * scale)
    for side in (model.src_input, model.tgt_input):
        assert isinstance(side, SegmentInput)
        expected = side.positions((table.weight[src] + side.segment) * scale)
        torch.testing.assert_close(side(table(src)), expected)


@pytest.mark.parametrize("changes", [{}, {"kv_heads": 1}, {"qk_norm": "layer"}, {"head_width": 4}])
def test_encoding_then_decoding_equals_one_pass(changes: dict[str, object]) -> None:
    model = model_of(decoder=("transformer", "ffn", "transformer"), **changes)
    src, mask, tgt = batch()
    whole = model.hidden(src, tgt, mask)
    torch.testing.assert_close(
        model.decode(tgt, model.encode(src, mask)), whole, atol=1e-5, rtol=1e-5
    )
    with record(model):  # explicit weights
        torch.testing.assert_close(model.hidden(src, tgt, mask), whole, atol=1e-5, rtol=1e-5)


def test_padding_and_other_rows_change_nothing() -> None:
    model = model_of()
    src, mask, tgt = batch()
    together = model.hidden(src, tgt, mask)
    for row, length in enumerate((5, 3, 1)):
        alone = model.hidden(src[row : row + 1, :length], tgt[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("beam", [1, 3])
def test_steps_equal_teacher_forcing_for_several_rows_a_sentence(beam: int) -> None:
    model = model_of()
    src, mask, tgt = batch()
    logits = model(src, tgt, mask)
    state = model.start(model.encode(src, mask))
    state = state.reorder(torch.arange(3).repeat_interleave(beam))
    for position in range(tgt.size(1)):
        found, state = model.step(tgt[:, position].repeat_interleave(beam), state)
        expected = logits[:, position].repeat_interleave(beam, dim=0)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    state = state.keep(torch.tensor([2, 0]))
    assert (state.rows, state.sentences, state.length) == (2 * beam, 2, 4)
    # the memory is not written to by decoding
    memory = model.encode(src, mask)
    first, second = (model.project(model.decode(tgt, memory)) for _ in range(2))
    assert torch.equal(first, second)


def test_selected_memories_decode_alike() -> None:
    model = model_of()
    src, mask, tgt = batch()
    rows = torch.tensor([2, 0, 0])
    selected = model.encode(src, mask).select(rows)
    expected = model.decode(tgt, model.encode(src, mask))
    torch.testing.assert_close(model.decode(tgt[[2, 0, 0]], selected)[0], expected[2])


def gradients(model: PrefixLM, src: Tensor, tgt: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return both embedded sides, which gradients are taken with respect to, and the states."""
    embedded = torch.cat(
        [
            model.src_input(model.embeddings["shared"](src)),
            model.tgt_input(model.embeddings["shared"](tgt)),
        ],
        dim=1,
    ).detach()
    embedded.requires_grad_()
    keys = torch.nn.functional.pad(mask, (0, tgt.size(1)), value=True)
    context = ForwardContext(mask=keys, prefix=src.size(1))
    return embedded, model.decoder(embedded, context)


def test_gradient_to_masked_positions_is_zero() -> None:
    """The gradient with respect to what a state must not see is zero, not small."""
    model = model_of().train()
    src, mask, tgt = batch()
    embedded, states = gradients(model, src, tgt, mask)
    sources = src.size(1)
    visible = masks.prefix(sources, sources + tgt.size(1)).expand(3, -1, -1).clone()
    visible[:, :, :sources] &= mask.unsqueeze(1)
    direction = torch.randn(16)  # a norm's outputs sum to zero
    for position in range(states.size(1)):
        output = (states[:, position] @ direction).sum()
        (grad,) = torch.autograd.grad(output, embedded, retain_graph=True)
        seen = visible[:, position].clone()
        seen[:, position] = True  # the residual connection
        real = torch.ones(3, dtype=torch.bool) if position >= sources else mask[:, position]
        nonzero = grad.abs().sum(dim=2) != 0
        assert not (nonzero & ~seen)[real].any()
        assert (nonzero | ~seen)[real].all()  # and what it may see, it does


def test_training_with_layer_drop_and_dropout_gives_every_weight_a_gradient() -> None:
    model = model_of(dropout=0.1, layer_drop=0.5, decoder=("transformer*4",)).train()
    src, mask, tgt = batch()
    model(src, tgt, mask).square().sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_shared_layers_and_learned_positions() -> None:
    model = model_of(share_layers="all", positions="learned", max_positions=8)
    src, mask, tgt = batch()
    torch.testing.assert_close(
        model.decode(tgt, model.encode(src, mask)),
        model.hidden(src, tgt, mask),
        atol=1e-5,
        rtol=1e-5,
    )


def test_the_summary_counts_every_weight() -> None:
    rows = summarize_model(config(), src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY)
    assert sum(row.parameters for row in rows) == count_parameters(model_of())


@pytest.mark.parametrize(
    ("changes", "found", "fix"),
    [
        ({"encoder": ("transformer*2",)}, "[transformer*2]", "model.encoder=[]"),
        ({"decoder": ("lstm", "transformer")}, "found lstm", "use transformer"),
        ({"positions": "rotary"}, "model.positions=rotary", "sinusoidal"),
        ({"window": 3}, "found a window", "model.window=0"),
        ({"decoder": ("transformer(window=3)",)}, "found a window", "model.window=0"),
        ({"decoder": ("cross_attention", "transformer")}, "found cross_attention", "transformer"),
    ],
)
def test_unsupported_settings_are_named(changes: dict[str, object], found: str, fix: str) -> None:
    with pytest.raises(ConfigError) as raised:
        model_of(**changes)
    assert found in str(raised.value)
    assert fix in str(raised.value)


def test_the_encoder_decoder_still_needs_an_encoder() -> None:
    problems = stack_problems(config(architecture="encoder_decoder"))
    assert any("model.encoder must list at least one block" in problem for problem in problems)


def test_training_reads_no_tensor_on_the_host() -> None:
    """On the meta device a read raises, as it would while a CUDA graph is captured."""
    model = model_of().train().to("meta")
    src, mask, tgt = (tensor.to("meta") for tensor in batch())
    model(src, tgt, mask).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
