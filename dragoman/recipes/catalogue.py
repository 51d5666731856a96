"""Recipes by name; each is a function that returns a configuration."""

from __future__ import annotations

from dragoman.registry import Entry, Registry

RECIPES = Registry(
    "recipe",
    tiny=Entry("dragoman.recipes.transformer:tiny", "A Transformer of 1.4 million weights that two CPU cores train in ten minutes."),
    small=Entry("dragoman.recipes.transformer:small", "A Transformer of 9 million weights for up to a few hundred thousand pairs."),
    vaswani2017_base=Entry("dragoman.recipes.transformer:vaswani2017_base", "The base Transformer of 'Attention Is All You Need'."),
    vaswani2017_big=Entry("dragoman.recipes.transformer:vaswani2017_big", "The big Transformer of 'Attention Is All You Need'."),
    gehring2017=Entry(
        "dragoman.recipes.convolution:gehring2017", "ConvS2S: gated convolutions, attention in every layer; 11 million weights."
    ),
    bahdanau2015=Entry("dragoman.recipes.recurrent:bahdanau2015", "RNNsearch: gated units, additive attention asked before each step."),
    luong2015_general=Entry(
        "dragoman.recipes.recurrent:luong2015_general", "Four LSTM layers, global attention with the general score, input feeding."
    ),
)
