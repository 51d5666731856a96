"""Measure what a training step with SimCut or R-Drop costs, relative to a plain one.

    python bench/consistency_step.py                   about five minutes on a GPU
    python bench/consistency_step.py --only small --modes cuda_graphs
    python bench/consistency_step.py --only tiny --modes eager --steps 4 --rounds 1    on a CPU

Each method trains the same model on the same batches with the trainer of bench/train_gpu.py, in the
modes that `dragoman train` uses on a GPU. Throughput counts the tokens of the batch once, though
both methods compute every pair twice. The ratio compares the best rounds. Methods take turns,
--repeats times, so that a change of the GPU's clock affects all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.synthetic_corpus import BenchmarkPlan, synthetic_corpus
from bench.timing_helpers import device_name, free_memory
from bench.train_gpu import MODES, SIZES, model_config, time_ours
from dragoman.training.torch_compile import configure_backends

METHODS: dict[str, dict[str, float]] = {
    "plain": {},
    "simcut": {"simcut": 3.0},
    "r_drop": {"r_drop": 5.0},
}


def main() -> None:
    """Time every method for every size and mode; print the ratios and one line of JSON."""
    options = parse_arguments()
    device = torch.device(options.device)
    configure_backends(device, deterministic=False)
    print(f"{device_name(device)}, torch {torch.__version__}", flush=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        corpus = synthetic_corpus(Path(name), options.pairs, vocabulary=options.vocabulary)
        plan = BenchmarkPlan(
            corpus.store,
            batch_tokens=options.batch_tokens,
            max_shapes=options.shapes,
            steps=options.steps,
            rounds=options.rounds,
        )
        for size in options.only:
            for mode in options.modes:
                best = dict.fromkeys(METHODS, 0.0)
                for repeat in range(options.repeats):
                    for method, settings in METHODS.items():
                        folder = Path(name) / f"{size}-{mode}-{method}-{repeat}"
                        row = time_ours(
                            mode, plan, model_config(size), options, device, folder, **settings
                        )
                        rows.append(row | {"size": size, "method": method})
                        best[method] = max(best[method], row["tokens_s"])
                        free_memory(device)
                for method, tokens_s in best.items():
                    memory = max(
                        row["MiB"] or 0.0
                        for row in rows
                        if (row["size"], row["system"], row["method"]) == (size, mode, method)
                    )
                    print(
                        f"  {size:6s} {mode:22s} {method:8s} {tokens_s:12,.0f} tokens/s  "
                        f"{best['plain'] / tokens_s:5.2f} times the plain step  "
                        f"{memory:8,.0f} MiB",
                        flush=True,
                    )
    signature = {
        name: getattr(options, name) for name in ("vocabulary", "batch_tokens", "steps", "shapes")
    }
    signature |= {"device": device_name(device), "torch": torch.__version__}
    print(json.dumps({"bench": "consistency_step", "rows": rows} | signature))


def parse_arguments() -> argparse.Namespace:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=list(SIZES), default=["base", "small"])
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=list(MODES),
        default=["cuda_graphs", "compiled+cuda_graphs"],
    )
    parser.add_argument("--steps", type=int, default=50, help="training steps per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--shapes", type=int, default=4, help="most batch shapes")
    parser.add_argument("--batch-tokens", type=int, help="padded tokens of the longer side")
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--pairs", type=int, help="synthetic pairs")
    parser.add_argument("--precision", choices=["auto", "float32", "bfloat16"], default="auto")
    options = parser.parse_args()
    on_gpu = options.device != "cpu"
    options.batch_tokens = options.batch_tokens or (25_600 if on_gpu else 256)
    options.pairs = options.pairs or (120_000 if on_gpu else 400)
    return options


if __name__ == "__main__":
    main()
