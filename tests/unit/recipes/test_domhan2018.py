"""Domhan (2018): every variant equals the released architecture, builds, decodes incrementally, and
learns.
"""

from __future__ import annotations

import pytest
import torch

from dragoman.config import Config, ModelConfig, read_config
from dragoman.models.block_list_parser import BlockSpec, parse_blocks
from dragoman.models.factory import build_model
from dragoman.recipes.catalogue import RECIPES
from dragoman.recipes.recipe_miniature import mini

# From the README.md of awslabs/sockeye, branch acl18, tables 3 to 5: encoder and decoder in its
# language, `pos` or `dropout` before each left out (a rung's positions are below), brackets closed
# where the README forgets to, and (...)*6 for repeat(6,...).
# (...)*6 for repeat(6,...).
SELF, FF, NORM = "res(norm->mh_dot_self_att)", "res(norm->ff->linear)", "norm"
ATT, ATT_1H = "res(norm->mh_dot_att)", "res(norm->mh_dot_att(heads=1))"
RNN, BIRNN, CNN = "res(norm->rnn->dropout)", "res(norm->birnn->dropout)", "res(norm->cnn(3,relu))"
BARE_RNN, BARE_BIRNN, BARE_CNN = "res(rnn->dropout)", "res(birnn->dropout)", "res(cnn(3,relu))"

TRANSFORMER_ENCODER = [*[SELF, FF] * 6, NORM]
TRANSFORMER_DECODER = [*[SELF, ATT, FF] * 6, NORM]
RNN_ENCODER = [BIRNN, FF, *[RNN, FF] * 5, NORM]
RNN_DECODER = [*[RNN, ATT, FF] * 6, NORM]
CNN_ENCODER = [*[CNN, FF] * 6, NORM]
CNN_DECODER = [*[CNN, ATT, FF] * 6, NORM]
LOW_ENCODER = [BIRNN, *[RNN] * 5, NORM]
RELEASED: dict[str, tuple[list[str], list[str]]] = {
    "transformer": (TRANSFORMER_ENCODER, TRANSFORMER_DECODER),
    "rnn": (
        [BARE_BIRNN, *[BARE_RNN] * 5],
        [*[BARE_RNN] * 6, "res(mh_dot_att(heads=1))", "res(ff->linear)"],
    ),
    "rnn_mh": (
        [BARE_BIRNN, *[BARE_RNN] * 5],
        [*[BARE_RNN] * 6, "res(mh_dot_att)", "res(ff->linear)"],
    ),
    "rnn_pos": (
        [BARE_BIRNN, *[BARE_RNN] * 5],
        [*[BARE_RNN] * 6, "res(mh_dot_att)", "res(ff->linear)"],
    ),
    "rnn_norm": (LOW_ENCODER, [*[RNN] * 6, ATT, FF, NORM]),
    "rnn_multi_att_1h": (LOW_ENCODER, [*[RNN, ATT_1H] * 6, FF, NORM]),
    "rnn_multi_att": (LOW_ENCODER, [*[RNN, ATT] * 6, FF, NORM]),
    "rnn_ff": (RNN_ENCODER, RNN_DECODER),
    "cnn": ([BARE_CNN] * 6, [BARE_CNN, "res(mh_dot_att(heads=1))"] * 6),
    "cnn_norm": ([*[CNN] * 6, NORM], [*[CNN, ATT_1H] * 6, NORM]),
    "cnn_mh": ([*[CNN] * 6, NORM], [*[CNN, ATT] * 6, NORM]),
    "cnn_ff": (CNN_ENCODER, CNN_DECODER),
    "self_rnn": (TRANSFORMER_ENCODER, RNN_DECODER),
    "self_cnn": (TRANSFORMER_ENCODER, CNN_DECODER),
    "rnn_self": (RNN_ENCODER, TRANSFORMER_DECODER),
    "cnn_self": (CNN_ENCODER, TRANSFORMER_DECODER),
    "self_combined": (
        TRANSFORMER_ENCODER,
        [*[SELF, ATT, FF, RNN, ATT, FF, CNN, ATT, FF] * 2, NORM],
    ),
    "self_none": (TRANSFORMER_ENCODER, [*[ATT, FF] * 6, NORM]),
    "none_self": ([*[FF] * 6, NORM], TRANSFORMER_DECODER),  # not there: see the recipe
}
WITHOUT_POSITIONS = ("rnn", "rnn_mh")
NAMES = [name for name in RECIPES if name.startswith("domhan2018_")]


def layers(spec: BlockSpec, *, decoder: bool) -> list[str]:
    """Write a block's layers in the released language."""
    cross = "mh_dot_att(heads=1)" if spec.options.get("heads") == 1 else "mh_dot_att"
    if spec.name == "conv":
        assert spec.options["weight_norm"] is False
        assert not decoder or spec.options["attention"] == "none"
    if spec.name == "lstm" and decoder:
        assert spec.options == {"initial_state": "zero"}
    return {
        "transformer": ["mh_dot_self_att", *(["mh_dot_att"] if decoder else []), "ff->linear"],
        "lstm": ["rnn->dropout"],
        "bilstm": ["birnn->dropout"],
        "conv": [f"cnn({spec.options.get('kernel_size', 3)},{spec.options.get('activation')})"],
        "cross_attention": [cross],
        "ffn": ["ff->linear"],
    }[spec.name]


def released(model: ModelConfig, blocks: tuple[str, ...], *, decoder: bool) -> list[str]:
    """Write a stack in the released language."""
    norm = {"pre_norm": "norm->", "no_norm": ""}[model.residual]
    found = [
        f"res({norm}{layer})"
        for spec in parse_blocks(blocks)
        for layer in layers(spec, decoder=decoder)
    ]
    return [*found, "norm"] if norm else found


def test_every_variant_is_registered() -> None:
    assert [name.removeprefix("domhan2018_") for name in NAMES] == list(RELEASED)


@pytest.mark.parametrize("name", NAMES)
def test_variant_equals_the_released_architecture(name: str) -> None:
    config: Config = RECIPES.load(name)()
    rung = name.removeprefix("domhan2018_")
    model = config.model
    assert (
        released(model, model.encoder, decoder=False),
        released(model, model.decoder, decoder=True),
    ) == RELEASED[rung]
    assert model.positions == ("none" if rung in WITHOUT_POSITIONS else "sinusoidal")
    assert (
        model.width,
        model.ffn_width,
        config.train.learning_rate,
        config.train.max_grad_norm,
    ) == (256, 1024, 2e-4, 0.0)
    assert config.problems() == []


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_variant_decodes_incrementally_as_in_the_forward_pass(name: str) -> None:
    torch.manual_seed(0)
    model = (
        build_model(
            read_config(recipe=name, scale=mini).model, src_vocab_size=11, tgt_vocab_size=11
        )
        .double()
        .eval()
    )
    src, tgt = torch.randint(4, 11, (2, 5)), torch.randint(4, 11, (2, 4))
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    whole = model(src, tgt, mask)
    torch.testing.assert_close(model(src[1:, :3], tgt[1:]), whole[1:])
    rows = torch.arange(2).repeat_interleave(2)  # two beams a sentence
    state = model.start(model.encode(src, mask)).reorder(rows)
    for position in range(4):
        logits, state = model.step(tgt[rows, position], state)
        torch.testing.assert_close(logits, whole[rows, position])
        state = state.reorder(torch.tensor([1, 0, 3, 3]))


def test_decoder_without_target_mixing_depends_on_the_last_token_only() -> None:
    """Table 5's `none`: earlier target tokens have no effect."""
    torch.manual_seed(0)
    model = build_model(
        read_config(recipe="domhan2018_self_none", scale=mini).model,
        src_vocab_size=11,
        tgt_vocab_size=11,
    ).eval()
    src, tgt = torch.randint(4, 11, (1, 5)), torch.tensor([[4, 5, 6]])
    other = torch.tensor([[9, 8, 6]])
    torch.testing.assert_close(model(src, tgt)[:, 2], model(src, other)[:, 2])
    assert not model(src, tgt)[:, 1].equal(model(src, other)[:, 1])
