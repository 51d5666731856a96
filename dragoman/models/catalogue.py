"""Blocks by the name they have in `model.encoder` and `model.decoder`; listing them imports no tensors."""

from __future__ import annotations

from dragoman.registry import Entry, Registry

BLOCKS = Registry(
    "block",
    self=Entry(
        "dragoman.models.transformer:TransformerLayer",
        "A Transformer layer: self-attention, in a decoder attention to the source, feed-forward.",
    ),
    conv=Entry(
        "dragoman.models.convolution:ConvolutionLayer",
        "A gated convolution, in a decoder with attention to the source: ConvS2S; conv(layers=3) for the paper's runs.",
    ),
    lstm=Entry(
        "dragoman.models.recurrent:LSTMLayer",
        "Long short-term memory, in a decoder with attention=NAME to the source.",
        exempt={"weights": "a plain recurrence attends to nothing"},
    ),
    gru=Entry(
        "dragoman.models.recurrent:GRULayer",
        "Gated recurrent units, in a decoder with attention=NAME to the source.",
        exempt={"weights": "a plain recurrence attends to nothing"},
    ),
    bilstm=Entry("dragoman.models.recurrent:BiLSTMLayer", "Long short-term memories from both ends; in an encoder."),
    bigru=Entry("dragoman.models.recurrent:BiGRULayer", "Gated recurrent units from both ends; in an encoder."),
    attend=Entry("dragoman.models.sublayers:AttendLayer", "Multi-head attention to the source alone; in a decoder."),
    feedforward=Entry(
        "dragoman.models.sublayers:FeedForwardLayer",
        "The feed-forward layer alone.",
        exempt={"weights": "it attends to nothing", "gradients": "a decoder of these alone never reads its encoder's output"},
    ),
)
