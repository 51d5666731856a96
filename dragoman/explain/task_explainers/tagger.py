"""A sentence to be tagged, as an input to be explained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from dragoman.attention.attention_weight_hooks import AttentionRecords, WeightsEdit, find_attentions
from dragoman.errors import DataError
from dragoman.explain.explanation import Token, TokenizedText
from dragoman.explain.task_explainers.base import (
    BATCH_ROWS,
    Floats,
    RecordedSite,
    StackSites,
    TaskExplainer,
    column_off,
    locate_tokens,
    read_stack,
    to_array,
)
from dragoman.layers.crf_and_token_softmax import LinearChainCRF
from dragoman.models.tagger import TaggingModel
from dragoman.tasks.tagging import TaggingTask
from dragoman.tasks.tagging_preprocessor import TaggedSentence
from dragoman.text.special_tokens import PAD, UNK


class TaggedText(TaskExplainer):
    """The tokens of a sentence, each with a tag."""

    task: ClassVar[str] = "tag"
    model: TaggingModel

    def __init__(
        self,
        model: TaggingModel,
        task: TaggingTask,
        sentence: TaggedSentence,
        *,
        text: str | None = None,
    ) -> None:
        super().__init__(model, task.config)
        if not sentence.tokens:
            raise DataError(
                "a sentence to explain must hold tokens", found="none", fix="pass a text with words"
            )
        self.tagging, self.sentence = task, sentence
        self.store = task.encode_sentences([sentence])
        joint = "" if task.config.tag.segmentation else " "
        self.text = joint.join(sentence.tokens) if text is None else text
        ids = task.text.word_ids(sentence.tokens)
        self._source = locate_tokens(self.text, sentence.tokens, ids)
        self._emissions: Tensor | None = None  # (1, T, K), of the last pass

    @property
    def source(self) -> TokenizedText:
        """The sentence's tokens."""
        return self._source

    @property
    def request(self) -> dict[str, Any]:
        """The text, the tokens, and their further column if the model reads one."""
        column = {"column": list(self.sentence.column)} if self.sentence.column else {}
        return {"text": self.text, "tokens": list(self.sentence.tokens), **column}

    def run(self, copies: int = 1, *, off: Sequence[str] = ()) -> Tensor:
        """Return the log-probabilities (copies, T, K) of the tags: a CRF's are its marginals."""
        return self._tag(self._batch(copies))

    def _batch(self, copies: int) -> Any:
        device = next(self.model.parameters()).device
        return self.tagging.collate(self.store, np.zeros(copies, np.int64)).to(device)

    def _tag(self, batch: Any) -> Tensor:
        """Return the log-probabilities (B, T, K) of the tags of a batch of equal lengths."""
        emissions = self.model(
            batch.words, None, characters=batch.characters, features=batch.features
        )
        self._emissions = emissions[:1].detach()
        return self.model.tag_output.log_marginals(emissions, None).float()

    def choose(self, log_probs: Tensor) -> list[int]:
        """Return the best sequence of tags, as `predict` does."""
        assert self._emissions is not None, "a pass comes first"
        return self.tagging.decode(self.model, self._emissions)[0].tolist()

    def name_output(self, output_id: int) -> str:
        """Return a tag in the scheme that the model was trained with."""
        return self.tagging.text.labels.names[output_id]

    def name_outputs(
        self, ids: Sequence[int], output_ids: Sequence[Sequence[int]]
    ) -> list[list[str]]:
        """Return tags in the scheme of the files, each in place of the one at its position.

        Two tags of the model may have one name: B-X and S-X are B-X in IOB2.
        """
        text = self.tagging.text
        if text.scheme == text.trained_scheme:
            return super().name_outputs(ids, output_ids)
        return [
            # The tags before and after decide what a tag is called.
            [
                text.tags_of([*ids[max(0, at - 1) : at], output_id, *ids[at + 1 : at + 2]])[
                    min(at, 1)
                ]
                for output_id in row
            ]
            for at, row in enumerate(output_ids)
        ]

    def target(self, ids: Sequence[int]) -> TokenizedText:
        """Return the tags in the scheme of the files, as `predict` does."""
        texts = self.tagging.text.tags_of(ids)
        text, tokens = "", list[Token]()
        for output_id, name in zip(ids, texts, strict=True):
            start = len(text)
            text += f" {name}" if tokens else name
            tokens.append(Token(output_id, text[start:], (start, len(text))))
        return TokenizedText(
            text=text, tokens=tokens, words=[(at, at + 1) for at in range(len(tokens))]
        )

    @property
    def model_fields(self) -> dict[str, Any]:
        """The family, and whether the tags depend on each other."""
        has_crf = isinstance(self.model.tag_output, LinearChainCRF)
        return {
            "family": "tagger",
            "crf": has_crf,
            "probabilities": "marginal" if has_crf else "independent",
        }

    @property
    def score_fields(self) -> dict[str, Any]:
        """The log-probability of the whole sequence of tags under the CRF."""
        assert self._emissions is not None, "a pass comes first"
        tags = self.tagging.decode(self.model, self._emissions)
        with torch.no_grad():
            return {"sequence": -float(self.model.tag_output.nll(self._emissions, tags, None).nll)}

    @property
    def embeddings(self) -> Sequence[nn.Module]:
        """The input of a token: its word, characters and features."""
        return (self.model.inputs,)

    def sum_inputs(self, parts: Mapping[int, Sequence[Tensor]], copies: int) -> Tensor:
        """Return numbers (copies, S) of the tokens."""
        return parts[0][0]

    def zero_values(self, token: int) -> dict[str, WeightsEdit]:
        """Return edits that make the values of a token zero."""
        return {path: column_off(token) for path in find_attentions(self.model)}

    @torch.no_grad()
    def occlude(self, ids: Sequence[int]) -> Floats:
        """Return the drop (T, S) of each tag's log-probability with each token unknown.

        An unknown token has no characters and no features; leaving it out would move the others.
        """
        size = len(self.source.tokens)
        base = self.explained(self.run(), ids)
        rows = []
        for first in range(0, size, BATCH_ROWS):
            at = torch.arange(first, min(first + BATCH_ROWS, size))
            batch = self._batch(len(at))
            here = torch.arange(len(at))
            batch.words[here, at] = UNK
            for part in (batch.characters, batch.features):
                if part is not None:
                    part[here, at] = PAD
            rows.append(base - self.explained(self._tag(batch), ids))
        return to_array(torch.cat(rows)).T

    def read_sites(self, records: AttentionRecords) -> list[RecordedSite]:
        """Return the encoder's attentions."""
        stack = StackSites("encoder.", "e", "encoder", "source", len(self.source.tokens))
        return read_stack(records, find_attentions(self.model), stack)

    @property
    def missing(self) -> dict[str, str]:
        """There is no beam."""
        return {
            "beam": "The best sequence of tags is found exactly, without a beam."
            if isinstance(self.model.tag_output, LinearChainCRF)
            else "The tags are predicted at once: there is no search.",
        }
