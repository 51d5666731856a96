"""Layers that share weights: one parameter, one name, whatever is done with the model."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dragoman.attention import record
from dragoman.attention.attention_weight_hooks import find_attentions
from dragoman.bundle import Bundle, write_bundle
from dragoman.cli.layer_diagram import format_stack
from dragoman.config import Config, ModelConfig, TrainConfig
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model, count_parameters, summarize_model
from dragoman.storage.tensor_files import read_header
from dragoman.text.sentencepiece_tokenizer import train_tokenizers
from dragoman.training.distributed.data_parallel import named_weights
from dragoman.training.ema import EMA
from dragoman.training.optimizer import build_adam, load_state_dict, state_dict

KINDS = ["all", "attention", "ffn"]


def config(sharing: str, **more: object) -> ModelConfig:
    values = {
        "encoder": ("transformer*3",),
        "decoder": ("transformer*3",),
        "width": 8,
        "heads": 2,
        "ffn_width": 16,
        "dropout": 0.0,
        **more,
    }
    return ModelConfig(share_layers=sharing, **values)  # type: ignore[arg-type]


def build(sharing: str, **more: object) -> EncoderDecoder:
    torch.manual_seed(0)
    return build_model(config(sharing, **more), src_vocab_size=11, tgt_vocab_size=11)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(4, 11, (2, 5)), torch.randint(4, 11, (2, 6))


@pytest.mark.parametrize("sharing", KINDS)
def test_shared_weights_are_one_parameter_with_one_name(sharing: str) -> None:
    model, alone = build(sharing), build("none")
    first, others = count_parameters(alone.encoder.get_submodule("0")), 0
    if sharing == "all":
        expected = (
            count_parameters(alone)
            - 2 * first
            - 2 * count_parameters(alone.decoder.get_submodule("0"))
        )
    else:
        parts = {
            "attention": ("encoder.0.self", "decoder.0.self", "decoder.0.cross"),
            "ffn": ("encoder.0.ffn",) * 2,
        }
        others = sum(count_parameters(alone.get_submodule(path)) for path in parts[sharing])
        expected = count_parameters(alone) - 2 * others
    assert count_parameters(model) == expected
    saved = model.state_dict()
    assert set(saved) == {name for name, _ in model.named_parameters()} == set(named_weights(model))
    assert sum(tensor.numel() for tensor in saved.values()) == expected
    assert ("encoder.2.self.output.weight" in saved) == (sharing == "ffn")
    assert ("decoder.1.ffn.inner.weight" in saved) == (sharing == "attention")
    assert ("decoder.1.self_residual.norm.weight" in saved) == (sharing != "all")


@pytest.mark.parametrize("sharing", KINDS)
@pytest.mark.parametrize("assign", [False, True])
def test_loading_keeps_shared_weights_shared(sharing: str, assign: bool) -> None:
    first = build(sharing)
    with torch.device("meta") if assign else torch.device("cpu"):
        second = build_model(config(sharing), src_vocab_size=11, tgt_vocab_size=11)
    second.load_state_dict(
        {name: tensor.clone() for name, tensor in first.state_dict().items()}, assign=assign
    )
    src, tgt = batch()
    torch.testing.assert_close(second(src, tgt), first(src, tgt), rtol=0, atol=0)
    assert count_parameters(second) == count_parameters(first)
    assert set(second.state_dict()) == set(first.state_dict())
    torch.nn.utils.vector_to_parameters(torch.zeros(count_parameters(second)), second.parameters())
    assert not any(weight.any() for weight in second.encoder.get_submodule("2").parameters())


def test_missing_weight_is_reported_by_name() -> None:
    model = build("all")
    weights = model.state_dict()
    del weights["encoder.0.self.output.weight"]
    with pytest.raises(RuntimeError, match=r"encoder\.0\.self\.output\.weight"):
        model.load_state_dict(weights)


def test_layers_are_run_as_often_as_there_are_blocks() -> None:
    """Against the same layer applied by hand."""
    from dragoman.models.forward_context import ForwardContext

    model = build("all").eval()
    src, _ = batch()
    x = model.src_input(model.embeddings["shared"](src))
    layer = model.encoder.get_submodule("0")
    for _ in range(3):
        x = layer(x, ForwardContext())
    torch.testing.assert_close(model.encode(src).values, x)


def test_each_block_is_recorded_by_its_own_path() -> None:
    model = build("all").eval()
    assert len(find_attentions(model)) == 9
    with record(model) as notes:
        model(*batch())
    assert list(notes)[:3] == ["encoder.0.self", "encoder.1.self", "encoder.2.self"]
    assert not torch.equal(notes["encoder.0.self"].weights, notes["encoder.1.self"].weights)


def test_blocks_with_different_options_share_nothing() -> None:
    model = build(
        "all",
        encoder=("transformer", "transformer(heads=4)", "transformer", "transformer(heads=4)"),
        decoder=("transformer", "gru(attention=dot)", "gru(attention=dot)"),
    )
    layers = [
        model.encoder.get_submodule(str(number)).get_parameter("self.output.weight")
        for number in range(4)
    ]
    assert layers[0] is layers[2]
    assert layers[1] is layers[3]
    assert layers[0] is not layers[1]
    weights = [
        dict(model.decoder.get_submodule(number).named_parameters()) for number in ("1", "2")
    ]
    assert all(weights[0][name] is weight for name, weight in weights[1].items())


def test_the_optimiser_and_averages_see_each_weight_once() -> None:
    model = build("all")
    optimizer, average = build_adam(model, TrainConfig()), EMA(model, 0.9)
    src, tgt = batch()
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(src, tgt).flatten(0, 1), tgt.flatten()).backward()
        optimizer.step()
        average.update(1)
    names = {name for name, _ in model.named_parameters()}
    assert set(average.state_dict()) == names
    state = state_dict(optimizer, model)
    assert {name.rpartition(".")[0] for name in state} == names
    again = copy.deepcopy(model)
    assert count_parameters(again) == count_parameters(model)
    load_state_dict(build_adam(again, TrainConfig()), again, state)
    assert again.encoder.get_submodule("0").get_parameter(
        "self.output.weight"
    ) is again.encoder.get_submodule("2").get_parameter("self.output.weight")
    with average.averaged_weights():
        averaged = model(src, tgt)
    assert (averaged - model(src, tgt)).abs().max() > 0
    torch.testing.assert_close(again.double().float()(src, tgt), model(src, tgt))


@pytest.mark.parametrize("sharing", KINDS)
def test_the_drawing_counts_each_weight_once_and_marks_shared_ones(sharing: str) -> None:
    rows = summarize_model(config(sharing), src_vocab_size=11, tgt_vocab_size=11)
    assert sum(row.parameters for row in rows) == count_parameters(build(sharing))
    shared = [row.path for row in rows if row.shapes == "shared"]
    assert ("encoder.1.self" in shared) == (sharing != "ffn")
    assert ("decoder.2.ffn" in shared) == (sharing != "attention")
    lines = format_stack(rows, config(sharing))
    assert any("layers 1 to 2, each" in line for line in lines)
    assert any("shared" in line and line.endswith(" 0") for line in lines)


def test_depth_dependent_initialization_and_sharing_exclude_each_other() -> None:
    (problem,) = (
        Config().replace(model={"share_layers": "all", "initialization": "depth_scaled"}).problems()
    )
    assert (
        "found model.initialization=depth_scaled and model.share_layers=all; set "
        "model.initialization=xavier" in problem
    )


def test_settings_that_no_block_supports_are_rejected() -> None:
    blocks = {"encoder": ("lstm",), "decoder": ("lstm(attention=dot)",)}
    (problem,) = Config().replace(model={**blocks, "share_layers": "ffn"}).problems()
    assert (
        "model.share_layers=ffn needs a block with a feed-forward network; found lstm, "
        "lstm(attention=dot)" in problem
    )
    (problem,) = Config().replace(model={**blocks, "talking_heads": True}).problems()
    assert (
        "model.talking_heads needs a block with several heads; found lstm, lstm(attention=dot)"
        in problem
    )
    assert not Config().replace(model={**blocks, "share_layers": "all"}).problems()


def test_a_bundle_holds_a_shared_weight_once(tmp_path: Path) -> None:
    sizes = {
        "width": 16,
        "heads": 2,
        "ffn_width": 16,
        "encoder": ("transformer*3",),
        "decoder": ("transformer*3",),
        "share_layers": "all",
    }
    settings = Config().replace(
        text={"vocab_size": 300}, model={**sizes, "embedding_width": 8, "fix_norm": True}
    )
    lines = ["ein mann geht", "eine frau steht", "zwei kinder spielen"] * 10
    tokenizers = train_tokenizers(lines, [line.upper() for line in lines], settings.text)
    torch.manual_seed(0)
    model = build_model(
        settings.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    ).eval()
    write_bundle(
        tmp_path / "m",
        config=settings,
        tokenizers=tokenizers,
        weights=named_weights(model),
        golden=["ein mann"],
    )
    bundle = Bundle.load(tmp_path / "m")
    assert bundle.parameters == count_parameters(model) == count_parameters(bundle.model)
    saved = read_header(tmp_path / "m" / "weights.safetensors")
    assert set(saved) == {name for name, _ in model.named_parameters()}
    src, tgt = batch()
    torch.testing.assert_close(bundle.model(src, tgt), model(src, tgt), rtol=0, atol=0)


@pytest.mark.parametrize(
    "block",
    ["conv*2", "gru(attention=dot)*2", "reformer(attention=full)*2", "cross_attention*2, ffn*2"],
)
def test_any_block_can_share_with_gradients_equal_to_finite_differences(block: str) -> None:
    """The gradient of a shared weight sums over its uses, also with recomputed activations."""
    decoder = tuple(block.split(", "))
    model = build("all", encoder=("transformer*2",), decoder=decoder).double()
    src, tgt = batch()
    model(src, tgt).log_softmax(-1)[..., 5].sum().backward()
    shared = set(model.decoder.shared_from.values())
    assert shared
    for path in shared:
        weight, grad = (
            model.decoder.get_parameter(path).data.view(-1),
            model.decoder.get_parameter(path).grad,
        )
        assert grad is not None
        index, ends = int(grad.abs().argmax()), []
        for step in (1e-6, -2e-6):
            weight[index] += step
            with torch.no_grad():
                ends.append(model(src, tgt).log_softmax(-1)[..., 5].sum().item())
        weight[index] += 1e-6
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(
            grad.view(-1)[index].item(), rel=1e-4, abs=1e-6
        )
