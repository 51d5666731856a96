"""Contracts of every block, norm, residual connection, activation and position encoding in a model.

An entry that breaks a contract by definition lists it in its registry entry (`exempt`); the reason
is then shown as a skip.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dragoman.attention import record
from dragoman.attention.catalogue import POSITIONS
from dragoman.config import ModelConfig
from dragoman.layers.norm_and_activation_catalogue import ACTIVATIONS, NORMS, RESIDUALS
from dragoman.models.block_catalogue import BLOCKS
from dragoman.models.block_interface import Block, BuildContext
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model
from dragoman.models.forward_context import ForwardContext, Memory
from dragoman.ops import linear_cross_entropy
from dragoman.registry import Registry

VOCABULARY = 23
SETTINGS: dict[str, tuple[str, Registry]] = {
    "norm": ("norm", NORMS),
    "residual": ("residual", RESIDUALS),
    "activation": ("activation", ACTIVATIONS),
    "positions": ("positions", POSITIONS),
}
# Not causal: the decoder has `transformer` instead.
ENCODER_ONLY = ("bilstm", "bigru", "birnn", "bisru", "sliced_rnn")
DECODER_ONLY = ("cross_attention",)  # needs a memory: the encoder has `transformer` instead
SOURCELESS = (
    "ffn",
    "tcn",
    "tcn(kernel_size=2, dilation=2)",
)  # it reads no source: the decoder has an `attend` block beside it
# Options of a block that take another code path; the exemptions of the plain form do not apply.
FORMS = [
    "lstm(attention=scaled_dot)",
    "lstm(attention=general, input_feeding=true, layers=2)",
    "gru(attention=additive, decoder=bahdanau, initial_state=first)",
    "lstm(attention=dot, decoder=bahdanau, input_feeding=true, initial_state=last, "
    "initial_cell=true, residual_connection=false)",
    "gru(attention=additive, alignment=location_sensitive)",
    "lstm(attention=additive, alignment=coverage, decoder=bahdanau)",
    "lstm(attention=location_cumulative)",
    "lstm(attention=normed_additive, decoder=gnmt, layers=3, initial_state=zero, "
    "residual_connection=false)",
    "conv(attention=convs2s, activation=relu, layers=2)",
    "tcn(kernel_size=2, dilation=2)",
    "conv(dilation=2)",
    "conv(dilation=3, kernel_size=2, layers=2)",
    "conv(width=12, layers=2)",
    "rnn(attention=additive, decoder=bahdanau, layers=2)",
    "sru(attention=dot, input_feeding=true, layers=2)",
    "sru(attention=additive, decoder=bahdanau, initial_state=last)",
    "lstm(attention=dot, initial_state=encoder)",
    "sru(attention=additive, initial_state=encoder)",
    "reformer(layers=2, attention=full, ffn_chunks=3)",
    "reformer(layers=2, rounds=1, buckets=2, window=2)",  # so narrow that seven tokens are sorted
]
MEMBERS = [("block", name) for name in (*BLOCKS, *FORMS)] + [
    (kind, name) for kind, (_, registry) in SETTINGS.items() for name in registry
]


def promise(kind: str, name: str, contract: str) -> None:
    """Skip with its reason a promise that a member's definition breaks."""
    registry = BLOCKS if kind == "block" else SETTINGS[kind][1]
    reason = (registry[name].exempt or {}).get(contract) if name in registry else None
    if reason:
        pytest.skip(f"{kind} {name}: {reason}")


def build(kind: str, name: str, **more: object) -> EncoderDecoder:
    """Build a small model that contains one member of a registry, ready for exact comparisons."""
    torch.manual_seed(0)
    decoder = (f"{name}*2",) if kind == "block" and name not in ENCODER_ONLY else ("transformer*2",)
    decoder = ("cross_attention", *decoder) if name in SOURCELESS else decoder
    encoder = (
        (f"{name.partition('(')[0]}*2",)
        if kind == "block" and name not in DECODER_ONLY
        else ("transformer*2",)
    )
    member = {} if kind == "block" else {SETTINGS[kind][0]: name}
    values = {
        "encoder": encoder,
        "decoder": decoder,
        "width": 16,
        "heads": 2,
        "ffn_width": 32,
        "dropout": 0.0,
        **member,
        **more,
    }
    model = build_model(ModelConfig(**values), src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY)  # type: ignore[arg-type]
    return model.double().eval()


def batch(rows: int = 3, src: int = 6, tgt: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Return sources, their mask and targets, of different lengths."""
    torch.manual_seed(1)
    lengths = torch.tensor([src, max(1, src // 2), max(1, src - 1)] * rows)[:rows]
    mask = torch.arange(src) < lengths.unsqueeze(1)
    return (
        torch.randint(4, VOCABULARY, (rows, src)) * mask,
        mask,
        torch.randint(4, VOCABULARY, (rows, tgt)),
    )


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
@torch.no_grad()
def test_incremental_decoding_in_any_split_equals_forward(kind: str, name: str) -> None:
    promise(kind, name, "extend")
    model = build(kind, name)
    src, mask, tgt = batch()
    whole = model(src, tgt, mask)
    memory = model.encode(src, mask)

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(cuts=st.sets(st.integers(1, 6)))
    def check(cuts: set[int]) -> None:
        state, found = model.start(memory), []
        for first, last in zip([0, *sorted(cuts)], [*sorted(cuts), 7], strict=True):
            logits, state = model.extend(tgt[:, first:last], state)
            found.append(logits)
        torch.testing.assert_close(torch.cat(found, 1), whole)
        assert state.length == 7

    check()


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
@torch.no_grad()
def test_padding_changes_nothing(kind: str, name: str) -> None:
    """Any registered member (fairseq#427, pytorch/translate#308): more padding, and other rubbish
    in it, same output.
    """
    promise(kind, name, "padding")
    model = build(kind, name)
    src, mask, tgt = batch()
    expected = model(src, tgt, mask)
    more = torch.nn.functional.pad
    rubbish = torch.randint(4, VOCABULARY, (3, 10))
    longer = torch.where(more(mask, (0, 4)), more(src, (0, 4)), rubbish)
    wider = torch.cat([tgt, rubbish[:, :2]], 1)
    tgt_mask = more(torch.ones_like(tgt, dtype=torch.bool), (0, 2))
    torch.testing.assert_close(model(longer, wider, more(mask, (0, 4)), tgt_mask)[:, :7], expected)
    for row in range(3):  # and none at all
        length = int(mask[row].sum())
        torch.testing.assert_close(
            model(src[row : row + 1, :length], tgt[row : row + 1])[0], expected[row]
        )


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
@torch.no_grad()
def test_other_rows_of_the_batch_change_nothing(kind: str, name: str) -> None:
    """A sentence's numbers are its own, whatever else is in the batch (OpenNMT-py#2208)."""
    promise(kind, name, "neighbours")
    model = build(kind, name)
    src, mask, tgt = batch(5)
    expected = model(src, tgt, mask)
    order = torch.tensor([4, 0, 3])
    torch.testing.assert_close(model(src[order], tgt[order], mask[order]), expected[order])


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
@torch.no_grad()
def test_no_position_sees_its_future(kind: str, name: str) -> None:
    promise(kind, name, "future")
    model = build(kind, name)
    src, mask, tgt = batch()
    before = model(src, tgt, mask)
    for position in (1, 4, 6):
        changed = tgt.clone()
        changed[:, position:] = (changed[:, position:] + 1) % VOCABULARY
        after = model(src, changed, mask)
        torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=0)
        assert (after[:, position:] - before[:, position:]).abs().max() > 1e-6


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
@pytest.mark.parametrize("verb", ["select", "reorder", "keep"])
@torch.no_grad()
def test_choosing_rows_commutes_with_stepping(kind: str, name: str, verb: str) -> None:
    promise(kind, name, "select")
    model = build(kind, name)
    src, mask, tgt = batch()
    fan = torch.arange(3).repeat_interleave(2)  # two rows a sentence, as beams have
    state = model.start(model.encode(src, mask)).reorder(fan)
    state = model.extend(tgt[fan, :3], state).state
    chosen = {
        "select": torch.tensor([5, 0, 0, 2]),
        "reorder": torch.tensor([1, 0, 2, 2, 5, 4]),
        "keep": torch.tensor([2, 0]),
    }[verb]
    rows = torch.tensor([4, 5, 0, 1]) if verb == "keep" else chosen
    picked = getattr(state, verb)(chosen)
    next_tokens = tgt[fan, 3]
    expected = model.step(next_tokens, state).logits[rows]
    logits, picked = model.step(next_tokens[rows], picked)
    torch.testing.assert_close(logits, expected)
    assert picked.rows == len(rows)
    assert picked.sentences == {"select": 4, "reorder": 3, "keep": 2}[verb]


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
def test_recorded_weights_times_values_give_the_output(kind: str, name: str) -> None:
    promise(kind, name, "weights")
    model = build(kind, name)
    src, mask, tgt = batch()
    with record(model) as notes:
        recorded = model(src, tgt, mask)
    torch.testing.assert_close(recorded, model(src, tgt, mask))  # recording changes nothing
    assert notes
    for note in notes.values():
        torch.testing.assert_close(note.weights @ note.values, note.output)
        torch.testing.assert_close(note.weights.sum(-1), torch.ones_like(note.weights[..., 0]))
        assert (note.weights >= 0).all()


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
def test_every_parameter_receives_a_gradient(kind: str, name: str) -> None:
    promise(kind, name, "gradients")
    model = build(kind, name, tie_embeddings="none", output_bias=True)
    src, mask, tgt = batch()
    hidden = model.decode(tgt[:, :-1], model.encode(src, mask))
    loss = linear_cross_entropy(
        hidden.flatten(0, 1),
        model.output_weight,
        model.output_bias,
        tgt[:, 1:].flatten(),
        smoothing=0.1,
    ).loss
    loss.backward()
    for path, weight in model.named_parameters():
        assert weight.grad is not None, path
        assert weight.grad.isfinite().all(), path
        assert weight.grad.any(), path


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
def test_saving_and_loading_change_nothing(kind: str, name: str) -> None:
    first = build(kind, name)
    torch.manual_seed(99)
    second = build_model_like(kind, name)
    second.load_state_dict(first.state_dict(), strict=True)
    src, mask, tgt = batch()
    torch.testing.assert_close(second(src, tgt, mask), first(src, tgt, mask), rtol=0, atol=0)


def build_model_like(kind: str, name: str) -> EncoderDecoder:
    """Build the same shape with other weights."""
    model = build(kind, name)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
    return model


def make_block(name: str, *, causal: bool, **more: object) -> Block:
    torch.manual_seed(0)
    config = ModelConfig(
        **{"width": 4, "heads": 2, "ffn_width": 6, "dropout": 0.0, "activation": "gelu", **more}
    )  # type: ignore[arg-type]
    return (
        BLOCKS.load(name)
        .build(BuildContext(config=config, causal=causal, memory_width=4 if causal else None))
        .double()
    )


PLACES = [
    case
    for case in product(BLOCKS, [False, True], RESIDUALS)
    if case[0] not in (ENCODER_ONLY if case[1] else DECODER_ONLY)
]


@pytest.mark.parametrize(("name", "causal", "residual"), PLACES)
def test_gradients_equal_finite_differences(name: str, causal: bool, residual: str) -> None:
    """Float64 gradcheck, with a smooth activation: ReLU is not differentiable at zero."""
    promise("block", name, "gradcheck")
    block = make_block(name, causal=causal, residual=residual)
    torch.manual_seed(1)
    x, values = (torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = torch.tensor([[True, True, True], [True, True, False]])

    def run(x: Tensor, values: Tensor) -> Tensor:
        context = ForwardContext(mask=mask, memory=Memory(values, mask) if causal else None)
        return block(x, context)

    assert torch.autograd.gradcheck(run, (x, values) if causal else (x, values.detach()))


@pytest.mark.parametrize("name", [name for name in BLOCKS if name not in ENCODER_ONLY])
def test_gradients_flow_through_incremental_decoding(name: str) -> None:
    """Segments of a long text train with what came before: extending must not write over what a
    gradient needs.
    """
    promise("block", name, "extend")
    block = make_block(name, causal=True)
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    context = ForwardContext(memory=Memory(torch.randn(2, 3, 4, dtype=torch.float64)))
    (whole,) = torch.autograd.grad((block(x, context) ** 2).sum(), x)
    state, parts = block.start(context), []
    for chunk in (x[:, :2], x[:, 2:3], x[:, 3:]):
        output, state = block.extend(chunk, state)
        parts.append(output)
    (in_chunks,) = torch.autograd.grad((torch.cat(parts, 1) ** 2).sum(), x)
    torch.testing.assert_close(in_chunks, whole)


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
def test_bfloat16_autocast_stays_close(kind: str, name: str) -> None:
    model = build(kind, name).float()
    src, mask, tgt = batch()
    exact = model(src, tgt, mask)
    with torch.autocast("cpu", torch.bfloat16):
        half = model(src, tgt, mask)
        with torch.no_grad():
            state = model.start(model.encode(src, mask))
            stepped = model.extend(tgt, state).logits
    assert (half.float() - exact).norm() < 0.05 * exact.norm()
    assert (stepped.float() - exact).norm() < 0.05 * exact.norm()
