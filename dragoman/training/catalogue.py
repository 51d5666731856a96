"""The optimisers and schedules by name; listing them imports no torch."""

from __future__ import annotations

from dragoman.registry import Entry, Registry

OPTIMISERS = Registry(
    "optimiser",
    adam=Entry("dragoman.training.optimisers:adam", "Adam; weight decay, where set, is added to the gradient."),
    adamw=Entry("dragoman.training.optimisers:adamw", "Adam whose weight decay acts on the weights themselves."),
)

SCHEDULES = Registry(
    "schedule",
    constant=Entry("dragoman.training.schedules:constant", "Rises over the warm-up, then stays."),
    noam=Entry("dragoman.training.schedules:noam", "The Transformer paper's, with train.learning_rate as a factor (the paper's is 1)."),
    inverse_sqrt=Entry("dragoman.training.schedules:inverse_sqrt", "Falls with the square root of the update after the warm-up."),
    cosine=Entry("dragoman.training.schedules:cosine", "Falls along half a cosine to zero at train.steps."),
    linear=Entry("dragoman.training.schedules:linear", "Falls in a straight line to zero at train.steps."),
    wsd=Entry("dragoman.training.schedules:wsd", "Warm-up, a stable stretch, then a straight fall over train.cooldown."),
)
