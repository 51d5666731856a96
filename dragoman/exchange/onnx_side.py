"""Running exported ONNX graphs with `onnxruntime` alone, greedily. Only to compare with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.decoding.greedy import Greedy
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.stepping import Strategy
from dragoman.engines.face import Request
from dragoman.exchange.onnx import DESCRIPTION, ENCODER, STEP
from dragoman.files.atomic import native_path


class OnnxRuntime:
    """Two graphs behind the engine's face: a greedy loop, as short as it can be."""

    name = "onnx"
    workers = callers = 1
    slots = None

    def __init__(self, directory: Path) -> None:
        import onnxruntime

        runtime: Any = onnxruntime
        options = runtime.SessionOptions()
        options.log_severity_level = 3  # errors alone
        with native_path(directory) as folder:
            self._encoder, self._step = (
                runtime.InferenceSession(str(Path(folder, name)), options, providers=["CPUExecutionProvider"]) for name in (ENCODER, STEP)
            )
        self._facts = json.loads((directory / DESCRIPTION).read_text("utf-8"))
        self._state = [each["name"] for each in self._facts["state"]]
        self._taken = {each.name for each in self._step.get_inputs()}  # a graph drops what it has no use for
        self._given = [each.name for each in self._step.get_outputs()]

    def refusal(self, strategy: Strategy, longest: int = 0) -> str:
        """Only greedy search, within the positions that were exported."""
        if not isinstance(strategy, Greedy):
            return f"is run without {type(strategy).__name__.lower()}"
        most = self._facts["most_positions"]
        return f"was exported for {most} positions" if longest > most else ""

    def generate(self, request: Request) -> list[list[Hypothesis]]:
        """Take the likeliest piece at each step, for all rows until the last has ended."""
        facts, rows = self._facts, len(request.sources)
        sources = [[*source, facts["eos"]] for source in request.sources]
        longest = max(map(len, sources))
        src = np.array([[*source, *[facts["pad"]] * (longest - len(source))] for source in sources], dtype=np.int64)
        mask = np.arange(longest) < np.array([[len(source)] for source in sources])
        state = dict(zip(self._state, self._encoder.run(None, {"src": src, "mask": mask}), strict=True))
        tokens = np.full(rows, facts["bos"], dtype=np.int64)
        limits = [max(limit, len(prefix), 1) for limit, prefix in zip(request.limits, request.prefixes, strict=True)]
        written: list[list[int]] = [[] for _ in range(rows)]
        log_probs: list[list[float]] = [[] for _ in range(rows)]
        going, finished = np.ones(rows, dtype=bool), np.zeros(rows, dtype=bool)
        for step in range(max(limits) + 1):
            taken = {name: value for name, value in {"tokens": tokens, **state}.items() if name in self._taken}
            found = dict(zip(self._given, self._step.run(None, taken), strict=True))
            scores = _log_softmax(found.pop("logits"))
            state |= {name.removeprefix("new_"): value for name, value in found.items()}
            tokens = _choose(scores, request, facts, step)
            for row in np.flatnonzero(going):
                token = int(tokens[row])
                ends = token == facts["eos"]
                if ends or step < limits[row]:
                    log_probs[row].append(float(scores[row, token]))
                    written[row] += [] if ends else [token]
                finished[row] = ends
                going[row] = not ends and step < limits[row]
            if not going.any():
                break
        penalty = request.strategy.penalty if isinstance(request.strategy, Greedy) else Greedy().penalty
        return [
            [Hypothesis(written[row], log_probs[row], penalty.score(sum(log_probs[row]), len(log_probs[row])), bool(finished[row]))]
            for row in range(rows)
        ]


def _choose(scores: Any, request: Request, facts: dict[str, int], step: int) -> Any:
    """Choose each row's likeliest piece that may be written, or the one that its prefix says."""
    allowed = scores.copy()
    allowed[:, [facts["pad"], facts["bos"], facts["unk"]]] = -np.inf
    if step < request.at_least:
        allowed[:, facts["eos"]] = -np.inf
    best = allowed.argmax(axis=-1)
    return np.array([prefix[step] if step < len(prefix) else best[row] for row, prefix in enumerate(request.prefixes)], dtype=np.int64)


def _log_softmax(logits: Any) -> Any:
    """Normalise logits (B, V)."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
