"""Recipes by name; each is a function that returns a configuration."""

from __future__ import annotations

from dragoman.registry import Entry, Registry

TRANSFORMER, RECURRENT, CONVOLUTIONAL = "Transformer", "recurrent", "convolutional"

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
    bahdanau2015=Entry(
        "dragoman.recipes.recurrent:bahdanau2015", "RNNsearch: gated units, additive attention asked before each step.", family=RECURRENT
    ),
    luong2015_general=Entry(
        "dragoman.recipes.recurrent:luong2015_general",
        "Four LSTM layers, global attention with the general score, input feeding.",
        family=RECURRENT,
    ),
    chorowski2015=Entry(
        "dragoman.recipes.aligned:chorowski2015", "Gated units, attention that knows where it looked last; by characters.", family=RECURRENT
    ),
    raffel2017=Entry(
        "dragoman.recipes.aligned:raffel2017", "Two LSTM layers, monotonic attention: one walk along the source.", family=RECURRENT
    ),
    gehring2017=Entry(
        "dragoman.recipes.convolution:gehring2017",
        "ConvS2S: gated convolutions, attention in every layer; 11 million weights.",
        family=CONVOLUTIONAL,
    ),
)
