"""Texts to be classified or tagged and sentence pairs, as inputs to be explained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dragoman.attention.attention_weight_hooks import AttentionRecords, WeightsEdit, find_attentions
from dragoman.errors import DataError
from dragoman.explain.classification_occlusion import CharacterSpan, find_spans, leave_out
from dragoman.explain.explanation import AttentionSite, Token, TokenizedText
from dragoman.explain.non_translation_inputs.task_input import (
    Floats,
    RecordedSite,
    StackSites,
    Switch,
    TaskInput,
    column_off,
    contribution_norms,
    heads_of,
    read_stack,
    to_array,
    uniform_switch,
)
from dragoman.explain.token_spans import find_words, grapheme_ends, text_direction
from dragoman.layers.crf import LinearChainCRF
from dragoman.models.classifier import ClassifierModel
from dragoman.models.sentence_pair_classifier import PairModel, PairOutput
from dragoman.models.tagger import TaggingModel
from dragoman.tasks.classification import ClassificationTask
from dragoman.tasks.classification_preprocessor import tokenize
from dragoman.tasks.sentence_pairs import PairsTask, expected_score
from dragoman.tasks.tagging import TaggingTask
from dragoman.tasks.tagging_preprocessor import TaggedSentence
from dragoman.text.special_tokens import PAD, SPECIAL_TOKENS, UNK

BATCH_ROWS = 32  # changed inputs that are run together


def locate_tokens(
    text: str, words: Sequence[str], ids: Sequence[int], *, spans: Sequence[Any] | None = None
) -> TokenizedText:
    """Return a text with tokens that are found in it, one after the other.

    A token's span begins where the one before it ends, so that spans tile the text; what a
    tokenizer dropped before a token, such as a space, belongs to it. The text ends with its last
    token: what was not read is left out.
    """
    found = find_spans(text, words) if spans is None else spans
    edges = grapheme_ends(text)
    tokens, start = list[Token](), 0
    for word, number, span in zip(words, ids, found, strict=True):
        end = start if span is None else max(start, edges[span[1]])
        # The rank by frequency of a vocabulary that is sorted by it.
        rank = number - len(SPECIAL_TOKENS) if number >= len(SPECIAL_TOKENS) else None
        tokens.append(Token(int(number), text[start:end] or word, (start, end), rank=rank))
        start = end
    return TokenizedText(
        text=text[:start],
        dir=text_direction(text),
        tokens=tokens,
        words=find_words(text, tokens),
    )


def name_classes(names: Sequence[str]) -> TokenizedText:
    """Return classes as the tokens of an output without a text."""
    return TokenizedText(
        text="", tokens=[Token(number, name, (0, 0)) for number, name in enumerate(names)]
    )


class ClassifiedText(TaskInput):
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

    def name_output(self, number: int) -> str:
        """Return a label."""
        return self.classification.text.labels.names[number]

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


class TaggedText(TaskInput):
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

    def name_output(self, number: int) -> str:
        """Return a tag in the scheme that the model was trained with."""
        return self.tagging.text.labels.names[number]

    def name_outputs(self, ids: Sequence[int], numbers: Sequence[Sequence[int]]) -> list[list[str]]:
        """Return tags in the scheme of the files, each in place of the one at its position.

        Two tags of the model may have one name: B-X and S-X are B-X in IOB2.
        """
        text = self.tagging.text
        if text.scheme == text.trained_scheme:
            return super().name_outputs(ids, numbers)
        return [
            # The tags before and after decide what a tag is called.
            [
                text.tags_of([*ids[max(0, at - 1) : at], number, *ids[at + 1 : at + 2]])[min(at, 1)]
                for number in row
            ]
            for at, row in enumerate(numbers)
        ]

    def target(self, ids: Sequence[int]) -> TokenizedText:
        """Return the tags in the scheme of the files, as `predict` does."""
        texts = self.tagging.text.tags_of(ids)
        text, tokens = "", list[Token]()
        for number, name in zip(ids, texts, strict=True):
            start = len(text)
            text += f" {name}" if tokens else name
            tokens.append(Token(number, text[start:], (start, len(text))))
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


class ComparedPair(TaskInput):
    """Two sentences, the label of the pair, and its score."""

    task: ClassVar[str] = "pairs"
    model: PairModel

    def __init__(self, model: PairModel, task: PairsTask, first: str, second: str) -> None:
        super().__init__(model, task.config)
        self.pairs, self.texts = task, (first, second)
        self.words = task.words(first), task.words(second)
        self.encoded = task.encode_pair(first, second)
        self._sides = tuple(
            locate_tokens(text, words, ids)
            for text, words, ids in zip(self.texts, self.words, self.encoded.tokens, strict=True)
        )
        self._score: float | None = None

    @property
    def source(self) -> TokenizedText:
        """The first sentence."""
        return self._sides[0]

    @property
    def request(self) -> dict[str, Any]:
        """Both sentences."""
        return {"first": self.texts[0], "second": self.texts[1], "text": "\t".join(self.texts)}

    def run(self, copies: int = 1, *, off: Sequence[str] = ()) -> Tensor:
        """Return the log-probabilities (copies, 1, L) of the labels, or else of the scores."""
        return self._compare([self.encoded] * copies)

    def _compare(self, encoded: Sequence[Any]) -> Tensor:
        device = next(self.model.parameters()).device
        batch = self.pairs.batch_pairs(encoded).to(device)
        output: PairOutput = self.model(batch.token_ids, batch.flags, batch.lengths)
        if output.score is not None:
            scores = expected_score(output.score.detach(), self.pairs.min_score)
            self._score = float(scores[0])
        logits = output.score if output.labels is None else output.labels
        assert logits is not None, "a model of pairs has labels or scores"
        return logits.float().log_softmax(dim=-1).unsqueeze(1)

    @property
    def names(self) -> Sequence[str]:
        """The labels, or the whole scores of a model without labels."""
        if self.pairs.text.labels is not None:
            return self.pairs.text.labels.names
        return [str(each) for each in range(self.pairs.min_score, self.pairs.max_score + 1)]

    def choose(self, log_probs: Tensor) -> list[int]:
        """Return the most probable label."""
        return [int(log_probs[0].argmax())]

    def name_output(self, number: int) -> str:
        """Return a label."""
        return self.names[number]

    def target(self, ids: Sequence[int]) -> TokenizedText:
        """Return the second sentence."""
        return self._sides[1]

    @property
    def model_fields(self) -> dict[str, Any]:
        """The interaction of the sentences, and the labels."""
        return {
            "family": "pairs",
            "interaction": self.config.pairs.interaction,
            "labels": list(self.names),
        }

    @property
    def score_fields(self) -> dict[str, Any]:
        """The score of the pair, where the model has one."""
        return {} if self._score is None else {"score": self._score}

    @property
    def embeddings(self) -> Sequence[nn.Module]:
        """The embeddings of words, and of whether they occur in the other sentence."""
        return self.model.embedding, self.model.flag_embedding

    def sum_inputs(self, parts: Mapping[int, Sequence[Tensor]], copies: int) -> Tensor:
        """Return numbers of the words of both sentences, (copies, S + T)."""
        values = parts[0][0] + parts[1][0]
        first, second = map(len, self.words)
        if self.pairs.is_sequence:  # with </s> in between
            return torch.cat([values[:, :first], values[:, first + 1 : first + 1 + second]], dim=1)
        return torch.cat([values[:copies, :first], values[copies:, :second]], dim=1)

    reads_target: ClassVar[bool] = True

    def zero_values(self, token: int) -> dict[str, WeightsEdit]:
        """Return edits that make the values of a word of either sentence zero."""
        side, column = (0, token) if token < self.split else (1, token - self.split)
        paths = list(find_attentions(self.model))
        if self.pairs.is_sequence:
            at = column if side == 0 else self.split + 1 + column
            return {path: column_off(at) for path in paths}
        # Direction `a` reads the second sentence, `b` the first.
        other = f"interaction.cross.{'ba'[side]}"
        return {
            path: column_off(column) if path == other else column_off(column, part=side, parts=2)
            for path in paths
            if path == other or not path.startswith("interaction.cross.")
        }

    @torch.no_grad()
    def occlude(self, ids: Sequence[int]) -> Floats:
        """Return the drop of the label's log-probability without each word of both sentences."""
        base = self.run()[0, 0, ids[0]]
        changed = []
        for side, words in enumerate(self.words):
            for at in range(len(words)):
                kept = [" ".join(each) for each in self.words]
                kept[side] = " ".join([*words[:at], *words[at + 1 :]])
                changed.append(self.pairs.encode_pair(*kept))
        drops = [
            base - self._compare(changed[first : first + BATCH_ROWS])[:, 0, ids[0]]
            for first in range(0, len(changed), BATCH_ROWS)
        ]
        return to_array(torch.cat(drops))[None]

    def read_sites(self, records: AttentionRecords) -> list[RecordedSite]:
        """Return the attentions of the encoder on each sentence, and co-attention both ways."""
        attentions = find_attentions(self.model)
        first, second = map(len, self.words)
        if self.pairs.is_sequence:
            labels = [*self.words[0], "</s>", *self.words[1]]
            joint = StackSites(
                "encoder.", "e", "encoder", "source+target", len(labels), labels=labels
            )
            return read_stack(records, attentions, joint)
        sites = self._read_sides(records, "encoder.", 0)
        layers = 1 + max((each.site.layer for each in sites), default=-1)
        for path, suffix, query, key, shape in (
            ("interaction.cross.a", "", "source", "target", (first, second)),
            ("interaction.cross.b", "b", "target", "source", (second, first)),
        ):
            if path not in records:
                continue
            seen = records[path]
            site = AttentionSite(
                id=f"x0{suffix}",
                path=path,
                kind="cross",
                group="cross",
                layer=0,
                heads=seen.weights.size(1),
                query=query,
                key=key,
            )
            weights = seen.weights[0, :, : shape[0], : shape[1]]
            norms = contribution_norms(None, weights, seen.values[0, :, : shape[1]])
            sites.append(RecordedSite(site, weights, norms, heads_of(path, site.heads)))
        return sites + self._read_sides(records, "interaction.composition.", layers)

    def _read_sides(
        self, records: AttentionRecords, path: str, first_layer: int
    ) -> list[RecordedSite]:
        """Return the attentions of a stack that reads both sentences."""
        attentions = find_attentions(self.model)
        return [
            site
            for side, (axis, suffix) in enumerate((("source", ""), ("target", "b")))
            for site in read_stack(
                records,
                attentions,
                StackSites(
                    path,
                    "e",
                    "encoder",
                    axis,
                    len(self.words[side]),
                    suffix=suffix,
                    part=side,
                    parts=2,
                    first_layer=first_layer,
                ),
            )
        ]

    @property
    def missing(self) -> dict[str, str]:
        """There is no search and no lens."""
        return {
            "beam": "A pair gets its label at once: there is no search.",
            "token": "A model of pairs predicts labels, not tokens: there is no logit lens.",
        }
