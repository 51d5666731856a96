"""Predictor: the base class for running trained models of every task but translation.

It loads a model, groups inputs of similar lengths into batches, streams any number of inputs in
bounded memory, and falls back to smaller batches, then to the CPU, when memory runs out.
"""

from __future__ import annotations

import abc
import inspect
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch
from numpy.typing import NDArray
from torch import nn

from dragoman.bundle import TaskBundle
from dragoman.bundle.non_translation_bundle_loader import build_loaded_task_model
from dragoman.data.inference_batches import group_by_length
from dragoman.data.labeled_records import TEXT, Record
from dragoman.errors import ConfigError
from dragoman.inference.input_line_buffer import FIRST_BUFFER_LINES, LineBuffers
from dragoman.inference.long_line_segments import check_text_iterable, check_unicode
from dragoman.runtime.device import CPU, choose_device, run_with_cpu_fallback
from dragoman.runtime.out_of_memory import BatchHalving
from dragoman.tasks.non_translation_task import TrainingTask

if TYPE_CHECKING:
    from dragoman.explain.explanation import Ablation, Attribution, Explanation
    from dragoman.explain.task_explainers.base import TaskExplainer

logger = logging.getLogger(__name__)

BATCH_TOKENS = 16_384  # padded tokens of a batch, unless the number of rows is given
BUFFER_SIZE = 2_048  # inputs that are sorted by length together; the most a stream keeps in memory


class Prediction(Protocol):
    """The prediction for one input."""

    @property
    def notes(self) -> Sequence[str]:
        """Anything unusual about the input, such as that it is empty or was cut."""

    def to_line(self, *, top: int = 1) -> str:
        """Return one line of plain output; `top` is the number of alternatives in it."""

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""


InputT = TypeVar("InputT")
EncodedT = TypeVar("EncodedT")
PredictionT = TypeVar("PredictionT", bound=Prediction)


class Predictor(abc.ABC, Generic[InputT, EncodedT, PredictionT]):
    """Predicts with a trained model.

    A subclass defines what an input is (`read_record`, `check_inputs`), how it is encoded
    (`encode`), its length in a batch (`length`), and the predictions of a batch (`predict_batch`).
    """

    task_name: ClassVar[str]  # as in `--task`
    # Parameters of `read_record` that name fields of a record: what --text-field gives, in order.
    record_fields: ClassVar[tuple[str, ...]] = ("text_field",)

    def __init__(self, model: nn.Module, task: TrainingTask) -> None:
        self.model, self.task, self.config = model.eval(), task, task.config
        self._halving = BatchHalving()
        self._cpu_model: nn.Module | None = None
        self._logged = set[str]()

    @classmethod
    def load(cls, path: str | Path, *, device: str | torch.device = "auto") -> Self:
        """Load a model directory; raise BundleError for a model of another task.

        The device `auto` is a GPU if there is one.
        """
        return run_with_cpu_fallback(
            choose_device(device), lambda where: cls._load_on(Path(path), where)
        )

    @classmethod
    def _load_on(cls, path: Path, device: torch.device) -> Self:
        bundle = TaskBundle.load(path, task=cls.task_name, device=device)
        return cls(bundle.model, bundle.task)

    def __repr__(self) -> str:
        """Return the recipe and the device in one line."""
        recipe = self.config.recipe or "none"
        return f"{type(self).__name__}(recipe {recipe:.60}, {self.device})"

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    # Defined by each task.

    @property
    def has_alternatives(self) -> bool:
        """Whether a prediction is one of several labels or tokens, with their probabilities."""
        return False

    @abc.abstractmethod
    def read_record(self, record: Record, *, text_field: str = "") -> InputT:
        """Return the input in a record of a file; raise DataError with its line if there is none.

        A line of plain text is a record with the field "text".
        """

    @abc.abstractmethod
    def encode(self, inputs: Sequence[InputT]) -> Sequence[EncodedT]:
        """Encode inputs, such as into token ids."""

    @abc.abstractmethod
    def length(self, encoded: EncodedT) -> int:
        """Return an input's number of padded tokens, or another measure of its memory."""

    @abc.abstractmethod
    def predict_batch(
        self, model: nn.Module, encoded: Sequence[EncodedT], device: torch.device
    ) -> list[PredictionT]:
        """Return the predictions of a batch, which must not depend on one another.

        `model` is the predictor's, or its copy on the CPU where the memory of the device is full.
        """

    def read_arguments(self, texts: Sequence[str]) -> list[InputT]:
        """Return the inputs in the arguments of `dragoman predict`; by default each is a text."""
        check_unicode(texts)
        return [
            self.read_record(Record(Path("argument"), number, {TEXT: text}))
            for number, text in enumerate(texts, 1)
        ]

    def check_inputs(self, inputs: Iterable[Any]) -> Iterable[InputT]:
        """Raise DataError for what is not an iterable of inputs; by default, of texts."""
        return check_text_iterable(inputs)

    def iter_inputs(self, inputs: Iterable[Any]) -> Iterator[InputT]:
        """Yield inputs; a task may raise DataError for the first that is none."""
        return iter(inputs)

    def size(self, example: InputT) -> int:
        """Return the characters of an input, which bound the memory of a buffer."""
        return len(example) if isinstance(example, str) else 1

    def explain_words(self, example: InputT) -> Any:
        """Explain a label by the words of a text; raise ConfigError where a task cannot."""
        raise ConfigError(
            [
                "--explain and explain_words are for models of the tasks classify and pairs; "
                f"found one of {self.task_name}; use dragoman explain, or the method explain"
            ]
        )

    def task_input(self, example: InputT, **options: Any) -> TaskExplainer:
        """Return an input that can be explained; the options are the task's own."""
        raise NotImplementedError

    def repeat_input(self, request: Mapping[str, Any]) -> TaskExplainer:
        """Return the input of an explanation from its request."""
        raise NotImplementedError

    # Explanations

    def explain(
        self,
        example: InputT,
        *,
        off: Sequence[str] = (),
        attribution: str | None = "input_x_gradient",
        **options: Any,
    ) -> Explanation:
        """Explain the prediction of one input: probabilities, attention weights, attribution.

        `off` names heads, such as "e0.1", and other parts of the model that are switched off; see
        docs/explanation.md. A model without embeddings is explained by leaving out instead of
        gradients.
        """
        from dragoman.explain.non_translation_explanation_builder import explain_task

        check_unicode([example, *options.values()])
        return explain_task(
            self.task_input(example, **self._check_options(options)),
            off=off,
            attribution=attribution,
        )

    def ablate(self, explanation: Explanation, heads: Sequence[str]) -> Ablation:
        """Switch heads or other parts off; return the changes and the new prediction."""
        from dragoman.explain.non_translation_explanation_builder import ablate_task

        return ablate_task(self.repeat_input(explanation.request), explanation, heads)

    def attribute(
        self, explanation: Explanation, method: str
    ) -> tuple[Attribution, dict[str, NDArray[Any]]]:
        """Return another attribution of an explanation, and its arrays."""
        from dragoman.explain.non_translation_explanation_builder import attribute_task

        return attribute_task(self.repeat_input(explanation.request), explanation, method)

    def head_effects(self, explanation: Explanation) -> Iterator[tuple[str, float]]:
        """Yield every head with the change of the explained log-probability when it is off."""
        from dragoman.explain.non_translation_explanation_builder import task_head_effects

        return task_head_effects(self.repeat_input(explanation.request), explanation)

    def _check_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options without empty ones; raise ConfigError for one that the task has not."""
        known = list(inspect.signature(self.task_input).parameters)[1:]
        given = {name: value for name, value in options.items() if value not in (None, "", [], ())}
        for name in given:
            if name not in known:
                raise ConfigError(
                    [
                        f"options of an explanation of the task {self.task_name} must be of "
                        f"{', '.join(['off', 'attribution', *known])}; found {name}; leave it out"
                    ]
                )
        return given

    # Shared by all tasks.

    def predict(
        self, inputs: Iterable[InputT], *, batch_size: int | None = None
    ) -> list[PredictionT]:
        """Return the prediction of each input, in order; it never depends on the batch."""
        return list(self.stream(list(self.check_inputs(inputs)), batch_size=batch_size))

    def stream(
        self,
        inputs: Iterable[InputT],
        *,
        batch_size: int | None = None,
        buffer_size: int = BUFFER_SIZE,
    ) -> Iterator[PredictionT]:
        """Yield predictions in order, as inputs come, in bounded memory.

        No input waits for others in a list, a regular file, or an iterable with a method `ready`,
        which returns whether another is available. Of other iterables the first 32 are predicted
        together.
        """
        for name, value in (("batch_size", batch_size), ("buffer_size", buffer_size)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError([f"{name} must be an integer from 1; found {value!r}"])
        groups: LineBuffers[InputT] = LineBuffers(
            self.check_inputs(inputs),
            first=FIRST_BUFFER_LINES,
            max_lines=buffer_size,
            check=self.iter_inputs,
            size=self.size,
        )
        return self._stream(groups, batch_size)

    def _stream(self, groups: LineBuffers[InputT], batch_size: int | None) -> Iterator[PredictionT]:
        """Predict buffer by buffer."""
        for buffer in itertools.chain.from_iterable(groups):
            yield from self._predict_buffer(buffer, batch_size)

    def _predict_buffer(
        self, buffer: Sequence[InputT], batch_size: int | None
    ) -> list[PredictionT]:
        """Return the predictions of a buffer of inputs, in order."""
        check_unicode(buffer)
        encoded = self.encode(buffer)
        lengths = [max(1, self.length(each)) for each in encoded]
        found: dict[int, PredictionT] = {}
        for group in group_by_length(lengths, batch_tokens=BATCH_TOKENS, max_rows=batch_size):
            longest = max(lengths[row] for row in group)
            predictions = self._run_batch([encoded[row] for row in group], longest)
            found |= dict(zip(group, predictions, strict=True))
        return [found[row] for row in range(len(buffer))]

    def _run_batch(self, batch: Sequence[EncodedT], longest: int) -> list[PredictionT]:
        """Run a batch; if it does not fit in memory, in halves or finally on the CPU."""

        @torch.inference_mode()
        def run(part: Sequence[EncodedT]) -> list[PredictionT]:
            return self.predict_batch(self.model, part, self.device)

        @torch.inference_mode()
        def run_on_cpu(part: Sequence[EncodedT]) -> list[PredictionT]:
            self._warn_once(
                "out of memory for a single input: inputs that do not fit are predicted on the "
                "CPU, and the result is the same"
            )
            return self.predict_batch(self._cpu_copy(), part, CPU)

        def log_halving(count: int) -> None:
            self._warn_once(
                "out of memory with a batch of %d inputs: batches that do not fit are predicted "
                "in halves, and the result is the same",
                count,
            )

        return self._halving.run(
            batch,
            run,
            padded_tokens=lambda part: len(part) * longest,
            fallback=None if self.device.type == "cpu" else run_on_cpu,
            on_halving=log_halving,
        )

    def _cpu_copy(self) -> nn.Module:
        """Return the same model on the CPU, for inputs that do not fit in GPU memory."""
        if self._cpu_model is None:
            weights = {name: tensor.cpu() for name, tensor in self.model.state_dict().items()}
            self._cpu_model = build_loaded_task_model(self.task, weights)
        return self._cpu_model

    def _warn_once(self, line: str, *values: object) -> None:
        """Log a warning once."""
        if line not in self._logged:
            self._logged.add(line)
            logger.warning(line, *values)
