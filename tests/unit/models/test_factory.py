"""From a configuration to a model: weight names, sizes, tying, initialization."""

from __future__ import annotations

import pytest
import torch

from dragoman.attention.multi_head import MultiHead
from dragoman.config import ModelConfig
from dragoman.errors import ConfigError
from dragoman.layers.convs2s import ConvS2SAttention
from dragoman.layers.feed_forward import FeedForward
from dragoman.layers.norms_and_residuals import LayerNorm, Residual
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model, count_parameters, summarize_model
from dragoman.models.tcn_blocks import TCNLayer

SMALL = {
    "encoder": ("transformer",),
    "decoder": ("transformer",),
    "width": 8,
    "heads": 2,
    "ffn_width": 16,
}

# Weight names are an interface: existing bundles contain them. A renamed one needs an
# entry in dragoman/bundle/renamed_weights.py.
FROZEN = """
embeddings.shared.weight 10x8
encoder.0.self.query_key_value.weight 24x8
encoder.0.self.query_key_value.bias 24
encoder.0.self.output.weight 8x8
encoder.0.self.output.bias 8
encoder.0.self_residual.norm.weight 8
encoder.0.self_residual.norm.bias 8
encoder.0.ffn.inner.weight 16x8
encoder.0.ffn.inner.bias 16
encoder.0.ffn.outer.weight 8x16
encoder.0.ffn.outer.bias 8
encoder.0.ffn_residual.norm.weight 8
encoder.0.ffn_residual.norm.bias 8
encoder.norm.weight 8
encoder.norm.bias 8
decoder.0.self.query_key_value.weight 24x8
decoder.0.self.query_key_value.bias 24
decoder.0.self.output.weight 8x8
decoder.0.self.output.bias 8
decoder.0.self_residual.norm.weight 8
decoder.0.self_residual.norm.bias 8
decoder.0.cross.query.weight 8x8
decoder.0.cross.query.bias 8
decoder.0.cross.key_value.weight 16x8
decoder.0.cross.key_value.bias 16
decoder.0.cross.output.weight 8x8
decoder.0.cross.output.bias 8
decoder.0.cross_residual.norm.weight 8
decoder.0.cross_residual.norm.bias 8
decoder.0.ffn.inner.weight 16x8
decoder.0.ffn.inner.bias 16
decoder.0.ffn.outer.weight 8x16
decoder.0.ffn.outer.bias 8
decoder.0.ffn_residual.norm.weight 8
decoder.0.ffn_residual.norm.bias 8
decoder.norm.weight 8
decoder.norm.bias 8
"""


def build(src_vocab_size: int = 10, tgt_vocab_size: int = 10, **settings: object) -> EncoderDecoder:
    config = ModelConfig(**{**SMALL, **settings})  # type: ignore[arg-type]
    return build_model(config, src_vocab_size=src_vocab_size, tgt_vocab_size=tgt_vocab_size)


def names(model: EncoderDecoder) -> set[str]:
    return {
        f"{name} {'x'.join(map(str, weight.shape))}" for name, weight in model.state_dict().items()
    }


def test_weight_names_are_frozen() -> None:
    assert names(build(residual="pre_norm")) == set(FROZEN.split("\n")) - {""}


def test_settings_add_and_remove_weights() -> None:
    pre = names(build(residual="pre_norm"))
    assert pre - names(build(residual="post_norm")) == {
        f"{side}.norm.{part} 8" for side in ("encoder", "decoder") for part in ("weight", "bias")
    }
    assert not any("norm" in name for name in names(build(residual="no_norm")))
    assert names(build(output_bias=True)) - names(build()) == {"output.bias 10"}
    learned = names(build(positions="learned", max_positions=12)) - names(build())
    assert learned == {"src_input.positions.weight 12x8", "tgt_input.positions.weight 12x8"}
    assert {
        name.split(" ")[0].rsplit(".", 2)[-2]
        for name in names(build()) - names(build(attention_bias=False))
    } == {
        "query_key_value",
        "query",
        "key_value",
        "output",
    }


def test_tied_embeddings_are_one_parameter_stored_once() -> None:
    tied = build(tie_embeddings="all")
    assert tied.output_weight is tied.embeddings["shared"].weight
    target = build(11, 10, tie_embeddings="target")
    assert target.output_weight is target.embeddings["tgt"].weight
    assert target.embeddings["src"].weight.shape == (11, 8)
    free = build(11, 10, tie_embeddings="none")
    assert free.output_weight is free.output.weight
    sizes = [count_parameters(model) for model in (tied, target, free)]
    assert (sizes[1] - sizes[0], sizes[2] - sizes[1]) == (11 * 8, 10 * 8)
    for model in (tied, target, free):
        pointers = [weight.data_ptr() for weight in model.state_dict().values()]
        assert len(set(pointers)) == len(pointers)


def test_two_vocabularies_cannot_share_one_matrix() -> None:
    with pytest.raises(
        ConfigError, match=r"found 11 source and 10 target tokens; set model.tie_embeddings=target"
    ):
        build(11, 10, tie_embeddings="all")


def test_blocks_take_options_of_their_own() -> None:
    model = build(encoder=("transformer(heads=4)", "transformer(ffn_width=32)"))
    first, second = (block for _, block in model.encoder.blocks())
    assert first.self.heads == 4  # type: ignore[union-attr]
    assert second.ffn.inner.out_features == 32  # type: ignore[union-attr]


def test_unknown_options_suggest_the_nearest() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"model.encoder must set options that transformer has; found 'haeds' in "
            r"'transformer\(haeds=4\)'; did you mean heads\?"
        ),
    ):
        build(encoder=("transformer(haeds=4)",))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "heads=x",
            "heads of 'transformer(heads=x)' in model.encoder must be an integer; found 'x'",
        ),
        ("heads=true", "must be an integer; found True"),
        ("heads=0", "must be at least 1; found 0"),
        ("ffn_width=1.5", "must be an integer; found 1.5"),
        ("activation=relo", "found 'relo'; did you mean relu?"),
        ("width=16", "found 'width' in 'transformer(width=16)'"),
    ],
)
def test_options_of_the_wrong_kind_are_rejected(option: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(encoder=(f"transformer({option})",))
    assert message in str(error.value)


def test_heads_of_a_block_must_divide_too() -> None:
    with pytest.raises(ConfigError, match="found 3 and 8"):
        build(decoder=("transformer(heads=3)",))


def test_a_seed_gives_the_same_weights() -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return build().state_dict()

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embeddings.shared.weight"], other["embeddings.shared.weight"])


def test_a_model_built_on_meta_is_filled_by_its_weights() -> None:
    torch.manual_seed(0)
    real = build(residual="pre_norm").eval()
    with torch.device("meta"):
        empty = build(residual="pre_norm").eval()
    assert {weight.device.type for weight in empty.parameters()} == {"meta"}
    empty.load_state_dict(real.state_dict(), assign=True)
    src, tgt = torch.randint(0, 10, (2, 5)), torch.randint(0, 10, (2, 4))
    torch.testing.assert_close(empty(src, tgt), real(src, tgt), rtol=0, atol=0)


def test_initialization_keeps_hidden_states_and_logits_at_unit_size() -> None:
    """N(0, 1) embeddings would give tied logits a variance of D: at width 256 a first loss of about
    100.
    """
    torch.manual_seed(0)
    model = build(
        500,
        500,
        width=256,
        heads=4,
        ffn_width=1024,
        encoder=("transformer*2",),
        decoder=("transformer*2",),
        dropout=0.0,
    )
    src, tgt = torch.randint(4, 500, (4, 20)), torch.randint(4, 500, (4, 20))
    assert model.embeddings["shared"](src).std().item() == pytest.approx(1.0, rel=0.1)
    memory = model.encode(src)
    assert memory.values.std().item() == pytest.approx(1.0, rel=0.1)
    logits = model(src, tgt)
    assert 0.3 < logits.std().item() < 2.0
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(4, 500, (80,)))
    assert loss.item() < 8.0  # log 500 is 6.2
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            assert not weight.any()


def test_queries_keys_and_values_start_alike_in_self_and_cross_attention() -> None:
    torch.manual_seed(0)
    layer = next(block for _, block in build(width=128, heads=4).decoder.blocks())
    expected = (2 / (128 + 3 * 128)) ** 0.5  # Xavier for the three stored as one
    for weight in (
        layer.self.query_key_value.weight,
        layer.cross.query.weight,
        layer.cross.key_value.weight,
    ):  # type: ignore[union-attr]
        assert weight.std().item() == pytest.approx(expected, rel=0.03)  # type: ignore[union-attr, operator]


def test_the_description_accounts_for_every_weight() -> None:
    rows = summarize_model(
        ModelConfig(**SMALL, residual="pre_norm", output_bias=True),
        src_vocab_size=10,
        tgt_vocab_size=10,
    )  # type: ignore[arg-type]
    assert sum(row.parameters for row in rows) == count_parameters(
        build(residual="pre_norm", output_bias=True)
    )
    paths = [row.path for row in rows]
    assert paths[0] == "embeddings.shared"
    assert paths[-1] == "output"
    assert {"encoder.0.self", "decoder.0.cross", "encoder.norm"} < set(paths)
    cross = next(row for row in rows if row.path == "decoder.0.cross")
    assert cross.class_name == "CrossAttention"
    assert "key_value.weight 16x8" in cross.shapes


def test_every_layer_has_the_dropout_and_epsilon_of_its_own_setting() -> None:
    config = ModelConfig(
        encoder=("transformer",),
        decoder=("transformer",),
        width=8,
        heads=2,
        ffn_width=8,
        dropout=0.1,
        attention_dropout=0.2,
        ffn_dropout=0.3,
        qk_norm="rms",
        norm_epsilon=1e-3,
    )
    model = build_model(config, src_vocab_size=9, tgt_vocab_size=9)
    rates = {
        path: module.dropout for path, module in model.named_modules() if hasattr(module, "dropout")
    }
    assert rates["src_input"] == rates["tgt_input"] == 0.1
    for path in ("encoder.0.self", "decoder.0.self", "decoder.0.cross"):
        assert rates[path] == 0.2
        assert rates[f"{path}_residual"] == 0.1
        attention = model.get_submodule(path)
        assert attention.query_norm.eps == attention.key_norm.eps == 1e-3
    for path in ("encoder.0.ffn", "decoder.0.ffn"):
        assert rates[path] == 0.3
        assert rates[f"{path}_residual"] == 0.1


SETTINGS_OF_LAYERS = {
    "dropout": 0.1,
    "attention_dropout": 0.2,
    "ffn_dropout": 0.3,
    "norm_epsilon": 1e-3,
    "attention_bias": False,
    "ffn_bias": False,
}


@pytest.mark.parametrize(
    ("side", "block"),
    [
        *(("encoder", each) for each in ("transformer", "reformer(attention=full)", "ffn")),
        *(("encoder", each) for each in ("conv", "bigru", "sliced_rnn", "tcn")),
        *(("encoder", f"{each}(residual_connection=false)") for each in ("lstm", "bisru")),
        *(("decoder", each) for each in ("transformer", "cross_attention", "conv")),
        *(("decoder", each) for each in ("reformer(attention=full)", "gru(attention=additive)")),
    ],
)
def test_every_kind_of_block_has_the_settings_of_the_model(side: str, block: str) -> None:
    blocks = {"encoder": ("transformer",), "decoder": ("transformer",), side: (block,)}
    config = ModelConfig(**blocks, width=8, heads=2, ffn_width=8, **SETTINGS_OF_LAYERS)
    model = build_model(config, src_vocab_size=9, tgt_vocab_size=9)
    for path, module in getattr(model, side).named_modules():
        if isinstance(module, MultiHead | ConvS2SAttention):
            assert module.dropout == 0.2, path
        if isinstance(module, FeedForward):
            assert module.dropout == 0.3, path
        if isinstance(module, Residual | TCNLayer):
            # The attention of a convolution is inside the layer's residual connection.
            is_inner = block == "conv" and path.endswith("cross_residual")
            assert module.dropout == (0.0 if is_inner else 0.1), path
        if isinstance(module, LayerNorm):
            assert module.eps == 1e-3, path
        if isinstance(module, MultiHead | FeedForward):
            assert not [name for name, _ in module.named_parameters() if "bias" in name], path


def test_the_last_block_decides_whether_a_stack_ends_in_a_norm() -> None:
    blocks = ("transformer", "ffn(residual=post_norm)")
    sizes = {"width": 8, "heads": 2, "ffn_width": 8, "residual": "pre_norm"}
    for encoder, ends_in_norm in ((blocks, False), (blocks[::-1], True)):
        config = ModelConfig(encoder=encoder, decoder=("transformer",), **sizes)
        model = build_model(config, src_vocab_size=9, tgt_vocab_size=9)
        assert (model.encoder.norm is not None) == ends_in_norm
