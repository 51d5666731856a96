"""The one entry to every search: encoded sources in, hypotheses out, whatever the model and the strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.stepping import Rows, Stepper, Strategy
from dragoman.text.specials import BOS, EOS, PAD


@torch.inference_mode()
def search(
    model: Stepper,
    memory: Any,
    *,
    limits: Tensor,
    strategy: Strategy,
    prefixes: Sequence[Sequence[int]] | None = None,
    lines: Sequence[int] | None = None,
    at_least: int = 0,
    scored: bool = True,
) -> list[list[Hypothesis]]:
    """Find the best outputs for every row of the memory, best first, at least one a row.

    `limits` (B,) are the most tokens a row may have, its end not counted; a prefix longer than its limit raises it.
    `prefixes` are forced beginnings, `lines` number the rows in the whole input for sampling, and before
    `at_least` tokens no row may end. Without `scored`, hypotheses of a search that needs no log-probabilities have none.
    """
    count = len(limits)
    forced = [list(prefix) for prefix in prefixes] if prefixes is not None else [[] for _ in range(count)]
    lines = range(count) if lines is None else lines
    assert len(forced) == len(lines) == count, f"{count} rows need as many prefixes and lines; got {len(forced)} and {len(lines)}"
    assert not any(token in (PAD, BOS, EOS) for prefix in forced for token in prefix), "a prefix must not hold PAD, BOS or EOS"
    most = np.maximum(limits.cpu().numpy().astype(np.int64), [max(1, len(prefix)) for prefix in forced])
    return strategy.run(model, model.start(memory), Rows(most, forced, lines, at_least, scored))
