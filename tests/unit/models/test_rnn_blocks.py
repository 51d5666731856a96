"""Recurrent blocks against PyTorch's cells and against loops written from the papers' equations."""

from __future__ import annotations

import pytest
import torch
from recurrent_kit import MASK, D, build_context, copy_weights
from torch import Tensor, nn

from dragoman.attention import SmoothedSoftmax, edit, heads_off, record
from dragoman.attention.catalogue import ALIGNMENTS, SCORES
from dragoman.config import ModelConfig, read_config
from dragoman.data.inference_batches import pad_sources
from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.search_interface import search
from dragoman.errors import ConfigError
from dragoman.layers.norms_and_residuals import NoResidual
from dragoman.layers.rnn import GRU, LSTM, MEMORY_SUMMARIES, RNN, SlicedRNN, TanhRNN
from dragoman.layers.rnn_decoders import RNN_DECODERS, AttentionDecoder
from dragoman.models.block_list_parser import parse_blocks
from dragoman.models.factory import build_model
from dragoman.models.forward_context import ForwardContext, Memory
from dragoman.models.rnn_blocks import (
    BiGRULayer,
    GRULayer,
    LSTMLayer,
    RNNLayer,
    SlicedRNNLayer,
    SRULayer,
)
from dragoman.recipes.catalogue import RECIPES, recipes_of
from dragoman.text.special_tokens import BOS, EOS


def decoder(kind: type[RNNLayer], **options: object) -> RNNLayer:
    torch.manual_seed(0)
    return kind.build(
        build_context(causal=True), **{"residual_connection": False, **options}
    ).double()  # type: ignore[arg-type]


def inputs() -> tuple[Tensor, Memory]:
    """Return targets (B, T, D) and a padded memory (B, S, D)."""
    torch.manual_seed(1)
    return torch.randn(2, 4, D, dtype=torch.float64), Memory(
        torch.randn(2, 5, D, dtype=torch.float64), MASK
    )


def attend(query: Tensor, values: Tensor) -> Tensor:
    """Attend to the memory (S, D) of one sentence with one query (D,): scaled dot product."""
    weights = (values @ query / D**0.5).softmax(0)
    return weights @ values


def build_rnn_decoder(name: str, *, layers: int, dropout: float = 0.0) -> AttentionDecoder:
    torch.manual_seed(0)
    return (
        RNN_DECODERS[name]
        .build(LSTM, D, memory_width=D, input_feeding=False, layers=layers, dropout=dropout)
        .double()
    )


@pytest.mark.parametrize("name", sorted(RNN_DECODERS))
@torch.no_grad()
def test_every_decoder_has_dropout_between_its_layers(name: str) -> None:
    """With a probability of 1 the upper layer reads zeros, and the context vector in GNMT."""
    layers, context = build_rnn_decoder(name, layers=2, dropout=1.0), inputs()[1].values[:, 0]

    def top_state(x: Tensor) -> Tensor:
        return layers.run(x, layers.zero_state(x), lambda _: context).rnn_state["hidden"][:, 1]

    x, _ = inputs()
    assert torch.equal(top_state(x), top_state(-x))
    layers.eval()
    assert not torch.equal(top_state(x), top_state(-x))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("attention", ["none", "dot"])
@pytest.mark.parametrize("name", sorted(RNN_DECODERS))
def test_model_dropout_reaches_the_stacked_layers_of_a_block(
    name: str, attention: str, causal: bool
) -> None:
    context = build_context(causal=causal, dropout=0.25)
    layer = GRULayer.build(context, attention=attention, decoder=name, layers=3)
    parts = [module.dropout for module in layer.modules() if isinstance(module, nn.GRU)]
    if attention == "dot" and causal and name == "gnmt":  # one RNN for each layer
        assert layer.attention_decoder.dropout == 0.25
    else:
        assert parts == [0.25]


def test_locked_dropout_of_a_block_has_one_mask_for_all_positions() -> None:
    torch.manual_seed(0)
    for locked in (False, True):
        layer = GRULayer.build(build_context(causal=False, dropout=0.5), locked_dropout=locked)
        dropped = layer.residual.apply_dropout(torch.ones(1, 50, D))
        assert torch.equal(dropped, dropped[:, :1].expand_as(dropped)) == locked


@torch.no_grad()
def test_dropout_spares_the_residual_connections_of_gnmt() -> None:
    layers, (x, memory) = build_rnn_decoder("gnmt", layers=3, dropout=1.0), inputs()
    context = memory.values[:, 0]
    found = layers.run(x, layers.zero_state(x), lambda _: context).output
    dropped = torch.cat([torch.zeros_like(x), context.unsqueeze(1).expand_as(x)], dim=-1)
    second, third = (rnn.run_forward(dropped) for rnn in layers.upper_layers)
    torch.testing.assert_close(found, second + third)


@pytest.mark.parametrize(
    ("name", "layer", "is_new"), [("bahdanau", 1, False), ("gnmt", 0, False), ("luong", 1, True)]
)
@torch.no_grad()
def test_decoders_of_two_layers_attend_with_the_state_of_their_paper(
    name: str, layer: int, is_new: bool
) -> None:
    """Bahdanau with the last state of the top layer, GNMT of the bottom one, Luong with the new."""
    layers, (x, memory) = build_rnn_decoder(name, layers=2), inputs()
    before = {state: torch.randn(2, 2, D, dtype=torch.float64) for state in layers.rnn.state_names}
    queries = list[Tensor]()

    def attend_to_first(query: Tensor) -> Tensor:
        queries.append(query)
        return memory.values[:, 0]

    after = layers.run(x[:, :1], before, attend_to_first).rnn_state
    torch.testing.assert_close(queries[0], (after if is_new else before)["hidden"][:, layer])


@pytest.mark.parametrize("input_feeding", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("initial_cell", [False, True])
@torch.no_grad()
def test_luong_step_by_step(input_feeding: bool, layers: int, initial_cell: bool) -> None:
    """Equation 5 and section 3.3 of Luong et al. (2015), a sentence and a position at a time; both
    first states from the memory.
    """
    layer = decoder(
        LSTMLayer,
        attention="scaled_dot",
        input_feeding=input_feeding,
        layers=layers,
        initial_state="last",
        initial_cell=initial_cell,
    )
    x, memory = inputs()
    found = layer(x, ForwardContext(memory=memory))
    cells = [
        copy_weights(
            layer.attention_decoder.rnn,
            n,
            nn.LSTMCell((1 + (input_feeding and n == 0)) * D, D).double(),
        )
        for n in range(layers)
    ]
    for row, length in enumerate((5, 3)):
        values = memory.values[row, :length]
        start = torch.tanh(layer.initial(values[-1])).view(layers, D)
        cell = (
            torch.tanh(layer.initial_cell(values[-1])).view(layers, D)
            if initial_cell
            else torch.zeros_like(start)
        )
        states = [(start[n], cell[n]) for n in range(layers)]
        attentional = torch.zeros(D, dtype=torch.float64)  # the h~ of the last step
        for step in range(4):
            hidden = torch.cat([x[row, step], attentional]) if input_feeding else x[row, step]
            for n, step_cell in enumerate(cells):
                states[n] = step_cell(hidden, states[n])
                hidden = states[n][0]
            attentional = torch.tanh(
                layer.attention_decoder.readout.weight @ torch.cat([attend(hidden, values), hidden])
            )
            torch.testing.assert_close(found[row, step], attentional)


@torch.no_grad()
def test_an_sru_decoder_starts_with_the_summary_as_its_cell() -> None:
    """An SRU reads its cell alone: with the hidden state only, it would ignore the source."""
    layer = decoder(SRULayer, initial_state="last")
    x, memory = inputs()
    found = layer(x, ForwardContext(memory=memory))
    cell = torch.tanh(layer.initial(memory.values[[0, 1], [4, 2]])).view(2, 1, D)
    state = {"hidden": torch.zeros_like(cell), "cell": cell}
    torch.testing.assert_close(found, layer.rnn.run(x, state).output)
    assert not torch.equal(found, layer.rnn.run_forward(x))


@pytest.mark.parametrize("input_feeding", [False, True])
@torch.no_grad()
def test_bahdanau_step_by_step(input_feeding: bool) -> None:
    """Sections 3.1 and A.2 of Bahdanau et al. (2015): the query is the previous state, the context
    is an input of the GRU, and the readout is a maxout layer; with input feeding the last readout
    is an input too.
    """
    layer = decoder(
        GRULayer,
        attention="additive",
        decoder="bahdanau",
        initial_state="first",
        input_feeding=input_feeding,
    )
    score = layer.cross.score
    w_a, u_a, v_a = score.query_proj.weight, score.key_proj.weight, score.energy.weight[0]
    x, memory = inputs()
    found = layer(x, ForwardContext(memory=memory))
    module = layer.attention_decoder.rnn.module
    wr, wz, wn = module.weight_ih_l0.split(D)
    ur, uz, un = module.weight_hh_l0.split(D)
    for bias in (module.bias_ih_l0, module.bias_hh_l0):
        assert not bias.any()  # the paper has none
    u_o, v_o, c_o = layer.attention_decoder.readout.weight.split(D, dim=1)
    for row, length in enumerate((5, 3)):
        values = memory.values[row, :length]
        state = torch.tanh(layer.initial(values[0]))
        readout = torch.zeros(D if input_feeding else 0, dtype=torch.float64)
        for step in range(4):
            energies = torch.stack(
                [v_a @ torch.tanh(w_a @ state + u_a @ value) for value in values]
            )
            context = energies.softmax(0) @ values
            joint = torch.cat([x[row, step], context, readout])
            reset, keep = (
                torch.sigmoid(wr @ joint + ur @ state),
                torch.sigmoid(wz @ joint + uz @ state),
            )
            proposal = torch.tanh(
                wn @ joint + reset * (un @ state)
            )  # the paper has U (r o s), the kernels r o (U s)
            state = (1 - keep) * proposal + keep * state
            pairs = u_o @ state + v_o @ x[row, step] + c_o @ context
            maxout = torch.maximum(pairs[0::2], pairs[1::2])
            torch.testing.assert_close(found[row, step], maxout)
            readout = maxout if input_feeding else readout


@torch.no_grad()
def test_gnmt_step_by_step() -> None:
    """Wu et al. (2016), section 3: the context of the lowest layer is an input of every layer;
    residual connections from the third layer on.
    """
    layer = decoder(
        LSTMLayer, attention="scaled_dot", decoder="gnmt", layers=4, initial_state="zero"
    )
    x, memory = inputs()
    found = layer(x, ForwardContext(memory=memory))
    rnns = [layer.attention_decoder.rnn, *layer.attention_decoder.upper_layers]  # type: ignore[misc]
    cells = [copy_weights(each, 0, nn.LSTMCell(2 * D, D).double()) for each in rnns]
    for row, length in enumerate((5, 3)):
        states = [(torch.zeros(D, dtype=torch.float64),) * 2 for _ in cells]
        for step in range(4):
            context = attend(states[0][0], memory.values[row, :length])
            flow = x[row, step]
            for n, cell in enumerate(cells):
                states[n] = cell(torch.cat([flow, context]), states[n])
                flow = states[n][0] + flow if n >= 2 else states[n][0]
            torch.testing.assert_close(found[row, step], flow)


@pytest.mark.parametrize(
    ("score", "alignment"),
    [
        *((score, "softmax") for score in SCORES),
        *(("additive", alignment) for alignment in ALIGNMENTS),
    ],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"input_feeding": True}, {"decoder": "bahdanau"}, {"decoder": "gnmt", "layers": 3}],
)
@torch.no_grad()
def test_incremental_decoding_equals_forward_with_every_score_and_alignment(
    score: str, alignment: str, options: dict[str, object]
) -> None:
    layer = decoder(GRULayer, attention=score, alignment=alignment, **options).eval()
    x, memory = inputs()
    whole = layer(x, ForwardContext(memory=memory))
    state, children = layer.start(ForwardContext(memory=memory)), []
    for piece in (x[:, :1], x[:, 1:3], x[:, 3:]):
        output, state = layer.extend(piece, state)
        children.append(output)
    torch.testing.assert_close(torch.cat(children, 1), whole)
    short = layer(
        x[1:], ForwardContext(memory=Memory(memory.values[1:, :3]))
    )  # without its padding
    torch.testing.assert_close(whole[1:], short)


@pytest.mark.parametrize("options", [{}, {"input_feeding": True}, {"decoder": "bahdanau"}])
@torch.no_grad()
def test_attention_is_noted_once_for_all_positions(options: dict[str, object]) -> None:
    layer = decoder(LSTMLayer, attention="scaled_dot", **options)
    x, memory = inputs()
    with record(layer) as notes:
        layer(x, ForwardContext(memory=memory))
    assert [note.weights.shape for note in notes.calls("cross")] == [(2, 1, 4, 5)]
    assert not notes["cross"].weights[1, :, :, 3:].any()
    scores = notes["cross"].scores
    assert scores is not None
    assert scores.shape == (2, 1, 4, 5)
    with edit(layer, {"cross": heads_off([0])}), record(layer) as off:
        layer(x, ForwardContext(memory=memory))
    assert not off["cross"].output.any()
    assert layer.cross.hooks is None


@torch.no_grad()
def test_the_state_is_named_tensors_with_rows_first() -> None:
    layer = decoder(LSTMLayer, attention="scaled_dot", input_feeding=True, layers=2)
    x, memory = inputs()
    state = layer.extend(x, layer.start(ForwardContext(memory=memory))).state
    assert {name: tuple(tensor.shape) for name, tensor in state.recurrent.items()} == {
        "hidden": (2, 2, D),
        "cell": (2, 2, D),
        "previous_output": (2, D),
        "alignment.mask": (2, 5),
    }
    assert state.length == 4


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@torch.no_grad()
def test_bidirectional_final_states_are_the_encoders_last_states(kind: str) -> None:
    """Against PyTorch's own bidirectional network, a sentence at a time: its last states are h_n
    (and Bahdanau's is the backward one).
    """
    torch.manual_seed(0)
    config = ModelConfig(
        encoder=(f"bi{kind}(residual_connection=false)",),
        decoder=(f"{kind}(initial_state=last_bidirectional)",),
        width=D,
        heads=1,
        positions="none",
        dropout=0.0,
    )
    model = build_model(config, src_vocab_size=9, tgt_vocab_size=9).double().eval()
    src = torch.tensor([[4, 5, 6, 7, 8], [8, 7, 6, 0, 0]])
    memory = model.encode(src, MASK)
    (_, layer), *_ = model.encoder.blocks()
    network = (nn.LSTM if kind == "lstm" else nn.GRU)(
        D, D // 2, bidirectional=True, batch_first=True
    ).double()
    weights = {**layer.rnn.forward_rnn.module.state_dict()} | {
        f"{k}_reverse": v for k, v in layer.rnn.backward_rnn.module.state_dict().items()
    }
    network.load_state_dict(weights)
    for row, length in enumerate((5, 3)):
        _, after = network(model.src_input(model.embeddings["shared"](src[row : row + 1, :length])))
        forward, back = (after[0] if kind == "lstm" else after).unbind()
        torch.testing.assert_close(
            MEMORY_SUMMARIES["last_bidirectional"](memory.values, MASK)[row],
            torch.cat([forward[0], back[0]]),
        )
        torch.testing.assert_close(
            MEMORY_SUMMARIES["last_backward"](memory.values, MASK)[row], back[0]
        )


@pytest.mark.parametrize("name", recipes_of("translate"))
def test_recipes_hand_over_the_states_that_their_papers_do(name: str) -> None:
    """Luong, Xu and See: hidden state and cell of the LSTM; Bahdanau: the final backward state of
    the GRU; GNMT, Raffel and Domhan: none.
    """
    config = RECIPES.load(name)()
    specs = [spec for spec in parse_blocks(config.model.decoder) if spec.name in ("lstm", "gru")]
    both = name.startswith("luong2015") or name in ("xu2015", "see2017")
    for spec in specs:
        assert spec.options.get("initial_cell", False) == both
        assert (spec.options["initial_state"] == "zero") == (
            not both and name not in ("bahdanau2015", "chorowski2015", "sutskever2014")
        )
    if name == "bahdanau2015":
        assert specs[0].options["initial_state"] == "last_backward"


def test_weights_from_before_the_cell_state_load_as_they_were() -> None:
    """A bundle's configuration that does not name initial_cell has no weights for it, and its cell
    starts at zero.
    """
    config = ModelConfig(
        encoder=("bilstm",), decoder=("lstm(attention=dot, initial_state=first)",), width=D, heads=1
    )
    model = build_model(config, src_vocab_size=9, tgt_vocab_size=9)
    assert {path.rpartition(".")[0] for path in model.state_dict() if "initial" in path} == {
        "decoder.0.initial"
    }
    state = model.start(model.encode(torch.tensor([[4, 5]])))
    assert not state.children["decoder"].children["0"].recurrent["cell"].any()


def test_without_the_final_state_a_plain_decoder_ignores_the_source() -> None:
    x, memory = inputs()
    other = Memory(memory.values + 1, memory.mask)
    zeroed, conditioned = decoder(GRULayer, initial_state="zero"), decoder(GRULayer)
    assert zeroed(x, ForwardContext(memory=memory)).equal(zeroed(x, ForwardContext(memory=other)))
    assert not conditioned(x, ForwardContext(memory=memory)).equal(
        conditioned(x, ForwardContext(memory=other))
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention": "scaled_dot", "input_feeding": True},
        {"attention": "scaled_dot", "decoder": "bahdanau"},
        {"attention": "scaled_dot", "decoder": "gnmt"},
    ],
)
def test_dropout_between_layers_works_in_training_only(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    layer = LSTMLayer.build(
        build_context(causal=True, dropout=0.5), residual_connection=False, layers=2, **options
    ).double()  # type: ignore[arg-type]
    layer.residual = NoResidual(dropout=0.0)  # the block's output has dropout too
    x, memory = inputs()
    assert not layer(x, ForwardContext(memory=memory)).equal(
        layer(x, ForwardContext(memory=memory))
    )
    layer.eval()
    assert layer(x, ForwardContext(memory=memory)).equal(layer(x, ForwardContext(memory=memory)))


@torch.no_grad()
def test_locked_dropout_is_the_same_at_all_positions() -> None:
    torch.manual_seed(0)
    context = build_context(causal=True, dropout=0.5)
    layer = GRULayer.build(context, residual_connection=False, locked_dropout=True).double()
    x, memory = inputs()
    dropped = layer(x, ForwardContext(memory=memory)) == 0
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    assert 0 < dropped.sum() < dropped.numel()


@pytest.mark.parametrize("chunk_size", [1, 2])
@torch.no_grad()
def test_mocha_attends_to_chunk_size_keys(chunk_size: int) -> None:
    layer = decoder(LSTMLayer, attention="mocha", chunk_size=chunk_size).eval()
    nn.init.zeros_(layer.cross.alignment.offset)
    nn.init.normal_(layer.cross.score.energy.weight)
    x, memory = inputs()
    with record(layer) as notes:
        layer(x, ForwardContext(memory=memory))
    assert notes["cross"].scores is not None
    first_stops = (notes["cross"].scores[0, 0] > 0).int().argmax(dim=1)
    assert first_stops.tolist() == [1] * 4  # the head stops at the second key
    assert notes["cross"].weights[0, 0].count_nonzero(dim=1).tolist() == [chunk_size] * 4


@pytest.mark.parametrize(
    ("block", "causal", "problem"),
    [
        ("bilstm", True, "must be causal; found bilstm, which is bidirectional; use lstm"),
        ("bigru", True, "must be causal; found bigru, which is bidirectional; use gru"),
        (
            "lstm(decoder=during)",
            True,
            "decoder of 'lstm(decoder=during)' in model.decoder must be one of bahdanau, "
            "luong, gnmt; found 'during'",
        ),
        (
            "gru(initial_state=midst)",
            True,
            "must be one of first, last, mean, last_backward, last_bidirectional, encoder, "
            "zero; found 'midst'",
        ),
        (
            "lstm(layers=0)",
            True,
            "layers of 'lstm(layers=0)' in model.decoder must be at least 1; found 0",
        ),
        ("lstm(attention=scaled_dots)", True, "found 'scaled_dots'; did you mean scaled_dot"),
        (
            "lstm(attention=mocha, alignment=monotonic)",
            True,
            "one alignment; found attention=mocha and alignment=monotonic; set one, or a "
            "score for it",
        ),
        (
            "lstm(attention=scaled_dot, alignment=softmaxx)",
            True,
            "found 'softmaxx'; did you mean softmax",
        ),
        (
            "lstm(attention=scaled_dot)",
            False,
            "is for decoders; found attention=scaled_dot",
        ),
        (
            "gru(input_feeding=true)",
            True,
            "input_feeding needs attention; found input_feeding=true with attention=none",
        ),
        (
            "lstm(attention=dot, decoder=gnmt, input_feeding=true)",
            True,
            "decoder=gnmt has no input feeding; found input_feeding=true",
        ),
        ("gru(reverse=true)", True, "found reverse=true in a decoder"),
        (
            "gru(initial_cell=true)",
            True,
            "initial_cell needs an LSTM's cell state; found initial_cell=true in a gru; "
            "leave it out, or use lstm",
        ),
        ("lstm(initial_cell=true)", False, "found initial_cell=true in an encoder; leave it out"),
        (
            "lstm(attention=dot, initial_state=zero, initial_cell=true)",
            True,
            "found initial_cell=true with initial_state=zero; leave it out",
        ),
        (
            "lstm(initial_state=last_bidirectional)",
            True,
            "ends in bigru or bilstm; found initial_state=last_bidirectional with "
            "model.encoder=[transformer]; use first, last or mean",
        ),
        (
            "gru(initial_state=last_backward)",
            True,
            "found initial_state=last_backward with model.encoder=[transformer]",
        ),
        (
            "lstm(initial_state=encoder)",
            True,
            "block with as many layers; found layers=1 with model.encoder=[transformer]; "
            "make the two equal, or use last or mean",
        ),
        ("sru(weight_dropout=0.5)", True, "found weight_dropout=0.5; leave it out, or use lstm"),
        ("sru(initial_cell=true)", True, "found initial_cell=true in a sru; leave it out"),
        ("birnn", True, "must be causal; found birnn, which is bidirectional; use rnn"),
        ("sliced_rnn", True, "must be causal; found sliced_rnn"),
        (
            "sliced_rnn(slice_length=1)",
            False,
            "slice_length of 'sliced_rnn(slice_length=1)' in model.encoder must be at least "
            "2; found 1",
        ),
    ],
)
def test_unsupported_rnn_options_are_rejected(block: str, causal: bool, problem: str) -> None:
    stacks = {"encoder": ("transformer",), "decoder": ("transformer",)} | {
        "decoder" if causal else "encoder": (block,)
    }
    with pytest.raises(ConfigError) as caught:
        build_model(
            ModelConfig(**stacks, width=8, heads=2, ffn_width=8), src_vocab_size=9, tgt_vocab_size=9
        )
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("encoder", "decoder", "problem"),
    [
        ("lstm(layers=2)", "lstm(layers=3, initial_state=encoder)", "found layers=3 with model"),
        ("gru", "lstm(initial_state=encoder)", "found layers=1 with model.encoder=[gru]"),
        ("bilstm", "lstm(initial_state=encoder)", "found layers=1 with model.encoder=[bilstm]"),
        (
            "lstm",
            "lstm(attention=dot, initial_state=encoder, decoder=gnmt)",
            "found decoder=gnmt; make the two equal",
        ),
        (
            "lstm",
            "lstm(attention=dot, initial_state=encoder, initial_cell=true)",
            "found initial_cell=true with initial_state=encoder; leave it out",
        ),
        (
            "lstm",
            "lstm(initial_state=encoder)",
            "found a residual connection in 'lstm' of model.encoder; add "
            "residual_connection=false to it",
        ),
    ],
)
def test_final_states_are_copied_only_between_equal_cells(
    encoder: str, decoder: str, problem: str
) -> None:
    config = ModelConfig(encoder=(encoder,), decoder=(decoder,), width=8, heads=2, positions="none")
    with pytest.raises(ConfigError) as caught:
        build_model(config, src_vocab_size=9, tgt_vocab_size=9)
    assert problem in str(caught.value)


def test_an_encoder_whose_states_are_copied_is_never_skipped() -> None:
    config = ModelConfig(
        encoder=("gru",), decoder=("gru(attention=dot, initial_state=encoder)",), layer_drop=0.1
    )
    with pytest.raises(ConfigError, match=r"cannot be skipped; found model\.layer_drop=0\.1"):
        build_model(config, src_vocab_size=9, tgt_vocab_size=9)


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn", "sru"])
@torch.no_grad()
def test_a_decoder_without_attention_continues_from_the_encoders_final_states(kind: str) -> None:
    """Sutskever et al. (2014): one RNN over the reversed source, another from its final states;
    PyTorch's modules where there are some.
    """
    torch.manual_seed(0)
    options = "layers=2, residual_connection=false"
    config = ModelConfig(
        encoder=(f"{kind}({options}, reverse=true)",),
        decoder=(f"{kind}({options}, initial_state=encoder)",),
        width=D,
        heads=1,
        positions="none",
        dropout=0.0,
        scale_embeddings=False,
    )
    model = build_model(config, src_vocab_size=12, tgt_vocab_size=12).double().eval()
    for weight in model.parameters():
        weight.normal_(std=0.5)
    mask = torch.arange(6) < torch.tensor([[6], [2], [4]])
    src, tgt = torch.randint(4, 12, (3, 6)), torch.randint(4, 12, (3, 5))
    found = model(src, tgt, mask)
    table = model.embeddings["shared"].weight
    encoder = model.encoder.get_submodule("0").rnn
    decoder = model.decoder.get_submodule("0").rnn
    for row, length in enumerate((6, 2, 4)):
        source = table[src[row, :length].flip(0)].unsqueeze(0)
        target = table[tgt[row]].unsqueeze(0)
        if kind == "sru":
            state = encoder.run(source, encoder.zero_state(source)).rnn_state
            hidden = decoder.run(target, state).output
        else:
            state = encoder.module(source)[1]
            hidden = decoder.module(target, state)[0]
        torch.testing.assert_close(found[row], hidden[0] @ table.t())
    state = model.start(model.encode(src, mask))
    for position in range(5):
        logits, state = model.step(tgt[:, position], state)
        torch.testing.assert_close(logits, found[:, position])


@pytest.mark.parametrize(("cell", "kind"), [("gru", GRU), ("lstm", LSTM), ("rnn", TanhRNN)])
@torch.no_grad()
def test_a_sliced_rnn_has_the_cells_levels_and_slices_of_its_options(
    cell: str, kind: type[RNN]
) -> None:
    layer = SlicedRNNLayer.build(
        build_context(causal=False),
        cell=cell,
        slice_length=2,
        levels=3,
        residual_connection=False,
    ).double()
    expected = SlicedRNN([kind(D, D) for _ in range(3)], 2).double()
    expected.load_state_dict(layer.sliced.state_dict())
    x = torch.randn(2, 9, D, dtype=torch.float64)
    torch.testing.assert_close(layer(x, ForwardContext()), expected(x, None))


def test_bidirectional_rnn_needs_an_even_width() -> None:
    config = ModelConfig(encoder=("bilstm",), decoder=("lstm",), width=7, heads=1, positions="none")
    with pytest.raises(
        ConfigError,
        match=(
            r"'bilstm': model\.width must be even for a bidirectional RNN; found 7; try "
            r"model\.width=8"
        ),
    ):
        build_model(config, src_vocab_size=9, tgt_vocab_size=9)


@pytest.mark.parametrize(
    "block",
    [
        "lstm",
        "gru(attention=additive, decoder=bahdanau)",
        "lstm(attention=general, input_feeding=true)",
        "lstm(attention=mocha, decoder=gnmt, layers=2)",
        "gru(attention=coverage)",
    ],
)
def test_beams_are_scored_as_with_the_target_known(block: str) -> None:
    """The incremental decoder and teacher forcing agree, whatever beams were reordered and dropped
    (tensor2tensor#917).
    """
    torch.manual_seed(11)
    config = ModelConfig(encoder=("bilstm",), decoder=(block,), width=16, heads=2, dropout=0.0)
    model = build_model(config, src_vocab_size=12, tgt_vocab_size=12).eval()
    for weight in model.parameters():
        weight.data.mul_(2.0)  # so that logits differ and beams are reordered
    sources = [[5, 6, 7, 8], [9], [4, 10, 4], [11, 11, 6, 5, 4, 8, 9]]
    with torch.no_grad():
        memory = model.encode(*pad_sources(sources))
        found = search(
            model, memory, limits=torch.tensor([3, 9, 1, 6]), strategy=BeamSearch(size=3, nbest=3)
        )
        for source, hypotheses in zip(sources, found, strict=True):
            for each in hypotheses:
                written = [*each.tokens, EOS] if each.finished else each.tokens
                log_probs = model(pad_sources([source]).ids, torch.tensor([[BOS, *written[:-1]]]))[
                    0
                ].log_softmax(-1)
                expected = [float(log_probs[at, token]) for at, token in enumerate(written)]
                assert each.log_probs == pytest.approx(expected, abs=1e-4)


@torch.no_grad()
def test_recurrent_blocks_mix_with_others() -> None:
    """Hybrids: the lists of the architecture's own example as they are written, stepped as in one
    pass.
    """
    torch.manual_seed(0)
    stacks = [
        "model.encoder=[conv*2, transformer*3, bilstm]",
        "model.decoder=[lstm(attention=monotonic), transformer*2]",
    ]
    sizes = [
        "model.width=16",
        "model.heads=2",
        "model.ffn_width=16",
        "model.dropout=0",
        "model.residual=pre_norm",
    ]
    config = read_config(overrides=[*stacks, *sizes]).model
    model = build_model(config, src_vocab_size=12, tgt_vocab_size=12).double().eval()
    src, tgt = torch.randint(4, 12, (2, 5)), torch.randint(4, 12, (2, 4))
    state, children = model.start(model.encode(src, MASK)), []
    for token in tgt.unbind(1):
        logits, state = model.step(token, state)
        children.append(logits)
    torch.testing.assert_close(torch.stack(children, 1), model(src, tgt, MASK))


def test_weights_load_into_a_meta_model() -> None:
    """A bundle is loaded into a model on the meta device."""
    config = ModelConfig(
        encoder=("bigru",),
        decoder=("gru(attention=scaled_dot, decoder=bahdanau)",),
        width=8,
        heads=2,
        dropout=0.0,
    )
    torch.manual_seed(0)
    whole = build_model(config, src_vocab_size=9, tgt_vocab_size=9).eval()
    with torch.device("meta"):
        empty = build_model(config, src_vocab_size=9, tgt_vocab_size=9).eval()
    empty.load_state_dict(whole.state_dict(), assign=True)
    src, tgt = torch.randint(4, 9, (2, 5)), torch.randint(4, 9, (2, 3))
    assert empty(src, tgt, MASK).equal(whole(src, tgt, MASK))


def test_options_of_attention_reach_the_alignment() -> None:
    location = decoder(LSTMLayer, attention="location_sensitive", radius=3, smoothing=True)
    assert location.cross.alignment.filters.kernel_size == (7,)
    assert isinstance(location.cross.alignment.base_alignment, SmoothedSoftmax)
    local = decoder(LSTMLayer, attention="dot", alignment="local_m", radius=2)
    assert local.cross.alignment.radius == 2
    assert decoder(LSTMLayer, attention="mocha", chunk_size=3).cross.alignment.chunk_size == 3


def test_directions_and_levels_have_weights_of_their_own() -> None:
    context = build_context(causal=False)
    both = BiGRULayer.build(context).rnn
    assert not set(both.forward_rnn.parameters()) & set(both.backward_rnn.parameters())
    sliced = SlicedRNNLayer.build(context, slice_length=3, levels=3).sliced
    assert sliced.slice_length == 3
    assert len(set(sliced.parameters())) == 3 * 4
