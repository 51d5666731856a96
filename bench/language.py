"""Measure training throughput of language models against the same models written plainly.

    python bench/language.py                     about four minutes on a GPU
    python bench/language.py --only gpt          one member, about one minute
    python bench/language.py --size tiny --steps 2 --device cpu --no-compile    a smoke test

The models are the causal Transformer of GPT's width (radford2018) and of WikiText-2's size
(vaswani2017_lm), against Hugging Face's GPT-2 of equal size, and Transformer-XL on words
(dai2019_lm) and bytes (dai2019_bytes), against Transformer-XL in plain PyTorch. Ours is the trainer
of `dragoman train`, data loading included. The others are compiled by torch.compile, with bfloat16
autocast and fused AdamW, on the same batches, which are ready in pinned memory. Texts are
generated.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.timing_helpers import device_name
from bench.training_throughput import (
    Row,
    Systems,
    pin_batches,
    plain_step,
    start_clock,
    throughput_parser,
    time_plain,
    time_systems,
    time_trainer,
)
from dragoman.config import Config, read_config
from dragoman.data.batch_plan import Cursor
from dragoman.data.in_memory_examples import InMemoryExamples
from dragoman.data.labeled_records import Record
from dragoman.recipes.recipe_miniature import mini
from dragoman.tasks.language_model import LanguageTask, SegmentBatch
from dragoman.training.bf16_mixed_precision import choose_precision
from dragoman.training.torch_compile import configure_backends


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
    rows: list[Row] = []
    for name in options.only:
        task, store = build_task(MEMBERS[name], options, device)
        print(
            f"{device_name(device)}, torch {torch.__version__}; {name}, "
            f"{len(task.text):,} types, {options.steps} steps per round",
            flush=True,
        )
        systems: Systems = {
            f"ours, {mode}": functools.partial(time_ours, mode, task, store, options.steps, device)
            for mode in options.modes
        }
        systems[PLAIN] = functools.partial(time_plain_model, task, store, options, device)
        rows += time_systems(name, systems, device, unit="tokens")
    print(json.dumps({"bench": "language", "device": device_name(device), "rows": rows}))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = throughput_parser(__doc__, MEMBERS, steps=60)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=None, help="of ours")
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
    mode: str, task: LanguageTask, store: InMemoryExamples, steps: int, device: torch.device
) -> Row:
    """Train with our trainer."""
    task = LanguageTask(task.config, task.text)  # with carried states of its own
    plan = task.plan(store, batch_tokens=task.config.train.batch_tokens, seed=1)
    warmup = WARMUP_STEPS[device.type]
    return time_trainer(task, store, plan, MODES[mode], device, warmup=warmup, steps=steps)


def time_plain_model(
    task: LanguageTask, store: InMemoryExamples, options: argparse.Namespace, device: torch.device
) -> Row:
    """Train the plain model, compiled, on batches in pinned memory."""
    batches = pin_batches(make_batches(task, store, options.steps), device)
    began = start_clock(device)
    precision = choose_precision(task.config.train.precision, device)
    model: Any
    if task.carries:
        model = PlainTransformerXL(task.config, len(task.text)).to(device).train()
        memory = model.empty_memory(len(batches[0].examples), device)
    else:
        model, memory = gpt2(task.config, len(task.text)).to(device).train(), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    compute: Any = model if options.no_compile else torch.compile(model)

    def step(batch: SegmentBatch) -> None:
        nonlocal memory
        batch = batch.to(device)
        with precision.autocast(device):
            if memory is None:
                loss = compute(input_ids=batch.inputs, labels=batch.inputs).loss
            else:
                loss, memory = compute(batch.inputs, batch.targets, memory)
        plain_step(loss, model, optimizer, max_grad_norm=1.0)

    return time_plain(step, batches, device, began=began)


def make_batches(task: LanguageTask, store: InMemoryExamples, steps: int) -> list[SegmentBatch]:
    """Return full batches of the training plan, from its beginning."""
    plan = task.plan(store, batch_tokens=task.config.train.batch_tokens, seed=2)
    full = max(1, plan.batches(0) - 1)  # the last of an epoch may be shorter
    return [
        task.collate(store, plan.batch(Cursor(number // full, number % full)))
        for number in range(steps)
    ]


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


if __name__ == "__main__":
    main()
