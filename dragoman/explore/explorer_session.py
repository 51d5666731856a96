"""A session of the explorer: one model, its recent explanations, and what can be asked of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.bundle import format as layout
from dragoman.config.translation_directions import Direction, parse_directions
from dragoman.errors import DragomanError
from dragoman.explain.explanation import Explanation
from dragoman.explore.model_thread import REQUEST_SECONDS, ModelWorker
from dragoman.explore.request_parsing import (
    MAX_BEAM,
    MAX_BODY_BYTES,
    MAX_HEADS,
    MAX_TEXT_CHARS,
    MAX_TOKENS,
    METHODS,
    REGION_CELLS,
    ExplainRequest,
    Region,
    RequestError,
    read_attribute_request,
    read_branch_request,
    read_off_request,
)
from dragoman.runtime.out_of_memory import is_out_of_memory

MAX_EXPLANATIONS = 64
MAX_CACHE_BYTES = 1_000_000_000  # of arrays and JSON; the newest explanation is always kept
MAX_EXAMPLES = 12
_TASK_OPTIONS = {
    "translate": {
        *("beam", "length_penalty", "prefix", "prefix_ids", "reference", "off", "target_language")
    },
    "language": {"prefix", "prefix_ids", "off"},
}  # of `explain`; other tasks have heads to switch off


@dataclass(frozen=True, slots=True)
class StoredExplanation:
    """An explanation in memory, the request that led to it, and its JSON form."""

    explanation: Explanation
    request: ExplainRequest
    digest: str
    json: bytes
    is_foreign: bool = False  # whether it came from a file, perhaps of another model

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays and of the JSON form."""
        arrays = self.explanation.arrays.values()
        return len(self.json) + sum(array.nbytes for array in arrays)


class ExplanationCache:
    """The most recently used explanations by digest, in memory only."""

    def __init__(self, *, most: int = MAX_EXPLANATIONS, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._most, self._max_bytes = most, max_bytes
        self._entries: OrderedDict[str, StoredExplanation] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """The number of explanations."""
        return len(self._entries)

    def add(self, entry: StoredExplanation) -> None:
        """Add an explanation and drop the least recently used ones that do not fit."""
        with self._lock:
            self._entries[entry.digest] = entry
            self._entries.move_to_end(entry.digest)
            total = sum(each.num_bytes for each in self._entries.values())
            while len(self._entries) > 1 and (
                len(self._entries) > self._most or total > self._max_bytes
            ):
                total -= self._entries.popitem(last=False)[1].num_bytes

    def get(self, digest: str) -> StoredExplanation:
        """Return an explanation; raise RequestError 404 if it is not here (any more)."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None:
                raise RequestError(
                    404, "This explanation is not in memory any more; explain the text again."
                )
            self._entries.move_to_end(digest)
            return entry


class ExplorerSession:
    """A predictor and the explanations of this session; without one, stored explanations only.

    The methods below `worker` run in the worker's thread; the rest is safe in any.
    """

    def __init__(
        self, predictor: Any = None, *, path: Path | None = None, examples: Sequence[str] = ()
    ) -> None:
        self.predictor, self.path = predictor, path
        self.task = str(getattr(predictor, "task_name", "translate"))
        self.examples = [text for text in examples if len(text) <= MAX_TEXT_CHARS][:MAX_EXAMPLES]
        self.cache = ExplanationCache()
        self._digest: str | None = None  # of the model, as its explanations state it
        self.first: StoredExplanation | None = None  # what the page opens with
        self.worker = ModelWorker(stops_modules=hasattr(predictor, "model"))

    @classmethod
    def load(
        cls, path: Path, *, device: str = "auto", target_language: str | None = None
    ) -> ExplorerSession:
        """Load the model of a directory, of whatever task; its examples are the bundle's.

        `target_language` is for translation models of several directions.
        """
        from dragoman.inference.predictors.catalogue import load

        options = {} if target_language is None else {"target_language": target_language}
        predictor = load(path, device=device, **options)
        return cls(predictor, path=path, examples=read_examples(path))

    def close(self) -> None:
        """Cancel what runs and release the model."""
        self.worker.close()

    def describe(self) -> dict[str, Any]:
        """Return the JSON object of the session."""
        model = dict(self.first.explanation.model) if self.first is not None else {}
        task = str(model.get("task") or self.task)
        return {
            "model": {**self._describe_model(), **model},
            "task": task,
            "examples": self.examples,
            "targets": list(dict.fromkeys(each.target for each in self._directions())),
            "explanation": None if self.first is None else self.first.digest,
            "can_explain": self.predictor is not None,
            "methods": list(METHODS),
            "limits": {
                "characters": MAX_TEXT_CHARS,
                "tokens": MAX_TOKENS,
                "beam": MAX_BEAM,
                "heads": MAX_HEADS,
                "body": MAX_BODY_BYTES,
                "region": REGION_CELLS,
                "seconds": REQUEST_SECONDS,
            },
        }

    def _describe_model(self) -> dict[str, Any]:
        if self.predictor is None:
            return {}
        config = getattr(self.predictor, "config", None)
        decode, data = getattr(config, "decode", None), getattr(config, "data", None)
        return {
            "name": str(getattr(config, "recipe", "") or ""),
            "path": "" if self.path is None else str(self.path),
            "task": self.task,
            "source_lang": str(getattr(data, "src_lang", "") or ""),
            "target_lang": str(getattr(data, "tgt_lang", "") or ""),
            "beam": getattr(decode, "beam", None),
            "length_penalty": getattr(decode, "length_penalty", None),
        }

    def open(self, explanation: Explanation) -> StoredExplanation:
        """Store an explanation that came from a file and open the page with it."""
        asked = explanation.request
        off, beam, penalty = (asked.get(name) for name in ("off", "beam", "length_penalty"))
        request = ExplainRequest(
            text=str(asked.get("text") or explanation.text),
            beam=beam if type(beam) is int and 1 <= beam <= MAX_BEAM else None,
            length_penalty=float(penalty) if isinstance(penalty, (int, float)) else None,
            off=tuple(map(str, off)) if isinstance(off, list) else (),
        )
        self.first = self._store(explanation, request, is_foreign=True)
        return self.first

    def region(self, digest: str, name: str, region: Region) -> np.ndarray[Any, Any]:
        """Return a part of an exact array as float32, in C order."""
        array = self.cache.get(digest).explanation.arrays.get(name)
        if array is None:
            raise RequestError(404, f"This explanation has no tensor {name!r:.60}.")
        if region.head is not None:
            if array.ndim != 3 or region.head >= array.shape[0]:
                heads = array.shape[0] if array.ndim == 3 else 0
                raise RequestError(
                    400, f"h must be a head of {name:.60}; found {region.head} of {heads}."
                )
            array = array[region.head]
        for axis, bounds in ((-2, region.queries), (-1, region.keys)):
            if bounds is None:
                continue
            first, last = bounds
            if array.ndim < -axis or last >= array.shape[axis]:
                size = array.shape[axis] if array.ndim >= -axis else 0
                raise RequestError(
                    400, f"A range of {name:.60} must end before {size}; found {first}-{last}."
                )
            index = [slice(None)] * array.ndim
            index[axis] = slice(first, last + 1)
            array = array[tuple(index)]
        if array.size > REGION_CELLS:
            raise RequestError(
                413,
                f"A region must have at most {REGION_CELLS:,} values; found {array.size:,}; "
                "ask for one head or a smaller range.",
            )
        return np.ascontiguousarray(array, dtype="<f4")

    # In the worker's thread.

    def explain(self, request: ExplainRequest) -> StoredExplanation:
        """Explain a text."""
        predictor = self._require_predictor()
        with as_request_errors():
            given = self._read_input(request.text)
            self._check_length(given)
            request = self._with_target_language(request)
            explanation = predictor.explain(given, **self._task_options(request))
        if self.path is not None:
            explanation = explanation.with_path(self.path)
        self._digest = explanation.model.get("digest")
        return self._store(explanation, request)

    def _directions(self) -> list[Direction]:
        """Return the directions that the model was trained on; empty where it has one."""
        return parse_directions(getattr(self.predictor, "directions", ()))

    def _with_target_language(self, request: ExplainRequest) -> ExplainRequest:
        """Return a request with a target language, where the model has several and none is named.

        It is the first of those into which the model translates the text's language.
        """
        directions = self._directions()
        named = request.target_language or getattr(self.predictor, "target_language", None)
        if named or not directions:
            return request
        [source] = self._require_predictor().identify_languages([request.text])
        target = next(each.target for each in directions if each.source == source)
        return dataclasses.replace(request, target_language=target)

    def _task_options(self, request: ExplainRequest) -> dict[str, Any]:
        """Return the options that models of this task have; the page sends a beam to all."""
        options = request.options()
        for name in options.keys() - _TASK_OPTIONS.get(self.task, {"off"}):
            if name not in ("beam", "length_penalty"):
                raise RequestError(400, f"Models of the task {self.task} have no {name}.")
            del options[name]
        return options

    def branch(self, entry: StoredExplanation, body: dict[str, Any]) -> StoredExplanation:
        """Keep the tokens before a step, take another token there and decode the rest again."""
        explanation = entry.explanation
        self._require_own(entry)
        step, token = read_branch_request(body, num_steps=len(explanation.target.tokens))
        kept = [each.id for each in explanation.target.tokens[:step]]
        request = dataclasses.replace(
            entry.request, prefix="", prefix_ids=(*kept, token), reference=None
        )
        return self.explain(request)

    def ablate(self, entry: StoredExplanation, body: dict[str, Any]) -> dict[str, Any]:
        """Return what changes when heads are switched off."""
        predictor = self._require_own(entry)
        sites = {site.id: site.heads for site in entry.explanation.sites}
        switches = entry.explanation.model.get("off_switches") or ()
        heads = read_off_request(body, sites=sites, switches=switches)
        with as_request_errors():
            found: dict[str, Any] = predictor.ablate(entry.explanation, heads).to_dict()
        return found

    def attribute(self, entry: StoredExplanation, body: dict[str, Any]) -> dict[str, Any]:
        """Return the attribution of a method, of one token or all, and its tensors."""
        from dragoman.explain.explanation_json import encode_tensor

        predictor = self._require_own(entry)
        # Of other tasks than translation every token is attributed at once.
        num_steps = len(entry.explanation.steps) if self.task == "translate" else 0
        method, step = read_attribute_request(body, num_steps=num_steps)
        options = {} if step is None else {"step": step}
        with as_request_errors():
            attribution, arrays = predictor.attribute(entry.explanation, method, **options)
        return {
            "attribution": dataclasses.asdict(attribution),
            "tensors": {name: encode_tensor(array) for name, array in arrays.items()},
        }

    def effects(self, entry: StoredExplanation) -> Iterator[tuple[str, float]]:
        """Yield each head with the exact change of the log-probability without it."""
        predictor = self._require_own(entry)
        with as_request_errors():
            yield from predictor.head_effects(entry.explanation)

    def _store(
        self, explanation: Explanation, request: ExplainRequest, *, is_foreign: bool = False
    ) -> StoredExplanation:
        written = explanation.to_json().encode()
        entry = StoredExplanation(explanation, request, explanation.digest, written, is_foreign)
        self.cache.add(entry)
        return entry

    def _require_predictor(self) -> Any:
        if self.predictor is None:
            raise RequestError(
                400,
                "This page shows a stored explanation without its model; start "
                "`dragoman explore MODEL` to explain more.",
            )
        return self.predictor

    def _require_own(self, entry: StoredExplanation) -> Any:
        """Return the predictor; raise RequestError for an explanation of another model."""
        predictor = self._require_predictor()
        if entry.is_foreign:
            if self._digest is None:  # only an explanation has the digest of a model
                self.explain(ExplainRequest(text=entry.request.text))
            if entry.explanation.model.get("digest") != self._digest:
                raise RequestError(
                    400, "This explanation is of another model than the one that is loaded."
                )
        return predictor

    def _read_input(self, text: str) -> Any:
        """Return a text as the predictor's input: a pair is split at the tab, a set is JSON."""
        if hasattr(self.predictor, "read_arguments"):
            [given] = self.predictor.read_arguments([text])
            return given
        return text

    def _check_length(self, given: Any) -> None:
        """Raise RequestError 413 for an input of too many tokens."""
        predictor = self.predictor
        if hasattr(predictor, "tokenizers"):
            length = len(predictor.tokenizers.src.encode(given))
        elif hasattr(predictor, "encode"):
            [encoded] = predictor.encode([given])
            length = predictor.length(encoded)
        else:
            return
        if length > MAX_TOKENS:
            raise RequestError(
                413,
                f"The text must have at most {MAX_TOKENS} tokens; found {length:,}; "
                "explain a part of it.",
            )


@contextlib.contextmanager
def as_request_errors() -> Iterator[None]:
    """Turn what a person can cause, and a full memory, into a RequestError."""
    try:
        yield
    except DragomanError as error:
        raise RequestError(400, str(error)) from error
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        sentence = "Memory is full; try a shorter text or a smaller beam."
        raise RequestError(503, sentence) from error


def read_examples(path: Path) -> list[str]:
    """Return texts to start with: the inputs of the bundle's golden vectors, as one line each."""
    try:
        cases = json.loads((path / layout.GOLDEN).read_text(encoding="utf-8")).get("cases", [])
        inputs = [case["input"] for case in cases]
    except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return []  # a model without examples still explains
    return [text for text in map(write_input, inputs) if text]


def write_input(value: Any) -> str:
    """Return a golden input as a person would type it, which `read_arguments` reads back."""
    if isinstance(value, dict):  # a tagger's tokens
        value = value.get("tokens")
        return " ".join(map(str, value)) if isinstance(value, list) else ""
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return "\t".join(value)  # a pair
    if isinstance(value, list):  # a set
        return json.dumps(value)
    return value if isinstance(value, str) else ""
