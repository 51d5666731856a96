"""Models learn: the miniature of every block, the paper's post-norm stack with the paper's
schedule, packed and compiled.
"""

from __future__ import annotations

import pytest
import torch
from model_kit import generate_greedy
from torch import Tensor

from dragoman.config import ModelConfig
from dragoman.models.block_catalogue import BLOCKS
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model
from dragoman.ops import CrossEntropyOutput, linear_cross_entropy

BOS = 1
# Decoder block for blocks that cannot be used there, or that learn to reverse only with attention.
DECODERS = {
    "lstm": ("lstm(attention=scaled_dot)",),
    "gru": ("gru(attention=scaled_dot)",),
    "rnn": ("rnn(attention=scaled_dot)",),
    "sru": ("sru(attention=scaled_dot)",),
    **dict.fromkeys(("bilstm", "bigru", "birnn", "bisru", "sliced_rnn"), ("transformer",)),
    "ffn": ("cross_attention", "ffn"),
    "tcn": ("tcn", "cross_attention"),
}
ENCODERS = {"cross_attention": ("transformer",)}  # the other way round
# Required by the block's definition: conv's dot product has no divisor, so large embeddings
# saturate it.
MINIATURES: dict[str, dict[str, object]] = {"conv": {"scale_embeddings": False}}


def model_of(seed: int = 0, vocabulary: int = 16, **settings: object) -> EncoderDecoder:
    torch.manual_seed(seed)
    return build_model(
        ModelConfig(**settings), src_vocab_size=vocabulary, tgt_vocab_size=vocabulary
    )  # type: ignore[arg-type]


def loss_of(
    model: EncoderDecoder, src: Tensor, tgt: Tensor, mask: Tensor | None = None
) -> CrossEntropyOutput:
    tgt_in = torch.cat([torch.full((tgt.size(0), 1), BOS), tgt[:, :-1]], 1)
    hidden = model.decode(tgt_in, model.encode(src, mask))
    return linear_cross_entropy(
        hidden.flatten(0, 1), model.output_weight, model.output_bias, tgt.flatten(), smoothing=0.1
    )


@pytest.mark.parametrize("name", BLOCKS)
def test_the_miniature_learns_to_reverse(name: str) -> None:
    settings = {
        "width": 32,
        "heads": 2,
        "ffn_width": 64,
        "residual": "pre_norm",
        "dropout": 0.0,
        **MINIATURES.get(name, {}),
    }
    model = model_of(
        encoder=ENCODERS.get(name, (name,)), decoder=DECODERS.get(name, (name,)), **settings
    )
    optimizer = torch.optim.Adam(model.parameters(), 4e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(250):
        src = torch.randint(4, 16, (32, 6), generator=generator)
        optimizer.zero_grad()
        (loss_of(model, src, src.flip(1)).loss / src.numel()).backward()
        optimizer.step()
    src = torch.randint(4, 16, (50, 6), generator=generator)
    assert (generate_greedy(model, src, 6) == src.flip(1)).all(1).float().mean() >= 0.9


def test_six_post_norm_layers_train_with_the_papers_schedule() -> None:
    model = model_of(
        vocabulary=32, width=64, heads=4, ffn_width=128
    )  # 6 + 6 layers, post-norm, dropout 0.1: the defaults
    optimizer = torch.optim.Adam(model.parameters(), 1.0, betas=(0.9, 0.98), eps=1e-9)
    warmup_steps = 400  # ten times shorter than the paper's: the peak would be 6e-3
    generator = torch.Generator().manual_seed(0)
    nlls = []
    for update in range(1, 81):
        for group in optimizer.param_groups:
            group["lr"] = 64**-0.5 * min(
                update**-0.5, update * warmup_steps**-1.5
            )  # section 5.3, equation 3
        src = torch.randint(4, 32, (16, 8), generator=generator)
        optimizer.zero_grad()
        found = loss_of(model, src, src)
        (found.loss / src.numel()).backward()
        assert all(
            weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None
        )
        optimizer.step()
        nlls.append(found.nll.item() / src.numel())
    assert nlls[0] < 6.0  # log 32 is 3.5: it starts near even odds
    assert sum(nlls[-10:]) / 10 < 3.1  # and has begun to learn, through 12 post-norm layers


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # torch's compiler, of its own doing
def test_the_training_path_is_one_graph() -> None:
    """Encoder, decoder and chunked loss compile without a break, whatever is padded."""
    model = model_of(
        encoder=("transformer*2",),
        decoder=("transformer*2",),
        width=16,
        heads=2,
        ffn_width=32,
        residual="pre_norm",
    )
    src, tgt = torch.randint(4, 16, (2, 5)), torch.randint(4, 16, (2, 4))
    mask = torch.tensor([[True] * 5, [True, True, False, False, False]])
    for padding in (None, mask):
        torch._dynamo.reset()
        report = torch._dynamo.explain(loss_of)(model, src, tgt, padding)
        assert (report.graph_count, report.graph_break_count) == (1, 0), report.break_reasons
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler, of its own doing
def test_the_compiled_loss_and_its_gradients_are_the_eager_ones() -> None:
    model = model_of(
        encoder=("transformer",),
        decoder=("transformer",),
        width=16,
        heads=2,
        ffn_width=32,
        dropout=0.0,
    )
    src, tgt = torch.randint(4, 16, (2, 5)), torch.randint(4, 16, (2, 4))
    expected = loss_of(model, src, tgt)
    expected_grads = torch.autograd.grad(expected.loss, list(model.parameters()))
    found = torch.compile(loss_of, fullgraph=True)(model, src, tgt)
    torch.testing.assert_close(found.loss, expected.loss)
    for one, other in zip(
        torch.autograd.grad(found.loss, list(model.parameters())), expected_grads, strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_long_outputs_go_past_the_position_table() -> None:
    """No index error and no silent exit (marian-dev#365)."""
    model = model_of(
        encoder=("transformer",),
        decoder=("transformer",),
        width=8,
        heads=2,
        ffn_width=16,
        max_positions=8,
    ).eval()
    with torch.inference_mode():
        state = model.start(model.encode(torch.randint(4, 16, (1, 20))))
        for _ in range(30):
            logits, state = model.step(torch.tensor([5]), state)
        whole = model(
            torch.randint(4, 16, (1, 20), generator=torch.Generator().manual_seed(0)),
            torch.full((1, 30), 5),
        )
    assert state.length == 30
    assert logits.isfinite().all()
    assert whole.shape == (1, 30, 16)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, 2),
        ({"residual": "pre_norm"}, 2),
        ({"architecture": "prefix_lm", "encoder": ()}, 2),
        ({"decoder": ("reformer(layers=3, attention=full)",)}, 3),
        ({"decoder": ("reformer(layers=2, window=4, buckets=4)",)}, 2),
        ({"decoder": ("conv(layers=3)", "transformer")}, 4),
        ({"decoder": ("lstm(attention=additive)", "transformer")}, 2),
    ],
)
def test_outputs_of_all_decoder_layers_are_collected_on_request(
    changes: dict[str, object], layers: int
) -> None:
    torch.manual_seed(0)
    blocks: dict[str, object] = {"encoder": ("transformer*2",), "decoder": ("transformer*2",)}
    settings = {"width": 16, "heads": 2, "ffn_width": 32, "dropout": 0.0, **blocks, **changes}
    config = ModelConfig(**settings)  # type: ignore[arg-type]
    model = build_model(config, src_vocab_size=11, tgt_vocab_size=11).eval()
    src, tgt = torch.randint(4, 11, (2, 5)), torch.randint(4, 11, (2, 6))
    outputs: list[Tensor] = []
    with torch.no_grad():
        expected = model.hidden(src, tgt)
        embedded = [model._embedding(side)(ids) for side, ids in (("src", src), ("tgt", tgt))]
        hidden = model.hidden_embedded(*embedded, layer_outputs=outputs)
        assert torch.equal(hidden, expected)
        assert [output.shape for output in outputs] == [(2, 6, 16)] * layers
        assert torch.equal(model.output(model.decoder.finish(outputs[-1])), hidden)
