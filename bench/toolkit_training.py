"""Time the training commands of OpenNMT-py, eole and JoeyNMT, each in its own environment.

They make their own batches of the same sentences. OpenNMT-py and eole have no source EOS: about 3 %
fewer tokens. JoeyNMT does not batch by length, so it gets the sentences in the order of our plan.
All train in float32, because none supports bfloat16 on a CPU. Throughput is what a toolkit logs;
the first report is warm-up.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import torch

from bench.synthetic_corpus import LETTERS, NUM_SPECIAL_TOKENS, PreparedCorpus
from bench.toolkit_configs import TOOLKIT_CONFIGS, TrainingJob
from bench.toolkit_environments import TOOLKITS, InstallError, toolkit_python
from dragoman.config import ModelConfig
from dragoman.data.batch_plan import BatchPlan


def time_toolkit(
    name: str, corpus: PreparedCorpus, model: ModelConfig, layers: int, options: Any, folder: Path
) -> dict[str, Any]:
    """Train with a toolkit's command; return a row with its logged throughput and memory."""
    row: dict[str, Any] = {
        "system": name,
        "precision": "float32",
        "version": TOOLKITS[name].release,
    }
    try:
        python = toolkit_python(name, torch.__version__)
    except InstallError as problem:
        return row | {"error": str(problem)}
    job = TrainingJob(
        width=model.width,
        heads=model.heads,
        ffn_width=model.ffn_width,
        layers=layers,
        folder=folder,
        dropout=model.dropout,
        batch_tokens=options.batch_tokens,
        steps=options.steps * (options.rounds + 1),
        report_every=options.steps,
        bucket=options.pairs,
    )
    target_fraction = write_corpus(corpus, job, options.vocabulary, options.shapes)
    toolkit_config = TOOLKIT_CONFIGS[name]
    log = folder / "log"
    status, peak = run_logged(toolkit_config.command(python, job, name), log, options.threads)
    log_text = log.read_text(encoding="utf-8", errors="replace")
    rates = [
        rate if toolkit_config.sides == 2 else rate / target_fraction
        for rate in toolkit_config.rates(log_text)[1:]
    ]
    if status or not rates:
        return row | {
            "error": (log_text.strip().splitlines() or ["it logged no throughput"])[-1][:200]
        }
    return row | {"tokens_s": max(rates), "slowest": min(rates), "MiB": peak}


def write_corpus(corpus: PreparedCorpus, job: TrainingJob, vocabulary: int, shapes: int) -> float:
    """Write the sentences batch by batch; return the fraction of target tokens."""
    plan = BatchPlan(
        corpus.store.src_lengths,
        corpus.store.tgt_lengths,
        batch_tokens=job.batch_tokens,
        seed=1,
        max_shapes=shapes,
    )
    order = [int(index) for batch in plan.epoch(0) for index in batch]
    src, tgt = ([list(texts[index]) for index in order] for texts in (corpus.src, corpus.tgt))
    job.write(LETTERS[: vocabulary - NUM_SPECIAL_TOKENS], src, tgt)
    many = [sum(len(text) + 1 for text in texts) for texts in (src, tgt)]  # EOS included
    return many[1] / sum(many)


def run_logged(command: list[str], log: Path, threads: int) -> tuple[int, float]:
    """Run a command with its output in a file; return its exit code and peak memory in MiB."""
    variables = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
    with log.open("w", encoding="utf-8") as words:
        process = subprocess.Popen(command, stdout=words, stderr=subprocess.STDOUT, env=variables)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, used.ru_maxrss / 1024
