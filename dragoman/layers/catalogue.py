"""Norms, residual wirings and activations by name; listing them imports no tensors."""

from __future__ import annotations

from dragoman.registry import Entry, Registry

NORMS = Registry(
    "norm",
    layer=Entry(
        "dragoman.layers.norms:LayerNorm",
        "Subtract the mean and divide by the deviation, then scale and shift.",
    ),
    rms=Entry("dragoman.layers.norms:RMSNorm", "Divide by the root mean square, then scale."),
    t5=Entry(
        "dragoman.layers.norms:T5Norm", "The same as T5 computes it, in float32 whatever comes in."
    ),
    scale=Entry(
        "dragoman.layers.norms:ScaleNorm",
        "Divide by the length, then multiply by one trained number.",
    ),
    batch=Entry(
        "dragoman.layers.norms:BatchNorm",
        "Normalise each feature over the batch: to show why not.",
        exempt={
            "neighbours in training": "its mean and variance are those of all positions of the batch, neighbours, padding and future"
        },
    ),
)

RESIDUALS = Registry(
    "residual",
    post_norm=Entry(
        "dragoman.layers.residual:PostNorm",
        "Normalise the sum of input and change, as in the Transformer's paper.",
    ),
    pre_norm=Entry(
        "dragoman.layers.residual:PreNorm",
        "Normalise what goes into the layer and leave the sum alone; trains without warm-up.",
    ),
    no_norm=Entry(
        "dragoman.layers.residual:NoNorm", "Add the change to the input and normalise nothing."
    ),
    scaled=Entry(
        "dragoman.layers.residual:ScaledResidual",
        "Add, then multiply by the root of a half, as in ConvS2S; normalises nothing.",
    ),
)

ACTIVATIONS = Registry(
    "activation",
    relu=Entry(
        "dragoman.layers.feed_forward:ReLU", "The positive part, as in the Transformer's paper."
    ),
    gelu=Entry(
        "dragoman.layers.feed_forward:GELU",
        "The input times the normal distribution's share below it.",
    ),
    swish=Entry(
        "dragoman.layers.feed_forward:Swish", "The input times its sigmoid, as in Marian's models."
    ),
    swiglu=Entry(
        "dragoman.layers.feed_forward:SwiGLU", "A second product gated by the first one's swish."
    ),
    geglu=Entry(
        "dragoman.layers.feed_forward:GEGLU", "A second product gated by the first one's gelu."
    ),
)
