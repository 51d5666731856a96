"""The attention family by name; listing it imports no tensors."""

from __future__ import annotations

from dragoman.registry import Entry, Registry

SCORES = Registry(
    "score",
    scaled_dot=Entry("dragoman.attention.scores:ScaledDotScore", "The dot product of query and key, divided by the root of their width."),
    dot=Entry("dragoman.attention.scores:DotScore", "The dot product of query and key as it is (Luong)."),
    learned_scale_dot=Entry("dragoman.attention.scores:LearnedScaleDotScore", "The dot product times one trained number (scaled Luong)."),
    cosine=Entry("dragoman.attention.scores:CosineScore", "The angle between query and key, times a trained strength."),
    general=Entry("dragoman.attention.scores:GeneralScore", "A trained matrix between query and key (Luong)."),
    additive=Entry("dragoman.attention.scores:AdditiveScore", "A one-layer network compares query and key (Bahdanau)."),
    normed_additive=Entry(
        "dragoman.attention.scores:NormedAdditiveScore", "The additive score with a bias and a trained length of its weights."
    ),
    location=Entry("dragoman.attention.scores:LocationScore", "The query alone chooses positions, whatever stands there (Luong)."),
)

ALIGNMENTS = Registry(
    "alignment",
    softmax=Entry("dragoman.attention.alignments:Softmax", "Every visible key gets a share, larger for a larger score."),
)

POSITIONS = Registry(
    "positions",
    sinusoidal=Entry(
        "dragoman.attention.positions:Sinusoidal", "Sines and cosines in turn, as in the Transformer's paper; no limit on length."
    ),
    sinusoidal_halves=Entry(
        "dragoman.attention.positions:SinusoidalHalves", "All sines, then all cosines, as in Marian; no limit on length."
    ),
    learned=Entry("dragoman.attention.positions:Learned", "A trained vector for each position up to model.max_positions."),
    none=Entry("dragoman.attention.positions:NoPositions", "Nothing is added: only causality tells the order."),
)
