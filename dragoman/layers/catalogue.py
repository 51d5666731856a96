"""Norms, residual wirings and activations by name; listing them imports no tensors."""

from __future__ import annotations

from dragoman.registry import Entry, Registry

NORMS = Registry(
    "norm",
    layer=Entry("dragoman.layers.norms:LayerNorm", "Subtract the mean and divide by the deviation, then scale and shift."),
    rms=Entry("dragoman.layers.norms:RMSNorm", "Divide by the root mean square, then scale."),
)

RESIDUALS = Registry(
    "residual",
    post=Entry("dragoman.layers.residual:PostNorm", "Normalise the sum of input and change, as in the Transformer's paper."),
    pre=Entry("dragoman.layers.residual:PreNorm", "Normalise what goes into the layer and leave the sum alone; trains without warm-up."),
    none=Entry("dragoman.layers.residual:Plain", "Add the change to the input and normalise nothing."),
)

ACTIVATIONS = Registry(
    "activation",
    relu=Entry("dragoman.layers.feedforward:ReLU", "The positive part, as in the Transformer's paper."),
    gelu=Entry("dragoman.layers.feedforward:GELU", "The input times the normal distribution's share below it."),
    swish=Entry("dragoman.layers.feedforward:Swish", "The input times its sigmoid, as in Marian's models."),
)
