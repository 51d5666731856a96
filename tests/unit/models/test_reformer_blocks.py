"""Reversible layers: the same outputs and gradients, with activation memory independent of
depth.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dragoman.attention import record
from dragoman.config import ModelConfig
from dragoman.errors import ConfigError
from dragoman.layers import reversible
from dragoman.layers.feed_forward import ChunkedFeedForward, FeedForward
from dragoman.layers.reversible import run_sublayers
from dragoman.models import reformer_blocks
from dragoman.models.block_interface import BuildContext
from dragoman.models.factory import build_model, build_stack
from dragoman.models.forward_context import ForwardContext, Memory
from dragoman.models.reformer_blocks import Reformer

KINDS = ["lsh", "full"]
SMALL = {"rounds": 2, "buckets": 4, "window": 2}  # so small that a dozen tokens are sorted


def make(
    *, causal: bool, attention: str = "lsh", layers: int = 3, dropout: float = 0.0, **more: int
) -> Reformer:
    torch.manual_seed(0)
    config = ModelConfig(width=16, heads=2, ffn_width=32, dropout=dropout, ffn_dropout=dropout)
    build_context = BuildContext(config=config, causal=causal, memory_width=16 if causal else None)
    return Reformer.build(
        build_context, layers=layers, attention=attention, **{"ffn_chunks": 2, **SMALL, **more}
    )


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ForwardContext]:
    torch.manual_seed(1)
    x, values = (torch.randn(2, size, 16, dtype=dtype, requires_grad=True) for size in (20, 5))
    mask = torch.arange(20) < torch.tensor([[20], [13]])
    return x, ForwardContext(
        mask=mask, memory=Memory(values, torch.arange(5) < torch.tensor([[5], [4]]))
    )


def output_and_gradients(
    block: Reformer, x: Tensor, context: ForwardContext, seed: int = 5
) -> list[Tensor]:
    """Return the output and the gradients of one pass, in training from a seed."""
    torch.manual_seed(seed)
    assert context.memory is not None
    output = block(x, context)
    leaves = [x, context.memory.values, *block.parameters()]
    grads = torch.autograd.grad(output.float().square().sum(), leaves, allow_unused=True)
    return [output, *(grad for grad in grads if grad is not None)]


@pytest.fixture
def run_unreversed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a context manager under which reversible layers run as ordinary ones."""

    def switch() -> None:
        monkeypatch.setattr(
            reformer_blocks,
            "run_sublayers_reversible",
            lambda changes, x, memory, *, random: run_sublayers(changes, x, memory),
        )

    return switch


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_equal_those_of_ordinary_layers(
    causal: bool, attention: str, dropout: float, run_unreversed: Callable[[], None]
) -> None:
    """With dropout too, whose numbers are drawn again, and with the memory's gradient."""
    block = make(causal=causal, attention=attention, dropout=dropout).double()
    x, context = tensors()
    backwards = output_and_gradients(block, x, context)
    run_unreversed()
    plain = output_and_gradients(block, x, context)
    assert len(plain) == len(backwards) == 2 + causal + len(list(block.parameters()))
    for one, other in zip(backwards, plain, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "inside", [False, True], ids=["backward after autocast", "backward inside"]
)
@pytest.mark.parametrize("attention", KINDS)
def test_mixed_precision_gives_gradients_as_exact_as_plain_layers_do(
    attention: str, inside: bool, run_unreversed: Callable[[], None]
) -> None:
    # So many rounds in so few buckets that every pair shares one: rounding may send a token
    # elsewhere, which would be another function.
    block = make(causal=True, attention=attention, dropout=0.2, rounds=16, buckets=2, window=20)
    x, context = tensors(torch.float32)
    assert context.memory is not None

    def run(*, half: bool = True) -> list[Tensor]:
        torch.manual_seed(2)
        leaves = [x, context.memory.values, *block.parameters()]  # type: ignore[union-attr]
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = block(x, context).square().sum()
            if inside:
                return list(torch.autograd.grad(loss, leaves))
        return list(torch.autograd.grad(loss, leaves))

    backwards = run()
    run_unreversed()
    plain, exact = run(), run(half=False)
    for one, other, wanted in zip(backwards, plain, exact, strict=True):
        assert (one - wanted).norm() <= 2 * (other - wanted).norm() + 0.01 * wanted.norm()


def test_the_backward_pass_leaves_random_numbers_alone() -> None:
    block = make(causal=True, dropout=0.3)
    x, context = tensors(torch.float32)
    output = block(x, context)
    before = torch.get_rng_state()
    output.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_cuda_graph_capture_is_rejected_with_recomputed_dropout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
        reversible._rng_states(torch.device("cuda"))
    assert [make(causal=False, dropout=rate).has_dropout for rate in (0.0, 0.1)] == [False, True]


def saved_bytes(run: Callable[[], Tensor]) -> int:
    """Count the bytes saved for the backward pass, each storage once."""
    sizes: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        run()
    return sum(sizes.values())


@pytest.mark.parametrize("attention", KINDS)
def test_saved_activations_do_not_grow_with_depth(
    attention: str, run_unreversed: Callable[[], None]
) -> None:
    x, context = tensors(torch.float32)

    def kept(layers: int) -> int:
        block = make(causal=True, attention=attention, layers=layers)
        return saved_bytes(lambda: block(x, context))

    assert kept(16) == kept(2)
    run_unreversed()
    assert kept(16) > 7 * kept(2)


def test_saved_buckets_are_int16() -> None:
    """Of each layer only buckets stay, in two bytes: for a token R * H of them against D floats."""
    x, context = tensors(torch.float32)
    output = make(causal=True, layers=4)(x, context)
    assert output.grad_fn is not None
    noted = [note["buckets"] for note in output.grad_fn.decisions if note]  # type: ignore[attr-defined]
    assert len(noted) == 4
    assert all(buckets.dtype == torch.int16 and buckets.shape == (2, 2, 2, 20) for buckets in noted)


@pytest.mark.parametrize("attention", KINDS)
def test_recorded_layers_run_unreversed_with_equal_outputs(attention: str) -> None:
    block = make(causal=True, attention=attention).double()
    x, context = tensors()
    expected = output_and_gradients(block, x, context)
    with record(block) as notes:
        watched = output_and_gradients(block, x, context)
    assert list(notes) == [f"{layer}.{kind}" for layer in range(3) for kind in ("self", "cross")]
    for one, other in zip(watched, expected, strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(block(x, context), expected[0])


def test_frozen_and_shared_weights_get_the_right_gradients(
    run_unreversed: Callable[[], None],
) -> None:
    block = make(causal=False, layers=2).double()
    first, second = (layer for _, layer in block.layers())
    second.ffn = first.ffn
    first.self.output.weight.requires_grad_(False)
    x, context = tensors()

    def run() -> dict[str, Tensor | None]:
        block.zero_grad()
        block(x, context).square().sum().backward()
        return {name: weight.grad for name, weight in block.named_parameters()}

    found = run()
    run_unreversed()
    assert found["0.self.output.weight"] is None
    torch.testing.assert_close(found, run())


@pytest.mark.parametrize("attention", KINDS)
@torch.no_grad()
def test_incremental_decoding_equals_forward_over_many_windows(attention: str) -> None:
    """A prefix longer than is compared at a time, single steps, and rows that are sorted in
    `forward`.
    """
    block = make(causal=True, attention=attention).double().eval()
    torch.manual_seed(3)
    x = torch.randn(2, 150, 16, dtype=torch.float64)
    context = ForwardContext(memory=Memory(torch.randn(2, 5, 16, dtype=torch.float64)))
    whole = block(x, context)
    state, parts = block.start(context), []
    for chunk in (x[:, :140], x[:, 140:141], x[:, 141:]):
        output, state = block.extend(chunk, state)
        parts.append(output)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    assert state.length == 150


def test_streams_follow_the_papers_equations() -> None:
    """The paper's equations, layer by layer: y1 = x1 + Attention(x2), y2 = x2 + FeedForward(y1),
    norms inside.
    """
    block = make(causal=False, attention="full").double()
    x, context = tensors()
    one, two = x, x
    for _, layer in block.layers():
        one = one + layer.self(layer.self_residual.norm(two), mask=context.self_mask(causal=False))
        two = two + layer.ffn(layer.ffn_residual.norm(one))
    torch.testing.assert_close(block(x, context), (one + two) / 2)


@pytest.mark.parametrize("chunks", [1, 3, 7, 50])
def test_a_chunked_feed_forward_layer_is_the_whole_one(chunks: int) -> None:
    torch.manual_seed(0)
    chunked = ChunkedFeedForward(8, 32, chunks=chunks, dropout=0.0).double()
    whole = FeedForward(8, 32).double()
    whole.load_state_dict(chunked.state_dict())
    x = torch.randn(2, 20, 8, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(chunked(x), whole(x))
    one, other = (
        torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
        for layer in (chunked, whole)
    )
    torch.testing.assert_close(one, other)


def test_chunks_save_no_wide_activations_and_repeat_dropout_in_backward() -> None:
    torch.manual_seed(0)
    chunked = ChunkedFeedForward(8, 64, chunks=4, dropout=0.5)
    x = torch.randn(1, 40, 8, requires_grad=True)
    widest = 0

    def record_size(tensor: Tensor) -> Tensor:
        nonlocal widest
        widest = max(widest, tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record_size, lambda tensor: tensor):
        chunked(x)
    assert widest <= 40 * 64 // 4  # one chunk's, and none where only inputs wait
    whole = FeedForward(8, 64, dropout=0.5)
    whole.load_state_dict(chunked.state_dict())
    torch.manual_seed(1)
    found = chunked(x)
    found_grads = torch.autograd.grad(found.square().sum(), [x, *chunked.parameters()])
    torch.manual_seed(1)
    expected = torch.cat([whole(part) for part in x.tensor_split(4, dim=1)], dim=1)
    grads = torch.autograd.grad(expected.square().sum(), [x, *whole.parameters()])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_grads, grads)


@pytest.mark.parametrize(
    ("block", "settings", "message"),
    [
        (
            "reformer(buckets=7)",
            {},
            "buckets must be even and at least 2, .*; found 7; try buckets=8",
        ),
        (
            "reformer(buckets=130)",
            {},
            "buckets must be a multiple of 4 above 128, .*; found 130; try buckets=132",
        ),
        (
            "reformer(kv_heads=1)",
            {},
            "does not support model.kv_heads: .*; found 1; leave it out, or use attention=full",
        ),
        (
            "reformer",
            {"attention_dropout": 0.1},
            "does not support model.attention_dropout: .*; found 0.1",
        ),
        (
            "reformer",
            {"qk_norm": "rms"},
            "does not support model.qk_norm: keys are normalized to unit length; found rms",
        ),
        ("reformer", {"window": 3}, "does not support model.window: .*; found 3"),
        (
            "reformer",
            {"positions": "rotary"},
            "needs positions that are added to the embeddings; found model.positions=rotary; "
            "use sinusoidal",
        ),
        (
            "reformer(attention=monotonic)",
            {},
            "found 'monotonic'; use attention=lsh or attention=full",
        ),
        ("reformer(residual=post_norm)", {}, "found 'residual'.*always pre-norm"),
        (
            "reformer(layers=0)",
            {},
            "layers of 'reformer\\(layers=0\\)' in model.encoder must be .*found 0",
        ),
    ],
)
def test_invalid_settings_are_rejected_with_a_remedy(
    block: str, settings: dict[str, object], message: str
) -> None:
    config = ModelConfig(encoder=(block,), decoder=("transformer",), width=16, heads=2, **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        build_model(config, src_vocab_size=8, tgt_vocab_size=8)


def test_full_attention_supports_options_that_hashing_does_not() -> None:
    settings = {
        "kv_heads": 1,
        "qk_norm": "rms",
        "positions": "rotary",
        "attention_dropout": 0.1,
        "window": 3,
    }
    config = ModelConfig(
        encoder=("reformer(attention=full)",),
        decoder=("transformer",),
        width=16,
        heads=2,
        ffn_width=8,
        **settings,
    )  # type: ignore[arg-type]
    model = build_model(config, src_vocab_size=8, tgt_vocab_size=8)
    assert model(torch.randint(4, 8, (2, 6)), torch.randint(4, 8, (2, 4))).isfinite().all()


def test_buckets_follow_the_longest_sequence_unless_they_are_given() -> None:
    for block, buckets in (
        ("reformer", 32),
        ("reformer(window=16)", 128),
        ("reformer(buckets=6)", 6),
    ):
        config = ModelConfig(
            encoder=(block,), decoder=("transformer",), width=16, heads=2, max_positions=1024
        )
        with torch.device("meta"):
            model = build_model(config, src_vocab_size=8, tgt_vocab_size=8)
        (run,) = (block for _, block in model.encoder.blocks())
        assert isinstance(run, Reformer)
        assert [layer.self.buckets for _, layer in run.layers()] == [buckets]


def test_settings_of_heads_biases_and_chunks_reach_the_layers() -> None:
    config = ModelConfig(
        encoder=("reformer(ffn_chunks=3)",),
        width=8,
        heads=2,
        head_width=6,
        attention_bias=False,
        ffn_bias=False,
    )
    stack = build_stack(config, config.encoder, "model.encoder", causal=False, memory_width=None)
    layer = stack.get_submodule("0.0")
    assert (layer.self.head_width, layer.self.output.in_features, layer.ffn.chunks) == (6, 12, 3)
    names = [name for name, _ in layer.named_parameters() if "norm" not in name]
    assert names
    assert not [name for name in names if "bias" in name]
