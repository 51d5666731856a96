"""The tagging task: part-of-speech tags, chunks, entities, and words as tagged characters."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dragoman.config import Config
from dragoman.config.tagging import FREQUENCY_TARGET
from dragoman.data.bucket_shapes import BatchShape
from dragoman.data.collate import TensorBatch
from dragoman.data.in_memory_examples import InMemoryExamples
from dragoman.data.labeled_records import (
    TAG_NAMES,
    TOKEN_FORMATS,
    TOKEN_NAMES,
    Record,
    find_field,
    find_text_field,
    record_format,
)
from dragoman.errors import DataError
from dragoman.evaluate.conlleval import SpanScorer, span_signature
from dragoman.layers.crf_and_token_softmax import AllowedTransitions, TagLoss, token_cross_entropy
from dragoman.models.tagger import TaggerSizes, TaggingModel, build_tagger
from dragoman.tasks.non_translation_task import (
    NUM_GOLDEN_INPUTS,
    ReadRecords,
    TaskScore,
    TrainingTask,
    check_finite_outputs,
    evaluation_batches,
    find_fields,
    padded_length,
)
from dragoman.tasks.tagging_preprocessor import (
    PLAIN,
    TaggedSentence,
    TaggingPreprocessor,
    segment_tags,
)
from dragoman.text.tag_schemes import allowed_pairs, is_span_tag
from dragoman.training.bf16_mixed_precision import Precision
from dragoman.training.progress_display import Progress
from dragoman.training.task_protocol import Loss

logger = logging.getLogger(__name__)

CHARACTER_STEP = 8  # characters are padded to a multiple of it, so that few shapes occur
MAX_GOLDEN_TOKENS = 60


class TagFields(NamedTuple):
    """The fields of a file's records."""

    tokens: str
    tags: str
    column: str  # "" without tag.input_field
    auxiliary: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TagBatch(TensorBatch):
    """A batch of sentences; `tags` and `auxiliary` are for losses."""

    words: Tensor  # (B, T)
    tags: Tensor  # (B, T); past the labels for tags that training did not have
    lengths: Tensor  # (B,)
    sizes: NDArray[np.int64]  # (B,) the lengths on the host
    characters: Tensor | None = None  # (B, T, C)
    features: Tensor | None = None  # (B, T, F)
    auxiliary: Tensor | None = None  # (B, T, A); -1 for values that training did not have

    @property
    def mask(self) -> Tensor | None:
        """True at real tokens, (B, T); None without padding."""
        width = self.words.shape[1]
        if bool((self.sizes == width).all()):
            return None
        return torch.arange(width, device=self.lengths.device) < self.lengths.unsqueeze(1)

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return int(self.sizes.sum())

    @property
    def padded_tokens(self) -> int:
        """The number of tokens, padding included."""
        return self.words.numel()

    @property
    def graph_key(self) -> tuple[Any, ...]:
        """All shapes, and whether there is padding: without, there is no mask."""
        full = bool((self.sizes == self.words.shape[1]).all())
        return (*super().graph_key, full)


class TagPrediction(NamedTuple):
    """Tags of a sentence in the files' scheme, with their marginal probabilities."""

    tags: list[str]
    probabilities: list[float]


class TaggingTask(TrainingTask):
    """Tags every token of a sentence, with or without a CRF over the tags."""

    name = "tag"
    learned_settings = ("scheme", "segmentation", "features")
    metrics: ClassVar[Mapping[str, bool]] = {"accuracy": True, "f1": True}
    unit = "sentences"
    text: TaggingPreprocessor

    def __init__(self, config: Config, text: TaggingPreprocessor) -> None:
        super().__init__(config, text)
        self._find = find_fields(lambda record: _find_tag_fields(config, record))
        self._reads_characters = config.tag.characters != "none"
        self._allowed = (
            _allowed_transitions(text)
            if config.tag.constrained and text.trained_scheme != PLAIN
            else None
        )

    @classmethod
    def fit_text(cls, config: Config, records: ReadRecords) -> TaggingPreprocessor:
        """Learn vocabularies, label sets and the tag scheme from the training records."""
        find = find_fields(lambda record: _find_tag_fields(config, record))
        sentences = list(read_sentences(config, records(), find))
        if not sentences:
            raise DataError(
                "training data must have tagged sentences",
                found="none",
                fix="check the files of --train",
            )
        text = TaggingPreprocessor.build(config, sentences)
        if len(text.labels) < 2:
            raise DataError(
                "the training data must have at least 2 tags",
                found=", ".join(text.labels.names),
                fix="check data.train and tag.tag_field",
            )
        return text

    @classmethod
    def load_text(cls, config: Config, files: Mapping[str, bytes]) -> TaggingPreprocessor:
        """Read the vocabularies and label sets of a bundle."""
        return TaggingPreprocessor.from_files(config, files)

    def text_files(self) -> dict[str, bytes]:
        """Return the files of a bundle's text/ folder."""
        return self.text.to_files()

    def describe(self) -> str:
        """Return the sizes of vocabularies and label sets."""
        text = self.text
        spans = "" if text.scheme == PLAIN else f", scheme {text.scheme}"
        found = text.vectors
        vectors = "" if found is None else f", {len(found.ids):,} words with vectors"
        return (
            f"{len(text.words):,} words, {len(text.characters):,} characters, "
            f"{len(text.labels):,} tags{spans}{vectors}"
        )

    def build_model(self) -> TaggingModel:
        """Build the tagger, with pre-trained word vectors where the run has them."""
        text = self.text
        model = build_tagger(
            self.config.model,
            self.config.tag,
            TaggerSizes(
                words=len(text.words),
                characters=len(text.characters),
                features=text.feature_size,
                columns=len(text.features),
                tags=len(text.labels),
                auxiliary=text.auxiliary_sizes,
            ),
        )
        if text.vectors is not None and model.inputs.words is not None:
            table = model.inputs.words.weight
            with torch.no_grad():
                table[torch.from_numpy(text.vectors.ids)] = torch.from_numpy(
                    text.vectors.vectors
                ).to(table)
        return model

    def encode(self, records: Iterable[Record]) -> InMemoryExamples:
        """Return tagged sentences as arrays; raise DataError for a bad record.

        Warn of tags that training did not have; raise DataError if there are no others.
        """
        tags: Counter[str] = Counter()

        def count() -> Iterator[TaggedSentence]:
            for sentence in read_sentences(self.config, records, self._find):
                tags.update(sentence.tags)
                yield sentence

        store = self.encode_sentences(count())
        unknown = {tag: count for tag, count in tags.items() if not self.text.knows_tag(tag)}
        named = ", ".join(list(unknown)[:5]) + (", …" if len(unknown) > 5 else "")
        if unknown and len(unknown) == len(tags):
            raise DataError(
                "the files must have tags of the training data",
                found=f"only others: {named}",
                fix="name the field of the tags: --set tag.tag_field=NAME",
            )
        if unknown:
            logger.warning(
                "%s of %s tags are not among those of training, and count as wrong: %s",
                f"{sum(unknown.values()):,}",
                f"{tags.total():,}",
                named,
            )
        return store

    def encode_sentences(self, sentences: Iterable[TaggedSentence]) -> InMemoryExamples:
        """Return sentences as arrays; without tags they get the first tag."""
        text = self.text
        columns: dict[str, list[Any]] = {"words": [], "tags": []}
        if self._reads_characters:
            columns["characters"] = []
        if text.features:
            columns["features"] = []
        if self.config.tag.auxiliary_fields:
            columns["auxiliary"] = []
        for each in sentences:
            columns["words"].append(text.word_ids(each.tokens))
            columns["tags"].append(
                text.tag_ids(each.tags) if each.tags else np.zeros(len(each.tokens), np.int32)
            )
            if self._reads_characters:
                columns["characters"].append(text.character_ids(each.tokens).ravel())
            if text.features:
                columns["features"].append(text.feature_ids(each).ravel())
            if self.config.tag.auxiliary_fields:
                columns["auxiliary"].append(
                    text.auxiliary_ids(each).ravel()
                    if each.tags
                    else np.zeros(len(each.tokens) * len(text.auxiliary_sizes), np.int32)
                )
        return InMemoryExamples(sequences=columns)

    def lengths(self, store: InMemoryExamples) -> NDArray[np.int64]:
        """Return the number of tokens of each sentence."""
        return store.lengths("words")

    def num_scored(self, store: InMemoryExamples) -> int:
        """Return the number of tokens."""
        return int(self.lengths(store).sum())

    def collate(
        self,
        store: InMemoryExamples,
        examples: NDArray[np.int64],
        *,
        shapes: Sequence[BatchShape] = (),
        seed: int = 0,
        training: bool = False,
    ) -> TagBatch:
        """Return sentences padded to one length, and their words to one number of characters."""
        examples = np.asarray(examples, np.int64)
        sizes = self.lengths(store)[examples]
        width = padded_length(shapes, int(sizes.max(initial=1)))

        def per_token(name: str, columns: int) -> Tensor | None:
            if not columns:
                return None
            rows = store.padded(name, examples, width * columns)
            return torch.from_numpy(rows.reshape(len(examples), width, columns))

        characters = per_token(
            "characters", self.config.tag.max_characters if self._reads_characters else 0
        )
        if characters is not None:
            used = int((characters != 0).any(dim=0).any(dim=0).sum())
            characters = characters[:, :, : max(1, -(-used // CHARACTER_STEP)) * CHARACTER_STEP]
            characters = characters.contiguous()
        return TagBatch(
            words=torch.from_numpy(store.padded("words", examples, width)),
            tags=torch.from_numpy(store.padded("tags", examples, width)),
            lengths=torch.from_numpy(sizes),
            characters=characters,
            features=per_token("features", len(self.text.features)),
            auxiliary=per_token("auxiliary", len(self.config.tag.auxiliary_fields)),
            examples=examples,
            sizes=sizes,
        )

    def loss(self, model: nn.Module, batch: TagBatch) -> Loss:
        """Return the negative log-likelihood of the tags, and the auxiliary losses, as sums."""
        assert isinstance(model, TaggingModel), f"found {type(model).__name__}"
        mask = batch.mask
        hidden = model.encode(
            batch.words, mask, characters=batch.characters, features=batch.features
        )
        total, nll = self._tag_loss(model, model.emit(hidden), batch)
        if batch.auxiliary is not None and model.training:
            for index, head in enumerate(model.auxiliary.values()):
                targets = batch.auxiliary[:, :, index]
                known = targets >= 0
                known = known if mask is None else known & mask
                auxiliary = token_cross_entropy(head(hidden), targets.clamp(min=0), known)
                total = total + self.config.tag.auxiliary_weight * auxiliary.total
        return Loss(total, nll, batch.lengths.sum())

    def _tag_loss(self, model: TaggingModel, emissions: Tensor, batch: TagBatch) -> TagLoss:
        """Return the loss of the tags alone, summed over the batch."""
        # Training has no unknown tags; in validation they count as the first one.
        tags = batch.tags.masked_fill(batch.tags >= len(self.text.labels), 0)
        smoothing = self.config.train.label_smoothing if model.training else 0.0
        return model.tag_output.nll(emissions, tags, batch.mask, smoothing=smoothing)

    def evaluate(
        self,
        model: nn.Module,
        store: InMemoryExamples,
        *,
        device: torch.device,
        precision: Precision,
        progress: Progress,
    ) -> dict[str, float]:
        """Return the loss per token, the accuracy, and precision, recall and F1 of spans."""
        assert isinstance(model, TaggingModel), f"found {type(model).__name__}"
        scorer, nll = SpanScorer(), 0.0
        for batch in evaluation_batches(self, store, device=device, progress=progress):
            assert isinstance(batch, TagBatch)
            with precision.autocast(device):
                emissions = _emissions(model, batch)
                nll += float(self._tag_loss(model, emissions, batch).nll)
            decoded = model.tag_output.decode(emissions, batch.mask, self._allowed).cpu().numpy()
            for row, (example, size) in enumerate(zip(batch.examples, batch.sizes, strict=True)):
                reference = store.sequence("tags", int(example))
                scorer.add(
                    self.text.tags_of(reference.tolist()),
                    self.text.tags_of(decoded[row, :size].tolist()),
                )
        metrics = {"loss": nll / max(scorer.tokens, 1), "accuracy": scorer.accuracy}
        if self.text.scheme == PLAIN:
            # Every token has one label, so micro-averaged precision, recall and F1 are equal.
            return metrics | {"f1": scorer.accuracy}
        spans = scorer.overall()
        return metrics | {"precision": spans.precision, "recall": spans.recall, "f1": spans.f1}

    def scores(self, metrics: Mapping[str, float]) -> list[TaskScore]:
        """Return accuracy, and for spans their precision, recall and F1, with signatures."""
        scheme = self.text.scheme
        tokens = f"tokens:given|scheme:{scheme}"
        found = [TaskScore("accuracy", metrics["accuracy"], tokens)]
        if scheme != PLAIN:
            signature = span_signature("words" if scheme == "bmes" else "spans")
            found += [
                TaskScore(name, metrics[name], signature) for name in ("precision", "recall", "f1")
            ]
        return found

    def predict(self, model: nn.Module, batch: TagBatch) -> list[TagPrediction]:
        """Return the best tags of each sentence, with their marginal probabilities."""
        assert isinstance(model, TaggingModel), f"found {type(model).__name__}"
        mask = batch.mask
        emissions = _emissions(model, batch)
        check_finite_outputs(emissions)
        decoded = self.decode(model, emissions, mask)
        marginals = model.tag_output.marginals(emissions, mask)
        chosen = marginals.gather(2, decoded.unsqueeze(2)).squeeze(2)
        return [
            TagPrediction(self.text.tags_of(ids[:size]), values[:size])
            for ids, values, size in zip(
                decoded.tolist(), chosen.tolist(), batch.sizes.tolist(), strict=True
            )
        ]

    def decode(self, model: TaggingModel, emissions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the best tags (B, T) of emissions (B, T, K) that the scheme allows."""
        return model.tag_output.decode(emissions, mask, self._allowed)

    def read_input(self, record: Record, *, text_field: str = "") -> TaggedSentence | str:
        """Return a record's tokens, with their further column if one is read, or else its text.

        Tags are not needed. The text is the field `text_field`, or the usual one.
        """
        tag = self.config.tag
        names = [tag.token_field] if tag.token_field in record.fields else TOKEN_NAMES
        found = next((name for name in names if name in record.fields), None)
        if tag.segmentation or text_field or found is None:
            trained = self.config.data.text_field
            wanted = text_field or (trained if trained in record.fields else "")
            text = record.text(find_text_field(record, wanted, setting="--text-field"))
            # Words that are separated already are joined, as in training.
            return "".join(text.split()) if tag.segmentation else text
        fields = TagFields(found, "", tag.input_field, ())
        return _read_sentence(self.config, record, fields)

    def golden_inputs(self, records: Iterable[Record]) -> list[Any]:
        """Return the first sentences: their tokens, and their further column if one is read."""
        found: list[Any] = []
        for sentence in read_sentences(self.config, records, self._find):
            tokens = list(sentence.tokens)[:MAX_GOLDEN_TOKENS]
            column = list(sentence.column)[:MAX_GOLDEN_TOKENS]
            found.append({"tokens": tokens, "column": column} if column else {"tokens": tokens})
            if len(found) == NUM_GOLDEN_INPUTS:
                break
        return found

    def golden_outputs(self, model: nn.Module, inputs: Sequence[Any]) -> list[Any]:
        """Return the tags of sentences and their marginal probabilities, as JSON values."""
        sentences = [_golden_sentence(each, self.config.tag.input_field) for each in inputs]
        store = self.encode_sentences(sentences)
        device = next(model.parameters()).device
        batch = self.collate(store, np.arange(len(store))).to(device)
        return [
            {"tags": tags, "probabilities": [round(each, 6) for each in probabilities]}
            for tags, probabilities in self.predict(model, batch)
        ]


def _emissions(model: TaggingModel, batch: TagBatch) -> Tensor:
    """Return the emissions (B, T, K) of a batch."""
    emissions: Tensor = model(
        batch.words, batch.mask, characters=batch.characters, features=batch.features
    )
    return emissions


def read_sentences(
    config: Config, records: Iterable[Record], find: Any
) -> Iterator[TaggedSentence]:
    """Yield the sentences of records with their tags; raise DataError for a bad one.

    Empty sentences are left out.
    """
    for record in records:
        fields = find(record)
        sentence = (
            segment_tags(record.text(fields.tokens).split())
            if config.tag.segmentation
            else _read_sentence(config, record, fields)
        )
        if sentence.tokens:
            yield sentence


def _find_tag_fields(config: Config, record: Record) -> TagFields:
    """Return the fields of a file, from its first record and the settings."""
    tag = config.tag
    if tag.segmentation:
        return TagFields(find_text_field(record, config.data.text_field), "", "", ())
    end = record_format(record.file)
    if end not in TOKEN_FORMATS and record.fields.keys().isdisjoint(TOKEN_NAMES):
        raise DataError(
            f"{record.file} must be a file of tagged tokens, by its name",
            found=f"one that ends in {end}" if end else "one without an end",
            fix="rename it to end in .conll, .conllu or .jsonl",
        )
    tokens = find_field(record, tag.token_field, TOKEN_NAMES, setting="tag.token_field")
    tags = find_field(record, tag.tag_field, TAG_NAMES, setting="tag.tag_field", used=(tokens,))
    column = (
        find_field(record, tag.input_field, (), setting="tag.input_field")
        if tag.input_field
        else ""
    )
    auxiliary = tuple(
        find_field(record, name, (), setting="tag.auxiliary_fields")
        for name in tag.auxiliary_fields
        if name != FREQUENCY_TARGET
    )
    return TagFields(tokens, tags, column, auxiliary)


def _read_sentence(config: Config, record: Record, fields: TagFields) -> TaggedSentence:
    """Return a record's tokens and tags; raise DataError if they do not fit together."""
    tokens = record.tokens(fields.tokens)
    if "" in tokens:
        raise record.error(
            f"must have no empty token in {fields.tokens!r}",
            f"one at position {tokens.index('') + 1}",
            "remove it and its tag",
        )

    def column(name: str) -> list[str]:
        values = record.labels(name)
        if len(values) != len(tokens):
            raise record.error(
                f"must have as many values in {name!r} as in {fields.tokens!r}",
                f"{len(values)} and {len(tokens)}",
                "assign one to each token",
            )
        return values

    tags = column(fields.tags) if fields.tags else []
    if config.tag.scheme not in ("auto", PLAIN):
        wrong = next((tag for tag in tags if not is_span_tag(tag)), None)
        if wrong is not None:
            raise record.error(
                f"must have tags of tag.scheme={config.tag.scheme} in {fields.tags!r}",
                wrong,
                "write O, B-TYPE or I-TYPE, or set tag.scheme=plain",
            )
    names = [name for name in config.tag.auxiliary_fields if name != FREQUENCY_TARGET]
    names = names if fields.auxiliary else []
    return TaggedSentence(
        tokens=tokens,
        tags=tags,
        column=column(fields.column) if fields.column else (),
        auxiliary={
            name: column(field) for name, field in zip(names, fields.auxiliary, strict=True)
        },
    )


def _golden_sentence(value: Any, input_field: str) -> TaggedSentence:
    """Return the sentence of a golden input; raise TypeError, ValueError or KeyError."""
    tokens, column = value["tokens"], value["column"] if input_field else []
    if not tokens or not all(isinstance(each, str) and each for each in [*tokens, *column]):
        raise ValueError(f"tokens must be texts; found {value!r:.80}")
    if input_field and len(column) != len(tokens):
        raise ValueError(f"each token needs one value; found {value!r:.80}")
    return TaggedSentence(tokens=tokens, column=column)


def _allowed_transitions(text: TaggingPreprocessor) -> AllowedTransitions:
    """Return which of the labels may start, follow each other and end."""
    return AllowedTransitions(*(torch.tensor(part) for part in allowed_pairs(text.labels.names)))
