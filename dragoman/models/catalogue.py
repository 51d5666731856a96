"""Blocks by the name they have in `model.encoder` and `model.decoder`, and rules about them; listing them imports no tensors."""

from __future__ import annotations

from dragoman.registry import Entry, Registry

BLOCKS = Registry(
    "block",
    transformer=Entry(
        "dragoman.models.transformer:TransformerLayer",
        "A Transformer layer: self-attention, in a decoder attention to the source, feed-forward.",
        options="dragoman.models.block_options:TransformerOptions",
    ),
    conv=Entry(
        "dragoman.models.convolution:ConvolutionLayer",
        "A gated convolution, in a decoder with attention to the source: ConvS2S; conv(layers=3) for the paper's runs.",
        options="dragoman.models.block_options:ConvolutionOptions",
    ),
    lstm=Entry(
        "dragoman.models.rnn:LSTMLayer",
        "Long short-term memory, in a decoder with attention=NAME to the source.",
        options="dragoman.models.block_options:RNNOptions",
        exempt={"weights": "a plain recurrence attends to nothing"},
    ),
    gru=Entry(
        "dragoman.models.rnn:GRULayer",
        "Gated recurrent units, in a decoder with attention=NAME to the source.",
        options="dragoman.models.block_options:GRUOptions",
        exempt={"weights": "a plain recurrence attends to nothing"},
    ),
    bilstm=Entry(
        "dragoman.models.rnn:BiLSTMLayer",
        "Long short-term memories from both ends; in an encoder.",
        options="dragoman.models.block_options:BidirectionalRNNOptions",
    ),
    bigru=Entry(
        "dragoman.models.rnn:BiGRULayer",
        "Gated recurrent units from both ends; in an encoder.",
        options="dragoman.models.block_options:BidirectionalRNNOptions",
    ),
    reformer=Entry(
        "dragoman.models.reformer:Reformer",
        "Reversible layers, with attention by hashing (or attention=full); reformer(layers=6) for a run that keeps no activations.",
        options="dragoman.models.block_options:ReformerOptions",
    ),
    cross_attention=Entry(
        "dragoman.models.transformer:CrossAttentionLayer",
        "Multi-head attention to the source alone; in a decoder.",
        options="dragoman.models.block_options:CrossAttentionOptions",
    ),
    ffn=Entry(
        "dragoman.models.transformer:FeedForwardLayer",
        "The feed-forward layer alone.",
        options="dragoman.models.block_options:FeedForwardOptions",
        exempt={"weights": "it attends to nothing"},
    ),
)

RULES = Registry(
    "rule",
    stacks=Entry(
        "dragoman.models.block_rules:config_problems",
        "Every block is known, has the options it is given, and can stand where it stands.",
    ),
)
