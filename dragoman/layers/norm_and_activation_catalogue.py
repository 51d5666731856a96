"""Registries of norms, residual connections and activations; reading them does not import torch."""

from __future__ import annotations

from dragoman.registry import Entry, Registry

NORMS = Registry(
    "norm",
    layer=Entry(
        "dragoman.layers.norms_and_residuals:LayerNorm",
        "Layer normalization (Ba et al. 2016).",
    ),
    rms=Entry(
        "dragoman.layers.norms_and_residuals:RMSNorm",
        "RMS normalization (Zhang and Sennrich 2019).",
    ),
    t5=Entry(
        "dragoman.layers.norms_and_residuals:T5Norm",
        "RMS normalization as in T5, always in float32.",
    ),
    scale=Entry(
        "dragoman.layers.norms_and_residuals:ScaleNorm",
        "ScaleNorm: L2 normalization with one trained length.",
    ),
    batch=Entry(
        "dragoman.layers.norms_and_residuals:BatchNorm",
        "Batch normalization, for comparison only.",
        exempt={"batch independence in training": "mean and variance are those of the whole batch"},
    ),
)

RESIDUALS = Registry(
    "residual",
    post_norm=Entry(
        "dragoman.layers.norms_and_residuals:PostNorm",
        "Post-norm: normalize the sum, as in Vaswani et al. (2017).",
    ),
    pre_norm=Entry(
        "dragoman.layers.norms_and_residuals:PreNorm",
        "Pre-norm: normalize the sublayer's input; trains without warm-up.",
    ),
    no_norm=Entry(
        "dragoman.layers.norms_and_residuals:NoNorm", "A residual connection without a norm."
    ),
    scaled=Entry(
        "dragoman.layers.norms_and_residuals:ScaledResidual",
        "A residual connection scaled by sqrt(1/2), without a norm, as in ConvS2S.",
    ),
)

ACTIVATIONS = Registry(
    "activation",
    relu=Entry(
        "dragoman.layers.feed_forward:ReLU", "Rectified linear unit, as in Vaswani et al. (2017)."
    ),
    gelu=Entry(
        "dragoman.layers.feed_forward:GELU",
        "Gaussian error linear unit.",
    ),
    swish=Entry("dragoman.layers.feed_forward:Swish", "Swish or SiLU, as in Marian's models."),
    swiglu=Entry(
        "dragoman.layers.feed_forward:SwiGLU", "Gated linear unit with Swish (three matrices)."
    ),
    geglu=Entry(
        "dragoman.layers.feed_forward:GEGLU", "Gated linear unit with GELU (three matrices)."
    ),
)
