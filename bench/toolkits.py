"""Another toolkit's own training command, in an environment that is made for it: OpenNMT-py.

It borrows this interpreter's torch, so that both multiply alike and nothing large is fetched twice. It cuts batches of its own from the
same sentences and puts no end on the source, which makes about 3 % fewer tokens.
"""

from __future__ import annotations

import json
import os
import re
import site
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.drawn import LETTERS, SPECIAL, Corpus
from dragoman.config import ModelConfig

OPENNMT = "OpenNMT-py"
PACKAGES = ("OpenNMT-py==3.0.4", "pyonmttok<2", "configargparse", "rapidfuzz", "flask", "waitress", "werkzeug")  # 3.0.4 takes any torch
_RATE = re.compile(r"(\d+)/(\d+) tok/s")


def time_opennmt(corpus: Corpus, model: ModelConfig, layers: int, options: Any, folder: Path) -> dict[str, Any]:
    """Train through its command in float32, and read the rates that it logs; the first report warms up."""
    python = environment(folder / "opennmt")
    # Its texts are cut at spaces, and every drawn letter is a piece.
    for name, texts in (("src", corpus.src), ("tgt", corpus.tgt)):
        (folder / name).write_text("\n".join(map(" ".join, texts)) + "\n", encoding="utf-8")
    vocabulary = folder / "vocabulary"
    vocabulary.write_text("".join(f"{letter}\t1\n" for letter in LETTERS[: options.vocabulary - SPECIAL]), encoding="utf-8")
    settings = configuration(model, layers, options, folder)
    (folder / "opennmt.yaml").write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML too
    command = [str(python), "-m", "onmt.bin.train", "-config", str(folder / "opennmt.yaml")]
    variables = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    rates = read_rates(done.stdout + done.stderr)[1:]
    if done.returncode or not rates:
        return {"way": OPENNMT, "precision": "float32", "error": (done.stderr.strip().splitlines() or ["it logged no rate"])[-1][:200]}
    return {"way": OPENNMT, "precision": "float32", "tokens_s": max(rates), "slowest": min(rates)}


def environment(folder: Path) -> Path:
    """Make an environment with the toolkit and what it needs to train; what this one has is lent to it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "lent.pth").write_text("\n".join(site.getsitepackages()) + "\n", encoding="utf-8")
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, *PACKAGES], check=True, capture_output=True)
    return python


def configuration(model: ModelConfig, layers: int, options: Any, folder: Path) -> dict[str, Any]:
    """Say in its words what is trained."""
    return {
        "data": {"corpus_1": {"path_src": str(folder / "src"), "path_tgt": str(folder / "tgt"), "transforms": []}},
        "src_vocab": str(folder / "vocabulary"),
        "tgt_vocab": str(folder / "vocabulary"),
        "share_vocab": True,
        "save_model": str(folder / "opennmt-model"),
        "train_steps": options.steps * (options.rounds + 1),
        "save_checkpoint_steps": 10**6,
        "report_every": options.steps,
        "world_size": 1,
        "gpu_ranks": [],
        "num_workers": 0,
        "encoder_type": "transformer",
        "decoder_type": "transformer",
        "enc_layers": layers,
        "dec_layers": layers,
        "heads": model.heads,
        "hidden_size": model.width,
        "word_vec_size": model.width,
        "transformer_ff": model.feedforward,
        "dropout": [model.dropout],
        "attention_dropout": [0.0],
        "label_smoothing": 0.1,
        "position_encoding": True,
        "share_embeddings": True,
        "share_decoder_embeddings": True,
        "batch_type": "tokens",
        "batch_size": options.batch_tokens,
        "bucket_size": options.pairs,
        "normalization": "tokens",
        "optim": "adam",
        "learning_rate": 1e-4,
        "max_grad_norm": 0,
    }


def read_rates(log: str) -> list[int]:
    """Find the tokens a second of each report, both sides together."""
    return [int(src) + int(tgt) for src, tgt in _RATE.findall(log)]
