"""Language models: causality, generation, segments that continue each other, dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman import ops
from dragoman.attention.relative_position_encodings import TransformerXLBias
from dragoman.config import ModelConfig
from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.sampling import Sampling
from dragoman.decoding.search_interface import search
from dragoman.errors import ConfigError
from dragoman.models.forward_context import ForwardContext
from dragoman.models.language_model import (
    LanguageDropout,
    NeuralLanguageModel,
    build_language_model,
    memory_mask,
)

VOCAB = 17
BLOCKS: dict[str, dict[str, Any]] = {
    "transformer": {"decoder": ("transformer*2",)},
    "transformer_xl": {"decoder": ("transformer*2",), "positions": "transformer_xl"},
    "rotary": {"decoder": ("transformer*2",), "positions": "rotary", "residual": "pre_norm"},
    "alibi": {"decoder": ("transformer", "ffn"), "positions": "alibi", "kv_heads": 2},
    "lstm": {"decoder": ("lstm*2",), "positions": "none"},
    "gru": {"decoder": ("gru(layers=2, residual_connection=false)",), "positions": "none"},
    "reformer": {"decoder": ("reformer(layers=2, rounds=2, buckets=4, window=4)",)},
    "reformer_full": {"decoder": ("reformer(layers=2, attention=full)",)},
    "conv": {"decoder": ("conv*2",)},
    "conv_layers": {"decoder": ("conv(layers=2, kernel_size=2)",)},
}


def build(name: str, *, dropout: LanguageDropout | None = None, **more: Any) -> NeuralLanguageModel:
    settings: dict[str, Any] = {"width": 16, "heads": 4, "ffn_width": 32, "dropout": 0.0}
    config = ModelConfig(**settings | BLOCKS[name] | more)
    torch.manual_seed(1)
    model = build_language_model(config, vocab_size=VOCAB, dropout=dropout)
    return model.double().eval()


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCAB, (rows, length), generator=generator)


@pytest.mark.parametrize("name", BLOCKS)
def test_no_position_sees_its_future(name: str) -> None:
    model = build(name)
    embedded = model.embed(tokens(2, 9)).detach().requires_grad_()
    hidden = model.decoder(embedded, ForwardContext())
    for position in (0, 4, 7):
        (gradient,) = torch.autograd.grad(
            hidden[:, position].pow(2).sum(), embedded, retain_graph=True
        )
        assert not gradient[:, position + 1 :].any()
        assert gradient[:, position].any()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("split", [(11,), (1,) * 11, (4, 1, 6), (2, 9)])
def test_incremental_decoding_in_any_split_equals_forward(
    name: str, split: tuple[int, ...]
) -> None:
    model, ids = build(name), tokens(3, 11)
    with torch.no_grad():
        expected = model(ids)
        state, parts = model.start(3), []
        for part in ids.split(list(split), dim=1):
            logits, state = model.extend(part, state)
            parts.append(logits)
    if name == "reformer":  # its chunks depend on the whole sequence
        assert torch.isfinite(torch.cat(parts, dim=1)).all()
        return
    torch.testing.assert_close(torch.cat(parts, dim=1), expected)
    assert state.length == 11


@pytest.mark.parametrize("name", BLOCKS)
def test_step_returns_the_logits_of_the_last_position(name: str) -> None:
    model, ids = build(name), tokens(2, 5)
    with torch.no_grad():
        state = model.start(2)
        extended, _ = model.extend(ids, model.start(2))
        for position in range(5):
            logits, state = model.step(ids[:, position], state)
    torch.testing.assert_close(logits, extended[:, -1])


@pytest.mark.parametrize("strategy", [GreedySearch(), BeamSearch(3), Sampling(seed=3, samples=2)])
@pytest.mark.parametrize("name", ["transformer_xl", "lstm", "conv"])
def test_every_search_strategy_decodes_a_language_model(name: str, strategy: Any) -> None:
    model = build(name).float()
    alone = search(model, 1, limits=[6], strategy=strategy, prefixes=[[5, 6]], sample_ids=[7])
    both = search(
        model, 2, limits=[6, 6], strategy=strategy, prefixes=[[9], [5, 6]], sample_ids=[3, 7]
    )
    assert [each.tokens for each in both[1]] == [each.tokens for each in alone[0]]
    assert all(each.tokens[:2] == [5, 6] for each in alone[0])


def run_segments(
    model: NeuralLanguageModel, ids: Tensor, split: tuple[int, ...], memory: int
) -> tuple[Tensor, Tensor]:
    """Return the hidden states of segments that continue each other, and the embeddings' input."""
    rows = ids.size(0)
    carried = {
        name: torch.zeros(rows, *shape, dtype=torch.float64)
        for name, shape in model.carried_shapes(memory).items()
    }
    outputs, seen = [], 0
    for part in ids.split(list(split), dim=1):
        lengths = torch.full((rows,), min(seen, memory))
        mask = memory_mask(lengths, memory) if memory else None
        found = model.decode_segment(part, carried, mask)
        carried = found.carried
        outputs.append(found.hidden)
        seen += part.size(1)
    return torch.cat(outputs, dim=1), carried[next(iter(carried))]


@pytest.mark.parametrize("name", ["transformer_xl", "rotary", "alibi", "lstm", "gru"])
@pytest.mark.parametrize("split", [(5, 6), (3, 3, 5), (1, 4, 6)])
def test_segments_equal_the_whole_sequence(name: str, split: tuple[int, ...]) -> None:
    """With a memory as long as the past, recurrence is full attention over the concatenation."""
    model, ids = build(name), tokens(2, 11)
    with torch.no_grad():
        expected = model.decode(ids)
        found, _ = run_segments(model, ids, split, memory=0 if name in ("lstm", "gru") else 12)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["transformer_xl", "rotary"])
@pytest.mark.parametrize("window", [0, 5])
def test_a_limited_cache_equals_the_memory_of_training(name: str, window: int) -> None:
    """Evaluation with cached keys equals training's hidden states, at any memory length, shorter
    or longer than the window.
    """
    model, ids, split = build(name, window=window), tokens(2, 24), (4,) * 6
    for memory in (2, 4, 7):
        with torch.no_grad():
            expected, _ = run_segments(model, ids, split, memory)
            state, parts = model.start(2, memory=memory), []
            for part in ids.split(list(split), dim=1):
                hidden, state = model.extend_hidden(part, state)
                parts.append(hidden)
        torch.testing.assert_close(torch.cat(parts, dim=1), expected)
        cache = state.children["decoder"].children["0"].cache["key_value"]
        assert cache.size(-2) <= 2 * memory + 4 + (2 * memory + 4) // 4 + 8


def test_a_memory_gets_no_gradient_but_its_projections_do() -> None:
    model, ids = build("transformer_xl"), tokens(2, 8)
    memory = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    carried = {"0.hidden": memory, "1.hidden": memory}
    out = model.decode_segment(ids, carried, memory_mask(torch.tensor([5, 2]), 5))
    assert not any(tensor.requires_grad for tensor in out.carried.values())
    attention = model.decoder.get_submodule("0.self")
    out.hidden.pow(2).sum().backward()  # type: ignore[no-untyped-call]
    assert memory.grad is None
    weight = attention.query_key_value.weight
    # Keys and values of the memory are projected with the weights of this step.
    with_memory = weight.grad.clone()
    model.zero_grad()
    model.decode(ids).pow(2).sum().backward()  # type: ignore[no-untyped-call]
    assert (with_memory[16:] - weight.grad[16:]).abs().max() > 1e-6


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_a_carried_state_gets_no_gradient(name: str) -> None:
    """Truncated back-propagation ends at the segment."""
    model = build(name)
    carried = {
        path: torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)
        for path, shape in model.carried_shapes(0).items()
    }
    out = model.decode_segment(tokens(2, 5), carried, None)
    out.hidden.pow(2).sum().backward()  # type: ignore[no-untyped-call]
    assert [state.grad for state in carried.values()] == [None] * len(carried)
    assert not any(state.requires_grad for state in out.carried.values())


def test_unfilled_memory_changes_nothing() -> None:
    model, ids = build("transformer_xl"), tokens(2, 6)
    mask = memory_mask(torch.tensor([0, 0]), 4)
    for junk in (0.0, 50.0):
        carried = {f"{n}.hidden": torch.full((2, 4, 16), junk).double() for n in range(2)}
        with torch.no_grad():
            found = model.decode_segment(ids, carried, mask).hidden
            unfilled = model.decode_segment(ids, carried, filled=0).hidden
        torch.testing.assert_close(found, model.decode(ids))
        torch.testing.assert_close(unfilled, model.decode(ids))


def test_a_partly_filled_memory_needs_no_mask() -> None:
    model, ids = build("transformer_xl"), tokens(2, 6)
    carried = {f"{n}.hidden": torch.randn(2, 4, 16).double() for n in range(2)}
    with torch.no_grad():
        masked = model.decode_segment(ids, carried, memory_mask(torch.tensor([3, 3]), 4))
        filled = model.decode_segment(ids, carried, filled=3)
    torch.testing.assert_close(masked.hidden, filled.hidden)
    torch.testing.assert_close(masked.carried["1.hidden"], filled.carried["1.hidden"])


def test_the_shift_equals_gathering_by_distance() -> None:
    """Against the definition: each query times the sinusoid of each distance."""
    torch.manual_seed(0)
    bias = TransformerXLBias(2, 4, causal=True).double()
    query = torch.randn(3, 2, 5, 4, dtype=torch.float64)
    for keys in (5, 9):
        for clamp in (0, 3):
            bias.max_distance = clamp
            shifted = ops.shift_causal(bias.distance_scores(query, keys))
            for t in range(5):
                for s in range(keys - 5 + t + 1):
                    distance = keys - 5 + t - s
                    distance = min(distance, clamp) if clamp else distance
                    sinusoid = bias.sinusoids.vectors(distance, 1).double()
                    key = F.linear(sinusoid, bias.proj.weight).view(2, 4)
                    v = bias.position_bias.view(2, 4)
                    expected = ((query[:, :, t] + v) * key).sum(-1) / 2
                    torch.testing.assert_close(shifted[:, :, t, s], expected)
            gathered = bias.causal_bias(query, keys)
            visible = torch.ones(5, keys, dtype=torch.bool).tril(keys - 5)
            torch.testing.assert_close(shifted[..., visible], gathered[..., visible])


def test_an_attention_mask_replaces_causality() -> None:
    model, ids = build("transformer"), tokens(1, 6)
    causal = torch.ones(1, 6, 6, dtype=torch.bool).tril()
    with torch.no_grad():
        torch.testing.assert_close(model.decode(ids, attention_mask=causal), model.decode(ids))
        prefix = causal.clone()
        prefix[:, :3, :3] = True
        changed = model.decode(ids, attention_mask=prefix)
    assert not torch.allclose(changed[:, 0], model.decode(ids)[:, 0])


def test_factorized_and_untied_embeddings() -> None:
    for more in ({"embedding_width": 8}, {"tie_embeddings": "none", "output_bias": True}):
        model, ids = build("transformer", **more), tokens(2, 4)
        with torch.no_grad():
            logits, _ = model.extend(ids, model.start(2))
            torch.testing.assert_close(logits, model(ids))
        assert logits.shape == (2, 4, VOCAB)


def test_dropout_of_rows_and_locked_dropout() -> None:
    model = build("lstm", dropout=LanguageDropout(embedding=0.5, input=0.3, locked=True)).train()
    ids = tokens(2, 40)
    torch.manual_seed(0)
    x = model.embed(ids)
    dropped = (x == 0).all(dim=-1)  # (B, T)
    assert not dropped[:, 0].any()  # a row's first token is kept
    for token in ids.unique():
        assert len(set(dropped[:, 1:][ids[:, 1:] == token].tolist())) <= 1  # every one or none
    assert 0 < dropped.double().mean() < 1
    kept = x[0][~dropped[0]]
    assert ((kept == 0).all(dim=0) | (kept != 0).all(dim=0)).all()  # one mask over positions
    assert (kept == 0).any()


@pytest.mark.parametrize(
    ("dropout", "rate"),
    [(None, 0.5), (LanguageDropout(), 0.0), (LanguageDropout(input=0.2), 0.2)],
)
@pytest.mark.parametrize("inner", [0, 64])
def test_the_input_is_dropped_once(
    dropout: LanguageDropout | None, rate: float, inner: int
) -> None:
    """At the language model's rate, whose default is model.dropout; factorized embeddings are
    dropped before the projection, which leaves no zeros.
    """
    config = ModelConfig(
        decoder=("lstm",),
        positions="none",
        width=128,
        heads=4,
        dropout=0.5,
        embedding_width=inner,
    )
    torch.manual_seed(1)
    model = build_language_model(config, vocab_size=VOCAB, dropout=dropout).train()
    zeros = (model.embed(tokens(8, 50)) == 0).double().mean()
    assert zeros.item() == pytest.approx(0.0 if inner else rate, abs=0.01)


@pytest.mark.parametrize("layers", [10, 16])
def test_the_first_gradient_of_a_deep_stack_with_embedding_dropout_is_finite(layers: int) -> None:
    """A vector that is zero in all layers would have its gradient grow by 1 / sqrt(epsilon)."""
    torch.manual_seed(0)
    dropout = LanguageDropout(embedding=0.5, input=0.5, locked=True)
    more = {"decoder": (f"transformer*{layers}",), "attention_bias": False}
    model = build("transformer_xl", dropout=dropout, **more).train()
    rows, memory = 32, 4
    previous = {
        name: torch.zeros(rows, *shape) for name, shape in model.carried_shapes(memory).items()
    }
    ids = tokens(rows, 6)
    hidden = model.decode_segment(ids, previous, filled=0).hidden
    torch.nn.functional.cross_entropy(model.project(hidden).flatten(0, 1), ids.flatten()).backward()
    norms = {name: float(each.grad.norm()) for name, each in model.named_parameters()}
    assert max(norms.values()) < 100, norms


def test_dropout_of_factorized_embeddings_hides_their_features() -> None:
    """Three of four features of E are hidden: so is any that could be computed from them."""
    dropout = LanguageDropout(input=0.75, output=0.75, locked=True)
    model = build("transformer", dropout=dropout, embedding_width=8).train()
    torch.manual_seed(1)
    ids = tokens(1, 40)
    x = model.embed(ids) - model.stack_input(torch.zeros(1, 40, model.decoder_width))
    assert torch.linalg.matrix_rank(x[0], rtol=1e-4) < 8
    hidden = model.decode(ids)[0]
    assert hidden.shape == (40, 8)
    hidden_features = (hidden == 0).all(dim=0)
    assert 0 < hidden_features.sum() < 8
    assert (hidden[:, ~hidden_features] != 0).all()


def test_weight_dropout_masks_hidden_weights_in_training_only() -> None:
    plain = build("lstm", decoder=("lstm(residual_connection=false)",))
    dropped = build("lstm", decoder=("lstm(residual_connection=false, weight_dropout=0.5)",))
    ids = tokens(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(dropped.decode(ids), plain.decode(ids))
        dropped.train()
        torch.manual_seed(3)
        found = dropped.decode(ids)
        # The same mask applied by hand to U.
        torch.manual_seed(3)
        module = plain.decoder.get_submodule("0.rnn.module")
        module.weight_hh_l0.copy_(ops.dropout(module.weight_hh_l0, 0.5))
        torch.testing.assert_close(found, plain.decode(ids))
        assert (module.weight_hh_l0 == 0).double().mean() == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (("cross_attention",), "a language model's block must have no cross-attention"),
        (("bilstm",), "must be causal; found bilstm"),
        (("lstm(attention=additive)",), "found attention=additive"),
        (
            ("lstm(locked_dropout=true, layers=3)",),
            "found layers=3; repeat the block instead: lstm*3",
        ),
    ],
)
def test_blocks_that_need_an_encoder_are_rejected(blocks: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(").replace("*", r"\*")):
        build_language_model(ModelConfig(decoder=blocks, width=16, heads=4), vocab_size=VOCAB)


def test_the_output_of_a_segment_is_given_before_and_after_dropout() -> None:
    """Activation regularization reads both; the logits are those after dropout."""
    torch.manual_seed(0)
    model = build("lstm", dropout=LanguageDropout(output=0.5)).train()
    raw, hidden, _ = model.decode_segment(tokens(2, 20), {})
    dropped = hidden == 0
    assert 0.4 < dropped.float().mean() < 0.6
    assert raw.all()
    torch.testing.assert_close(hidden[~dropped], 2 * raw[~dropped])


def test_max_distance_is_that_of_every_layer() -> None:
    settings = {"width": 16, "heads": 4, "dropout": 0.0} | BLOCKS["transformer_xl"]
    model = build_language_model(ModelConfig(**settings), vocab_size=VOCAB, max_distance=5)
    biases = [each for each in model.modules() if isinstance(each, TransformerXLBias)]
    assert [bias.max_distance for bias in biases] == [5, 5]
