"""Recipes by name; each is a function that returns a configuration."""

from __future__ import annotations

from dragoman.registry import Entry, Registry

TRANSFORMER, RECURRENT, CONVOLUTIONAL, DOMHAN2018 = (
    "Transformer",
    "recurrent",
    "convolutional",
    "merging ladder",
)
VARIANTS = "Transformer variants"

RECIPES = Registry(
    "recipe",
    tiny=Entry(
        "dragoman.recipes.transformer:tiny",
        "1.4 million weights: ten minutes on two cores.",
        family=TRANSFORMER,
    ),
    small=Entry(
        "dragoman.recipes.transformer:small",
        "9 million weights, for 100,000 pairs or so.",
        family=TRANSFORMER,
    ),
    vaswani2017_base=Entry(
        "dragoman.recipes.transformer:vaswani2017_base",
        "The base model of 'Attention Is All You Need'.",
        family=TRANSFORMER,
    ),
    vaswani2017_big=Entry(
        "dragoman.recipes.transformer:vaswani2017_big",
        "The big model of 'Attention Is All You Need'.",
        family=TRANSFORMER,
    ),
    shaw2018=Entry(
        "dragoman.recipes.transformer_variants:shaw2018",
        "Relative positions in the keys.",
        family=VARIANTS,
    ),
    dai2019=Entry(
        "dragoman.recipes.transformer_variants:dai2019",
        "Relative positions as in Transformer-XL.",
        family=VARIANTS,
    ),
    su2021=Entry(
        "dragoman.recipes.transformer_variants:su2021",
        "Rotary positions (RoFormer).",
        family=VARIANTS,
    ),
    press2022=Entry(
        "dragoman.recipes.transformer_variants:press2022",
        "Scores that fall with the distance (ALiBi).",
        family=VARIANTS,
    ),
    raffel2020=Entry(
        "dragoman.recipes.transformer_variants:raffel2020",
        "T5's layers: its norm, distance buckets, no bias.",
        family=VARIANTS,
    ),
    xiong2020=Entry(
        "dragoman.recipes.transformer_variants:xiong2020",
        "Norm inside the way around, so no warm-up.",
        family=VARIANTS,
    ),
    nguyen2019=Entry(
        "dragoman.recipes.transformer_variants:nguyen2019",
        "For little data: ScaleNorm and FixNorm.",
        family=VARIANTS,
    ),
    lan2020=Entry(
        "dragoman.recipes.transformer_variants:lan2020",
        "Layers share weights, small embeddings (ALBERT).",
        family=VARIANTS,
    ),
    fan2020=Entry(
        "dragoman.recipes.transformer_variants:fan2020",
        "12 + 6 layers, a fifth left out (LayerDrop).",
        family=VARIANTS,
    ),
    zhang2019=Entry(
        "dragoman.recipes.transformer_variants:zhang2019",
        "12 + 12 layers, drawn smaller by depth (DS-Init).",
        family=VARIANTS,
    ),
    shazeer2020=Entry(
        "dragoman.recipes.transformer_variants:shazeer2020",
        "Heads that talk to each other.",
        family=VARIANTS,
    ),
    shazeer2020_glu=Entry(
        "dragoman.recipes.transformer_variants:shazeer2020_glu",
        "Gated feed-forward layers (SwiGLU).",
        family=VARIANTS,
    ),
    ainslie2023=Entry(
        "dragoman.recipes.transformer_variants:ainslie2023",
        "Heads that share keys and values in groups (GQA).",
        family=VARIANTS,
    ),
    henry2020=Entry(
        "dragoman.recipes.transformer_variants:henry2020",
        "For little data: queries, keys of length 1.",
        family=VARIANTS,
    ),
    bhojanapalli2020=Entry(
        "dragoman.recipes.transformer_variants:bhojanapalli2020",
        "Heads as wide as a sentence is long.",
        family=VARIANTS,
    ),
    vaswani2017_restricted=Entry(
        "dragoman.recipes.transformer_variants:vaswani2017_restricted",
        "Self-attention that sees neighbours only.",
        family=VARIANTS,
    ),
    kitaev2020=Entry(
        "dragoman.recipes.reformer:kitaev2020",
        "Reformer for documents: hashed, reversible.",
        family=TRANSFORMER,
    ),
    kitaev2020_wmt=Entry(
        "dragoman.recipes.reformer:kitaev2020_wmt",
        "Reformer for sentences: reversible base layers.",
        family=TRANSFORMER,
    ),
    bahdanau2015=Entry(
        "dragoman.recipes.rnn:bahdanau2015",
        "RNNsearch: gated units and additive attention.",
        family=RECURRENT,
    ),
    luong2015_general=Entry(
        "dragoman.recipes.rnn:luong2015_general",
        "Four LSTM layers, general score, input feeding.",
        family=RECURRENT,
    ),
    luong2015_dot=Entry(
        "dragoman.recipes.rnn:luong2015_dot", "The same with the dot product.", family=RECURRENT
    ),
    luong2015_concat=Entry(
        "dragoman.recipes.rnn:luong2015_concat",
        "The same, scored by a small network.",
        family=RECURRENT,
    ),
    luong2015_location=Entry(
        "dragoman.recipes.rnn:luong2015_location",
        "The same, weighed by the target's state alone.",
        family=RECURRENT,
    ),
    luong2015_local_m=Entry(
        "dragoman.recipes.rnn:luong2015_local_m",
        "The same in a window that walks along.",
        family=RECURRENT,
    ),
    luong2015_local_p=Entry(
        "dragoman.recipes.rnn:luong2015_local_p",
        "The same in a window whose place is predicted.",
        family=RECURRENT,
    ),
    wu2016=Entry(
        "dragoman.recipes.rnn:wu2016",
        "GNMT: eight LSTM layers, the lowest one attends.",
        family=RECURRENT,
    ),
    chorowski2015=Entry(
        "dragoman.recipes.rnn_alignments:chorowski2015",
        "Attention that knows where it looked; characters.",
        family=RECURRENT,
    ),
    raffel2017=Entry(
        "dragoman.recipes.rnn_alignments:raffel2017",
        "Monotonic attention: one walk along the source.",
        family=RECURRENT,
    ),
    chiu2018=Entry(
        "dragoman.recipes.rnn_alignments:chiu2018",
        "The same with a soft look back (MoChA).",
        family=RECURRENT,
    ),
    xu2015=Entry(
        "dragoman.recipes.rnn_alignments:xu2015",
        "Hard attention: one source word, by reward.",
        family=RECURRENT,
    ),
    see2017=Entry(
        "dragoman.recipes.rnn_alignments:see2017",
        "Coverage: nothing is said twice.",
        family=RECURRENT,
    ),
    gehring2017=Entry(
        "dragoman.recipes.convs2s:gehring2017",
        "ConvS2S: gated convolutions, attention in each.",
        family=CONVOLUTIONAL,
    ),
    domhan2018_transformer=Entry(
        "dragoman.recipes.domhan2018:domhan2018_transformer",
        "Both ladders' top: six layers, norms inside.",
        family=DOMHAN2018,
    ),
    domhan2018_rnn=Entry(
        "dragoman.recipes.domhan2018:domhan2018_rnn",
        "Ladder: residual LSTMs, one attention at the end.",
        family=DOMHAN2018,
    ),
    domhan2018_rnn_mh=Entry(
        "dragoman.recipes.domhan2018:domhan2018_rnn_mh",
        "Ladder: the same with multi-head attention.",
        family=DOMHAN2018,
    ),
    domhan2018_rnn_pos=Entry(
        "dragoman.recipes.domhan2018:domhan2018_rnn_pos",
        "Ladder: and with positions.",
        family=DOMHAN2018,
    ),
    domhan2018_rnn_norm=Entry(
        "dragoman.recipes.domhan2018:domhan2018_rnn_norm",
        "Ladder: and with norms.",
        family=DOMHAN2018,
    ),
    domhan2018_rnn_multi_att_1h=Entry(
        "dragoman.recipes.domhan2018:domhan2018_rnn_multi_att_1h",
        "Ladder: and with attention after every LSTM.",
        family=DOMHAN2018,
    ),
    domhan2018_rnn_multi_att=Entry(
        "dragoman.recipes.domhan2018:domhan2018_rnn_multi_att",
        "Ladder: and that with many heads.",
        family=DOMHAN2018,
    ),
    domhan2018_rnn_ff=Entry(
        "dragoman.recipes.domhan2018:domhan2018_rnn_ff",
        "Ladder: and with feed-forward layers, both sides.",
        family=DOMHAN2018,
    ),
    domhan2018_cnn=Entry(
        "dragoman.recipes.domhan2018:domhan2018_cnn",
        "Ladder: residual convolutions, attention in each.",
        family=DOMHAN2018,
    ),
    domhan2018_cnn_norm=Entry(
        "dragoman.recipes.domhan2018:domhan2018_cnn_norm",
        "Ladder: the same with norms.",
        family=DOMHAN2018,
    ),
    domhan2018_cnn_mh=Entry(
        "dragoman.recipes.domhan2018:domhan2018_cnn_mh",
        "Ladder: and with multi-head attention.",
        family=DOMHAN2018,
    ),
    domhan2018_cnn_ff=Entry(
        "dragoman.recipes.domhan2018:domhan2018_cnn_ff",
        "Ladder: and with feed-forward layers, both sides.",
        family=DOMHAN2018,
    ),
    domhan2018_self_rnn=Entry(
        "dragoman.recipes.domhan2018:domhan2018_self_rnn",
        "Self-attention reads, LSTMs write.",
        family=DOMHAN2018,
    ),
    domhan2018_self_cnn=Entry(
        "dragoman.recipes.domhan2018:domhan2018_self_cnn",
        "Self-attention reads, convolutions write.",
        family=DOMHAN2018,
    ),
    domhan2018_rnn_self=Entry(
        "dragoman.recipes.domhan2018:domhan2018_rnn_self",
        "LSTMs read, self-attention writes.",
        family=DOMHAN2018,
    ),
    domhan2018_cnn_self=Entry(
        "dragoman.recipes.domhan2018:domhan2018_cnn_self",
        "Convolutions read, self-attention writes.",
        family=DOMHAN2018,
    ),
    domhan2018_self_combined=Entry(
        "dragoman.recipes.domhan2018:domhan2018_self_combined",
        "Self-attention reads; all three kinds write.",
        family=DOMHAN2018,
    ),
    domhan2018_self_none=Entry(
        "dragoman.recipes.domhan2018:domhan2018_self_none",
        "Self-attention reads, writes word by word.",
        family=DOMHAN2018,
    ),
    domhan2018_none_self=Entry(
        "dragoman.recipes.domhan2018:domhan2018_none_self",
        "Reads word by word, self-attention writes.",
        family=DOMHAN2018,
    ),
)
