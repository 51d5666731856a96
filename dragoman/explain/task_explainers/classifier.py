"""A text to be classified, as an input to be explained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dragoman.attention.attention_weight_hooks import AttentionRecords, WeightsEdit, find_attentions
from dragoman.errors import DataError
from dragoman.explain.classification_occlusion import CharacterSpan, leave_out
from dragoman.explain.explanation import AttentionSite, TokenizedText
from dragoman.explain.task_explainers.base import (
    BATCH_ROWS,
    Floats,
    RecordedSite,
    StackSites,
    Switch,
    TaskExplainer,
    column_off,
    contribution_norms,
    locate_tokens,
    name_classes,
    read_stack,
    to_array,
    uniform_switch,
)
from dragoman.models.classifier import ClassifierModel
from dragoman.tasks.classification import ClassificationTask
from dragoman.tasks.classification_preprocessor import tokenize


class ClassifiedText(TaskExplainer):
    """A text and one of its labels."""

    task: ClassVar[str] = "classify"
    model: ClassifierModel

    def __init__(
        self, model: ClassifierModel, task: ClassificationTask, text: str, *, label: str = ""
    ) -> None:
        super().__init__(model, task.config)
        self.classification, self.text = task, text
        self.sentences = task.tokenize(text).sentences
        self.store = task.encode_texts([text])
        words = [word for sentence in self.sentences for word in sentence]
        if not words:
            raise DataError(
                "a text to explain must hold words", found=repr(text), fix="pass a text with words"
            )
        names = task.text.labels.names
        if label and label not in names:
            raise DataError(
                "a label to explain must be one of the model's",
                found=repr(label),
                fix=f"choose one of {', '.join(names[:12])}",
            )
        self.label = names.index(label) if label else None
        spans = _byte_spans(text, len(words)) if task.config.text.tokenizer == "bytes" else None
        self._source = locate_tokens(text, words, task.text.vocabulary.ids(words), spans=spans)
        if len(words) >= task.config.data.max_length:
            self.num_tokens = len(tokenize(task.config, text))

    @property
    def source(self) -> TokenizedText:
        """The text's tokens."""
        return self._source

    @property
    def request(self) -> dict[str, Any]:
        """The text and the label."""
        names = self.classification.text.labels.names
        return {"text": self.text} | ({} if self.label is None else {"label": names[self.label]})

    @property
    def is_hierarchical(self) -> bool:
        """Whether the text is read as sentences of words."""
        return self.config.classify.hierarchical

    def run(self, copies: int = 1, *, off: Sequence[str] = ()) -> Tensor:
        """Return the log-probabilities (copies, 1, C) of the labels."""
        return self._classify(self.store, np.zeros(copies, np.int64)).unsqueeze(1)

    def _classify(self, store: Any, rows: NDArray[np.int64]) -> Tensor:
        """Return the log-probabilities (B, C) of the texts of a store."""
        device = next(self.model.parameters()).device
        batch = self.classification.collate(store, rows).to(device)
        logits = self.classification.forward(self.model, batch).logits.float()
        return (
            nn.functional.logsigmoid(logits)
            if self.classification.text.multi_label
            else logits.log_softmax(dim=-1)
        )

    def choose(self, log_probs: Tensor) -> list[int]:
        """Return the wanted label, or the most probable one."""
        return [int(log_probs[0].argmax()) if self.label is None else self.label]

    def name_output(self, output_id: int) -> str:
        """Return a label."""
        return self.classification.text.labels.names[output_id]

    def target(self, ids: Sequence[int]) -> TokenizedText:
        """Return all labels."""
        return name_classes(self.classification.text.labels.names)

    @property
    def model_fields(self) -> dict[str, Any]:
        """The family, and whether a text may have several labels."""
        return {
            "family": "han" if self.is_hierarchical else "classifier",
            "multi_label": self.classification.text.multi_label,
            "labels": len(self.classification.text.labels.names),
        }

    @property
    def embeddings(self) -> Sequence[nn.Module]:
        """The word embeddings; n-grams and one-hot filters have none."""
        return () if self.model.embedding is None else (self.model.embedding,)

    def sum_inputs(self, parts: Mapping[int, Sequence[Tensor]], copies: int) -> Tensor:
        """Return numbers (copies, S) of the words, in the order of the text."""
        values = parts[0][0]
        if not self.is_hierarchical:
            return values[:, : len(self.source.tokens)]
        values = values.view(copies, -1, values.size(1))  # (copies, N, W)
        rows = [values[:, at, : len(each)] for at, each in enumerate(self.sentences)]
        return torch.cat(rows, dim=1)

    @torch.no_grad()
    def occlude(self, ids: Sequence[int]) -> Floats:
        """Return the drop (1, S) of the label's log-probability without each word."""
        base = self.run()[0, 0, ids[0]]
        texts = []
        for token in self.source.tokens:
            start, end = token.span
            blank = len(self.text[start:end]) - len(self.text[start:end].lstrip())
            texts.append(leave_out(self.text, CharacterSpan(start + blank, end)))
        drops = np.zeros((1, len(texts)), np.float32)
        for first in range(0, len(texts), BATCH_ROWS):
            chosen = texts[first : first + BATCH_ROWS]
            store = self.classification.encode_texts(chosen)
            # A text without words has no label; the drop of its only word stays zero.
            rows = np.flatnonzero(store.lengths("words"))
            if len(rows):
                found = base - self._classify(store, rows)[:, ids[0]]
                drops[0, first + rows] = found.cpu().numpy()
        return drops

    def read_sites(self, records: AttentionRecords) -> list[RecordedSite]:
        """Return the encoder's attentions, then those of the pooling: words, then sentences."""
        attentions = find_attentions(self.model)
        lengths = tuple(len(each) for each in self.sentences)
        sites = read_stack(
            records,
            attentions,
            StackSites("encoder.", "e", "encoder", "source", sum(lengths), lengths=lengths),
        )
        numbers = [f"sentence {number}" for number in range(1, len(lengths) + 1)]
        if "words" in records:
            sites += self._read_words(records, lengths, numbers)
        stack = StackSites(
            "sentence_encoder.", "t", "encoder", "sentence", len(lengths), labels=numbers
        )
        sites += read_stack(records, attentions, stack)
        names = list(self.classification.text.labels.names)
        attributes = self.classification.text.attributes
        for path, letter, labels in (
            ("sentences", "s", names),
            ("pooling", "p", names),
            ("attributes", "a", [] if attributes is None else list(attributes.names)),
        ):
            if path in records:
                sites.append(self._read_pooling(records, path, letter, labels, numbers))
        return sites

    def zero_values(self, token: int) -> dict[str, WeightsEdit]:
        """Return edits that make the values of a word zero: in the encoder and the pooling."""
        found = find_attentions(self.model)
        if not self.is_hierarchical:
            return {path: column_off(token) for path in found}
        ends = np.cumsum([len(each) for each in self.sentences]).tolist()
        row = next(number for number, end in enumerate(ends) if token < end)
        column = token - (ends[row - 1] if row else 0)
        return {
            path: column_off(column, row=row, of=len(ends))
            for path in found
            if path.startswith("encoder.") or path == "words"
        }

    def _read_words(
        self, records: AttentionRecords, lengths: Sequence[int], numbers: Sequence[str]
    ) -> Iterator[RecordedSite]:
        """Yield the word-level pooling of each sentence, over the words of the whole text."""
        seen, start = records["words"], 0
        total = sum(lengths)
        for row, length in enumerate(lengths):
            heads = seen.weights.size(1)
            weights = seen.weights.new_zeros(heads, seen.weights.size(2), total)
            weights[..., start : start + length] = seen.weights[row, ..., :length]
            values = seen.values.new_zeros(heads, total, seen.values.size(-1))
            values[:, start : start + length] = seen.values[row, :, :length]
            norms = contribution_norms(None, weights, values)
            site = AttentionSite(
                id=f"w{row}",
                path=f"words.{row}",
                kind="pool",
                group="encoder",
                layer=0,
                heads=heads,
                query="sentence",
                key="source",
                segments=[(numbers[row], start, start + length)],
                query_labels=[numbers[row]],
            )
            switch = uniform_switch("words", row=row, of=len(lengths))
            yield RecordedSite(site, weights, norms, (switch,) * heads)
            start += length

    def _read_pooling(
        self,
        records: AttentionRecords,
        path: str,
        letter: str,
        names: list[str],
        numbers: list[str],
    ) -> RecordedSite:
        """Return a pooling of the text: by one query, several hops, or one query per label."""
        seen = records[path]
        over_sentences = self.is_hierarchical
        length = len(numbers) if over_sentences else len(self.source.tokens)
        weights = seen.weights[0, ..., :length]
        queries = weights.size(1)
        is_labeled = path == "attributes" or self.config.classify.pooling == "labels"
        labels = [f"hop {number}" for number in range(1, queries + 1)]
        site = AttentionSite(
            id=f"{letter}0",
            path=path,
            kind="pool",
            group="encoder",
            layer=1 if over_sentences else 0,
            heads=weights.size(0),
            query="class" if is_labeled else "seed",
            key="sentence" if over_sentences else "source",
            query_labels=names if is_labeled else labels if queries > 1 else ["text"],
            key_labels=numbers if over_sentences else None,
        )
        norms = contribution_norms(None, weights, seen.values[0, :, :length])
        return RecordedSite(site, weights, norms, (uniform_switch(path),) * weights.size(0))

    @property
    def special_switches(self) -> dict[str, tuple[Switch, ...]]:
        """The levels of a hierarchical model, whose weights become uniform."""
        if not self.is_hierarchical:
            return {}
        count, found = len(self.sentences), find_attentions(self.model)
        switches = {
            "words": tuple(uniform_switch("words", row=row, of=count) for row in range(count)),
            "sentences": (uniform_switch("sentences"),),
        }
        return {name: each for name, each in switches.items() if name in found}

    def extras(
        self, seen: Sequence[RecordedSite], ids: Sequence[int]
    ) -> dict[str, tuple[str, NDArray[Any]]]:
        """Return the importance of words and the sentences' ranges of tokens.

        The importance (1, S) is the product of the weights of both levels, or the pooling's weight;
        of several queries it is the mean, of one query per label the explained label's.
        """
        by_id = {each.site.id: to_array(each.weights)[0] for each in seen}  # (Q, K)
        found = dict[str, tuple[str, NDArray[Any]]]()
        lengths = [len(each) for each in self.sentences]
        ends = np.cumsum(lengths)
        if "w0" in by_id:
            weights = np.concatenate([by_id[f"w{row}"] for row in range(len(lengths))]).sum(axis=0)
            if "s0" in by_id:
                weights = weights * np.repeat(self._label_row(by_id["s0"], ids[0]), lengths)
            found["word_importance"] = ("words.p", weights[None].astype(np.float32))
        elif "p0" in by_id:
            found["word_importance"] = ("words.p", self._label_row(by_id["p0"], ids[0])[None])
        if self.is_hierarchical:
            ranges = np.stack([ends - lengths, ends], axis=1).astype(np.int32)
            found["sentences"] = ("words.sentences", ranges)
        return found

    def _label_row(self, weights: Floats, label: int) -> Floats:
        """Return the weights (K,) of a label, or the mean of rows (Q, K) that are no labels."""
        if self.config.classify.pooling == "labels":
            return weights[label]
        return np.asarray(weights.mean(axis=0), np.float32)

    @property
    def missing(self) -> dict[str, str]:
        """There is no search and no lens."""
        return {
            "beam": "A classifier scores all classes at once: there is no search.",
            "token": "A classifier predicts classes, not tokens: there is no logit lens.",
        }


def _byte_spans(text: str, count: int) -> list[CharacterSpan | None]:
    """Return the character that each of the first bytes belongs to; None past the last."""
    spans: list[CharacterSpan | None] = []
    for at, char in enumerate(text):
        spans += [CharacterSpan(at, at + 1)] * len(char.encode(errors="surrogatepass"))
    return (spans + [None] * count)[:count]
