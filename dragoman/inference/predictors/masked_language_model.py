"""MaskedLanguageModel: fills in the masks of texts, and scores texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from dragoman.errors import ConfigError, DataError
from dragoman.inference.long_line_segments import check_text_iterable, check_unicode
from dragoman.inference.predictors.language_model import (
    EMPTY_NOTE,
    EncodedText,
    LanguageModel,
    TextScore,
)
from dragoman.inference.translation_result import truncate_repr
from dragoman.models.bert_and_xlnet_language_model import MaskedLM
from dragoman.text.sentencepiece_tokenizer import replace_control_chars

if TYPE_CHECKING:
    from dragoman.explain.task_explainers.base import TaskExplainer
    from dragoman.tasks.bert_and_xlnet_language_modeling import FilledText, MaskedLanguageTask

NO_MASK_NOTE = "the text has no <mask>: there is nothing to fill in"
MAX_GUESSES = 10  # tokens of a prediction for each mask


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskFilling:
    """A text with its masks filled in, and the most probable tokens for each."""

    text: str  # as given
    filled: str
    masks: tuple[tuple[tuple[str, float], ...], ...]  # (token, probability), best first
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return the text as filled in, in one line."""
        return f"MaskFilling({truncate_repr(self.filled)}, {len(self.masks)} masks)"

    def to_line(self, *, top: int = 1) -> str:
        """Return the filled text; with `top` above 1, `token probability` pairs for each mask."""
        if top == 1:
            return replace_control_chars(self.filled).replace("\t", " ")
        shown = [
            " ".join(f"{token} {probability:.4f}" for token, probability in guesses[:top])
            for guesses in self.masks
        ]
        return replace_control_chars(" | ".join(shown)).replace("\t", " ")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values; six decimals."""
        return {
            "text": self.text,
            "filled": self.filled,
            "masks": [
                [
                    {"token": token, "probability": round(probability, 6)}
                    for token, probability in guesses
                ]
                for guesses in self.masks
            ],
            "notes": list(self.notes),
        }


class MaskedLanguageModel(LanguageModel):
    """Fills in `<mask>` or `[MASK]`, and scores texts by pseudo-log-likelihood.

    `LanguageModel.load("my-mlm").fill_mask("The <mask> sat.")`
    """

    task: MaskedLanguageTask
    model: MaskedLM

    @property
    def has_alternatives(self) -> bool:
        """Whether a prediction is one of several tokens: always."""
        return True

    def fill_mask(self, text: str, *, top: int = 5) -> FilledText:
        """Return the most probable tokens for each mask of a text, and the text filled in.

        Raise DataError for a text without a mask, or with more tokens than a training segment.
        """
        if not isinstance(text, str):
            raise DataError(
                "what is to be filled in must be text",
                found=f"{type(text).__name__} {text!r:.60}",
                fix='pass "The <mask> sat."',
            )
        if not isinstance(top, int) or top < 1:
            raise ConfigError([f"top must be an integer from 1; found {top!r}; try 5"])
        check_unicode(text)
        with torch.inference_mode():
            return self.task.fill_masks(self.model, [text], top=top)[0]

    def task_input(self, example: str) -> TaskExplainer:  # type: ignore[override]
        """Return a text with masks to be explained, or one whose tokens are masked in turn."""
        from dragoman.explain.task_explainers.masked_language_model import MaskedText

        if not isinstance(example, str):
            raise DataError(
                "a text to explain must be text",
                found=f"{type(example).__name__} {example!r:.60}",
                fix='pass "The <mask> sat."',
            )
        return MaskedText(self.model, self.task, example)

    def repeat_input(self, request: Mapping[str, Any]) -> TaskExplainer:
        """Return the text of an explanation."""
        return self.task_input(request["text"])

    def generate(self, prompt: str = "", **options: Any) -> NoReturn:
        """Raise ConfigError: this model does not continue texts."""
        raise ConfigError(
            [
                "a model that generates must be trained with language.objective=causal; found "
                f"{self.config.language.objective}; fill in a <mask> with `dragoman predict`"
            ]
        )

    def score(self, texts: Iterable[str], *, batch_size: int | None = None) -> list[TextScore]:
        """Return the pseudo-log-likelihood of each text: every token given all others."""
        return list(self._score(check_text_iterable(texts)))

    def _score(self, texts: Iterable[str]) -> Iterator[TextScore]:
        for text in texts:
            if not text:
                yield TextScore(text=text, log_prob=0.0, tokens=0, notes=(EMPTY_NOTE,))
                continue
            log_prob, tokens = self.task.pseudo_log_likelihood(self.model, text)
            yield TextScore(text=text, log_prob=log_prob, tokens=tokens)

    def length(self, encoded: EncodedText) -> int:
        """Return the number of tokens."""
        return len(encoded.ids)

    def predict_batch(  # type: ignore[override]
        self, model: nn.Module, encoded: Sequence[EncodedText], device: torch.device
    ) -> list[MaskFilling]:
        """Fill in the masks of a batch of texts; a text without one stays as it is."""
        assert isinstance(model, MaskedLM), f"found {type(model).__name__}"
        masked = [each.text for each in encoded if self.task.has_mask(each.text)]
        found = iter(self.task.fill_masks(model, masked, top=MAX_GUESSES))
        predictions = []
        for each in encoded:
            if not self.task.has_mask(each.text):
                predictions.append(
                    MaskFilling(text=each.text, filled=each.text, masks=(), notes=(NO_MASK_NOTE,))
                )
                continue
            filled = next(found)
            masks = tuple(tuple((*guess,) for guess in guesses) for guesses in filled.guesses)
            predictions.append(MaskFilling(text=each.text, filled=filled.text, masks=masks))
        return predictions
