"""Models of sets: Set Transformers of Lee et al. (2019), Deep Sets of Zaheer et al. (2017).

Settings that differ from the paper are marked. In all: numbers are standardized before the first
layer, a linear layer of the model's width comes before the first block, and the learning rate
falls to zero in a run of fewer, larger steps that fits minutes of a GPU.
"""

from __future__ import annotations

from dragoman.config import Config, DataConfig, ModelConfig, TrainConfig
from dragoman.config.unordered_set_input_task import SetsConfig


def lee2019() -> Config:
    """Set Transformer for a user's own sets: two SABs and a PMA."""
    return Config(
        task="sets",
        sets=SetsConfig(
            problem="auto",  # a number or a label, as the records have it
            encoder="sab",  # the paper: quadratic in the size of the set
            layers=2,  # the paper: two blocks in every experiment
            pooling="pma",  # the paper, section 3.3
            seeds=1,  # the paper: one, for one output
            decoder_layers=0,  # the paper, table 10: none for one seed
        ),
        data=DataConfig(),
        model=_set_model(width=64, heads=4),  # the paper, table 10: SAB(64, 4)
        train=_set_training(steps=5000, batch_tokens=8192, learning_rate=1e-3),
    )


def lee2019_isab() -> Config:
    """Set Transformer for large sets: two ISABs, linear in the size of the set, and a PMA."""
    return lee2019().replace(
        sets={
            "encoder": "isab",  # the paper, section 3.2
            "inducing_points": 16,  # the paper: 16 suffice in its experiments
        }
    )


def lee2019_max() -> Config:
    """Maximum of numbers: two SABs and a PMA."""
    return Config(
        task="sets",
        sets=SetsConfig(
            problem="maximum",  # the paper, section 5.1
            encoder="sab",  # the paper, table 10: SAB + PMA
            layers=2,  # the paper: two blocks
            pooling="pma",  # the paper: PMA_1(64, 4)
            decoder_layers=0,  # the paper: FC(1) follows
        ),
        model=_set_model(width=64, heads=4),  # the paper: SAB(64, 4)
        # the paper: 20,000 steps of 128 sets; here 1,024 sets of at most 10 elements
        train=_set_training(steps=20_000, batch_tokens=10_240, learning_rate=1e-3),
    )


def lee2019_unique() -> Config:
    """Number of different characters: convolutions, two SABs and a PMA, Poisson regression."""
    return Config(
        task="sets",
        sets=SetsConfig(
            problem="unique",  # the paper, section 5.2; characters are generated, not Omniglot's
            encoder="sab",  # the paper, table 11: SAB + PMA
            layers=2,  # the paper: two blocks
            pooling="pma",  # the paper: PMA_1(64, 8)
            decoder_layers=0,  # the paper: FC(1, softplus) follows
        ),
        model=_set_model(width=64, heads=4),  # the paper: SAB(64, 4)
        # the paper: 200,000 steps of 32 sets at 1e-4; here 128 sets of at most 10 images
        train=_set_training(steps=20_000, batch_tokens=1280, learning_rate=1e-3, max_grad_norm=1.0),
    )


def lee2019_clustering() -> Config:
    """Amortized clustering of points: two ISABs, a PMA with a seed for each cluster, two SABs."""
    return Config(
        task="sets",
        sets=SetsConfig(
            problem="clustering",  # the paper, section 5.3
            encoder="isab",  # the paper, table 13: ISAB_m + PMA
            layers=2,  # the paper: two blocks
            inducing_points=32,  # the paper: 16, 32 or 64
            pooling="pma",  # the paper: PMA_4(128, 4)
            seeds=4,  # the paper: a vector for each component
            decoder_layers=2,  # the paper: SAB after PMA; its released code has two
            components=4,  # the paper: four
        ),
        # the paper: ISAB(128, 4), normalized after each sublayer; before it, training leaves the
        # plateau of one wide cluster in half the steps
        model=_set_model(width=128, heads=4, residual="pre_norm"),
        # the paper: 50,000 steps of 10 sets; here 64,000 points
        train=_set_training(
            steps=20_000, batch_tokens=64_000, learning_rate=1e-3, max_grad_norm=1.0
        ),
    )


def zaheer2017_mean() -> Config:
    """Deep Sets with mean pooling, on the maximum of numbers."""
    return _deep_sets("mean")


def zaheer2017_sum() -> Config:
    """Deep Sets with sum pooling, on the maximum of numbers."""
    return _deep_sets("sum")


def zaheer2017_max() -> Config:
    """Deep Sets with max pooling, on the maximum of numbers."""
    return _deep_sets("max")


def _deep_sets(pooling: str) -> Config:
    """Return a baseline of Lee et al. (2019), table 10: rFF, pooling, rFF."""
    return Config(
        task="sets",
        sets=SetsConfig(
            problem="maximum",
            encoder="mlp",  # no attention between elements
            layers=3,  # Lee et al.: four linear layers; the first is the input's
            pooling=pooling,
            decoder_layers=2,  # Lee et al.: FC(64, ReLU) before FC(1)
        ),
        model=_set_model(width=64, heads=4),  # Lee et al.: FC(64, ReLU)
        train=_set_training(steps=20_000, batch_tokens=10_240, learning_rate=1e-3),
    )


def _set_model(*, width: int, heads: int, residual: str = "no_norm") -> ModelConfig:
    """Return the settings that all models of sets share."""
    return ModelConfig(
        width=width,
        heads=heads,
        ffn_width=width,  # the paper's rFF has the width of the block
        residual=residual,
        positions="none",  # a set has no order
        dropout=0.0,  # the paper names none
    )


def _set_training(
    *, steps: int, batch_tokens: int, learning_rate: float, max_grad_norm: float = 0.0
) -> TrainConfig:
    """Return the settings of training that all models of sets share."""
    return TrainConfig(
        steps=steps,
        batch_tokens=batch_tokens,  # elements, padding included
        optimizer="adam",  # the paper: Adam
        learning_rate=learning_rate,  # the paper: 1e-3, or 1e-4 for characters
        beta2=0.999,  # Adam's default
        epsilon=1e-8,  # Adam's default
        schedule="cosine",  # the paper: one or two drops; here down to zero
        warmup_steps=500,  # not in the paper
        max_grad_norm=max_grad_norm,
        label_smoothing=0.0,
        precision="float32",  # bfloat16 has too few digits for 0 to 100
        param_dtype="float32",
        compile="auto",
        checkpoint_every=2000,
        validate_every=2000,
    )
