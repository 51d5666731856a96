"""Measure training throughput of two classifiers against the same models in plain PyTorch.

    python bench/classification.py                     about three minutes on a GPU
    python bench/classification.py --only han          one member
    python bench/classification.py --size tiny --steps 4 --device cpu    a smoke test

The members are HAN (yang2016) and the Transformer encoder (vaswani2017_classifier). Ours is the
trainer of `dragoman train`, data loading included. The plain models are written with torch.nn and
compiled by torch.compile, with bfloat16 autocast and fused AdamW, on batches that are ready in
pinned memory. "shuffled" pads random batches of as many texts to their longest, as most tutorials
do; "our batches" gets ours, of similar lengths. Throughput counts words without padding. Texts are
generated with the lengths of IMDB reviews.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.timing import device_name, free_memory, reset_peak, synchronize, timing_row
from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.config import Config, read_config
from dragoman.data.batch_plan import BatchPlan, Cursor
from dragoman.data.in_memory_examples import InMemoryExamples
from dragoman.data.labeled_records import Record
from dragoman.recipes.recipe_miniature import mini
from dragoman.tasks.classification import ClassificationBatch, ClassificationTask
from dragoman.training.mixed_precision import choose_precision
from dragoman.training.torch_compile import configure_backends
from dragoman.training.trainer import Trainer

MEMBERS = {"han": "yang2016", "transformer": "vaswani2017_classifier"}
LENGTH_MEAN, LENGTH_DEVIATION = 5.2, 0.65  # of the logarithm of IMDB's lengths in words
WORDS_PER_SENTENCE = 18
MODES = {"eager": "off", "cuda_graphs": "auto"}  # values of train.cuda_graphs
PLAIN = ("plain, shuffled", "plain, our batches")


def main() -> None:
    """Time every system, print the ratios and one line of JSON."""
    options = parse_arguments()
    device = torch.device(options.device)
    configure_backends(device, deterministic=False)
    rows: list[dict[str, Any]] = []
    for member in options.only:
        config = read_config(
            recipe=MEMBERS[member],
            scale=mini if options.size == "tiny" else None,
            overrides=["train.precision=float32"] if device.type == "cpu" else [],
        )
        task, store = build_task(config, options)
        print(
            f"{device_name(device)}, torch {torch.__version__}; {member}, {len(store):,} texts, "
            f"{options.steps} steps per round",
            flush=True,
        )
        ours = [mode for mode in MODES if device.type == "cuda" or mode == "eager"]
        for system in (*(f"ours, {mode}" for mode in ours), *PLAIN):
            row: dict[str, Any]
            try:
                row = time_system(system, member, task, store, options, device)
            except Exception as error:  # such as torch.compile without a compiler
                row = {"error": " ".join(str(error).split())[:200]}
            row["system"] = f"{member}: {system}"
            rows.append(row)
            show(row)
            free_memory(device)
        report(rows, member)
    print(json.dumps({"bench": "classification", "device": device_name(device), "rows": rows}))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=MEMBERS, default=list(MEMBERS))
    parser.add_argument("--size", choices=["recipe", "tiny"], default="recipe")
    parser.add_argument("--steps", type=int, default=100, help="training steps of each round")
    parser.add_argument("--texts", type=int, default=0, help="generated texts; 0 for the size's")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", metavar="DEVICE"
    )
    parser.add_argument("--no-compile", action="store_true", help="do not compile the plain models")
    options = parser.parse_args()
    options.texts = options.texts or (64 if options.size == "tiny" else 8000)
    return options


def build_task(
    config: Config, options: argparse.Namespace
) -> tuple[ClassificationTask, InMemoryExamples]:
    """Return the task and its examples, of generated texts."""
    generator = np.random.default_rng(0)
    vocabulary = np.array([f"word{number}" for number in range(20_000)])
    ranks = np.arange(1, len(vocabulary) + 1)
    frequencies = (1 / ranks) / (1 / ranks).sum()
    lengths = np.exp(generator.normal(LENGTH_MEAN, LENGTH_DEVIATION, options.texts)).astype(int)
    if options.size == "tiny":
        lengths //= 8
    records = []
    for number, length in enumerate(np.clip(lengths, 4, 1000)):
        words = generator.choice(vocabulary, length, p=frequencies)
        parts = [words[at : at + WORDS_PER_SENTENCE] for at in range(0, length, WORDS_PER_SENTENCE)]
        text = ". ".join(" ".join(part).capitalize() for part in parts)
        records.append(Record(Path("texts"), number, {"text": text, "label": number % 2}))
    text = ClassificationTask.fit_text(config, lambda: iter(records))
    task = ClassificationTask(config, text)
    return task, task.encode(records)


def time_system(
    system: str,
    member: str,
    task: ClassificationTask,
    store: InMemoryExamples,
    options: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:
    """Time one system."""
    if system in PLAIN:
        on_ours = system == PLAIN[1]
        return time_plain(member, task, store, options, device, on_our_batches=on_ours)
    return time_ours(system.removeprefix("ours, "), task, store, options, device)


def time_ours(
    mode: str,
    task: ClassificationTask,
    store: InMemoryExamples,
    options: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:
    """Train with our trainer, reading the clock at every step's record."""
    plan = task.plan(store, batch_tokens=task.config.train.batch_tokens, seed=1)
    assert isinstance(plan, BatchPlan)
    warmup = 2 * plan.batches(0)  # every shape is captured at its second occurrence
    config = task.config.replace(
        train={
            "steps": warmup + 2 * options.steps + 1,
            "epochs": 0.0,
            "cuda_graphs": MODES[mode],
            "checkpoint_every": 10**6,
            "validate_every": 10**6,
            "ema_decay": 0.0,  # the plain models have none
        }
    ).train
    clock: dict[int, float] = {}
    tokens: dict[int, int] = {}

    def on_record(record: Mapping[str, Any]) -> None:
        if "tokens" in record:
            clock[int(record["step"])] = time.perf_counter()
            tokens[int(record["step"])] = int(record["tokens"])

    def collate(examples: np.ndarray, /, *, seed: int) -> ClassificationBatch:
        return task.collate(store, examples, shapes=plan.shapes, seed=seed, training=True)

    began = time.perf_counter()
    reset_peak(device)
    torch.manual_seed(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        RunDirectory(Path(folder), keep_checkpoints=1) as run,
    ):
        trainer = Trainer(
            model=task.build_model().to(device),
            task=task,
            plan=plan,
            collate=collate,
            config=config,
            run=run,
            width=task.config.model.width,
            on_record=on_record,
        )
        trainer.fit(resume=False)
    bounds = [
        (warmup + each * options.steps, warmup + (each + 1) * options.steps) for each in (0, 1)
    ]
    seconds = [clock[last] - clock[first] for first, last in bounds]
    counts = [sum(tokens[step] for step in range(first + 1, last + 1)) for first, last in bounds]
    return timing_row(mode, counts, seconds, clock[warmup] - began, device) | {"ours": True}


def time_plain(
    member: str,
    task: ClassificationTask,
    store: InMemoryExamples,
    options: argparse.Namespace,
    device: torch.device,
    *,
    on_our_batches: bool,
) -> dict[str, Any]:
    """Train the plain model, compiled, on batches in pinned memory."""
    began = time.perf_counter()
    dtype = choose_precision(task.config.train.precision, device).dtype
    reset_peak(device)
    torch.manual_seed(1)
    kind = PlainHAN if member == "han" else PlainTransformer
    model = kind(task).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def plain_loss(words: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(words, mask), labels)

    compute: Any = plain_loss if options.no_compile else torch.compile(plain_loss, dynamic=True)

    def step(batch: ClassificationBatch) -> None:
        batch = batch.to(device)
        positions = torch.arange(batch.words.size(-1), device=device)
        mask = positions < batch.lengths.unsqueeze(-1)
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = compute(batch.words, mask, batch.labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    batches = list(
        make_batches(task, store, options.steps, ours=on_our_batches, pin=device.type == "cuda")
    )
    for batch in batches:
        step(batch)
    synchronize(device)
    warmup = time.perf_counter() - began
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        for batch in batches:
            step(batch)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    tokens = [sum(batch.tokens for batch in batches)] * 2
    return timing_row("plain", tokens, seconds, warmup, device)


def make_batches(
    task: ClassificationTask, store: InMemoryExamples, steps: int, *, ours: bool, pin: bool
) -> Iterator[ClassificationBatch]:
    """Yield batches of similar lengths, or of as many texts at random."""
    plan = task.plan(store, batch_tokens=task.config.train.batch_tokens, seed=2)
    assert isinstance(plan, BatchPlan)
    rows = max(1, len(store) // plan.batches(0))
    generator = np.random.default_rng(2)
    cursor = Cursor(0, 0)
    for _ in range(steps):
        if ours:
            batch = task.collate(store, plan.batch(cursor), shapes=plan.shapes)
            following = Cursor(cursor.epoch, cursor.batch + 1)
            is_last = following.batch == plan.batches(cursor.epoch)
            cursor = Cursor(cursor.epoch + 1, 0) if is_last else following
        else:
            batch = task.collate(store, generator.choice(len(store), rows, replace=False))
        yield batch.pin_memory() if pin else batch


class PlainPooling(nn.Module):
    """Attention pooling as in Yang et al. (2016)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden, self.query = nn.Linear(width, hidden), nn.Linear(hidden, 1, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Pool (B, T, D) to (B, D)."""
        scores = self.query(torch.tanh(self.hidden(x))).squeeze(-1)
        weights = scores.masked_fill(~mask, -1e4).softmax(dim=-1).to(x.dtype)
        return (weights.unsqueeze(-1) * x).sum(dim=1)


class PlainHAN(nn.Module):
    """HAN in torch.nn, with the sizes of the task's configuration."""

    def __init__(self, task: ClassificationTask) -> None:
        super().__init__()
        width, classify = task.config.model.width, task.config.classify
        score_width = classify.score_width or width
        self.embedding = nn.Embedding(len(task.text.vocabulary), width, padding_idx=0)
        self.words = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.sentences = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.word_pooling = PlainPooling(width, score_width)
        self.sentence_pooling = PlainPooling(width, score_width)
        self.dropout = nn.Dropout(0.5)
        self.output = nn.Linear(width, len(task.text.labels))

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        """Return logits (B, C) of documents (B, N, W)."""
        rows, count, width = words.shape
        embedded = self.dropout(self.embedding(words.view(rows * count, width)))
        hidden, _ = self.words(embedded)
        vectors = self.word_pooling(hidden, mask.view(rows * count, width)).view(rows, count, -1)
        hidden, _ = self.sentences(vectors)
        return self.output(self.dropout(self.sentence_pooling(hidden, mask.any(dim=-1))))


class PlainTransformer(nn.Module):
    """A Transformer encoder in torch.nn, with the sizes of the task's configuration."""

    def __init__(self, task: ClassificationTask) -> None:
        super().__init__()
        model = task.config.model
        self.embedding = nn.Embedding(len(task.text.vocabulary), model.width, padding_idx=0)
        self.positions = nn.Embedding(4096, model.width)
        layer = nn.TransformerEncoderLayer(
            model.width,
            model.heads,
            model.ffn_width,
            dropout=model.dropout,
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pooling = PlainPooling(model.width, task.config.classify.score_width or model.width)
        self.dropout = nn.Dropout(0.5)
        self.output = nn.Linear(model.width, len(task.text.labels))

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        """Return logits (B, C) of texts (B, T)."""
        positions = self.positions(torch.arange(words.size(1), device=words.device))
        hidden = self.encoder(self.embedding(words) + positions, src_key_padding_mask=~mask)
        return self.output(self.dropout(self.pooling(hidden, mask)))


def show(row: Mapping[str, Any]) -> None:
    """Print a row."""
    if "error" in row:
        print(f"  {row['system']:34s} failed: {row['error']}", flush=True)
        return
    memory = "" if row["MiB"] is None else f"  {row['MiB']:8,.0f} MiB"
    print(
        f"  {row['system']:34s} {row['tokens_s']:12,.0f} words/s (slowest round "
        f"{row['slowest']:,.0f})  warm-up {row['warm_up_s']:6.1f} s{memory}",
        flush=True,
    )


def report(rows: list[dict[str, Any]], member: str) -> None:
    """Print the ratio of our fastest mode to the plain model."""
    good = [row for row in rows if "error" not in row and row["system"].startswith(member)]
    ours = [row for row in good if "ours" in row]
    if ours:
        best = max(ours, key=lambda row: row["tokens_s"])
        for row in good:
            if "ours" not in row:
                ratio = best["tokens_s"] / row["tokens_s"]
                print(f"  {best['system']} against {row['system']}: {ratio:.2f} times")


if __name__ == "__main__":
    main()
