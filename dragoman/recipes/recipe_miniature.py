"""Miniature of any recipe: the same blocks, small enough to learn a toy task on a CPU in minutes.

A miniature trains until it translates the validation set: most need a few hundred steps, hard
attention and stacks without residual connections a few thousand.
"""

from __future__ import annotations

from typing import Any

from dragoman.config import Config
from dragoman.config.root_config import TASK_STACKS, TRANSLATE
from dragoman.models.block_list_parser import BlockSpec, parse_blocks

WIDTH, HEADS, LAYERS, WINDOW = 64, 4, 2, 4
MAX_STEPS = 4000  # training stops earlier once TARGET_EXACT is reached
MINI_TASK_STEPS = 400  # of tasks other than translation
TARGET_EXACT = 0.97  # fraction of the validation sentences translated exactly
_MAX_SIZES: dict[str, int | float] = {
    "layers": LAYERS,
    "heads": HEADS,
    "kv_heads": HEADS,
    "head_width": WIDTH // HEADS,
    "value_width": WIDTH // HEADS,
    "ffn_width": 4 * WIDTH,
    "buckets": 8,  # short sequences need few
    # a larger loss would keep attention from being learned in so few steps
    "coverage_loss_weight": 0.02,
}
# half-width of local attention windows, in characters
RADIUS = 20


def mini(config: Config) -> Config:
    """Return a small configuration with the same kinds of blocks and residual connections."""
    if config.task != TRANSLATE:
        return _mini_task(config)
    model = config.model
    heads = max(n for n in range(1, min(model.heads, HEADS) + 1) if HEADS % n == 0)
    # Query heads per key-value head.
    group = model.heads // model.kv_heads if model.kv_heads else 0
    return config.replace(
        text={
            "tokenizer": "characters",  # needs no training
            "vocab_size": 1000,  # an upper bound
            "bpe_dropout": 0.0,  # characters have no merges
        },
        data={"max_length": 200},  # in characters
        model={
            "encoder": _reduce_blocks(model.encoder, "model.encoder", model.width)
            if model.encoder
            else (),
            "decoder": _reduce_blocks(model.decoder, "model.decoder", model.width),
            "width": WIDTH,
            "heads": heads,
            "kv_heads": max(1, heads // group) if group else 0,
            "head_width": min(model.head_width, _MAX_SIZES["head_width"]),
            "value_width": min(model.value_width, _MAX_SIZES["value_width"]),
            "window": min(model.window, WINDOW),
            "embedding_width": min(model.embedding_width, WIDTH // 4),
            "ffn_width": min(model.ffn_width, _MAX_SIZES["ffn_width"]),
            "max_positions": max(model.max_positions, 256),  # more than the longest sentence
            "dropout": 0.0,  # so small a model does not overfit
            "attention_dropout": 0.0,  # the same
            "ffn_dropout": 0.0,  # the same
        },
        train={
            "steps": MAX_STEPS,
            "target_exact": TARGET_EXACT,
            "batch_tokens": 512,  # dozens of short lines
            "gradient_accumulation": 1,
            "optimizer": "adam",
            "learning_rate": 4e-3,  # small models train at high rates
            # averages over 50 steps; 0.999 over more than the run has
            "beta2": 0.98,
            "epsilon": 1e-9,
            "weight_decay": 0.0,
            "schedule": "inverse_sqrt",  # does not depend on the number of steps
            "warmup_steps": 200,  # for post-norm stacks
            "max_grad_norm": min(config.train.max_grad_norm or 1.0, 1.0),
            "label_smoothing": 0.0,  # a toy task has one right answer
            "ema_decay": 0.0,  # the run is too short
            "average_checkpoints": 1,
            "compile": "off",  # torch.compile would take longer than the run
            "checkpoint_every": 500,
            "validate_every": 100,
            "validate_sentences": 200,
            "patience": 0,  # there is a long plateau before attention is learned
            "time_budget": 0.0,  # bounded by steps
        },
        decode={"beam": min(config.decode.beam, 4)},
    )


def _mini_task(config: Config) -> Config:
    """Return a small configuration of another task: its section's `mini` has the sizes.

    The tokenizer stays, because predictions depend on it: tags of words, masked subwords.
    """
    model, section = config.model, getattr(config, config.task)
    stacks = TASK_STACKS[config.task]
    heads = max(n for n in range(1, min(model.heads, HEADS) + 1) if HEADS % n == 0)
    small = {name: _smaller(getattr(section, name), value) for name, value in section.mini.items()}
    return config.replace(
        model={
            **{
                side: _reduce_blocks(getattr(model, side), f"model.{side}", model.width)
                for side in stacks
            },
            "width": WIDTH,
            "heads": heads,
            "kv_heads": min(model.kv_heads, heads),
            "head_width": min(model.head_width, _MAX_SIZES["head_width"]),
            "value_width": min(model.value_width, _MAX_SIZES["value_width"]),
            "embedding_width": min(model.embedding_width, WIDTH // 4),
            "ffn_width": min(model.ffn_width, _MAX_SIZES["ffn_width"]),
            "dropout": min(model.dropout, 0.1),  # so small a model hardly overfits
            "attention_dropout": 0.0,
            "ffn_dropout": 0.0,
        },
        train={
            "steps": MINI_TASK_STEPS,
            "epochs": 0.0,
            "batch_tokens": min(config.train.batch_tokens, 2048),
            "gradient_accumulation": 1,
            "learning_rate": max(config.train.learning_rate, 3e-3),
            "warmup_steps": min(config.train.warmup_steps, MINI_TASK_STEPS // 10),
            "ema_decay": 0.0,  # the run is too short
            "compile": "off",  # torch.compile would take longer than the run
            "checkpoint_every": MINI_TASK_STEPS // 2,
            "validate_every": MINI_TASK_STEPS // 4,
            "patience": 0,
            "time_budget": 0.0,  # bounded by steps
        },
        **{config.task: small},
    )


def _smaller(value: Any, most: Any) -> Any:
    """Return the smaller of two numbers; anything else is replaced."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return min(value, most) if is_number else most


def _reduce_blocks(blocks: tuple[str, ...], setting: str, width: int) -> tuple[str, ...]:
    """Return two repetitions of a stack's repeated pattern, or each distinct block once."""
    found = [str(_shrink_block(spec, width)) for spec in parse_blocks(blocks, setting)]
    period = next(
        size for size in range(1, len(found) + 1) if found == found[:size] * (len(found) // size)
    )
    repeats = min(len(found) // period, LAYERS)
    if repeats == 1:
        return tuple(dict.fromkeys(found))
    return (f"{found[0]}*{repeats}",) if period == 1 else tuple(found[:period] * repeats)


def _shrink_block(spec: BlockSpec, width: int) -> BlockSpec:
    """Return a block with smaller sizes; windows over the source are wider, for characters.

    A width of its own shrinks as the model's width does.
    """
    options = {
        name: min(value, _MAX_SIZES[name]) if name in _MAX_SIZES else value
        for name, value in spec.options.items()
    }
    if options.get("width"):
        options["width"] = max(1, int(options["width"]) * WIDTH // width)
    if {"local_m", "local_p"} & {options.get("attention"), options.get("alignment")}:
        options["radius"] = max(int(options.get("radius", 0)), RADIUS)
    return BlockSpec(spec.name, options)
