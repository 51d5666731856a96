"""The attention family by name; listing it imports no tensors."""

from __future__ import annotations

from dragoman.registry import Entry, Registry

SCORES = Registry(
    "score",
    scaled_dot=Entry(
        "dragoman.attention.scores:ScaledDotScore",
        "The dot product of query and key, divided by the root of their width.",
    ),
    dot=Entry(
        "dragoman.attention.scores:DotScore", "The dot product of query and key as it is (Luong)."
    ),
    learned_scale_dot=Entry(
        "dragoman.attention.scores:LearnedScaleDotScore",
        "The dot product times one trained number (scaled Luong).",
    ),
    cosine=Entry(
        "dragoman.attention.scores:CosineScore",
        "The angle between query and key, times a trained strength.",
    ),
    general=Entry(
        "dragoman.attention.scores:GeneralScore", "A trained matrix between query and key (Luong)."
    ),
    additive=Entry(
        "dragoman.attention.scores:AdditiveScore",
        "A one-layer network compares query and key (Bahdanau).",
        traits=("accepts_features",),
    ),
    normed_additive=Entry(
        "dragoman.attention.scores:NormedAdditiveScore",
        "The additive score with a bias and a trained length of its weights.",
        traits=("accepts_features",),
    ),
    location=Entry(
        "dragoman.attention.scores:LocationScore",
        "The query alone chooses positions, whatever stands there (Luong).",
    ),
)

ALIGNMENTS = Registry(
    "alignment",
    softmax=Entry(
        "dragoman.attention.alignments:Softmax",
        "Every visible key gets a share, larger for a larger score.",
    ),
    smoothed=Entry(
        "dragoman.attention.alignments:SmoothedSoftmax",
        "Shares by the sigmoid of the scores: flatter than a softmax (Chorowski).",
    ),
    hard=Entry(
        "dragoman.attention.alignments:HardAlignment",
        "One key only: sampled in training, the best one afterwards (Xu).",
        exempt={
            "gradients": "a choice has no slope; training takes the softmax's (straight-through)"
        },
    ),
    reinforce=Entry(
        "dragoman.attention.reinforce:ReinforceAlignment",
        "The same, trained by reward instead of the softmax's slope: REINFORCE (Xu).",
        exempt={
            "gradients": "a choice has no slope; training learns from the sentence's likelihood"
        },
        traits=("stateful",),
    ),
    local_m=Entry(
        "dragoman.attention.local_alignment:LocalMonotonicAlignment",
        "A window that walks along, one place a step (Luong).",
        traits=("stateful",),
    ),
    local_p=Entry(
        "dragoman.attention.local_alignment:LocalPredictiveAlignment",
        "A window under a bell, at a place that the query predicts (Luong).",
        exempt={
            "rows sum to one": "the bell takes some of each weight, and the definition does not give it back"
        },
    ),
    monotonic=Entry(
        "dragoman.attention.monotonic:MonotonicAlignment",
        "The first key from the last place on that fits; never back (Raffel).",
        traits=("stateful",),
        exempt={
            "rows sum to one": "a head that runs past the last key attends to nothing",
            "gradients": "after training a choice, which has no slope; training's expected weights have",
        },
    ),
    mocha=Entry(
        "dragoman.attention.monotonic:MochaAlignment",
        "Monotonic, with a soft look back over a few keys (Chiu and Raffel).",
        traits=("stateful",),
        exempt={
            "rows sum to one": "a head that runs past the last key attends to nothing",
            "gradients": "after training the stop is a choice, which has no slope; training's expected weights have",
        },
    ),
    location_sensitive=Entry(
        "dragoman.attention.location_coverage:LocationSensitiveAlignment",
        "Filters over the last weights tell the score where to go on (Chorowski).",
        traits=("stateful", "has_score_features"),
    ),
    location_cumulative=Entry(
        "dragoman.attention.location_coverage:CumulativeLocationAlignment",
        "The same over the sum of all earlier weights (Tacotron 2).",
        traits=("stateful", "has_score_features"),
    ),
    coverage=Entry(
        "dragoman.attention.location_coverage:CoverageAlignment",
        "What was attended to so far is a term of the score (See).",
        traits=("stateful", "has_score_features"),
    ),
)

POSITIONS = Registry(
    "positions",
    sinusoidal=Entry(
        "dragoman.attention.positions:SinusoidalPositions",
        "Sines and cosines in turn, as in the Transformer's paper; no limit on length.",
    ),
    sinusoidal_halves=Entry(
        "dragoman.attention.positions:SinusoidalHalvesPositions",
        "All sines, then all cosines, as in Marian; no limit on length.",
    ),
    learned=Entry(
        "dragoman.attention.positions:LearnedPositions",
        "A trained vector for each position up to model.max_positions.",
    ),
    none=Entry(
        "dragoman.attention.positions:NoPositions",
        "Nothing is added: only causality tells the order.",
    ),
    rotary=Entry(
        "dragoman.attention.relative_positions:RotaryPositions",
        "Queries and keys are turned by their places (RoPE); no limit on length.",
        traits=("in_attention",),
    ),
    alibi=Entry(
        "dragoman.attention.relative_positions:AlibiPositions",
        "Scores fall with the distance, in each head at its own slope; no limit on length.",
        traits=("in_attention",),
    ),
    t5=Entry(
        "dragoman.attention.relative_positions:T5Positions",
        "Scores get a trained term for each bucket of distances; no limit on length.",
        traits=("in_attention",),
    ),
    shaw=Entry(
        "dragoman.attention.relative_positions:ShawPositions",
        "Queries also meet a trained vector for each distance up to 16; no limit on length.",
        traits=("in_attention",),
    ),
    transformer_xl=Entry(
        "dragoman.attention.relative_positions:TransformerXLPositions",
        "Queries also meet a projected sinusoid of each distance, and two trained vectors ask of all; no limit on length.",
        traits=("in_attention",),
    ),
)
