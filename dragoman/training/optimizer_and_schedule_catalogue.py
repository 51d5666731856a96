"""Registries of optimizers and learning-rate schedules; importing this does not import torch.

An optimizer is an entry here, its `build_...` in optimizer.py and its branch of `state_shapes`
there; a schedule is an entry and a function of lr_schedule.py.
"""

from __future__ import annotations

from dragoman.registry import Entry, Registry

OPTIMIZERS = Registry(
    "optimizer",
    adam=Entry(
        "dragoman.training.optimizer:build_adam",
        "Adam; weight decay is added to the gradient (L2 regularization).",
    ),
    adamw=Entry(
        "dragoman.training.optimizer:build_adamw",
        "AdamW: weight decay decoupled from the gradient.",
    ),
    adafactor=Entry(
        "dragoman.training.optimizer:build_adafactor",
        "Adafactor: little memory; train.learning_rate is relative to the weights' size.",
    ),
    muon=Entry(
        "dragoman.training.optimizer:build_muon",
        "Muon for matrices between layers, AdamW for embeddings, norms, biases and the output.",
    ),
    sgd=Entry(
        "dragoman.training.optimizer:build_sgd",
        "Stochastic gradient descent with Nesterov momentum, train.momentum.",
    ),
)

SCHEDULES = Registry(
    "schedule",
    constant=Entry("dragoman.training.lr_schedule:constant", "Constant after the warm-up."),
    noam=Entry(
        "dragoman.training.lr_schedule:noam",
        "The schedule of the Transformer paper; train.learning_rate is its factor (1 there).",
    ),
    inverse_sqrt=Entry(
        "dragoman.training.lr_schedule:inverse_sqrt",
        "Inverse square root of the step after the warm-up.",
    ),
    cosine=Entry("dragoman.training.lr_schedule:cosine", "Cosine decay to zero at train.steps."),
    linear=Entry("dragoman.training.lr_schedule:linear", "Linear decay to zero at train.steps."),
    wsd=Entry(
        "dragoman.training.lr_schedule:wsd",
        "Warm-up, stable, then linear decay over train.cooldown_fraction of the steps (WSD).",
    ),
)
