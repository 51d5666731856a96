"""Run exported ONNX graphs with `onnxruntime` greedily, to compare them with the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.search_interface import SearchRequest, SearchStrategy
from dragoman.exchange.onnx_export import DECODER_STEP, DESCRIPTION, ENCODER
from dragoman.storage.atomic_and_safe_file_io import native_path


class OnnxRuntimeEngine:
    """Encoder and decoder step graphs as an engine: a minimal greedy loop."""

    name = "onnx"
    workers = client_threads = 1
    batch_tokens = None

    def __init__(self, directory: Path) -> None:
        import onnxruntime

        runtime: Any = onnxruntime
        options = runtime.SessionOptions()
        options.log_severity_level = 3  # errors only
        with native_path(directory) as folder:
            self._encoder, self._step = (
                runtime.InferenceSession(
                    str(Path(folder, name)), options, providers=["CPUExecutionProvider"]
                )
                for name in (ENCODER, DECODER_STEP)
            )
        self._description = json.loads((directory / DESCRIPTION).read_text("utf-8"))
        self._state = [each["name"] for each in self._description["state"]]
        # A graph drops inputs that it does not use.
        self._input_names = {each.name for each in self._step.get_inputs()}
        self._output_names = [each.name for each in self._step.get_outputs()]

    def unsupported_reason(self, strategy: SearchStrategy, longest: int = 0) -> str:
        """Return why a search is unsupported: not greedy, or more positions than exported."""
        if strategy.beam_size != 1:
            return f"does not support {strategy.name}"
        most = self._description["most_positions"]
        return f"was exported for {most} positions" if longest > most else ""

    def generate(self, request: SearchRequest) -> list[list[Hypothesis]]:
        """Take the most probable token at each step until all rows have ended."""
        description, rows = self._description, len(request.sources)
        sources = [[*source, description["eos"]] for source in request.sources]
        longest = max(map(len, sources))
        src = np.array(
            [[*source, *[description["pad"]] * (longest - len(source))] for source in sources],
            dtype=np.int64,
        )
        mask = np.arange(longest) < np.array([[len(source)] for source in sources])
        state = dict(
            zip(self._state, self._encoder.run(None, {"src": src, "mask": mask}), strict=True)
        )
        tokens = np.full(rows, description["bos"], dtype=np.int64)
        limits = [
            max(limit, len(prefix), 1)
            for limit, prefix in zip(request.limits, request.prefixes, strict=True)
        ]
        written: list[list[int]] = [[] for _ in range(rows)]
        log_probs: list[list[float]] = [[] for _ in range(rows)]
        is_active, finished = np.ones(rows, dtype=bool), np.zeros(rows, dtype=bool)
        for step in range(max(limits) + 1):
            taken = {
                name: value
                for name, value in {"tokens": tokens, **state}.items()
                if name in self._input_names
            }
            found = dict(zip(self._output_names, self._step.run(None, taken), strict=True))
            scores = _log_softmax(found.pop("logits"))
            state |= {name.removeprefix("new_"): value for name, value in found.items()}
            tokens = _choose_tokens(scores, request, description, step)
            for row in np.flatnonzero(is_active):
                token = int(tokens[row])
                ends = token == description["eos"]
                if ends or step < limits[row]:
                    log_probs[row].append(float(scores[row, token]))
                    written[row] += [] if ends else [token]
                finished[row] = ends
                is_active[row] = not ends and step < limits[row]
            if not is_active.any():
                break
        penalty = request.strategy.penalty
        return [
            [
                Hypothesis(
                    written[row],
                    log_probs[row],
                    penalty.score(sum(log_probs[row]), len(log_probs[row])),
                    bool(finished[row]),
                )
            ]
            for row in range(rows)
        ]


def _choose_tokens(
    scores: Any, request: SearchRequest, description: dict[str, int], step: int
) -> Any:
    """Return the most probable allowed token of each row, or that of its prefix."""
    allowed = scores.copy()
    allowed[:, [description["pad"], description["bos"], description["unk"]]] = -np.inf
    if step < request.min_length:
        allowed[:, description["eos"]] = -np.inf
    best = allowed.argmax(axis=-1)
    return np.array(
        [
            prefix[step] if step < len(prefix) else best[row]
            for row, prefix in enumerate(request.prefixes)
        ],
        dtype=np.int64,
    )


def _log_softmax(logits: Any) -> Any:
    """Return log-probabilities of logits (B, V)."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
