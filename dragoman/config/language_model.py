"""Settings of language modeling: each with its default, range and description."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dragoman.config.setting_declaration import setting


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageConfig:
    """Language modeling: segments, memory, dropout outside the blocks, evaluation."""

    # Metrics of validation, besides the loss.
    metrics: ClassVar[tuple[str, ...]] = (
        "perplexity",
        "bits_per_byte",
        "pseudo_perplexity",
        "order_accuracy",
    )

    objective: str = setting(
        "causal",
        "What is predicted: the next token, masked tokens (BERT), or tokens in a random order "
        "(XLNet).",
        choices=("causal", "masked", "permuted"),
    )
    mask_rate: float = setting(
        0.15,
        "Fraction of the tokens that a masked or permuted model predicts.",
        at_least=0.01,
        at_most=0.9,
    )
    sentence_order: bool = setting(
        False,
        "Also predict whether two segments are in order (sentence-order prediction, ALBERT).",
    )
    eval_masked: str = setting(
        "rate",
        "Tokens masked at a time in evaluation: language.mask_rate of them, or one, which is slow.",
        choices=("rate", "one"),
    )
    # Largest sizes of a miniature (`dragoman train --mini`), by setting.
    mini: ClassVar[dict[str, object]] = {
        "segment": 32,
        "memory": 32,
        "eval_memory": 64,
        "clamp_distance": 64,
        "eval_stride": 16,
        "embedding_dropout": 0.0,
        "input_dropout": 0.1,
        "output_dropout": 0.1,
        "activation_penalty": 0.1,
        "temporal_penalty": 0.1,
    }

    segment: int = setting(
        128, "Tokens of a training segment of the text.", at_least=2, at_most=1_000_000
    )
    memory: int = setting(
        0,
        "Transformer-XL: hidden states of earlier segments that a segment attends to; 0 for none.",
        at_least=0,
        at_most=1_000_000,
    )
    eval_memory: int = setting(
        0,
        "The memory in evaluation and generation; 0 for language.memory.",
        at_least=0,
        at_most=1_000_000,
    )
    clamp_distance: int = setting(
        0,
        "Clamp Transformer-XL's relative distances to this; 0 disables clamping.",
        at_least=0,
        at_most=1_000_000,
    )
    eval_stride: int = setting(
        0,
        "Tokens scored in each evaluation window of language.segment tokens, for a model that "
        "carries nothing from segment to segment; 0 for half a segment.",
        at_least=0,
        at_most=1_000_000,
    )
    eval_rows: int = setting(
        0,
        "Parts of the text that are evaluated in parallel, each after a warm-up that is not "
        "scored; 1 scores each document in one go; 0 for as many as a training batch has.",
        at_least=0,
        at_most=65_536,
    )
    embedding_dropout: float = setting(
        0.0,
        "Probability of dropping a token's embedding, at all its positions in a batch but the "
        "first of a row.",
        at_least=0.0,
        at_most=0.95,
    )
    input_dropout: float = setting(
        0.1, "Dropout probability of the stack's input.", at_least=0.0, at_most=0.95
    )
    output_dropout: float = setting(
        0.0, "Dropout probability of the stack's output.", at_least=0.0, at_most=0.95
    )
    locked_dropout: bool = setting(
        False,
        "Variational dropout: all positions of a row share the masks of the input and output.",
    )
    activation_penalty: float = setting(
        0.0,
        "Activation regularization: weight of the mean square of the stack's output.",
        at_least=0.0,
        at_most=1000.0,
    )
    temporal_penalty: float = setting(
        0.0,
        "Temporal activation regularization: weight of the mean squared change of the output "
        "from one position to the next.",
        at_least=0.0,
        at_most=1000.0,
    )

    @property
    def resolved_eval_memory(self) -> int:
        """Return the memory in evaluation."""
        return self.eval_memory or self.memory

    @property
    def resolved_eval_stride(self) -> int:
        """Return the tokens that each evaluation window scores."""
        return self.eval_stride or max(1, self.segment // 2)

    def problems(self) -> Iterator[str]:
        """Yield inconsistencies between fields."""
        if self.objective != "causal" and self.memory:
            yield (
                f"language.objective={self.objective} reads each segment alone; found "
                f"language.memory={self.memory}; set language.memory=0"
            )
        if self.sentence_order and self.objective != "masked":
            yield (
                "language.sentence_order needs language.objective=masked; found "
                f"language.objective={self.objective}; set it, or leave sentence_order out"
            )
        if self.sentence_order and self.segment < 4:
            yield (
                "language.sentence_order cuts a segment in two, of at least 2 tokens each; found "
                f"language.segment={self.segment}; raise it"
            )
        if self.eval_stride > self.segment:
            yield (
                "language.eval_stride must be at most language.segment, the length of a window; "
                f"found {self.eval_stride} and {self.segment}; lower it"
            )
        if self.eval_memory and not self.memory:
            yield (
                "language.eval_memory needs a model trained with a memory; found "
                f"language.eval_memory={self.eval_memory} and language.memory=0; "
                "set language.memory, or leave it out"
            )
