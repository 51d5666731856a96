"""Attention recorder and editor: every layer is captured, and hooks are removed afterwards."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from dragoman.attention import (
    Mechanism,
    ScaledDotScore,
    Softmax,
    edit,
    find_attentions,
    heads_off,
    record,
)
from dragoman.config import ModelConfig
from dragoman.errors import DragomanError
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model

PATHS = [
    "encoder.0.self",
    "encoder.1.self",
    "decoder.0.self",
    "decoder.0.cross",
    "decoder.1.self",
    "decoder.1.cross",
]


@pytest.fixture
def model() -> EncoderDecoder:
    torch.manual_seed(0)
    config = ModelConfig(
        encoder=("transformer*2",), decoder=("transformer*2",), width=8, heads=2, ffn_width=16
    )
    return build_model(config, src_vocab_size=20, tgt_vocab_size=20).eval()


@pytest.fixture
def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    mask = torch.tensor([[True] * 5, [True, True, True, False, False]])
    return {
        "src": torch.randint(4, 20, (2, 5)),
        "tgt_in": torch.randint(4, 20, (2, 4)),
        "src_mask": mask,
    }


def test_every_attention_is_noted_by_its_path(
    model: EncoderDecoder, batch: dict[str, Tensor]
) -> None:
    """Encoder, decoder and cross attention alike (OpenNMT-py#897), each head by itself
    (fairseq#3365).
    """
    before = model(**batch)
    with record(model) as notes:
        torch.testing.assert_close(model(**batch), before)
    assert list(notes) == PATHS == list(find_attentions(model))
    for path, note in notes.items():
        keys = 5 if path.startswith("encoder") or path.endswith("cross") else 4
        assert note.weights.shape == (2, 2, 5 if path.startswith("encoder") else 4, keys)
        torch.testing.assert_close(
            note.weights.sum(-1), torch.ones(note.weights.shape[:-1])
        )  # never all zeros (awslabs/sockeye#385)
        torch.testing.assert_close(note.weights @ note.values, note.output)
    assert not notes["decoder.1.cross"].weights[1, ..., 3:].any()
    assert not notes["decoder.1.self"].weights.triu(1).any()


def test_no_hooks_are_left_behind(model: EncoderDecoder, batch: dict[str, Tensor]) -> None:
    def break_off() -> None:
        with record(model), edit(model, {"decoder.0.cross": heads_off([0])}):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        break_off()
    assert all("watch" not in vars(module) for module in find_attentions(model).values())
    with record(model) as notes:
        pass
    model(**batch)
    assert len(notes) == 0


def test_only_named_attentions_take_the_plain_path(
    model: EncoderDecoder, batch: dict[str, Tensor]
) -> None:
    """An alignment can be had from one layer without slowing the others
    (sillsdev/machine.py#201).
    """
    with record(model, ["decoder.1.cross"]) as notes:
        assert find_attentions(model)["decoder.0.cross"].hooks is None
        model(**batch)
    assert list(notes) == ["decoder.1.cross"]


def test_steps_of_generation_are_all_kept(model: EncoderDecoder, batch: dict[str, Tensor]) -> None:
    with torch.no_grad(), record(model) as notes:
        state = model.start(model.encode(batch["src"], batch["src_mask"]))
        for column in batch["tgt_in"].unbind(1):
            _, state = model.step(column, state)
    with record(model) as whole:
        model(**batch)
    steps = notes.calls("decoder.1.cross")
    assert len(steps) == 4
    torch.testing.assert_close(
        torch.cat([step.weights for step in steps], dim=2), whole["decoder.1.cross"].weights
    )
    assert [step.weights.size(-1) for step in notes.calls("decoder.0.self")] == [1, 2, 3, 4]


def test_heads_are_switched_off(model: EncoderDecoder, batch: dict[str, Tensor]) -> None:
    before = model(**batch)
    with edit(model, {"decoder.1.cross": heads_off([1])}), record(model) as notes:
        changed = model(**batch)
    note = notes["decoder.1.cross"]
    assert not note.weights[:, 1].any()
    assert not note.output[:, 1].any()
    torch.testing.assert_close(note.weights[:, 0].sum(-1), torch.ones(2, 4))
    assert (changed - before).abs().max() > 1e-4
    torch.testing.assert_close(model(**batch), before)


def test_all_heads_off_leaves_only_the_bias(
    model: EncoderDecoder, batch: dict[str, Tensor]
) -> None:
    cross = find_attentions(model)["decoder.0.cross"]
    with edit(model, {"decoder.0.cross": heads_off([0, 1])}):
        found = cross(torch.randn(1, 2, 8), torch.randn(1, 3, 8))
    torch.testing.assert_close(found, cross.output.bias.expand(1, 2, 8))  # type: ignore[union-attr, operator]


def test_any_function_of_the_weights_is_an_edit(
    model: EncoderDecoder, batch: dict[str, Tensor]
) -> None:
    def first_only(weights: Tensor) -> Tensor:
        only = torch.zeros_like(weights)
        only[..., 0] = 1
        return only

    with edit(model, dict.fromkeys(PATHS, first_only)), record(model, ["decoder.0.cross"]) as notes:
        model(**batch)
    torch.testing.assert_close(
        notes["decoder.0.cross"].output,
        notes["decoder.0.cross"].values[:, :, :1].expand(2, 2, 4, 4),
    )


def test_two_edits_apply_in_their_order(model: EncoderDecoder, batch: dict[str, Tensor]) -> None:
    with (
        edit(model, {"encoder.0.self": lambda weights: weights + 1}),
        edit(model, {"encoder.0.self": lambda weights: weights * 0}),
        record(model) as notes,
    ):
        model(**batch)
    assert not notes["encoder.0.self"].weights.any()


def test_compiled_blocks_are_one_graph_unless_recorded(
    model: EncoderDecoder, batch: dict[str, Tensor]
) -> None:
    """A recording, or another thread's, must neither break the graph of an unrecorded model nor be
    baked into it.
    """
    off = {"decoder.0.cross": heads_off([0])}
    with torch.no_grad():
        before = model(**batch)
        with edit(model, off):
            edited = model(**batch)
        for block in [*model.encoder.blocks(), *model.decoder.blocks()]:
            block[1].compile(backend="eager", fullgraph=True)
        torch.testing.assert_close(model(**batch), before)
        for block in [*model.encoder.blocks(), *model.decoder.blocks()]:
            block[1].compile(backend="eager")
        other: list[Tensor] = []
        for _ in range(2):
            torch.testing.assert_close(model(**batch), before)
            with edit(model, off), record(model) as notes:
                torch.testing.assert_close(model(**batch), edited)
                assert [len(notes.calls(path)) for path in notes] == [1] * len(PATHS)
                thread = threading.Thread(
                    target=lambda: other.append(torch.no_grad()(model)(**batch))
                )
                thread.start()
                thread.join()
                assert [len(notes.calls(path)) for path in notes] == [1] * len(PATHS)
    for found in other:
        torch.testing.assert_close(found, before)
    assert len(other) == 2


def test_unknown_names_are_reported(model: EncoderDecoder, batch: dict[str, Tensor]) -> None:
    with (
        pytest.raises(
            DragomanError, match=r"found 'decoder.1.crass'; did you mean decoder.1.cross\?"
        ),
        record(model, ["decoder.1.crass"]),
    ):
        pass
    with (
        pytest.raises(DragomanError, match=r"found .decoder.9.cross."),
        edit(model, {"decoder.9.cross": heads_off([0])}),
    ):
        pass
    with (
        pytest.raises(DragomanError, match="from 0 to 1; found 2"),
        edit(model, {"decoder.1.cross": heads_off([2])}),
    ):
        model(**batch)
    with record(model) as notes:
        pass
    with pytest.raises(DragomanError, match=r"found 'decoder.1.cross'; run the model first"):
        notes["decoder.1.cross"]


def test_wrappers_do_not_change_the_paths(model: EncoderDecoder) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

    assert list(find_attentions(Wrapper())) == PATHS


def test_a_mechanism_is_watched_as_one_head() -> None:
    torch.manual_seed(0)
    mechanism = Mechanism(ScaledDotScore(query_width=4, key_width=4), Softmax())
    query, key = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    with record(mechanism) as notes:
        attended = mechanism(query=query, key=key, value=key)
    assert notes[""].weights.shape == (2, 1, 3, 5)
    torch.testing.assert_close(notes[""].output.squeeze(1), attended.context)
    with edit(mechanism, {"": heads_off([0])}):
        assert not mechanism(query=query, key=key, value=key).context.any()
