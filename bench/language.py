"""Measure training throughput of language models against the same models written plainly.

    python bench/language.py                     about four minutes on a GPU
    python bench/language.py --only gpt          one member, about one minute
    python bench/language.py --size tiny --steps 2 --device cpu --no-compile    a smoke test

The members are the causal Transformer of GPT's width (radford2018) and of WikiText-2's size
(vaswani2017_lm), against Hugging Face's GPT-2 of equal size, and Transformer-XL on words
(dai2019_lm) and bytes (dai2019_bytes), against Transformer-XL in plain PyTorch. Ours is the trainer
of `dragoman train`, data loading included. The others are compiled by torch.compile, with bfloat16
autocast and fused AdamW, on the same batches, which are ready in pinned memory. Texts are
generated.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.timing import device_name, free_memory, reset_peak, synchronize, timing_row
from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.config import Config, read_config
from dragoman.data.batch_plan import Cursor
from dragoman.data.in_memory_examples import InMemoryExamples
from dragoman.data.labeled_records import Record
from dragoman.recipes.recipe_miniature import mini
from dragoman.tasks.language_model import LanguageTask, SegmentBatch
from dragoman.training.mixed_precision import choose_precision
from dragoman.training.torch_compile import configure_backends
from dragoman.training.trainer import Trainer


class Member(NamedTuple):
    """A recipe that is measured."""

    recipe: str
    types: int  # words of the generated text
    settings: tuple[str, ...] = ()


WORDS = ("text.tokenizer=words", "text.vocab_size=300000", "text.normalization=none")
MEMBERS = {
    # Half of the paper's layers, so that compiling GPT-2 takes half a minute.
    "gpt": Member("radford2018", 16_000, (*WORDS, "model.decoder=[transformer*6]")),
    "words": Member("vaswani2017_lm", 33_278),
    "xl": Member("dai2019_lm", 33_278),
    "xl_bytes": Member("dai2019_bytes", 33_278),
}
MODES = {  # settings of ours
    "eager": {"cuda_graphs": "off", "compile": "off"},
    "cuda_graphs": {"cuda_graphs": "auto", "compile": "off"},
    "compiled": {"cuda_graphs": "auto", "compile": "on"},
}
WARMUP_STEPS = {"cuda": 12, "cpu": 1}  # a CUDA graph is captured at a shape's second occurrence
PLAIN = "plain"


def main() -> None:
    """Time every system, print the ratios and one line of JSON."""
    options = parse_arguments()
    device = torch.device(options.device)
    configure_backends(device, deterministic=False)
    rows: list[dict[str, Any]] = []
    for name in options.only:
        task, store = build_task(MEMBERS[name], options, device)
        print(
            f"{device_name(device)}, torch {torch.__version__}; {name}, "
            f"{len(task.text):,} types, {options.steps} steps per round",
            flush=True,
        )
        for system in (*options.modes, PLAIN):
            row: dict[str, Any]
            try:
                if system == PLAIN:
                    row = time_plain(task, store, options, device)
                else:
                    row = time_ours(system, task, store, options, device)
            except Exception as error:  # such as torch.compile without a compiler
                row = {"error": " ".join(str(error).split())[:200]}
            row["system"] = f"{name}: {system if system == PLAIN else 'ours, ' + system}"
            rows.append(row)
            show(row)
            free_memory(device)
        report(rows, name)
    print(json.dumps({"bench": "language", "device": device_name(device), "rows": rows}))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=MEMBERS, default=list(MEMBERS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=None, help="of ours")
    parser.add_argument("--size", choices=["recipe", "tiny"], default="recipe")
    parser.add_argument("--steps", type=int, default=60, help="training steps of each round")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", metavar="DEVICE"
    )
    parser.add_argument("--no-compile", action="store_true", help="do not compile the plain models")
    options = parser.parse_args()
    if options.modes is None:
        options.modes = ["cuda_graphs", "compiled"] if options.device != "cpu" else ["eager"]
    return options


def build_task(
    member: Member, options: argparse.Namespace, device: torch.device
) -> tuple[LanguageTask, InMemoryExamples]:
    """Return the task and its text, generated with the word frequencies of Zipf's law."""
    is_tiny = options.size == "tiny"
    config = read_config(
        recipe=member.recipe,
        task="language",
        scale=mini if is_tiny else None,
        overrides=[
            *member.settings,
            *(["train.precision=float32"] if device.type == "cpu" else []),
        ],
    )
    generator = np.random.default_rng(0)
    types = 200 if is_tiny else member.types
    vocabulary = np.array([f"word{number}" for number in range(types)])
    frequencies = 1 / np.arange(1, types + 1)
    words = generator.choice(
        vocabulary, 8_000 if is_tiny else 400_000, p=frequencies / frequencies.sum()
    )
    words = np.concatenate([vocabulary, words])
    lines = [" ".join(words[at : at + 20]) for at in range(0, len(words), 20)]
    records = [
        Record(Path("generated.txt"), number, {"text": line}) for number, line in enumerate(lines)
    ]
    text = LanguageTask.fit_text(config, lambda: iter(records))
    task = LanguageTask(config, text)
    return task, task.encode(records)


def time_ours(
    mode: str,
    task: LanguageTask,
    store: InMemoryExamples,
    options: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:
    """Train with our trainer, reading the clock at every step's record."""
    task = LanguageTask(task.config, task.text)  # with carried states of its own
    warmup = WARMUP_STEPS[device.type]
    plan = task.plan(store, batch_tokens=task.config.train.batch_tokens, seed=1)
    config = task.config.replace(
        train={
            "steps": warmup + 2 * options.steps + 1,
            "checkpoint_every": 10**6,
            "validate_every": 10**6,
            "ema_decay": 0.0,  # the plain models have none
            **MODES[mode],
        }
    ).train
    clock: dict[int, float] = {}
    tokens: dict[int, int] = {}

    def on_record(record: Mapping[str, Any]) -> None:
        if "tokens" in record:
            clock[int(record["step"])] = time.perf_counter()
            tokens[int(record["step"])] = int(record["tokens"])

    def collate(examples: np.ndarray, /, *, seed: int) -> SegmentBatch:
        return task.collate(store, examples, seed=seed, training=True)

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
    task: LanguageTask, store: InMemoryExamples, options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Train the plain model, compiled, on batches in pinned memory."""
    began = time.perf_counter()
    dtype = choose_precision(task.config.train.precision, device).dtype
    batches = make_batches(task, store, options.steps, pin=device.type == "cuda")
    rows = len(batches[0].examples)
    reset_peak(device)
    torch.manual_seed(1)
    model: Any
    if task.carries:
        model = PlainTransformerXL(task.config, len(task.text)).to(device).train()
        memory = model.empty_memory(rows, device)
    else:
        model, memory = gpt2(task.config, len(task.text)).to(device).train(), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    compute: Any = model if options.no_compile else torch.compile(model)

    def step(batch: SegmentBatch) -> None:
        nonlocal memory
        batch = batch.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            if memory is None:
                loss = compute(input_ids=batch.inputs, labels=batch.inputs).loss
            else:
                loss, memory = compute(batch.inputs, batch.targets, memory)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

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
    return timing_row(PLAIN, tokens, seconds, warmup, device)


def make_batches(
    task: LanguageTask, store: InMemoryExamples, steps: int, *, pin: bool
) -> list[SegmentBatch]:
    """Return full batches of the training plan, from its beginning."""
    plan = task.plan(store, batch_tokens=task.config.train.batch_tokens, seed=2)
    full = max(1, plan.batches(0) - 1)  # the last of an epoch may be shorter
    batches = [
        task.collate(store, plan.batch(Cursor(number // full, number % full)))
        for number in range(steps)
    ]
    return [batch.pin_memory() if pin else batch for batch in batches]


def count_layers(config: Config) -> int:
    """Return the number of layers of a decoder such as `transformer*6`."""
    name, _, count = config.model.decoder[0].partition("*")
    assert name == "transformer", f"found {config.model.decoder}"
    return int(count or 1)


def gpt2(config: Config, vocab_size: int) -> nn.Module:
    """Return Hugging Face's GPT-2 with the sizes and dropout of a configuration."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = config.model
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocab_size,
            n_positions=config.language.segment,
            n_embd=model.width,
            n_layer=count_layers(config),
            n_head=model.heads,
            n_inner=model.ffn_width,
            resid_pdrop=model.dropout,
            embd_pdrop=config.language.input_dropout,
            attn_pdrop=model.attention_dropout,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
    )


class PlainTransformerXL(nn.Module):
    """Transformer-XL in PyTorch, as Dai et al. (2019) describe it, with pre-norm layers."""

    def __init__(self, config: Config, vocab_size: int) -> None:
        super().__init__()
        model, language = config.model, config.language
        self.width, self.memory_length = model.width, language.memory
        self.embedding = nn.Embedding(vocab_size, model.width)
        nn.init.normal_(self.embedding.weight, std=model.width**-0.5)
        self.layers = nn.ModuleList(PlainXLLayer(config) for _ in range(count_layers(config)))
        self.norm = nn.LayerNorm(model.width)
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        self.input_dropout = nn.Dropout(language.input_dropout)
        self.output_dropout = nn.Dropout(language.output_dropout)

    def empty_memory(self, rows: int, device: torch.device) -> list[Tensor]:
        """Return a memory of zeros for each layer."""
        shape = (rows, self.memory_length, self.width)
        return [torch.zeros(shape, device=device) for _ in self.layers]

    def forward(
        self, inputs: Tensor, targets: Tensor, memory: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the mean loss of a segment (B, T) and the memory after it."""
        x = self.input_dropout(self.embedding(inputs) * self.width**0.5)
        keys = inputs.size(1) + self.memory_length
        distance = torch.arange(keys - 1, -1, -1.0, device=x.device).unsqueeze(1)
        frequency = 10_000.0 ** (-torch.arange(0, self.width, 2.0, device=x.device) / self.width)
        positions = torch.cat([(distance * frequency).sin(), (distance * frequency).cos()], dim=-1)
        following = []
        for layer, earlier in zip(self.layers, memory, strict=True):
            following.append(torch.cat([earlier, x.detach().float()], dim=1)[:, inputs.size(1) :])
            x = layer(x, earlier, positions)
        hidden = self.output_dropout(self.norm(x))
        logits = F.linear(hidden, self.embedding.weight, self.bias)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()), following


class PlainXLLayer(nn.Module):
    """Attention with relative positions to a segment and a memory, and a feed-forward network."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        model = config.model
        width, self.heads = model.width, model.heads
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.position = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.content_bias, self.position_bias = (
            nn.Parameter(torch.zeros(self.heads, 1, width // self.heads)) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.ffn = nn.Sequential(
            nn.Linear(width, model.ffn_width),
            nn.ReLU(),
            nn.Dropout(model.ffn_dropout),
            nn.Linear(model.ffn_width, width),
        )
        self.dropout = nn.Dropout(model.dropout)
        self.attention_dropout = nn.Dropout(model.attention_dropout)

    def forward(self, x: Tensor, memory: Tensor, positions: Tensor) -> Tensor:
        """Return the output for (B, T, D), given (B, M, D) and the positions (M + T, D)."""
        normed = self.norms[0](torch.cat([memory, x], dim=1))
        queries, keys = x.size(1), normed.size(1)
        query = self._heads(self.query(normed[:, keys - queries :]))
        key, value = (self._heads(each) for each in self.key_value(normed).chunk(2, dim=-1))
        relative = self._heads(self.position(positions).unsqueeze(0))
        content = (query + self.content_bias) @ key.mT
        by_distance = (query + self.position_bias) @ relative.mT
        # The relative shift of the paper's appendix B.
        padded = F.pad(by_distance, (1, 0)).view(*query.shape[:2], keys + 1, queries)
        scores = content + padded[:, :, 1:].reshape(content.shape)
        later = torch.ones(queries, keys, dtype=torch.bool, device=x.device).triu(
            keys - queries + 1
        )
        scores = (scores * key.size(-1) ** -0.5).masked_fill(later, float("-inf"))
        weights = self.attention_dropout(scores.softmax(dim=-1)).to(value.dtype)
        x = x + self.dropout(self.output((weights @ value).transpose(1, 2).flatten(2)))
        return x + self.dropout(self.ffn(self.norms[1](x)))

    def _heads(self, x: Tensor) -> Tensor:
        """Split (B, T, D) into heads: (B, H, T, D / H)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def show(row: Mapping[str, Any]) -> None:
    """Print a row."""
    if "error" in row:
        print(f"  {row['system']:34s} failed: {row['error']}", flush=True)
        return
    memory = "" if row["MiB"] is None else f"  {row['MiB']:8,.0f} MiB"
    print(
        f"  {row['system']:34s} {row['tokens_s']:12,.0f} tokens/s (slowest round "
        f"{row['slowest']:,.0f})  warm-up {row['warm_up_s']:6.1f} s{memory}",
        flush=True,
    )


def report(rows: list[dict[str, Any]], member: str) -> None:
    """Print the ratio of our fastest mode to the plain model."""
    good = [row for row in rows if "error" not in row and row["system"].startswith(f"{member}: ")]
    ours = [row for row in good if "ours" in row]
    if ours:
        best = max(ours, key=lambda row: row["tokens_s"])
        for row in good:
            if "ours" not in row:
                ratio = best["tokens_s"] / row["tokens_s"]
                print(f"  {best['system']} against {row['system']}: {ratio:.2f} times")


if __name__ == "__main__":
    main()
