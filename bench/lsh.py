"""Measure LSH attention against full attention, and reversible against plain layers.

    python bench/lsh.py                                     1k, 4k and 16k tokens, bfloat16 on a GPU
    python bench/lsh.py --lengths 16384 65536 --compiled    with torch.compile as well
    python bench/lsh.py --device cpu --lengths 512 1024     times only

It prints the ratio to full attention, the error by number of rounds, and the memory by depth. "CUDA
graph" is the time of the captured kernels, which is how the trainer runs them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.attention.lsh_bucket_count import default_buckets, factor_buckets
from dragoman.config import ModelConfig
from dragoman.layers.reversible import run_sublayers, run_sublayers_reversible
from dragoman.models.block_interface import BuildContext
from dragoman.models.forward_context import ForwardContext
from dragoman.models.reformer_blocks import Reformer
from dragoman.ops import attend_reference
from dragoman.ops.lsh_attention import attend_sorted, hash_vectors, sort_by_bucket

HEADS, WIDTH = 8, 64
DEPTHS = (2, 4, 8, 16)
ROUNDS = (1, 2, 4, 8, 16, 32)


def main() -> None:
    """Run the three measurements; print a table for each and one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[1024, 4096, 16384] if torch.cuda.is_available() else [256, 1024],
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--compiled", action="store_true", help="also with torch.compile")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    where = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    print(
        f"{where}, torch {torch.__version__}, {str(dtype).removeprefix('torch.')}, batch 1, "
        f"{HEADS} heads of {WIDTH}, forward and backward"
    )
    settings = {"rounds": options.rounds, "window": options.window}
    left_out = set() if options.compiled else {"LSH, compiled"}
    attention = [
        row
        for causal in (True, False)
        for length in options.lengths
        for row in time_attention(
            length, causal, device, dtype, repeats=options.repeats, left_out=left_out, **settings
        )
    ]
    errors = measure_errors(device)
    depths = measure_depths(device)
    signature = {
        "device": where,
        "torch": torch.__version__,
        "dtype": str(dtype),
        "heads": HEADS,
        "head_width": WIDTH,
        **settings,
    }
    print(
        json.dumps(
            {"bench": "lsh", "attention": attention, "errors": errors, "depths": depths} | signature
        )
    )


def time_attention(
    length: int,
    causal: bool,
    device: torch.device,
    dtype: torch.dtype,
    *,
    rounds: int,
    window: int,
    repeats: int,
    left_out: set[str],
) -> list[dict[str, Any]]:
    """Time LSH attention, hashing included, and full attention on the same tensors."""
    query, key, value = (
        torch.randn(1, HEADS, length, WIDTH, device=device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    outer = torch.randn(1, HEADS, length, WIDTH, device=device, dtype=dtype)
    buckets = default_buckets(length, window)
    rotations = torch.randn(HEADS, WIDTH, rounds, sum(factor_buckets(buckets)) // 2, device=device)

    def hashed(*, compiled: bool = False) -> Tensor:
        unit = F.normalize(query.float(), dim=-1, eps=1e-6).to(dtype)
        with torch.no_grad():
            tokens = sort_by_bucket(
                hash_vectors(query.detach(), rotations, factor_buckets(buckets)).to(torch.int16),
                window,
            )
        return attend_sorted(
            query, unit, value, tokens, window=window, causal=causal, torch_compile=compiled
        )

    systems: dict[str, Callable[[], Tensor]] = {
        "LSH": hashed,
        "LSH, compiled": lambda: hashed(compiled=True),
        "full, materialised": lambda: attend_reference(query, key, value, causal=causal).context,
        "full, fused": lambda: F.scaled_dot_product_attention(query, key, value, is_causal=causal),
    }
    print(
        f"\n{length:,} tokens, {'causal' if causal else 'bidirectional'}; {buckets} buckets, "
        f"{rounds} rounds, window {window}"
    )
    rows: list[dict[str, Any]] = []
    for name, system in (
        (name, system) for name, system in systems.items() if name not in left_out
    ):
        row = {"system": name, "length": length, "causal": causal, "buckets": buckets}
        try:
            inputs = [query, value] if name.startswith("LSH") else [query, key, value]
            rows.append(
                row
                | measure_action(
                    lambda system=system, inputs=inputs: torch.autograd.grad(
                        system(), inputs, outer
                    ),
                    device,
                    repeats,
                )
            )
        except torch.OutOfMemoryError:
            rows.append(row | {"ms": None, "cuda_graph_ms": None, "MiB": None})
            if device.type == "cuda":
                torch.cuda.empty_cache()
    for row in rows:
        ratios = "".join(
            f"{_ratio(row[unit], rows[0][unit])}" for unit in ("ms", "cuda_graph_ms", "MiB")
        )
        cells = (
            f"{_number(row['ms'], 'ms')} {_number(row['cuda_graph_ms'], 'ms CUDA graph')} "
            f"{_number(row['MiB'], 'MiB')}"
        )
        print(f"  {row['system']:20s} {cells}   ratio to LSH:{ratios}", flush=True)
    return rows


def measure_action(
    action: Callable[[], object], device: torch.device, repeats: int
) -> dict[str, float | None]:
    """Return the best time of several, and the peak memory above the baseline."""
    action()  # warm-up
    action()
    peak = None
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        action()
        torch.cuda.synchronize(device)
        peak = (torch.cuda.max_memory_allocated(device) - before) / 2**20
    best = _best_ms(action, device, repeats)
    cuda_graph_ms = None
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            action()
        cuda_graph_ms = _best_ms(graph.replay, device, repeats)
    return {"ms": best, "cuda_graph_ms": cuda_graph_ms, "MiB": peak}


def _best_ms(action: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the best time of several, in milliseconds."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


@torch.no_grad()
def measure_errors(
    device: torch.device, length: int = 256, buckets: int = 4, window: int = 256
) -> list[dict[str, float]]:
    """Compare with full attention over shared queries and keys, on random vectors."""
    query, value = (torch.randn(1, HEADS, length, WIDTH, device=device) for _ in range(2))
    key = F.normalize(query, dim=-1)
    itself = torch.eye(length, dtype=torch.bool, device=device)
    wanted = (query @ key.mT).masked_fill(itself, -torch.inf).softmax(-1) @ value
    print(
        f"\nerror against full attention with shared queries and keys, {length} tokens, "
        f"{buckets} buckets, window {window}, float32"
    )
    rows = []
    for rounds in ROUNDS:
        rotations = torch.randn(HEADS, WIDTH, rounds, buckets // 2, device=device)
        tokens = sort_by_bucket(hash_vectors(query, rotations, (buckets,)), window)
        found = attend_sorted(query, key, value, tokens, window=window, causal=False)
        error = float((found - wanted).norm() / wanted.norm())
        rows.append({"rounds": rounds, "error": error})
        print(f"  {rounds:3d} rounds  relative error {error:.6f}")
    return rows


def measure_depths(device: torch.device) -> list[dict[str, Any]]:
    """Compare the memory of reversible and plain layers in training."""
    length, width = (2048, 512) if device.type == "cuda" else (256, 64)
    unit = "peak" if device.type == "cuda" else "saved for the backward pass"
    print(
        f"\nmemory of layers, MiB, {unit}: {length} tokens, width {width}, LSH attention, "
        f"ffn_width {4 * width} in 4 chunks"
    )
    rows = []
    for depth in DEPTHS:
        config = ModelConfig(
            width=width, heads=8, ffn_width=4 * width, dropout=0.1, max_positions=length
        )
        block = Reformer.build(
            BuildContext(config=config, causal=False, memory_width=None), layers=depth, ffn_chunks=4
        ).to(device)
        x = torch.randn(1, length, width, device=device, requires_grad=True)
        sublayers = [
            sublayer
            for _, layer in block.layers()
            for sublayer in layer.sublayers(ForwardContext())
        ]
        systems: dict[str, Callable[[], Tensor]] = {
            "reversible": lambda sublayers=sublayers, x=x: run_sublayers_reversible(
                sublayers, x, None, random=True
            ),
            "plain": lambda sublayers=sublayers, x=x: run_sublayers(sublayers, x, None),
        }
        found = {
            name: _memory(system, list(block.parameters()), device)
            for name, system in systems.items()
        }
        rows.append({"depth": depth, **found})
        print(
            f"  {depth:3d} layers  reversible {found['reversible']:9.1f}"
            f"  plain {found['plain']:9.1f}"
        )
    return rows


def _memory(
    system: Callable[[], Tensor], weights: list[torch.nn.Parameter], device: torch.device
) -> float:
    """Return the memory of one run in MiB, without weights and their gradients."""
    if device.type == "cuda":
        for _ in range(2):  # the first is warm-up
            for weight in weights:
                weight.grad = None
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            with torch.autocast("cuda", torch.bfloat16):
                system().sum().backward()
            torch.cuda.synchronize(device)
        gradients = sum(weight.grad.nbytes for weight in weights if weight.grad is not None)
        return (torch.cuda.max_memory_allocated(device) - before - gradients) / 2**20
    sizes: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        system()
    return sum(sizes.values()) / 2**20


def _number(value: float | None, unit: str) -> str:
    return f"{'-':>9} {unit}" if value is None else f"{value:9.2f} {unit}"


def _ratio(value: float | None, base: float | None) -> str:
    return f"{'-':>8}" if value is None or base is None else f"{value / base:8.2f}"


if __name__ == "__main__":
    main()
