"""LayerDrop: which layers are dropped, how often, their gradients, and resuming."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dragoman.attention.catalogue import ALIGNMENTS, SCORES
from dragoman.config import ModelConfig
from dragoman.data.collate import Batch
from dragoman.models.block_catalogue import BLOCKS
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model
from dragoman.models.forward_context import ForwardContext
from dragoman.tasks.translation import TranslationTask


def build(drop: float, depth: int = 4) -> EncoderDecoder:
    torch.manual_seed(0)
    blocks = (f"transformer*{depth}",)
    config = ModelConfig(
        encoder=blocks, decoder=blocks, width=8, heads=2, ffn_width=16, dropout=0.0, layer_drop=drop
    )
    return build_model(config, src_vocab_size=11, tgt_vocab_size=11)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(4, 11, (2, 5), generator=generator), torch.randint(
        4, 11, (2, 6), generator=generator
    )


def test_dropped_layers_follow_the_generator() -> None:
    model = build(0.5)
    x = torch.randn(2, 5, 8)
    torch.manual_seed(7)
    kept = [bool(torch.rand(()) >= 0.5) for _ in range(4)]
    assert 0 < sum(kept) < 4
    expected = x
    for keep, (_, block) in zip(kept, model.encoder.blocks(), strict=True):
        expected = block(expected, ForwardContext()) if keep else expected
    torch.manual_seed(7)
    torch.testing.assert_close(model.encoder(x, ForwardContext()), expected)


def test_no_layer_is_dropped_in_evaluation() -> None:
    src, tgt = batch()
    torch.testing.assert_close(build(0.9).eval()(src, tgt), build(0.0).eval()(src, tgt))


def test_layers_are_dropped_at_the_configured_rate() -> None:
    model, ran = build(0.3, depth=10), []
    for _, block in model.encoder.blocks():
        block.register_forward_hook(lambda *_: ran.append(1))
    with torch.no_grad():
        for _ in range(100):
            model.encoder(torch.zeros(1, 1, 8), ForwardContext())
    assert 650 <= len(ran) <= 750


def test_dropped_layers_get_zero_gradients() -> None:
    """None would skip the optimizer step of one rank where several ranks would not skip theirs, and
    leave a checkpoint without its state.
    """
    model = build(0.5)
    src, tgt = batch()
    torch.manual_seed(3)
    model(src, tgt).sum().backward()
    grads = {path: weight.grad for path, weight in model.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    dropped = {
        path.rpartition(".")[0]
        for path, grad in grads.items()
        if grad is not None and not grad.any() and "output.weight" in path
    }
    assert dropped
    assert len(dropped) < 12


def test_encoder_without_readers_gets_zero_gradients() -> None:
    model = build(0.95, depth=1)
    src, tgt = batch()
    torch.manual_seed(0)
    model(src, tgt).sum().backward()
    weights = dict(model.named_parameters())
    assert all(weight.grad is not None for weight in weights.values())
    assert not any(
        weight.grad.any() for path, weight in weights.items() if path[:7] in ("encoder", "decoder")
    )  # type: ignore[union-attr]


def test_same_seed_drops_the_same_layers() -> None:
    model = build(0.5)
    src, tgt = batch()
    found = []
    for seed in (5, 6, 5):
        torch.manual_seed(seed)
        found.append(model(src, tgt))
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("seed", [0, 1])
def test_layer_drop_under_torch_compile_selects_layers(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path taken under torch.compile, in eager mode: the layer is computed and then
    selected.
    """
    model, x = build(0.5), torch.randn(2, 5, 8)
    torch.manual_seed(seed)
    expected = model.encoder(x, ForwardContext())
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.manual_seed(seed)
    torch.testing.assert_close(model.encoder(x, ForwardContext()), expected)


ATTENTIONS = [*SCORES, *(name for name in ALIGNMENTS if name != "softmax")]
FORMS = [
    *(f"{kind}(attention={name})" for kind in ("lstm", "gru") for name in ATTENTIONS),
    *(
        f"lstm(attention={name}, decoder=bahdanau, input_feeding=true, layers=2, "
        f"residual_connection=false)"
        for name in ATTENTIONS
    ),
    *(f"lstm(attention={name}, decoder=gnmt, layers=2)" for name in ATTENTIONS),
    "lstm(attention=coverage, coverage_loss_weight=0.5)",
    "conv(layers=2)",
    "conv(attention=none)",
    "reformer(layers=2, attention=full)",
]


def pairs() -> Batch:
    """Return two pairs, the second shorter on both sides."""
    sizes = np.array([[4, 3], [3, 2]])
    return Batch(
        src=torch.tensor([[4, 5, 6, 2], [7, 2, 0, 0]]),
        src_lengths=torch.from_numpy(sizes[:, 0]),
        tgt_in=torch.tensor([[1, 7, 8], [1, 5, 0]]),
        tgt_out=torch.tensor([[7, 8, 2], [5, 2, 0]]),
        tgt_lengths=torch.from_numpy(sizes[:, 1]),
        examples=np.arange(2),
        sizes=sizes,
    )


@pytest.mark.parametrize("sharing", ["none", "all"])
@pytest.mark.parametrize("form", [*BLOCKS, *FORMS])
def test_every_block_may_be_dropped(form: str, sharing: str) -> None:
    """Each registered block with each score and alignment: some passes leave both out, one or none,
    and all give finite gradients.
    """
    torch.manual_seed(0)
    plain = form.partition("(")[0]
    in_decoder = not BLOCKS.options(plain).is_bidirectional  # type: ignore[union-attr]
    in_encoder = plain != "cross_attention"
    config = ModelConfig(
        encoder=(f"{plain}*2",) if in_encoder else ("transformer",),
        decoder=("cross_attention", f"{form}*2") if in_decoder else ("transformer",),
        width=8,
        heads=2,
        ffn_width=16,
        layer_drop=0.5,
        share_layers=sharing,
    )
    model = build_model(config, src_vocab_size=11, tgt_vocab_size=11).train()
    for seed in range(8):
        torch.manual_seed(seed)
        loss = TranslationTask(smoothing=0.1).loss(model, pairs())
        model.zero_grad()
        (loss.total / loss.count).backward()
        assert all(
            weight.grad is not None and weight.grad.isfinite().all()
            for weight in model.parameters()
        )


def test_samples_of_a_failed_pass_are_not_rewarded_later() -> None:
    """An out-of-memory error between choice and reward, then a pass of other rows that leaves the
    layer out.
    """
    torch.manual_seed(0)
    config = ModelConfig(
        encoder=("bigru",),
        decoder=("cross_attention", "lstm(attention=reinforce)"),
        width=8,
        heads=2,
        layer_drop=0.9,
    )
    model = build_model(config, src_vocab_size=11, tgt_vocab_size=11).train()
    (alignment,) = model.reinforce_alignments()
    alignment.store_log_probs(torch.zeros(5, requires_grad=True))
    torch.manual_seed(0)
    TranslationTask(smoothing=0.0).loss(model, pairs())
    assert alignment.stored_log_probs is None
    assert not alignment.baseline
