"""Language modeling: streams of text cut into segments, perplexity and bits per byte."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dragoman.config import Config
from dragoman.data.batch_plan import Plan
from dragoman.data.bucket_shapes import BatchShape
from dragoman.data.collate import TensorBatch
from dragoman.data.in_memory_examples import InMemoryExamples
from dragoman.data.labeled_records import TEXT, Record, find_text_field, record_format
from dragoman.data.language_model_segment_plan import SegmentPlan
from dragoman.errors import ConfigError
from dragoman.models.language_model import (
    LanguageDropout,
    NeuralLanguageModel,
    build_language_model,
    carries_state,
)
from dragoman.ops import linear_cross_entropy
from dragoman.tasks.language_model_scorer import TokenScorer
from dragoman.tasks.non_translation_task import (
    NUM_GOLDEN_INPUTS,
    ReadRecords,
    TaskScore,
    TrainingTask,
    find_fields,
)
from dragoman.tasks.segment_recurrence_states import SegmentStates
from dragoman.text.language_model_tokenizer import (
    LanguageModelTokenizer,
    fit_language_model_tokenizer,
    load_language_model_tokenizer,
)
from dragoman.text.special_tokens import BOS
from dragoman.training.bf16_mixed_precision import Precision
from dragoman.training.progress_display import Progress
from dragoman.training.task_protocol import Loss

TOKENS, DOCUMENT, BYTES = "tokens", "document", "bytes"  # fields of the store
MAX_NLL = 80.0  # a loss whose perplexity still fits a float
GOLDEN_CHARACTERS = 200  # of a text whose log-probability a bundle records
_LINE_FORMATS = ("", ".txt", ".text", ".tokens")


@dataclass(frozen=True, kw_only=True)
class SegmentBatch(TensorBatch):
    """Segments of a stream of tokens."""

    inputs: Tensor  # (B, T) the token before each target; BOS at a document's start
    targets: Tensor  # (B, T)
    streams: Tensor  # (B,) rows whose states the segments continue
    segments: Tensor  # (B,) index of the segment in its stream
    parity: int  # of that index: which of two buffers holds the states
    filled: int  # positions of the memory that hold earlier tokens, in all rows

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.targets.numel()

    @property
    def padded_tokens(self) -> int:
        """The number of tokens: there is no padding."""
        return self.targets.numel()

    @property
    def graph_key(self) -> tuple[Any, ...]:
        """The key of batches that run the same kernels: shapes, buffer and length of the memory."""
        return (*super().graph_key, self.parity, self.filled)


class TokenStream(NamedTuple):
    """The tokens of all documents in order."""

    inputs: NDArray[np.int32]  # (N,) the token before each; BOS at a document's start
    targets: NDArray[np.int32]  # (N,)
    starts: NDArray[np.int64]  # where documents begin


class LanguageTask(TrainingTask):
    """Predict every token of a text from those before it."""

    name = "language"
    learned_settings = ("objective",)
    metrics: ClassVar[Mapping[str, bool]] = {"perplexity": False, "bits_per_byte": False}
    unit = "texts"
    max_epochs: ClassVar[float] = 200.0  # recipes train for about as many on WikiText-2

    def __new__(cls, config: Config, text: LanguageModelTokenizer) -> LanguageTask:
        """Return the task of `language.objective`: causal, or one of `masked_language_model.py`."""
        if config.language.objective != "causal":
            from dragoman.tasks.bert_and_xlnet_language_modeling import (
                MaskedLanguageTask,  # here: it imports this module
            )

            return super().__new__(MaskedLanguageTask)
        return super().__new__(cls)

    def __init__(self, config: Config, text: LanguageModelTokenizer) -> None:
        super().__init__(config, text)
        self.language = config.language
        self.carries = carries_state(config.model, self.language.memory)
        self._streams: weakref.WeakKeyDictionary[InMemoryExamples, TokenStream] = (
            weakref.WeakKeyDictionary()
        )
        self._plan: SegmentPlan | None = None
        self._states: SegmentStates | None = None
        self._restored: Mapping[str, Tensor] = {}  # carried states of a checkpoint, not yet used
        self._device = torch.device("cpu")  # of the carried states

    # Text and examples

    @classmethod
    def fit_text(cls, config: Config, records: ReadRecords) -> LanguageModelTokenizer:
        """Learn the vocabulary of the training text."""
        read = _text_reader(config)
        return fit_language_model_tokenizer((read(record) for record in records()), config.text)

    @classmethod
    def load_text(cls, config: Config, files: Mapping[str, bytes]) -> LanguageModelTokenizer:
        """Read the vocabulary of a bundle."""
        return load_language_model_tokenizer(files, config.text)

    def text_files(self) -> dict[str, bytes]:
        """Return the vocabulary's files."""
        files: dict[str, bytes] = self.text.files()
        return files

    def encode(self, records: Iterable[Record]) -> InMemoryExamples:
        """Encode documents: records of JSONL, CSV and TSV, or all lines of a plain-text file."""
        read = _text_reader(self.config)
        tokens, documents, sizes = list[NDArray[np.int32]](), list[int](), list[int]()
        document, last = -1, None
        for record in records:
            text = read(record)
            if not _is_line(record) or record.file != last:
                document += 1
            last = record.file
            tokens.append(self.text.encode(text))
            documents.append(document)
            sizes.append(len(text.encode("utf-8", "surrogatepass")))
        return InMemoryExamples(
            sequences={TOKENS: tokens},
            values={
                DOCUMENT: np.array(documents, np.int64),
                BYTES: np.array(sizes, np.int64),
            },
        )

    def stream(self, store: InMemoryExamples) -> TokenStream:
        """Return the tokens of a store as one stream, computed once."""
        if store not in self._streams:
            self._streams[store] = build_stream(store)
        return self._streams[store]

    # Training

    def build_model(self) -> NeuralLanguageModel:
        """Build the model."""
        return build_language_model(
            self.config.model,
            vocab_size=len(self.text),
            max_distance=self.language.clamp_distance,
            dropout=LanguageDropout.of(self.language),
        )

    def plan(self, store: InMemoryExamples, *, batch_tokens: int, seed: int) -> Plan:
        """Cut the stream into rows and segments; raise ConfigError for several processes."""
        ranks = torch.distributed.get_world_size() if _is_distributed() else 1
        if self.carries and ranks > 1:
            raise ConfigError(
                [
                    "a model that carries states from segment to segment trains in one process; "
                    f"found {ranks}; start it without torchrun, or use transformer blocks with "
                    "language.memory=0"
                ]
            )
        self._plan = SegmentPlan(
            len(self.stream(store).targets),
            segment=self.language.segment,
            batch_tokens=batch_tokens,
            seed=seed,
            carried=self.carries,
        )
        return self._plan

    def collate(
        self,
        store: InMemoryExamples,
        examples: NDArray[np.int64],
        *,
        shapes: Sequence[BatchShape] = (),
        seed: int = 0,
        training: bool = False,
    ) -> SegmentBatch:
        """Return the segments of a batch."""
        assert self._plan is not None, "a batch is part of a plan"
        stream, spans = self.stream(store), self._plan.locate(examples)
        index = (spans.starts[:, None] + np.arange(spans.length)) % len(stream.targets)
        inputs, targets = (each[index].astype(np.int64) for each in stream[:2])
        return SegmentBatch(
            examples=examples,
            inputs=torch.from_numpy(inputs),
            targets=torch.from_numpy(targets),
            streams=torch.from_numpy(spans.streams),
            segments=torch.from_numpy(spans.segments),
            parity=int(spans.segments[0]) % 2,
            filled=min(int(spans.segments[0]) * self._plan.segment, self.language.memory),
        )

    def loss(self, model: nn.Module, batch: SegmentBatch) -> Loss:
        """Return the cross-entropy of the segments' tokens, with activation regularization."""
        assert isinstance(model, NeuralLanguageModel), f"found {type(model).__name__}"
        if not self.carries:
            hidden = model.decode(batch.inputs)
            return self._loss(model, hidden, hidden, batch.targets)
        states = self._segment_states(model, batch.inputs.device)
        previous = states.read(batch.parity, batch.streams, batch.segments)
        found = model.decode_segment(batch.inputs, previous, filled=batch.filled)
        states.write(batch.parity, batch.streams, batch.segments, found.carried)
        return self._loss(model, found.hidden, found.raw, batch.targets)

    def _loss(
        self, model: NeuralLanguageModel, hidden: Tensor, raw: Tensor, targets: Tensor
    ) -> Loss:
        """Return the cross-entropy and the penalties, as sums over the targets (B, T).

        `raw` and `hidden` are the stack's output before and after dropout.
        """
        cross_entropy = linear_cross_entropy(
            hidden.flatten(0, 1),
            model.output_weight,
            model.output_bias,
            targets.flatten(),
            smoothing=self.config.train.label_smoothing,
        )
        total = cross_entropy.loss
        count = targets.numel()
        # Merity, McCann and Socher (2017), "Revisiting activation regularization".
        if self.language.activation_penalty:
            penalty = hidden.float().pow(2).mean()
            total = total + self.language.activation_penalty * count * penalty
        if self.language.temporal_penalty and raw.size(1) > 1:
            change = (raw[:, 1:] - raw[:, :-1]).float()
            total = total + self.language.temporal_penalty * count * change.pow(2).mean()
        return Loss(total, cross_entropy.nll, torch.full_like(cross_entropy.nll, count))

    def _segment_states(self, model: NeuralLanguageModel, device: torch.device) -> SegmentStates:
        """Return the carried states, allocated at the first batch."""
        if self._states is None:
            assert self._plan is not None, "a batch is part of a plan"
            shapes = model.carried_shapes(self.language.memory)
            self._states = SegmentStates(shapes, self._plan.rows)
            self._states.load_state_dict(self._restored, device)
            self._restored, self._device = {}, device
        return self._states

    def carried_state(self) -> dict[str, Tensor]:
        """Return the memories and recurrent states that the next segment continues."""
        return {} if self._states is None else self._states.state_dict()

    def load_carried_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore `carried_state`; with an empty mapping, start from zero."""
        if self._states is None:
            self._restored = dict(state)
        else:
            self._states.load_state_dict(state, self._device)

    # Evaluation and bundles

    def scorer(self, model: NeuralLanguageModel, device: torch.device) -> TokenScorer:
        """Return the scorer that computes log-probabilities of tokens in evaluation."""
        settings = self.language
        return TokenScorer(
            model,
            device=device,
            segment=settings.segment,
            memory=settings.resolved_eval_memory,
            stride=settings.resolved_eval_stride,
            carries=self.carries,
            batch_rows=max(1, self.config.train.batch_tokens // settings.segment),
            parts=settings.eval_rows,
        )

    def evaluate(
        self,
        model: nn.Module,
        store: InMemoryExamples,
        *,
        device: torch.device,
        precision: Precision,
        progress: Progress,
    ) -> dict[str, float]:
        """Return loss and perplexity per token, and bits per byte where no text is unknown."""
        assert isinstance(model, NeuralLanguageModel), f"found {type(model).__name__}"
        stream = self.stream(store)
        with precision.autocast(device):
            nll = self.scorer(model, device).total(stream, progress=progress)
        loss = nll / max(len(stream.targets), 1)
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, MAX_NLL))}
        if self.text.is_lossless:
            metrics["bits_per_byte"] = nll / math.log(2) / max(int(store.values[BYTES].sum()), 1)
        return metrics

    def scores(self, metrics: Mapping[str, float]) -> list[TaskScore]:
        """Return perplexity and bits per byte, with the tokens and the context they refer to."""
        settings = self.language
        context = (
            f"memory:{settings.resolved_eval_memory}|segment:{settings.segment}"
            if self.carries
            else f"window:{settings.segment}|stride:{settings.resolved_eval_stride}"
        )
        signature = f"tokens:{self.config.text.tokenizer}|{context}|eval_rows:{settings.eval_rows}"
        return [
            TaskScore(name, metrics[name], signature) for name in self.metrics if name in metrics
        ]

    def golden_inputs(self, records: Iterable[Record]) -> list[Any]:
        """Return the beginnings of a few texts."""
        read, found = _text_reader(self.config), list[str]()
        for record in records:
            if text := read(record).strip():
                found.append(text[:GOLDEN_CHARACTERS])
            if len(found) == NUM_GOLDEN_INPUTS:
                break
        return list(found)

    def golden_outputs(self, model: nn.Module, inputs: Sequence[Any]) -> list[Any]:
        """Return the log-probability of each text and its number of tokens."""
        assert isinstance(model, NeuralLanguageModel), f"found {type(model).__name__}"
        if not all(isinstance(each, str) for each in inputs):
            raise TypeError("a golden input of a language model must be text")
        scorer = self.scorer(model, next(model.parameters()).device)
        rows = [self.text.encode(each) for each in inputs]
        return [
            {"log_prob": -nll, "tokens": len(row)}
            for nll, row in zip(scorer.documents(rows), rows, strict=True)
        ]

    def describe(self) -> str:
        """Return the vocabulary size."""
        return f"vocabulary of {len(self.text):,} tokens ({self.config.text.tokenizer})"


def build_stream(store: InMemoryExamples) -> TokenStream:
    """Concatenate the documents of a store; the token before each document's first is BOS."""
    lengths, documents = store.lengths(TOKENS), store.values[DOCUMENT]
    rows = [store.sequence(TOKENS, example) for example in range(len(store))]
    targets = np.concatenate(rows) if rows else np.zeros(0, np.int32)
    ends = np.cumsum(lengths)
    begins_document = np.ones(len(store), bool)
    begins_document[1:] = documents[1:] != documents[:-1]
    starts = np.unique((ends - lengths)[begins_document])
    starts = starts[starts < len(targets)]  # an empty document has no first token
    inputs = np.empty_like(targets)
    inputs[1:] = targets[:-1]
    inputs[starts] = BOS
    return TokenStream(inputs, targets, starts.astype(np.int64))


def _text_reader(config: Config) -> Any:
    """Return a function from a record to its text; a line of plain text keeps its line break."""
    field = find_fields(lambda record: find_text_field(record, config.data.text_field))

    def read(record: Record) -> str:
        return record.text(TEXT) + "\n" if _is_line(record) else record.text(field(record))

    return read


def _is_line(record: Record) -> bool:
    """Whether a record is a line of a plain-text file."""
    return set(record.fields) == {TEXT} and record_format(record.file) in _LINE_FORMATS


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
