"""The optimisers and schedules by name; listing them imports no torch."""

from __future__ import annotations

from dragoman.registry import Entry, Registry

OPTIMIZERS = Registry(
    "optimizer",
    adam=Entry(
        "dragoman.training.optimizers:build_adam",
        "Adam; weight decay, where set, is added to the gradient.",
    ),
    adamw=Entry(
        "dragoman.training.optimizers:build_adamw",
        "Adam whose weight decay acts on the weights themselves.",
    ),
)

SCHEDULES = Registry(
    "schedule",
    constant=Entry("dragoman.training.lr_schedule:constant", "Rises over the warm-up, then stays."),
    noam=Entry(
        "dragoman.training.lr_schedule:noam",
        "The Transformer paper's, with train.learning_rate as a factor (the paper's is 1).",
    ),
    inverse_sqrt=Entry(
        "dragoman.training.lr_schedule:inverse_sqrt",
        "Falls with the square root of the update after the warm-up.",
    ),
    cosine=Entry(
        "dragoman.training.lr_schedule:cosine", "Falls along half a cosine to zero at train.steps."
    ),
    linear=Entry(
        "dragoman.training.lr_schedule:linear", "Falls in a straight line to zero at train.steps."
    ),
    wsd=Entry(
        "dragoman.training.lr_schedule:wsd",
        "Warm-up, a stable stretch, then a straight fall over train.cooldown_fraction.",
    ),
)
