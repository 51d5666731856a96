"""Registry of the blocks of `model.encoder` and `model.decoder`; needs no torch."""

from __future__ import annotations

from dragoman.registry import Entry, Registry

BLOCKS = Registry(
    "block",
    transformer=Entry(
        "dragoman.models.transformer_blocks:TransformerLayer",
        "Transformer layer: self-attention, in a decoder cross-attention, feed-forward network.",
        options="dragoman.models.block_options:TransformerOptions",
    ),
    conv=Entry(
        "dragoman.models.convs2s_blocks:ConvolutionLayer",
        "Gated convolution, in a decoder with attention (ConvS2S).",
        options="dragoman.models.block_options:ConvolutionOptions",
    ),
    lstm=Entry(
        "dragoman.models.rnn_blocks:LSTMLayer",
        "LSTM; in a decoder with attention=NAME.",
        options="dragoman.models.block_options:RNNOptions",
        exempt={"weights": "an RNN without attention has no attention weights"},
    ),
    gru=Entry(
        "dragoman.models.rnn_blocks:GRULayer",
        "GRU; in a decoder with attention=NAME.",
        options="dragoman.models.block_options:GRUOptions",
        exempt={"weights": "an RNN without attention has no attention weights"},
    ),
    bilstm=Entry(
        "dragoman.models.rnn_blocks:BiLSTMLayer",
        "Bidirectional LSTM; encoders only.",
        options="dragoman.models.block_options:BidirectionalRNNOptions",
    ),
    bigru=Entry(
        "dragoman.models.rnn_blocks:BiGRULayer",
        "Bidirectional GRU; encoders only.",
        options="dragoman.models.block_options:BidirectionalRNNOptions",
    ),
    tcn=Entry(
        "dragoman.models.tcn_blocks:TCNLayer",
        "Two causal dilated convolutions with a residual connection (TCN).",
        options="dragoman.models.block_options:TCNOptions",
        exempt={"weights": "it has no attention weights"},
    ),
    rnn=Entry(
        "dragoman.models.rnn_blocks:TanhRNNLayer",
        "Plain RNN (tanh); in a decoder with attention=NAME.",
        options="dragoman.models.block_options:TanhRNNOptions",
        exempt={"weights": "an RNN without attention has no attention weights"},
    ),
    sru=Entry(
        "dragoman.models.rnn_blocks:SRULayer",
        "Simple recurrent unit, parallel over units; in a decoder with attention=NAME.",
        options="dragoman.models.block_options:SRUOptions",
        exempt={"weights": "an RNN without attention has no attention weights"},
    ),
    birnn=Entry(
        "dragoman.models.rnn_blocks:BiTanhRNNLayer",
        "Bidirectional plain RNN; encoders only.",
        options="dragoman.models.block_options:BidirectionalRNNOptions",
    ),
    bisru=Entry(
        "dragoman.models.rnn_blocks:BiSRULayer",
        "Bidirectional SRU; encoders only.",
        options="dragoman.models.block_options:BidirectionalRNNOptions",
    ),
    sliced_rnn=Entry(
        "dragoman.models.rnn_blocks:SlicedRNNLayer",
        "Sliced RNN: slices in parallel, their last states in the next level; encoders only.",
        options="dragoman.models.block_options:SlicedRNNOptions",
    ),
    reformer=Entry(
        "dragoman.models.reformer_blocks:Reformer",
        "Reversible Transformer layers with LSH attention (or attention=full).",
        options="dragoman.models.block_options:ReformerOptions",
    ),
    cross_attention=Entry(
        "dragoman.models.transformer_blocks:CrossAttentionLayer",
        "Multi-head cross-attention alone; decoders only.",
        options="dragoman.models.block_options:CrossAttentionOptions",
    ),
    ffn=Entry(
        "dragoman.models.transformer_blocks:FeedForwardLayer",
        "Feed-forward network alone.",
        options="dragoman.models.block_options:FeedForwardOptions",
        exempt={"weights": "it has no attention weights"},
    ),
)
