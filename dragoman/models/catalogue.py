"""Blocks by the name they have in `model.encoder` and `model.decoder`, and rules about them; listing them imports no tensors."""

from __future__ import annotations

from dragoman.registry import Entry, Registry

BLOCKS = Registry(
    "block",
    self=Entry(
        "dragoman.models.transformer:TransformerLayer",
        "A Transformer layer: self-attention, in a decoder attention to the source, feed-forward.",
        options="dragoman.models.options:TransformerOptions",
    ),
    conv=Entry(
        "dragoman.models.convolution:ConvolutionLayer",
        "A gated convolution, in a decoder with attention to the source: ConvS2S; conv(layers=3) for the paper's runs.",
        options="dragoman.models.options:ConvolutionOptions",
    ),
    lstm=Entry(
        "dragoman.models.recurrent:LSTMLayer",
        "Long short-term memory, in a decoder with attention=NAME to the source.",
        options="dragoman.models.options:RecurrentOptions",
        exempt={"weights": "a plain recurrence attends to nothing"},
    ),
    gru=Entry(
        "dragoman.models.recurrent:GRULayer",
        "Gated recurrent units, in a decoder with attention=NAME to the source.",
        options="dragoman.models.options:GRUOptions",
        exempt={"weights": "a plain recurrence attends to nothing"},
    ),
    bilstm=Entry(
        "dragoman.models.recurrent:BiLSTMLayer",
        "Long short-term memories from both ends; in an encoder.",
        options="dragoman.models.options:TwoSidedOptions",
    ),
    bigru=Entry(
        "dragoman.models.recurrent:BiGRULayer",
        "Gated recurrent units from both ends; in an encoder.",
        options="dragoman.models.options:TwoSidedOptions",
    ),
    reformer=Entry(
        "dragoman.models.reformer:Reformer",
        "Reversible layers, with attention by hashing (or attention=full); reformer(layers=6) for a run that keeps no activations.",
        options="dragoman.models.options:ReformerOptions",
    ),
    attend=Entry(
        "dragoman.models.sublayers:AttendLayer",
        "Multi-head attention to the source alone; in a decoder.",
        options="dragoman.models.options:AttendOptions",
    ),
    feedforward=Entry(
        "dragoman.models.sublayers:FeedForwardLayer",
        "The feed-forward layer alone.",
        options="dragoman.models.options:FeedForwardOptions",
        exempt={"weights": "it attends to nothing"},
    ),
)

RULES = Registry(
    "rule",
    stacks=Entry("dragoman.models.rules:stacks", "Every block is known, has the options it is given, and can stand where it stands."),
)
