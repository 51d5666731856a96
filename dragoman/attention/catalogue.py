"""Registries of scores, alignments and positions; reading them does not import torch."""

from __future__ import annotations

from dragoman.registry import Entry, Registry

SCORES = Registry(
    "score",
    scaled_dot=Entry(
        "dragoman.attention.score_functions:ScaledDotScore",
        "Dot product divided by the square root of the width (Vaswani).",
    ),
    dot=Entry(
        "dragoman.attention.score_functions:DotScore", "Dot product of query and key (Luong)."
    ),
    learned_scale_dot=Entry(
        "dragoman.attention.score_functions:LearnedScaleDotScore",
        "Dot product times a trained scale (scaled Luong).",
    ),
    cosine=Entry(
        "dragoman.attention.score_functions:CosineScore",
        "Cosine similarity of query and key, times a trained scale (Graves).",
    ),
    general=Entry(
        "dragoman.attention.score_functions:GeneralScore",
        "Bilinear: a trained matrix between query and key (Luong).",
    ),
    additive=Entry(
        "dragoman.attention.score_functions:AdditiveScore",
        "Additive: a one-layer network compares query and key (Bahdanau).",
        traits=("accepts_features",),
    ),
    normed_additive=Entry(
        "dragoman.attention.score_functions:NormedAdditiveScore",
        "Additive, with a bias and weight normalization.",
        traits=("accepts_features",),
    ),
    location=Entry(
        "dragoman.attention.score_functions:LocationScore",
        "Location-based: depends on the query and the position only (Luong).",
    ),
    fixed=Entry(
        "dragoman.attention.score_functions:FixedScore",
        "Trained weights of the positions, whatever the query: no attention, to compare with.",
        exempt={"learns": "its weights do not depend on the query, so that all rows are equal"},
    ),
)

ALIGNMENTS = Registry(
    "alignment",
    softmax=Entry(
        "dragoman.attention.softmax_and_gumbel_alignment:Softmax",
        "Softmax over all keys that the mask allows (global attention).",
    ),
    smoothed=Entry(
        "dragoman.attention.softmax_and_gumbel_alignment:SmoothedSoftmax",
        "Normalized sigmoid of the scores: flatter than a softmax (Chorowski).",
    ),
    hard=Entry(
        "dragoman.attention.softmax_and_gumbel_alignment:HardAlignment",
        "Hard attention: one key, sampled in training, the best in evaluation (Xu).",
        exempt={
            "gradients": "an argmax has no gradient; training uses the softmax's (straight-through)"
        },
    ),
    reinforce=Entry(
        "dragoman.attention.policy_gradient_alignment:ReinforceAlignment",
        "Hard attention trained with REINFORCE instead of straight-through (Xu).",
        exempt={"gradients": "an argmax has no gradient; training is by reward"},
        traits=("stateful",),
    ),
    local_m=Entry(
        "dragoman.attention.luong_local_alignment:LocalMonotonicAlignment",
        "A window that moves by one position per step (Luong, local-m).",
        traits=("stateful",),
    ),
    local_p=Entry(
        "dragoman.attention.luong_local_alignment:LocalPredictiveAlignment",
        "A Gaussian window at a position that the query predicts (Luong, local-p).",
        exempt={"rows sum to one": "weights are multiplied by a Gaussian and not renormalized"},
    ),
    monotonic=Entry(
        "dragoman.attention.monotonic:MonotonicAlignment",
        "Monotonic: stop at the first match from the previous key on (Raffel).",
        traits=("stateful",),
        exempt={
            "rows sum to one": "a head that runs past the last key attends to nothing",
            "gradients": "evaluation stops at one key and has no gradient; training has one",
        },
    ),
    mocha=Entry(
        "dragoman.attention.monotonic:MochaAlignment",
        "Monotonic chunkwise: a softmax over the keys before the stop (Chiu and Raffel).",
        traits=("stateful",),
        exempt={
            "rows sum to one": "a head that runs past the last key attends to nothing",
            "gradients": "evaluation stops at one key and has no gradient; training has one",
        },
    ),
    location_sensitive=Entry(
        "dragoman.attention.location_and_coverage:LocationSensitiveAlignment",
        "Convolved previous weights are features of the score (Chorowski).",
        traits=("stateful", "has_score_features"),
    ),
    location_cumulative=Entry(
        "dragoman.attention.location_and_coverage:CumulativeLocationAlignment",
        "Location-sensitive on the sum of all earlier weights (Tacotron 2).",
        traits=("stateful", "has_score_features"),
    ),
    coverage=Entry(
        "dragoman.attention.location_and_coverage:CoverageAlignment",
        "Coverage, the sum of earlier weights, is a feature of the score (See).",
        traits=("stateful", "has_score_features"),
    ),
)

POSITIONS = Registry(
    "positions",
    sinusoidal=Entry(
        "dragoman.attention.absolute_position_encodings:SinusoidalPositions",
        "Sinusoidal, interleaved as in Vaswani et al. (2017); no limit on length.",
    ),
    sinusoidal_halves=Entry(
        "dragoman.attention.absolute_position_encodings:SinusoidalHalvesPositions",
        "Sinusoidal, all sines before all cosines as in Marian; no limit on length.",
    ),
    learned=Entry(
        "dragoman.attention.absolute_position_encodings:LearnedPositions",
        "A trained vector for each position up to model.max_positions.",
    ),
    none=Entry(
        "dragoman.attention.absolute_position_encodings:NoPositions",
        "No position encoding: order is visible through the causal mask only.",
    ),
    rotary=Entry(
        "dragoman.attention.relative_position_encodings:RotaryPositions",
        "Rotary position embedding (RoPE); no limit on length.",
        traits=("in_attention",),
    ),
    alibi=Entry(
        "dragoman.attention.relative_position_encodings:AlibiPositions",
        "ALiBi: a linear penalty on the distance, per head; no limit on length.",
        traits=("in_attention",),
    ),
    t5=Entry(
        "dragoman.attention.relative_position_encodings:T5Positions",
        "T5's relative position bias, per bucket of distances; no limit on length.",
        traits=("in_attention",),
    ),
    shaw=Entry(
        "dragoman.attention.relative_position_encodings:ShawPositions",
        "Shaw's relative keys, for distances up to 16; no limit on length.",
        traits=("in_attention",),
    ),
    transformer_xl=Entry(
        "dragoman.attention.relative_position_encodings:TransformerXLPositions",
        "Transformer-XL's relative sinusoids with two trained biases; no limit on length.",
        traits=("in_attention",),
    ),
)
