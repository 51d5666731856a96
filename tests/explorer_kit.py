"""A predictor with the explorer's contract and no model behind it, for tests of what lies between
it and the page.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dragoman.errors import ConfigError
from dragoman.explain.explanation import (
    AttentionSite,
    Attribution,
    Explanation,
    HeadSummary,
    Step,
    Token,
    TokenizedText,
)

HEADS = 2


def tokenized(words: Sequence[str]) -> TokenizedText:
    """Return words as tokens of a text, with an end of sentence."""
    tokens, at = [], 0
    for number, word in enumerate(words):
        text = word if number == 0 else f" {word}"
        tokens.append(Token(10 + len(word), text, (at, at + len(text))))
        at += len(text)
    tokens.append(Token(2, "</s>", (at, at), special=True))
    return TokenizedText(
        " ".join(words), tokens=tokens, words=[(n, n + 1) for n in range(len(words))]
    )


def make_explanation(text: str, **request: Any) -> Explanation:
    """Return an explanation of a "translation": the words in capitals, after the forced ones."""
    words = text.split()
    source = tokenized(words)
    forced = len(request.get("prefix_ids", ()))
    target = tokenized([word.upper() for word in words])
    steps = [
        Step(
            token.id,
            -0.5,
            1,
            0.7,
            forced=number < forced,
            top=[(token.id, token.text, -0.5), (99, "other", -1.5)],
        )
        for number, token in enumerate(target.tokens)
    ]
    size = len(source.tokens)
    weights = np.full((HEADS, size, size), 1 / size, np.float32)
    weights[0] = np.eye(size, dtype=np.float32)
    site = AttentionSite("x0", "decoder.0.cross", "cross", "cross", 0, HEADS, "target", "source")
    return Explanation(
        model={"name": "stub", "family": "transformer", "task": "translate", "digest": "stub"},
        request={"text": text, "beam": 1, **request},
        source=source,
        target=target,
        steps=steps,
        score={"sum": -0.5 * len(steps), "normalised": -0.5, "penalty": "none"},
        sites=[site],
        heads=[HeadSummary("x0", head, effect_estimate=-0.1) for head in range(HEADS)],
        arrays={"x0.w": weights},
    )


@dataclasses.dataclass(frozen=True)
class StubAblation:
    """What switching heads off changed."""

    off: list[str]

    def to_dict(self) -> dict[str, Any]:
        return {"off": self.off, "effect": [-0.25], "sum_change": -0.25, "text": "X"}


class StubPredictor:
    """Answers at once, or waits for `gate`; counts calls and the most that ran at the same time."""

    task_name = "translate"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.heads_done = 0
        self.num_heads = HEADS
        self.running = self.most_running = 0
        self._lock = threading.Lock()

    def explain(self, text: str, **options: Any) -> Explanation:
        with self._lock:
            self.calls.append((text, options))
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        try:
            assert self.gate.wait(30)
            if text == "refuse":
                raise ConfigError(["a text must be liked; found another; write it anew"])
            if text == "secret bug":
                raise ValueError(f"cannot bear {text}")
            if text == "full":
                raise RuntimeError(
                    "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory"
                )
            return make_explanation(text, **options)
        finally:
            with self._lock:
                self.running -= 1

    def ablate(self, explanation: Explanation, heads: list[str]) -> StubAblation:
        return StubAblation(heads)

    def attribute(
        self, explanation: Explanation, method: str
    ) -> tuple[Attribution, dict[str, np.ndarray]]:
        size = len(explanation.source.tokens)
        return Attribution(method, "ixg.s"), {"ixg.s": np.ones((size, size), np.float32)}

    def head_effects(self, explanation: Explanation) -> Iterator[tuple[str, float]]:
        for head in range(self.num_heads):
            assert self.gate.wait(30)
            self.heads_done += 1
            yield f"x0.{head}", -0.125 * head
