"""Recipes by name; each is a function that returns a configuration."""

from __future__ import annotations

from dragoman.registry import Entry, Registry

TRANSFORMER, RECURRENT, CONVOLUTIONAL, LADDER = "Transformer", "recurrent", "convolutional", "merging ladder"
VARIANTS = "Transformer variants"

RECIPES = Registry(
    "recipe",
    tiny=Entry(
        "dragoman.recipes.transformer:tiny",
        "A Transformer of 1.4 million weights that two CPU cores train in ten minutes.",
        family=TRANSFORMER,
    ),
    small=Entry(
        "dragoman.recipes.transformer:small",
        "A Transformer of 9 million weights for up to a few hundred thousand pairs.",
        family=TRANSFORMER,
    ),
    vaswani2017_base=Entry(
        "dragoman.recipes.transformer:vaswani2017_base", "The base Transformer of 'Attention Is All You Need'.", family=TRANSFORMER
    ),
    vaswani2017_big=Entry(
        "dragoman.recipes.transformer:vaswani2017_big", "The big Transformer of 'Attention Is All You Need'.", family=TRANSFORMER
    ),
    shaw2018=Entry("dragoman.recipes.variants:shaw2018", "Transformer with relative positions in the keys.", family=VARIANTS),
    dai2019=Entry("dragoman.recipes.variants:dai2019", "Transformer with Transformer-XL's relative positions.", family=VARIANTS),
    su2021=Entry("dragoman.recipes.variants:su2021", "Transformer with rotary positions (RoFormer).", family=VARIANTS),
    press2022=Entry("dragoman.recipes.variants:press2022", "Transformer whose scores fall with the distance (ALiBi).", family=VARIANTS),
    raffel2020=Entry(
        "dragoman.recipes.variants:raffel2020", "Transformer with T5's layers: its norm, buckets of distances, no biases.", family=VARIANTS
    ),
    xiong2020=Entry(
        "dragoman.recipes.variants:xiong2020", "Transformer with the norm inside the way around, without warm-up.", family=VARIANTS
    ),
    nguyen2019=Entry("dragoman.recipes.variants:nguyen2019", "Transformer for little data: ScaleNorm and FixNorm.", family=VARIANTS),
    lan2020=Entry(
        "dragoman.recipes.variants:lan2020", "Transformer whose layers share weights, embeddings factorised (ALBERT).", family=VARIANTS
    ),
    fan2020=Entry(
        "dragoman.recipes.variants:fan2020", "Transformer with 12 + 6 layers, a fifth left out at random (LayerDrop).", family=VARIANTS
    ),
    zhang2019=Entry(
        "dragoman.recipes.variants:zhang2019",
        "Transformer with 12 + 12 layers, first weights smaller with depth (DS-Init).",
        family=VARIANTS,
    ),
    shazeer2020=Entry("dragoman.recipes.variants:shazeer2020", "Transformer whose heads talk to each other.", family=VARIANTS),
    shazeer2020_glu=Entry(
        "dragoman.recipes.variants:shazeer2020_glu", "Transformer with gated feed-forward layers (SwiGLU).", family=VARIANTS
    ),
    ainslie2023=Entry("dragoman.recipes.variants:ainslie2023", "Transformer whose heads share keys and values by groups.", family=VARIANTS),
    henry2020=Entry(
        "dragoman.recipes.variants:henry2020", "Transformer for little data: queries and keys normalised (QKNorm).", family=VARIANTS
    ),
    bhojanapalli2020=Entry(
        "dragoman.recipes.variants:bhojanapalli2020", "Transformer with heads as wide as a sentence is long.", family=VARIANTS
    ),
    vaswani2017_restricted=Entry(
        "dragoman.recipes.variants:vaswani2017_restricted", "Transformer whose self-attention sees neighbours only.", family=VARIANTS
    ),
    kitaev2020=Entry(
        "dragoman.recipes.reformer:kitaev2020", "The Reformer for documents: hashing, reversible layers, chunks.", family=TRANSFORMER
    ),
    kitaev2020_wmt=Entry(
        "dragoman.recipes.reformer:kitaev2020_wmt", "The same for sentences: a base Transformer of reversible layers.", family=TRANSFORMER
    ),
    bahdanau2015=Entry(
        "dragoman.recipes.recurrent:bahdanau2015", "RNNsearch: gated units, additive attention asked before each step.", family=RECURRENT
    ),
    luong2015_general=Entry(
        "dragoman.recipes.recurrent:luong2015_general",
        "Four LSTM layers, global attention with the general score, input feeding.",
        family=RECURRENT,
    ),
    luong2015_dot=Entry("dragoman.recipes.recurrent:luong2015_dot", "The same with the dot product.", family=RECURRENT),
    luong2015_concat=Entry(
        "dragoman.recipes.recurrent:luong2015_concat", "The same with a small network for the score (concat).", family=RECURRENT
    ),
    luong2015_location=Entry(
        "dragoman.recipes.recurrent:luong2015_location", "The same with weights from the target state alone.", family=RECURRENT
    ),
    luong2015_local_m=Entry("dragoman.recipes.recurrent:luong2015_local_m", "The same in a window that walks along.", family=RECURRENT),
    luong2015_local_p=Entry(
        "dragoman.recipes.recurrent:luong2015_local_p", "The same in a window whose place is predicted.", family=RECURRENT
    ),
    wu2016=Entry("dragoman.recipes.recurrent:wu2016", "GNMT: eight LSTM layers a side, the lowest asks for all.", family=RECURRENT),
    chorowski2015=Entry(
        "dragoman.recipes.aligned:chorowski2015", "Gated units, attention that knows where it looked last; by characters.", family=RECURRENT
    ),
    raffel2017=Entry(
        "dragoman.recipes.aligned:raffel2017", "Two LSTM layers, monotonic attention: one walk along the source.", family=RECURRENT
    ),
    chiu2018=Entry(
        "dragoman.recipes.aligned:chiu2018", "Monotonic attention with a soft look back over a few words (MoChA).", family=RECURRENT
    ),
    xu2015=Entry("dragoman.recipes.aligned:xu2015", "Hard attention: one source word at a time, trained by reward.", family=RECURRENT),
    see2017=Entry("dragoman.recipes.aligned:see2017", "Coverage in the score and in the loss: nothing is said twice.", family=RECURRENT),
    gehring2017=Entry(
        "dragoman.recipes.convolution:gehring2017",
        "ConvS2S: gated convolutions, attention in every layer; 11 million weights.",
        family=CONVOLUTIONAL,
    ),
    domhan2018_transformer=Entry(
        "dragoman.recipes.ladder:domhan2018_transformer",
        "Both ladders' top: a Transformer of six layers with its norms inside.",
        family=LADDER,
    ),
    domhan2018_rnn=Entry(
        "dragoman.recipes.ladder:domhan2018_rnn", "Ladder: residual LSTMs, one attention of one head at the decoder's end.", family=LADDER
    ),
    domhan2018_rnn_mh=Entry("dragoman.recipes.ladder:domhan2018_rnn_mh", "Ladder: the same with multi-head attention.", family=LADDER),
    domhan2018_rnn_pos=Entry("dragoman.recipes.ladder:domhan2018_rnn_pos", "Ladder: and with positions.", family=LADDER),
    domhan2018_rnn_norm=Entry("dragoman.recipes.ladder:domhan2018_rnn_norm", "Ladder: and with norms.", family=LADDER),
    domhan2018_rnn_multi_att_1h=Entry(
        "dragoman.recipes.ladder:domhan2018_rnn_multi_att_1h", "Ladder: and with attention of one head after every LSTM.", family=LADDER
    ),
    domhan2018_rnn_multi_att=Entry(
        "dragoman.recipes.ladder:domhan2018_rnn_multi_att", "Ladder: and with multi-head attention after every LSTM.", family=LADDER
    ),
    domhan2018_rnn_ff=Entry(
        "dragoman.recipes.ladder:domhan2018_rnn_ff",
        "Ladder: and with a feed-forward layer after every LSTM; an RNN on both sides.",
        family=LADDER,
    ),
    domhan2018_cnn=Entry(
        "dragoman.recipes.ladder:domhan2018_cnn", "Ladder: residual convolutions, attention of one head after each.", family=LADDER
    ),
    domhan2018_cnn_norm=Entry("dragoman.recipes.ladder:domhan2018_cnn_norm", "Ladder: the same with norms.", family=LADDER),
    domhan2018_cnn_mh=Entry("dragoman.recipes.ladder:domhan2018_cnn_mh", "Ladder: and with multi-head attention.", family=LADDER),
    domhan2018_cnn_ff=Entry(
        "dragoman.recipes.ladder:domhan2018_cnn_ff", "Ladder: and with feed-forward layers; a CNN on both sides.", family=LADDER
    ),
    domhan2018_self_rnn=Entry("dragoman.recipes.ladder:domhan2018_self_rnn", "Self-attention reads, LSTMs write.", family=LADDER),
    domhan2018_self_cnn=Entry("dragoman.recipes.ladder:domhan2018_self_cnn", "Self-attention reads, convolutions write.", family=LADDER),
    domhan2018_rnn_self=Entry("dragoman.recipes.ladder:domhan2018_rnn_self", "LSTMs read, self-attention writes.", family=LADDER),
    domhan2018_cnn_self=Entry("dragoman.recipes.ladder:domhan2018_cnn_self", "Convolutions read, self-attention writes.", family=LADDER),
    domhan2018_self_combined=Entry(
        "dragoman.recipes.ladder:domhan2018_self_combined",
        "Self-attention reads; self-attention, LSTMs and convolutions write in turn.",
        family=LADDER,
    ),
    domhan2018_self_none=Entry(
        "dragoman.recipes.ladder:domhan2018_self_none", "Self-attention reads; no target word knows another.", family=LADDER
    ),
    domhan2018_none_self=Entry(
        "dragoman.recipes.ladder:domhan2018_none_self", "No source word knows another; self-attention writes.", family=LADDER
    ),
)
