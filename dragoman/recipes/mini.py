"""The miniature of any recipe: the same kinds of blocks, small enough to learn a toy task on a CPU in a minute or two.

How many steps a kind of model needs on a task that nobody has seen is not known beforehand, so a miniature trains until validation
says that it has learnt: most need a few hundred steps, hard attention and stacks without residual connections some thousands.
"""

from __future__ import annotations

from dragoman.config import Config
from dragoman.models.block_spec import BlockSpec, parse_blocks

WIDTH, HEADS, LAYERS, WINDOW = 64, 4, 2, 4
MAX_STEPS = 4000  # at most: training ends when validation says that the task is learnt
TARGET_EXACT = 0.97  # of the validation sentences, translated exactly
_MAX_SIZES: dict[str, int | float] = {
    "layers": LAYERS,
    "heads": HEADS,
    "kv_heads": HEADS,
    "head_width": WIDTH // HEADS,
    "ffn_width": 4 * WIDTH,
    "buckets": 8,  # in more, a dozen tokens would hardly meet
    "coverage_loss_weight": 0.02,  # a loss for attending twice gets in the way until it is known where to attend, most of a miniature's run
}
REACH = 20  # tokens to either side of a window over the source: characters, of which a recipe's subwords have several


def mini(config: Config) -> Config:
    """Scale a configuration down, its text settings too; what its blocks are, and how they are joined, stays."""
    model = config.model
    heads = max(n for n in range(1, min(model.heads, HEADS) + 1) if HEADS % n == 0)
    group = (
        model.heads // model.kv_heads if model.kv_heads else 0
    )  # queries to a key, kept as far as the heads reach
    return config.replace(
        text={
            "tokenizer": "characters",  # any corpus has them, however small
            "vocab_size": 1000,  # at most; an alphabet takes far fewer
            "bpe_dropout": 0.0,  # there are no merges to skip
        },
        data={"max_length": 200},  # a sentence in characters; recipes count pieces
        model={
            "encoder": _reduce_blocks(model.encoder, "model.encoder"),
            "decoder": _reduce_blocks(model.decoder, "model.decoder"),
            "width": WIDTH,
            "heads": heads,
            "kv_heads": max(1, heads // group) if group else 0,
            "head_width": min(model.head_width, _MAX_SIZES["head_width"]),
            "window": min(model.window, WINDOW),
            "embedding_width": min(model.embedding_width, WIDTH // 4),
            "ffn_width": min(model.ffn_width, _MAX_SIZES["ffn_width"]),
            "max_positions": max(model.max_positions, 256),  # more than the longest sentence
            "dropout": 0.0,  # so small a model learns nothing by heart
            "attention_dropout": 0.0,  # the same
            "ffn_dropout": 0.0,  # the same
        },
        train={
            "steps": MAX_STEPS,
            "target_exact": TARGET_EXACT,
            "batch_tokens": 512,  # dozens of short lines
            "gradient_accumulation": 1,
            "optimizer": "adam",
            "learning_rate": 4e-3,  # a width of 64 bears ten times what one of 1000 does
            "beta2": 0.98,  # a memory of 50 updates: 0.999 would look back further than the run is long
            "epsilon": 1e-9,
            "weight_decay": 0.0,
            "schedule": "inverse_sqrt",  # needs no planned end
            "warmup_steps": 200,  # to settle post-norm stacks
            "max_grad_norm": min(config.train.max_grad_norm or 1.0, 1.0),
            "label_smoothing": 0.0,  # a toy task has one right answer
            "ema_decay": 0.0,  # an average over more updates than there are
            "average_checkpoints": 1,
            "compile": "off",  # compiling would take longer than the run
            "checkpoint_every": 500,
            "validate_every": 100,
            "validate_sentences": 200,
            "patience": 0,  # a plateau before attention is learnt may be long
            "time_budget": 0.0,  # bounded by steps
        },
        decode={"beam": min(config.decode.beam, 4)},
    )


def _reduce_blocks(blocks: tuple[str, ...], setting: str) -> tuple[str, ...]:
    """Keep two layers: two repeats of the pattern that a stack repeats, or one block of each kind where it repeats none."""
    found = [str(_shrink_block(spec)) for spec in parse_blocks(blocks, setting)]
    period = next(
        size for size in range(1, len(found) + 1) if found == found[:size] * (len(found) // size)
    )
    repeats = min(len(found) // period, LAYERS)
    if repeats == 1:
        return tuple(dict.fromkeys(found))
    return (f"{found[0]}*{repeats}",) if period == 1 else tuple(found[:period] * repeats)


def _shrink_block(spec: BlockSpec) -> BlockSpec:
    """Lower those of a block's own options that are sizes; a window over the source spans characters instead of subwords."""
    options = {
        name: min(value, _MAX_SIZES[name]) if name in _MAX_SIZES else value
        for name, value in spec.options.items()
    }
    if {"local_m", "local_p"} & {options.get("attention"), options.get("alignment")}:
        options["radius"] = max(int(options.get("radius", 0)), REACH)
    return BlockSpec(spec.name, options)
