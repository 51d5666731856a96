"""Measure Transformer-XL's evaluation, which reuses states, against a sliding window.

    python bench/xl_evaluation.py                         the size of dai2019_bytes, context 512
    python bench/xl_evaluation.py --context 800 3800      the paper's attention lengths
    python bench/xl_evaluation.py --device cpu --layers 2 --width 64 --context 64

Both give every token a context of at least as many tokens. With states reused, a segment of that
length attends to a memory of that length, and each token is computed once. A sliding window moves
by one token and computes the whole window for it, but only the logits of its last position. Both
run with one row, and with as many as fill the device; weights are random, since they do not change
the time. Dai et al. (2019), section 4.6, report 363 times at 800 and 1,874 times at 3,800.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.timing_helpers import device_name, synchronize
from dragoman.config import ModelConfig
from dragoman.models.language_model import NeuralLanguageModel, build_language_model

VOCAB_SIZE = 260  # bytes and special tokens
SEGMENTS = 4  # of a measurement that reuses states


def main() -> None:
    """Print a table and one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--context", type=int, nargs="+", default=[512])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32, help="rows that fill the device")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    model = build_model(options.layers, options.width, options.heads).to(device).eval()
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    print(f"{device_name(device)}, torch {torch.__version__}, {dtype}")
    print(f"{options.layers} layers, width {options.width}, {options.heads} heads, forward only")
    results = []
    with torch.inference_mode(), autocast(device):
        for context in options.context:
            for rows in (1, options.rows):
                results.append(compare(model, context, rows, device, options.repeats))
    signature = {"device": device_name(device), "torch": torch.__version__, "dtype": dtype}
    print(json.dumps({"bench": "xl_evaluation", "results": results} | signature))


def build_model(layers: int, width: int, heads: int) -> NeuralLanguageModel:
    """Build a Transformer-XL on bytes."""
    config = ModelConfig(
        decoder=(f"transformer*{layers}",),
        width=width,
        heads=heads,
        ffn_width=4 * width,
        positions="transformer_xl",
        max_positions=2048,
    )
    return build_language_model(config, vocab_size=VOCAB_SIZE)


def compare(
    model: NeuralLanguageModel, context: int, rows: int, device: torch.device, repeats: int
) -> dict[str, Any]:
    """Time both methods with so many rows; print and return the seconds per token and the ratio."""
    reused = median_of(lambda: reuse_states(model, context, rows, device), repeats)
    window = median_of(lambda: slide_window(model, context, rows, device), repeats)
    ratio = window / reused
    print(
        f"context {context:5d}  rows {rows:3d}  states reused {1e6 * reused:10.3f} us/token  "
        f"sliding window {1e6 * window:12.2f} us/token  {ratio:8.1f} times"
    )
    return {"context": context, "rows": rows, "reused": reused, "window": window, "ratio": ratio}


def reuse_states(
    model: NeuralLanguageModel, context: int, rows: int, device: torch.device
) -> float:
    """Score segments with a full memory; return the seconds per token."""
    tokens = torch.randint(4, VOCAB_SIZE, (rows, context), device=device)
    state = model.start(rows, memory=context)
    _, state = model.extend_hidden(tokens, state)  # fills the memory, as in a long text
    synchronize(device)
    began = time.perf_counter()
    for _ in range(SEGMENTS):
        hidden, state = model.extend_hidden(tokens, state)
        log_probs_of(model, hidden, tokens)
    synchronize(device)
    return (time.perf_counter() - began) / (SEGMENTS * rows * context)


def slide_window(
    model: NeuralLanguageModel, context: int, rows: int, device: torch.device
) -> float:
    """Score the last position of so many windows; return the seconds per token, one each."""
    tokens = torch.randint(4, VOCAB_SIZE, (rows, context), device=device)
    synchronize(device)
    began = time.perf_counter()
    hidden = model.decode(tokens)[:, -1:]
    log_probs_of(model, hidden, tokens[:, -1:])
    synchronize(device)
    return (time.perf_counter() - began) / rows


def median_of(measure: Callable[[], float], repeats: int) -> float:
    """Return the median of several measurements, after a warm-up."""
    return statistics.median([measure() for _ in range(repeats + 1)][1:])


def log_probs_of(
    model: NeuralLanguageModel, hidden: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Return the log-probability of each target (B, T)."""
    logits = model.project(hidden).float()
    return logits.log_softmax(dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def autocast(device: torch.device) -> Any:
    """Return the context of bfloat16 on a GPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


if __name__ == "__main__":
    main()
