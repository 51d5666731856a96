"""Settings of the sentence-pair task: fields, interaction of the sentences, loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dragoman.config.setting_declaration import setting


@dataclass(frozen=True, kw_only=True, slots=True)
class PairsConfig:
    """Sentence pairs: a label such as entailment, and a score such as relatedness."""

    # Metrics of validation, besides the loss.
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "pearson", "spearman", "mse")
    # Largest sizes of a miniature (`dragoman train --mini`), by setting.
    mini: ClassVar[dict[str, object]] = {"classifier_width": 64}

    first_field: str = setting(
        "", "Field with the first sentence, the premise: a name or number; detected when empty."
    )
    second_field: str = setting(
        "", "Field with the second sentence, the hypothesis: as pairs.first_field."
    )
    label_field: str = setting("", "Field with the label; detected when empty, and may be missing.")
    score_field: str = setting(
        "", "Field with the score, a number; detected when empty, and may be missing."
    )
    interaction: str = setting(
        "co_attention",
        "Interaction: co-attention, decomposable attention, none, or a pair as one sequence.",
        choices=("co_attention", "decomposable", "none", "sequence"),
    )
    composition: tuple[str, ...] = setting(
        ("bilstm",), "Blocks over the compared words, after co-attention."
    )
    pooling: str = setting(
        "mean_max",
        "Pooling of a sentence's states; mean_max concatenates both.",
        choices=("mean_max", "mean", "max", "sum"),
    )
    classifier_width: int = setting(
        300, "Hidden width of the classifier.", at_least=1, at_most=65_536
    )
    match_features: bool = setting(
        False,
        "Mark words that also occur in the other sentence, as they are or with the same stem.",
    )
    word_dropout: float = setting(
        0.0, "Probability of replacing a word by <unk> in training.", at_least=0.0, at_most=0.9
    )
    score_weight: float = setting(
        1.0, "Weight of the score's loss beside the label's.", at_least=0.0, at_most=1000.0
    )
    min_score: int = setting(1, "Lowest score.", at_least=-1000, at_most=1000)
    max_score: int = setting(5, "Highest score.", at_least=-1000, at_most=1000)
    swap: bool = setting(
        False,
        "Also train the score on swapped pairs; never the label: entailment is directional.",
    )

    def problems(self) -> Iterator[str]:
        """Yield inconsistencies between fields."""
        fields = (self.first_field, self.second_field, self.label_field, self.score_field)
        names = [name for name in fields if name]
        if len(set(names)) < len(names):
            yield (
                "pairs.first_field, second_field, label_field and score_field must differ; "
                f"found {', '.join(map(repr, names))}; name different fields"
            )
        if self.swap and self.interaction != "sequence":
            yield (
                "pairs.swap=true needs pairs.interaction=sequence, because elsewhere the score "
                f"does not depend on the order; found {self.interaction}; set pairs.swap=false"
            )
        if self.min_score >= self.max_score:
            yield (
                "pairs.min_score must be below pairs.max_score; found "
                f"{self.min_score} and {self.max_score}; set the range of the scores"
            )
