"""Settings of the set task: the problem, the encoder of a set and its pooling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dragoman.config.setting_declaration import setting

GENERATED_PROBLEMS = ("maximum", "unique", "clustering")


@dataclass(frozen=True, kw_only=True, slots=True)
class SetsConfig:
    """Set Transformers (Lee et al. 2019) and Deep Sets (Zaheer et al. 2017)."""

    # Metrics of validation, besides the loss.
    metrics: ClassVar[tuple[str, ...]] = ("mae", "accuracy", "log_likelihood", "log_likelihood_gap")
    # Largest sizes of a miniature (`dragoman train --mini`), by setting.
    mini: ClassVar[dict[str, object]] = {
        "inducing_points": 8,
        "validation_sets": 200,
        "epoch_sets": 10_000,
    }

    problem: str = setting(
        "auto",
        "What is predicted; auto, regression and classification read files, others are generated.",
        choices=("auto", "regression", "classification", *GENERATED_PROBLEMS),
    )
    set_field: str = setting("set", "Field with the set: a list of numbers or of vectors.")
    target_field: str = setting("target", "Field with the target: a number or a label.")
    encoder: str = setting(
        "sab",
        "Encoder blocks: self-attention (SAB), induced self-attention (ISAB), or MLP (Deep Sets).",
        choices=("sab", "isab", "mlp"),
    )
    layers: int = setting(2, "Number of encoder blocks.", at_least=1, at_most=64)
    inducing_points: int = setting(
        16, "Number of inducing points of an isab block, m.", at_least=1, at_most=4096
    )
    pooling: str = setting(
        "pma",
        "Pooling of the encoded elements; pma is pooling by multi-head attention.",
        choices=("pma", "mean", "sum", "max"),
    )
    seeds: int = setting(1, "Number of seed vectors of pma, k.", at_least=1, at_most=4096)
    decoder_layers: int = setting(
        0,
        "Blocks after pooling: self-attention between seeds, or linear layers with ReLU.",
        at_least=0,
        at_most=64,
    )
    loss: str = setting(
        "l1", "Loss of regression: absolute or squared error.", choices=("l1", "l2")
    )
    max_size: int = setting(
        1000, "Largest set in elements; larger ones are an error.", at_least=1, at_most=1_000_000
    )
    components: int = setting(
        4, "Components of the mixtures of the clustering problem.", at_least=1, at_most=64
    )
    validation_sets: int = setting(
        2000, "Number of generated sets per validation.", at_least=1, at_most=10_000_000
    )
    epoch_sets: int = setting(
        100_000, "Number of generated sets per epoch.", at_least=1, at_most=1_000_000_000
    )

    @property
    def is_generated(self) -> bool:
        """Whether examples are generated instead of read from files."""
        return self.problem in GENERATED_PROBLEMS

    def problems(self) -> Iterator[str]:
        """Yield inconsistencies between fields."""
        if self.pooling != "pma" and self.seeds != 1:
            yield (
                "sets.seeds above 1 needs sets.pooling=pma, because other poolings return one "
                f"vector; found sets.pooling={self.pooling} and sets.seeds={self.seeds}; "
                "set sets.seeds=1"
            )
        if (
            self.problem == "clustering"
            and self.pooling == "pma"
            and (self.seeds not in (1, self.components))
        ):
            yield (
                "sets.seeds must be 1 or sets.components for clustering; found "
                f"{self.seeds} and {self.components}; set sets.seeds={self.components}"
            )
        if self.set_field == self.target_field:
            yield (
                "sets.set_field and sets.target_field must differ; found "
                f"{self.set_field!r} for both; name two fields"
            )
