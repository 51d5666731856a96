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
    additive=Entry(
        "dragoman.attention.scores:AdditiveScore",
        "A one-layer network compares query and key (Bahdanau).",
        traits=("takes_features",),
    ),
    normed_additive=Entry(
        "dragoman.attention.scores:NormedAdditiveScore",
        "The additive score with a bias and a trained length of its weights.",
        traits=("takes_features",),
    ),
    location=Entry("dragoman.attention.scores:LocationScore", "The query alone chooses positions, whatever stands there (Luong)."),
)

ALIGNMENTS = Registry(
    "alignment",
    softmax=Entry("dragoman.attention.alignments:Softmax", "Every visible key gets a share, larger for a larger score."),
    smoothed=Entry("dragoman.attention.alignments:Smoothed", "Shares by the sigmoid of the scores: flatter than a softmax (Chorowski)."),
    hard=Entry(
        "dragoman.attention.alignments:Hard",
        "One key only: sampled in training, the best one afterwards (Xu).",
        exempt={"gradients": "a choice has no slope; training takes the softmax's (straight-through)"},
    ),
    reinforced=Entry(
        "dragoman.attention.reinforced:Reinforced",
        "The same, trained by reward instead of the softmax's slope: REINFORCE (Xu).",
        exempt={"gradients": "a choice has no slope; training learns from the sentence's likelihood"},
        traits=("remembers",),
    ),
    local_m=Entry("dragoman.attention.local:LocalM", "A window that walks along, one place a step (Luong).", traits=("remembers",)),
    local_p=Entry(
        "dragoman.attention.local:LocalP",
        "A window under a bell, at a place that the query predicts (Luong).",
        exempt={"rows sum to one": "the bell takes some of each weight, and the definition does not give it back"},
    ),
    monotonic=Entry(
        "dragoman.attention.monotonic:Monotonic",
        "The first key from the last place on that fits; never back (Raffel).",
        traits=("remembers",),
        exempt={
            "rows sum to one": "a head that runs past the last key attends to nothing",
            "gradients": "after training a choice, which has no slope; training's expected weights have",
        },
    ),
    mocha=Entry(
        "dragoman.attention.monotonic:Mocha",
        "Monotonic, with a soft look back over a few keys (Chiu and Raffel).",
        traits=("remembers",),
        exempt={
            "rows sum to one": "a head that runs past the last key attends to nothing",
            "gradients": "after training the stop is a choice, which has no slope; training's expected weights have",
        },
    ),
    location_sensitive=Entry(
        "dragoman.attention.remembering:LocationSensitive",
        "Filters over the last weights tell the score where to go on (Chorowski).",
        traits=("remembers", "gives_features"),
    ),
    location_cumulative=Entry(
        "dragoman.attention.remembering:LocationCumulative",
        "The same over the sum of all earlier weights (Tacotron 2).",
        traits=("remembers", "gives_features"),
    ),
    coverage=Entry(
        "dragoman.attention.remembering:Coverage",
        "What was attended to so far is a term of the score (See).",
        traits=("remembers", "gives_features"),
    ),
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
    rotary=Entry(
        "dragoman.attention.relative:Rotary",
        "Queries and keys are turned by their places (RoPE); no limit on length.",
        traits=("within",),
    ),
    alibi=Entry(
        "dragoman.attention.relative:Alibi",
        "Scores fall with the distance, in each head at its own slope; no limit on length.",
        traits=("within",),
    ),
    t5=Entry(
        "dragoman.attention.relative:T5Buckets",
        "Scores get a trained term for each bucket of distances; no limit on length.",
        traits=("within",),
    ),
    shaw=Entry(
        "dragoman.attention.relative:Shaw",
        "Queries also meet a trained vector for each distance up to 16; no limit on length.",
        traits=("within",),
    ),
    transformer_xl=Entry(
        "dragoman.attention.relative:TransformerXL",
        "Queries also meet a projected sinusoid of each distance, and two trained vectors ask of all; no limit on length.",
        traits=("within",),
    ),
)
