"""ConvS2S against PyTorch's convolution and weight normalisation, and against a loop written from
the paper's equations.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from convolution_kit import PAPER, VOCABULARY, build_conv_model
from model_kit import generate_greedy
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.attention import edit, heads_off, record
from dragoman.config import ModelConfig
from dragoman.errors import ConfigError
from dragoman.layers.convs2s import ConvS2SAttention, WeightNormWeight
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model, summarize_model
from dragoman.text.special_tokens import BOS

MIXED = [
    (("conv*2", "transformer"), ("conv(layers=2)", "transformer")),
    (
        ("transformer", "conv(kernel_size=5, layers=2)"),
        ("transformer", "conv(kernel_size=1)", "conv(kernel_size=4)"),
    ),
    (("conv(weight_norm=false)",), ("transformer",)),
    (
        ("conv", "conv(dilation=2)", "conv(dilation=4)"),
        ("conv(dilation=2)", "conv(dilation=3, layers=2, kernel_size=2)"),
    ),
    (
        ("conv(width=8)*2", "conv(width=24)*2", "transformer", "conv(width=32, kernel_size=1)"),
        ("conv(width=8)*2", "conv(width=24, layers=2)", "conv", "conv(width=4, attention=none)"),
    ),
]


def sentences() -> tuple[Tensor, Tensor, Tensor]:
    """Return three sources of 6, 3 and 5 tokens, their mask, and targets of 7."""
    torch.manual_seed(1)
    mask = torch.arange(6) < torch.tensor([[6], [3], [5]])
    return torch.randint(4, VOCABULARY, (3, 6)), mask, torch.randint(4, VOCABULARY, (3, 7))


# The whole, from the paper's equations


def paper_convolution(layer: nn.Module, inputs: list[Tensor], position: int, first: int) -> Tensor:
    """Section 3.2: k inputs from `first` on, concatenated; W of (2d, kd); v([A; B]) = A *
    sigma(B).
    """
    weight = layer.convolution.weight()  # type: ignore[union-attr, operator]
    width, kernel = weight.size(1), weight.size(2)
    total = layer.convolution.bias.clone()  # type: ignore[union-attr, operator]
    for tap in range(kernel):
        index = position + first + tap
        if 0 <= index < len(inputs):
            total = total + weight[:, :, tap] @ inputs[index]
    return total[:width] * torch.sigmoid(total[width:])


def paper_encoder(model: EncoderDecoder, src: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return z and e of one sentence (S,): section 3.1, e_j = w_j + p_j."""
    words = [model.embeddings["src"].weight[token] for token in src]  # type: ignore[union-attr, index]
    e = z = [word + model.src_input.positions.weight[index] for index, word in enumerate(words)]  # type: ignore[index]
    for _, layer in model.encoder.blocks():
        z = [
            (paper_convolution(layer, z, index, -1) + z[index]) * math.sqrt(0.5)
            for index in range(len(z))
        ]
    return z, e


def paper_decoder(
    model: EncoderDecoder, tgt: Tensor, z: list[Tensor], e: list[Tensor]
) -> list[Tensor]:
    """Return the last layer's h of one sentence (T,): section 3.3, equations 1 and 2.

    The constants are those of section 3.4.
    """
    table, position_ids = model.embeddings["tgt"].weight, model.tgt_input.positions.weight
    g = [table[token] + position_ids[index] for index, token in enumerate(tgt)]  # type: ignore[index]
    x = g
    for _, layer in model.decoder.get_submodule("0").layers():  # type: ignore[operator]
        new = []
        for i in range(len(x)):
            h = paper_convolution(layer, x, i, -2)
            d = (layer.cross.query.weight() @ h + layer.cross.query.bias + g[i]) * math.sqrt(0.5)
            scores = [math.exp(float(d @ key)) for key in z]
            a = [score / sum(scores) for score in scores]
            c = sum(
                (a[j] * (z[j] + e[j]) * math.sqrt(0.5) for j in range(len(z))), torch.zeros_like(h)
            )
            c = c * (len(z) * math.sqrt(1 / len(z)))
            h = (layer.cross.output.weight() @ c + layer.cross.output.bias + h) * math.sqrt(0.5)
            new.append((h + x[i]) * math.sqrt(0.5))
        x = new
    return x


@torch.no_grad()
def test_the_model_is_the_papers_equations() -> None:
    """Two encoder and three decoder layers in float64, sentence by sentence, position by
    position.
    """
    model = build_conv_model(("conv*2",), ("conv(layers=3)",), **PAPER)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(weight, std=0.3)
        elif "embeddings" in name:
            nn.init.normal_(weight)  # so that attention is not even
    src, mask, tgt = sentences()
    memory = model.encode(src, mask)
    hidden = model.decode(tgt, memory)
    for row, length in enumerate([6, 3, 5]):
        z, e = paper_encoder(model, src[row, :length])
        torch.testing.assert_close(memory.values[row, :length], torch.stack(z))
        torch.testing.assert_close(hidden[row], torch.stack(paper_decoder(model, tgt[row], z, e)))


@torch.no_grad()
def test_widths_of_their_own_are_the_released_codes() -> None:
    """fairseq's fconv.py: fc1, convolutions of 8, 24 and 32 with projected residuals, fc2; in the
    decoder attention through projections to the embeddings' width and back.
    """
    model = build_conv_model(
        ("conv(width=8)*2", "conv(width=24)", "conv(width=32, kernel_size=1)"),
        ("conv(width=8)*2", "conv(width=24)"),
        **PAPER,
    )
    for name, weight in model.named_parameters():
        if name.endswith("bias") or "embeddings" in name:
            nn.init.normal_(weight, std=0.5)
    src, tgt = torch.randint(4, VOCABULARY, (2, 6)), torch.randint(4, VOCABULARY, (2, 5))
    half = math.sqrt(0.5)

    def linear(module: nn.Module, x: Tensor) -> Tensor:
        return x @ module.weight().t() + module.bias  # type: ignore[operator]

    def convolve(layer: nn.Module, x: Tensor, padding: tuple[int, int]) -> tuple[Tensor, Tensor]:
        weight, bias = layer.convolution.weight(), layer.convolution.bias  # type: ignore[union-attr, operator]
        same = weight.size(0) // 2 == weight.size(1)
        assert same == (not layer.has_shortcut)
        residual = x if same else linear(layer.shortcut, x)  # type: ignore[arg-type]
        padded = F.pad(x.transpose(1, 2), padding)
        return F.glu(F.conv1d(padded, weight, bias), dim=1).transpose(1, 2), residual

    positions_ = torch.arange(6)
    words = model.embeddings["src"].weight[src] + model.src_input.positions.weight[positions_]  # type: ignore[index]
    x = linear(model.encoder.projections["0"], words)
    for _, layer in model.encoder.blocks():
        reach = layer.convolution.weight().size(2) // 2
        x, residual = convolve(layer, x, (reach, reach))
        x = (x + residual) * half
    z = linear(model.encoder.projections["end"], x)
    memory = model.encode(src)
    torch.testing.assert_close(memory.values, z)
    values = (z + words) * half
    g = model.embeddings["tgt"].weight[tgt] + model.tgt_input.positions.weight[positions_[:5]]  # type: ignore[index]
    x = linear(model.decoder.projections["0"], g)
    for _, layer in model.decoder.blocks():
        x, residual = convolve(layer, x, (2, 0))
        scores = ((linear(layer.cross.query, x) + g) * half) @ z.transpose(1, 2)
        context = scores.softmax(-1) @ values * math.sqrt(6)
        x = (linear(layer.cross.output, context) + x) * half
        x = (x + residual) * half
    torch.testing.assert_close(
        model.decode(tgt, memory), linear(model.decoder.projections["end"], x)
    )


# Mixed stacks keep the contracts


@pytest.mark.parametrize(("encoder", "decoder"), MIXED)
@pytest.mark.parametrize("residual", ["pre_norm", "scaled"])
@torch.no_grad()
def test_incremental_decoding_of_mixed_stacks_equals_forward(
    encoder: tuple[str, ...], decoder: tuple[str, ...], residual: str
) -> None:
    model = build_conv_model(encoder, decoder, residual=residual)
    src, mask, tgt = sentences()
    whole = model(src, tgt, mask)
    for cuts in ([0, 7], [0, 1, 2, 3, 4, 5, 6, 7], [0, 2, 3, 7], [0, 5, 7]):
        state, found = model.start(model.encode(src, mask)), []
        for first, last in pairwise(cuts):
            logits, state = model.extend(tgt[:, first:last], state)
            found.append(logits)
        torch.testing.assert_close(torch.cat(found, 1), whole)


@pytest.mark.parametrize(("encoder", "decoder"), MIXED)
@torch.no_grad()
def test_padding_and_batch_size_change_nothing(
    encoder: tuple[str, ...], decoder: tuple[str, ...]
) -> None:
    """Padding that a convolution sees made BLEU depend on the batch size, 37.28 or 36.5
    (fairseq#427).
    """
    model = build_conv_model(encoder, decoder)
    src, mask, tgt = sentences()
    together = model(src, tgt, mask)  # the padding contains random tokens
    for row, length in enumerate([6, 3, 5]):
        torch.testing.assert_close(
            model(src[row : row + 1, :length], tgt[row : row + 1])[0], together[row]
        )


@pytest.mark.parametrize(("encoder", "decoder"), MIXED)
@torch.no_grad()
def test_no_position_of_a_mixed_stack_sees_its_future(
    encoder: tuple[str, ...], decoder: tuple[str, ...]
) -> None:
    model = build_conv_model(encoder, decoder)
    src, mask, tgt = sentences()
    changed = tgt.clone()
    changed[:, 4:] = 5
    torch.testing.assert_close(model(src, changed, mask)[:, :4], model(src, tgt, mask)[:, :4])


@pytest.mark.parametrize("watched", [False, True])
@torch.no_grad()
def test_beams_share_the_projected_source(watched: bool) -> None:
    """Two beams per sentence read one copy of its keys; recorded or not, they find what single rows
    find.
    """
    model = build_conv_model(("conv",), ("conv(layers=2)",))
    src, mask, tgt = sentences()
    expected = model(src, tgt, mask)
    state = model.start(model.encode(src, mask)).reorder(torch.tensor([0, 0, 1, 1, 2, 2]))
    rows = torch.tensor([0, 0, 1, 1, 2, 2])
    with record(model, ["decoder.0.1.cross"] if watched else []) as notes:
        logits, state = model.extend(tgt[rows, :3], state)
        torch.testing.assert_close(logits, expected[rows, :3])
        logits, state = model.step(tgt[rows, 3], state.reorder(torch.tensor([1, 0, 3, 3, 4, 5])))
    torch.testing.assert_close(logits, expected[rows, 3])
    assert (state.rows, state.sentences) == (6, 3)
    if watched:
        assert notes["decoder.0.1.cross"].weights.shape == (6, 1, 1, 6)


@torch.no_grad()
def test_the_state_is_as_long_as_the_kernel_and_does_not_grow() -> None:
    model = build_conv_model(("conv",), ("conv(kernel_size=4)",))
    state = model.start(model.encode(sentences()[0]))
    for _ in range(20):
        _, state = model.step(torch.tensor([5, 6, 7]), state)
    layer = state.children["decoder"].children["0"]
    assert layer.recurrent["before"].shape == (3, 3, 16)
    assert (layer.cache, layer.length) == ({}, 20)


@torch.no_grad()
def test_a_dilated_stack_reads_far_with_few_weights() -> None:
    """Kernels of 3 with dilations 1, 2 and 4 see 7 positions to either side, in a decoder 14
    back.
    """
    blocks = tuple(f"conv(dilation={2**level}, attention=none)" for level in range(3))
    model = build_conv_model(blocks, (*blocks, "cross_attention"), positions="none")
    src = torch.randint(4, VOCABULARY, (1, 31))
    other = src.clone()
    other[0, 15] = (other[0, 15] - 3) % (VOCABULARY - 4) + 4
    seen = (model.encode(src).values != model.encode(other).values).any(-1)[0]
    assert seen.nonzero().flatten().tolist() == list(range(8, 23))
    memory = model.encode(src)
    seen = (model.decode(src, memory) != model.decode(other, memory)).any(-1)[0]
    assert seen.nonzero().flatten().tolist() == list(range(15, 30))
    state = model.start(memory).children["decoder"].children["2"]
    assert state.recurrent["before"].shape == (1, 8, 16)


@torch.no_grad()
def test_attention_is_recorded_and_edited_in_every_layer() -> None:
    model = build_conv_model(("conv",), ("conv*2", "conv(layers=2)"))
    src, mask, tgt = sentences()
    with record(model) as notes:
        plain = model(src, tgt, mask)
    assert list(notes) == [
        "decoder.0.cross",
        "decoder.1.cross",
        "decoder.2.0.cross",
        "decoder.2.1.cross",
    ]
    for note in notes.values():
        assert note.weights.shape == (3, 1, 7, 6)
        assert not note.weights[1, :, :, 3:].any()  # padding
        torch.testing.assert_close(note.weights.sum(-1), torch.ones(3, 1, 7, dtype=torch.float64))
        torch.testing.assert_close(note.weights @ note.values, note.output)
    with edit(model, {"decoder.1.cross": heads_off([0])}):
        assert (model(src, tgt, mask) - plain).abs().max() > 1e-6


@torch.no_grad()
def test_a_source_that_may_not_be_seen_adds_only_the_bias() -> None:
    """Without visible keys the length is zero: no division by it, no NaN."""
    attention = ConvS2SAttention(4, weight=WeightNormWeight)
    x = torch.randn(1, 2, 4)
    source = attention.prepare(torch.randn(1, 3, 4), None)
    found = attention(x, x, source, mask=torch.zeros(1, 1, 3, dtype=torch.bool))
    torch.testing.assert_close(found, attention.output.bias.expand(1, 2, 4))


def test_weight_normalisation_is_an_option() -> None:
    names = {
        name
        for name, _ in build_conv_model(("conv",), ("conv(weight_norm=false)",)).named_parameters()
    }
    assert {
        "encoder.0.convolution.weight.direction",
        "encoder.0.convolution.weight.length",
    } <= names
    assert {"decoder.0.convolution.weight.value", "decoder.0.cross.query.weight.value"} <= names


@pytest.mark.parametrize(
    ("encoder", "decoder", "message"),
    [
        (
            "conv(kernel_size=4)",
            "conv",
            "kernel_size must be odd in an encoder; found 4; try kernel_size=5",
        ),
        ("conv(kernel_size=0)", "conv", "must be at least 1; found 0"),
        (
            "conv",
            "conv(kernel_size=-3)",
            "kernel_size of 'conv(kernel_size=-3)' in model.decoder must be at least 1; found -3",
        ),
        (
            "conv",
            "conv(layers=0)",
            "layers of 'conv(layers=0)' in model.decoder must be at least 1; found 0",
        ),
        (
            "conv(dilation=0)",
            "conv",
            "dilation of 'conv(dilation=0)' in model.encoder must be at least 1; found 0",
        ),
        ("conv(width=-1)", "conv", "width of 'conv(width=-1)' in model.encoder must be at least 0"),
        ("conv(kernel_size=wide)", "conv", "found 'wide'"),
        (
            "conv(kernel_sise=3)",
            "conv",
            "found 'kernel_sise' in 'conv(kernel_sise=3)'; did you mean kernel_size?",
        ),
    ],
)
def test_invalid_settings_are_rejected_with_the_found_value(
    encoder: str, decoder: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        build_conv_model((encoder,), (decoder,))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_drop": 0.2}, "cannot be skipped; found width=8 with model.layer_drop=0.2"),
        ({"share_layers": "all"}, "found width=8 with model.share_layers=all"),
    ],
)
def test_blocks_of_several_widths_are_neither_skipped_nor_shared(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        build_conv_model(("conv(width=8)",), ("conv",), **settings)
    assert message in str(error.value)


def test_scaling_the_encoders_gradient_counts_the_attentions_of_all_blocks() -> None:
    blocks = ("conv(layers=2, scale_encoder_grad=true)", "conv(width=8, scale_encoder_grad=true)")
    model = build_conv_model(("conv",), (*blocks, "conv(attention=none)"))
    scales = [layer.grad_scale for layer in model.modules() if isinstance(layer, ConvS2SAttention)]
    assert scales == [pytest.approx(1 / 6)] * 3


def test_the_encoders_gradient_is_scaled_in_training_only() -> None:
    src, _, tgt = sentences()
    found = {}
    for scaled in ("true", "false"):
        for training in (True, False):
            torch.manual_seed(0)
            blocks = (f"conv(scale_encoder_grad={scaled})",)
            model = build_conv_model(("conv",), blocks, dropout=0.0).train(training)
            embedded = model._embedding("src")(src).detach().requires_grad_()
            memory = model.encode_embedded(embedded)
            model.decode(tgt, memory).sin().sum().backward()
            found[scaled, training] = embedded.grad
    torch.testing.assert_close(found["true", False], found["false", False])
    assert not torch.allclose(found["true", True], found["false", True])


def test_dropout_works_on_the_layers_input_in_training_only() -> None:
    model = build_conv_model(("conv(dropout=0.5)",), ("conv",), residual="scaled")
    src, mask, tgt = sentences()
    torch.testing.assert_close(model(src, tgt, mask), model(src, tgt, mask))
    model.train()
    assert (model(src, tgt, mask) - model(src, tgt, mask)).abs().max() > 1e-6


def test_the_description_allocates_nothing_and_shows_every_layer() -> None:
    config = ModelConfig(
        encoder=("conv*2", "transformer"),
        decoder=("conv(layers=2)",),
        width=16,
        heads=2,
        ffn_width=32,
    )
    rows = {row.path: row for row in summarize_model(config, src_vocab_size=50, tgt_vocab_size=50)}
    assert "weight.direction 32x16x3" in rows["encoder.1.convolution"].shapes
    assert rows["decoder.0.1.cross"].parameters == rows["decoder.0.0.cross"].parameters > 0


def test_learning_to_reverse_with_the_papers_settings() -> None:
    """The miniature: two layers each, in well under a hundred steps."""
    torch.manual_seed(0)
    config = ModelConfig(
        encoder=("conv*2",),
        decoder=("conv(layers=2)",),
        width=32,
        heads=2,
        **{**PAPER, "output_bias": True},
    )  # type: ignore[arg-type]
    model = build_model(config, src_vocab_size=16, tgt_vocab_size=16)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(150):
        src = torch.randint(4, 16, (32, 7))
        wanted = src.flip(1)
        logits = model(src, F.pad(wanted[:, :-1], (1, 0), value=BOS))
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), wanted.flatten()).backward()
        optimizer.step()
    src = torch.randint(4, 16, (100, 7))
    assert (generate_greedy(model, src, 7) == src.flip(1)).all(1).float().mean() >= 0.9


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # torch's compiler, of its own doing
def test_the_model_compiles_as_one_graph() -> None:
    model = build_conv_model(("conv*2",), ("conv(layers=2)",)).train()
    src, mask, tgt = sentences()
    for padding in (None, mask):
        torch._dynamo.reset()
        report = torch._dynamo.explain(model)(src, tgt, padding)
        assert (report.graph_count, report.graph_break_count) == (1, 0), report.break_reasons
    torch._dynamo.reset()
