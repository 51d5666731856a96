"""The Transformer with the weights of other implementations computes their outputs; how parity
with them is measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from model_kit import perturb_weights
from torch import Tensor, nn

from dragoman.config import Config, ModelConfig
from dragoman.errors import ConfigError, CorruptError
from dragoman.exchange.ctranslate2_export import position_table_rows, vocabulary_tokens
from dragoman.exchange.export import require_close_log_probs, require_parity
from dragoman.exchange.export_parity import Parity, measure_parity
from dragoman.exchange.onnx_export import max_exported_positions
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model
from dragoman.recipes.transformer import vaswani2017_base


def from_torch(theirs: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Rename the weights of `torch.nn.Transformer`."""
    ours: dict[str, Tensor] = {}
    for side, norms in (
        ("encoder", ("self", "ffn")),
        ("decoder", ("self", "cross", "ffn")),
    ):
        for part in ("weight", "bias"):
            for n in range(layers):
                layer, old = f"{side}.{n}", f"{side}.layers.{n}"
                ours[f"{layer}.self.query_key_value.{part}"] = theirs[
                    f"{old}.self_attn.in_proj_{part}"
                ]
                ours[f"{layer}.self.output.{part}"] = theirs[f"{old}.self_attn.out_proj.{part}"]
                ours[f"{layer}.ffn.inner.{part}"] = theirs[f"{old}.linear1.{part}"]
                ours[f"{layer}.ffn.outer.{part}"] = theirs[f"{old}.linear2.{part}"]
                for number, name in enumerate(norms, start=1):
                    ours[f"{layer}.{name}_residual.norm.{part}"] = theirs[
                        f"{old}.norm{number}.{part}"
                    ]
                if side == "decoder":
                    fused = theirs[f"{old}.multihead_attn.in_proj_{part}"]
                    width = fused.size(0) // 3
                    ours[f"{layer}.cross.query.{part}"] = fused[:width]
                    ours[f"{layer}.cross.key_value.{part}"] = fused[width:]
                    ours[f"{layer}.cross.output.{part}"] = theirs[
                        f"{old}.multihead_attn.out_proj.{part}"
                    ]
            ours[f"{side}.norm.{part}"] = theirs[f"{side}.norm.{part}"]
    return ours


def test_base_model_with_the_weights_of_torch_nn_transformer() -> None:
    torch.manual_seed(0)
    theirs = perturb_weights(
        nn.Transformer(512, 8, 6, 6, 2048, dropout=0.0, batch_first=True, activation="relu")
    )
    # PyTorch has biases and a norm after each stack, which the paper does not.
    config = (
        vaswani2017_base()
        .replace(
            model={"attention_bias": True, "final_norm": "on", "norm_epsilon": 1e-5, "dropout": 0.0}
        )
        .model
    )
    ours = build_model(config, src_vocab_size=100, tgt_vocab_size=100)
    missing, unexpected = ours.load_state_dict(from_torch(theirs.state_dict(), 6), strict=False)
    assert (missing, unexpected) == (["embeddings.shared.weight"], [])
    src, tgt = torch.randint(4, 100, (3, 9)), torch.randint(4, 100, (3, 7))
    mask = torch.arange(9) < torch.tensor([[9], [4], [7]])
    with torch.no_grad():
        expected = theirs(
            ours.src_input(ours.embeddings["shared"](src)),
            ours.tgt_input(ours.embeddings["shared"](tgt)),
            tgt_mask=torch.ones(7, 7, dtype=torch.bool).triu(1),
            src_key_padding_mask=~mask,
            memory_key_padding_mask=~mask,
        )
        memory = ours.encode(src, mask)
        torch.testing.assert_close(ours.decode(tgt, memory), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(
            ours.extend(tgt, ours.start(memory)).logits,
            ours.project(expected),
            atol=1e-5,
            rtol=1e-5,
        )


def from_marian(theirs: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Rename the weights of a Hugging Face Marian model whose embeddings are shared."""
    ours = {
        "embeddings.shared.weight": theirs["model.shared.weight"],
        "output.bias": theirs["final_logits_bias"][0],
    }
    for side in ("encoder", "decoder"):
        for n in range(layers):
            layer, old = f"{side}.{n}", f"model.{side}.layers.{n}"
            for part in ("weight", "bias"):

                def fused(attention: str, names: str, part: str = part, old: str = old) -> Tensor:
                    return torch.cat(
                        [theirs[f"{old}.{attention}.{name}_proj.{part}"] for name in names]
                    )

                ours[f"{layer}.self.query_key_value.{part}"] = fused("self_attn", "qkv")
                ours[f"{layer}.self.output.{part}"] = theirs[f"{old}.self_attn.out_proj.{part}"]
                ours[f"{layer}.self_residual.norm.{part}"] = theirs[
                    f"{old}.self_attn_layer_norm.{part}"
                ]
                ours[f"{layer}.ffn.inner.{part}"] = theirs[f"{old}.fc1.{part}"]
                ours[f"{layer}.ffn.outer.{part}"] = theirs[f"{old}.fc2.{part}"]
                ours[f"{layer}.ffn_residual.norm.{part}"] = theirs[f"{old}.final_layer_norm.{part}"]
                if side == "decoder":
                    ours[f"{layer}.cross.query.{part}"] = fused("encoder_attn", "q")
                    ours[f"{layer}.cross.key_value.{part}"] = fused("encoder_attn", "kv")
                    ours[f"{layer}.cross.output.{part}"] = theirs[
                        f"{old}.encoder_attn.out_proj.{part}"
                    ]
                    ours[f"{layer}.cross_residual.norm.{part}"] = theirs[
                        f"{old}.encoder_attn_layer_norm.{part}"
                    ]
    return ours


def marian_pair(
    width: int, layers: int, heads: int, ffn_width: int, vocabulary: int
) -> tuple[nn.Module, EncoderDecoder]:
    """Build a Marian model with random weights, and ours with the same."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MarianConfig(
        vocab_size=vocabulary,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=ffn_width,
        decoder_ffn_dim=ffn_width,
        activation_function="swish",
        scale_embedding=True,
        max_position_embeddings=64,
        pad_token_id=vocabulary - 1,
        decoder_start_token_id=vocabulary - 1,
        eos_token_id=0,
        forced_eos_token_id=0,
        dropout=0.0,
    )
    theirs = transformers.MarianMTModel(config).eval()
    perturb_weights(theirs.model.encoder.layers)
    perturb_weights(theirs.model.decoder.layers)
    with torch.no_grad():
        theirs.final_logits_bias.normal_()
        theirs.model.shared.weight.normal_(std=width**-0.5)[-1] = (
            0  # the padding row starts a sentence: it must be zero
        )
    settings = ModelConfig(
        encoder=(f"transformer*{layers}",),
        decoder=(f"transformer*{layers}",),
        width=width,
        heads=heads,
        ffn_width=ffn_width,
        activation="swish",
        positions="sinusoidal_halves",
        output_bias=True,
    )
    ours = build_model(settings, src_vocab_size=vocabulary, tgt_vocab_size=vocabulary).eval()
    ours.load_state_dict(from_marian(theirs.state_dict(), layers))
    return theirs, ours


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((32, 2, 4, 64, 50), id="small"),
        pytest.param((512, 6, 8, 2048, 1000), id="realistic"),
    ],
)
def test_logits_with_the_weights_of_a_marian_model(sizes: tuple[int, int, int, int, int]) -> None:
    torch.manual_seed(0)
    theirs, ours = marian_pair(*sizes)
    last = sizes[-1] - 1
    src, tgt = torch.randint(1, last, (3, 9)), torch.randint(1, last, (3, 6))
    tgt[:, 0] = last  # a Marian sentence starts with padding
    mask = torch.arange(9) < torch.tensor([[9], [4], [7]])
    with torch.no_grad():
        expected = theirs(input_ids=src, attention_mask=mask.long(), decoder_input_ids=tgt).logits
        torch.testing.assert_close(ours(src, tgt, mask), expected, atol=1e-4, rtol=0)
        state = ours.start(ours.encode(src, mask))
        stepped = []
        for column in tgt.unbind(1):
            logits, state = ours.step(column, state)
            stepped.append(logits)
        torch.testing.assert_close(torch.stack(stepped, 1), expected, atol=1e-4, rtol=0)
    assert expected.std() > 0.5  # numbers of a size at which agreement means something


def parity_of(ours: list[tuple[str, float]], theirs: list[tuple[str, float]]) -> Parity:
    return measure_parity("theirs", ours, theirs, None, None, "en")


def test_parity_has_the_largest_difference_of_equal_outputs() -> None:
    ours = [("a", -1.0), ("b", -2.0), ("c", -3.0), ("d", -4.0)]
    theirs = [("a", -1.0), ("b", -2.5), ("x", -9.0), ("d", -3.875)]
    found = parity_of(ours, theirs)
    assert (found.equal, found.sentences, found.difference) == (3, 4, 0.5)
    with pytest.raises(CorruptError, match=r"found 0\.5000 off"):
        require_parity(found)
    assert parity_of([("a", -1.0)], [("b", -1.0)]).difference == 0.0


@pytest.mark.parametrize("theirs", [(math.nan, -2.0), (-1.0, math.nan)])
def test_log_probabilities_that_are_nan_are_no_parity(theirs: tuple[float, float]) -> None:
    ours = [("a", -1.0), ("b", -2.0)]
    found = parity_of(ours, list(zip("ab", theirs, strict=True)))
    assert math.isnan(found.difference)
    with pytest.raises(CorruptError, match="found nan off"):
        require_parity(found)


@pytest.mark.parametrize("exact", [True, False])
def test_an_export_must_reproduce_the_golden_log_probabilities(exact: bool) -> None:
    most = 1e-3 if exact else 1.0
    assert require_close_log_probs(most, exact=exact) == most
    for error in (1.01 * most, math.inf, math.nan):
        with pytest.raises(CorruptError, match=f"within {most:g}; found"):
            require_close_log_probs(error, exact=exact)


@pytest.mark.parametrize(("equal", "kept"), [(10, True), (9, True), (8, False)])
def test_nine_of_ten_outputs_of_an_export_must_be_equal(equal: int, kept: bool) -> None:
    found = Parity(program="it", sentences=10, equal=equal, difference=0.0)
    if kept:
        require_parity(found)
    else:
        with pytest.raises(CorruptError, match="at least 90 % of the sentences; found 8 of 10"):
            require_parity(found)


def test_parity_reports_bleu_of_the_model_and_then_of_the_export() -> None:
    references = ["a b c d e f", "g h i j k l"]
    outputs = (references, [references[0], "g h i j x y"])
    pairs = [(text, -1.0) for text in references]
    found = measure_parity("it", pairs, pairs, outputs, references, "en")
    assert found.bleu is not None
    assert found.bleu[0] == pytest.approx(100.0)
    assert found.bleu[1] < 90
    lost = found.bleu[0] - found.bleu[1]
    assert str(found).endswith(
        f"; BLEU 100.00 native, {found.bleu[1]:.2f} it, difference -{lost:.2f}"
    )
    assert found.to_dict() == {
        "sentences": 2,
        "equal": 2,
        "difference": 0.0,
        "bleu_native": found.bleu[0],
        "bleu": found.bleu[1],
    }
    nothing = Parity(program="it", sentences=0, equal=0, difference=0.0)
    assert nothing.equal_fraction == 1.0
    assert "bleu" not in nothing.to_dict()


@pytest.mark.parametrize(
    ("longest", "ratio", "extra", "rows"),
    [
        (200, 2.0, 50, 1024),
        (1000, 2.0, 50, 2052),
        (1000, 2.0, 9, 2011),
        (2000, 0.5, 50, 2002),
    ],
)
def test_position_tables_hold_the_longest_source_and_its_longest_output(
    longest: int, ratio: float, extra: int, rows: int
) -> None:
    decode = {"max_length_ratio": ratio, "max_length_extra": extra}
    config = Config().replace(data={"max_length": longest}, decode=decode)
    assert position_table_rows(config) == rows


@pytest.mark.parametrize(("positions", "exported"), [(300, 300), (2048, 2048), (9000, 2048)])
def test_graphs_have_at_most_2048_positions(positions: int, exported: int) -> None:
    config = Config().replace(model={"max_positions": positions})
    assert max_exported_positions(config) == exported


def test_two_tokens_of_one_string_are_indistinguishable() -> None:
    class Repeated:
        def __len__(self) -> int:
            return 3

        def tokens(self, ids: range) -> list[str]:
            return [["a", "b", "a"][each] for each in ids]

    with pytest.raises(ConfigError, match="a distinct string; found 'a' twice"):
        vocabulary_tokens(Repeated())  # type: ignore[arg-type]
