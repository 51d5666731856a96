"""Measure the time of `dragoman translate` for one sentence against `python -c "import torch"`.

    python bench/startup.py -m MODEL [--repeats 7]

The two commands alternate. The untimed runs write bytecode files, as an installation by pip does,
also where PYTHONDONTWRITEBYTECODE is set; torch has been installed with its own. It prints the
median seconds with quartiles, the ratio of the medians, which should be at most 1.6, and one line
of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

LIMIT = 1.6  # largest ratio
SENTENCE = "Guten Morgen."


def main() -> None:
    """Time both commands; print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "-m",
        "--model",
        type=Path,
        help="model directory; default: a small one with random weights",
    )
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each command")
    parser.add_argument(
        "--warmups",
        type=int,
        default=2,
        help="untimed runs, which fill caches and compile kernels",
    )
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = chosen.model or write_random_model(Path(folder) / "model")
        commands = {
            "import torch": [sys.executable, "-c", "import torch"],
            "translate": [
                sys.executable,
                "-m",
                "dragoman",
                "translate",
                "-m",
                str(model),
                SENTENCE,
            ],
        }
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(chosen.warmups + chosen.repeats):
            for name, command in commands.items():
                begin = time.perf_counter()
                subprocess.run(command, check=True, capture_output=True, env=environment)
                times[name].append(time.perf_counter() - begin)
    found = {}
    for name, all_times in times.items():
        low, middle, high = statistics.quantiles(all_times[chosen.warmups :], n=4)
        found[name] = middle
        print(f"{name:<14}{middle:6.2f} s  (quartiles {low:.2f} to {high:.2f})")
    ratio = found["translate"] / found["import torch"]
    print(f"{'ratio':<14}{ratio:6.2f}    (limit: {LIMIT})")
    signature = {
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
        "repeats": chosen.repeats,
    }
    seconds = {
        "translate_s": round(found["translate"], 3),
        "import_torch_s": round(found["import torch"], 3),
    }
    print(
        json.dumps(
            {"bench": "startup", **seconds, "ratio": round(ratio, 3), "limit": LIMIT, **signature}
        )
    )


def write_random_model(path: Path) -> Path:
    """Write a tiny model with random weights and return its directory."""
    import torch

    from dragoman.bundle import write_bundle
    from dragoman.config import read_config
    from dragoman.models.factory import build_model
    from dragoman.text.sentencepiece_tokenizer import train_tokenizers

    config = read_config(
        recipe="tiny",
        overrides=[
            "text.tokenizer=characters",
            "decode.max_length_ratio=1",
            "decode.max_length_extra=4",
        ],
    )
    tokenizers = train_tokenizers([SENTENCE] * 20, ["Good morning."] * 20, config.text)
    torch.manual_seed(1)
    model = build_model(
        config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    )
    write_bundle(
        path, config=config, tokenizers=tokenizers, weights=model.state_dict(), golden=[SENTENCE]
    )
    return path


if __name__ == "__main__":
    main()
