"""Configurations of architectures.py: every recipe at one size, with one training setup."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from dragoman.config import Config
from dragoman.models.block_list_parser import BlockSpec, parse_blocks
from dragoman.registry import catalogue

NARROW, WIDE = (
    128,
    256,
)  # a Transformer layer has four to six times the parameters of an RNN layer
DEPTH = {"transformer": 4, "conv": 4, "reformer": 4, "lstm": 2, "gru": 2}  # maximum, of one kind
SKIPPED = {
    "tiny",
    "small",
    "vaswani2017_big",
    "gehring2017_wmt",
}  # other sizes of a listed architecture


class Dataset(NamedTuple):
    """A corpus and how its outputs are scored."""

    folder: str
    sides: tuple[str, str]
    test: str
    text: dict[str, Any]  # settings


TRANSLATION = Dataset(
    "multi30k",
    ("de", "en"),
    "test_2016_flickr",
    {"tokenizer": "bpe", "vocab_size": 5500, "shared_vocab": True},
)
PRONUNCIATION = Dataset(
    "cmudict_g2p",
    ("letters", "phones"),
    "test",
    {"tokenizer": "characters", "vocab_size": 500, "shared_vocab": False},
)


class Architecture(NamedTuple):
    """A row of the table."""

    name: str
    group: str
    config: Config
    headline: bool = False  # trained with three seeds
    dataset: Dataset = TRANSLATION


def list_architectures() -> Iterator[Architecture]:
    """Yield every recipe, and an RNN with each score and alignment that no recipe uses."""
    recipes = catalogue("recipe")
    used: set[str] = set()
    for name in recipes:
        if name in SKIPPED or recipes[name].task != "translate":
            continue
        recipe: Config = recipes.load(name)()
        used |= {str(value) for spec in _specs(recipe) for value in spec.options.values()}
        yield Architecture(
            name, recipes[name].family, scale_recipe(recipe), headline=name in HEADLINES
        )
    base: Config = recipes.load("luong2015_concat")()  # additive, which every alignment supports
    for kind, option in (("score", "attention"), ("alignment", "alignment")):
        for name in catalogue(kind):
            if name not in used and name != "softmax":  # the default
                decoder = tuple(
                    str(_with_option(spec, option, name))
                    for spec in parse_blocks(base.model.decoder)
                )
                yield Architecture(
                    f"luong2015 with {name}",
                    "RNN",
                    scale_recipe(base.replace(model={"decoder": decoder})),
                )
    for name in ("monotonic", "softmax", "mocha"):  # the same RNN with three alignments
        raffel: Config = recipes.load("raffel2017")()
        # For all three: a bidirectional encoder, because pronunciation depends on the next letters,
        # and the plain additive score. With the recipe's smaller initialization hard decoding lost
        # 0.19 nats per phoneme against expected alignments after 500 steps, with this one 0.05.
        decoder = tuple(
            str(_with_option(_with_option(spec, "attention", "additive"), "alignment", name))
            for spec in parse_blocks(raffel.model.decoder)
        )
        config = scale_recipe(
            raffel.replace(
                model={"encoder": ("bilstm(residual_connection=false)*2",), "decoder": decoder}
            ),
            PRONUNCIATION,
        )
        # best of 2e-3, 4e-3 and this on the validation set
        config = config.replace(train={"learning_rate": 8e-3})
        yield Architecture(
            f"pronunciation with {name}",
            "pronunciation",
            config,
            headline=name != "mocha",
            dataset=PRONUNCIATION,
        )
    for name, changes in HYBRIDS.items():
        yield Architecture(
            name,
            "hybrid",
            scale_recipe(recipes.load("small")().replace(model=changes)),
            headline=name in HEADLINES,
        )


HYBRIDS: dict[str, dict[str, Any]] = {
    "hybrid: self-attention, then LSTM": {
        "encoder": ("transformer*4",),
        "decoder": ("lstm(attention=additive)", "transformer*2"),
    },
    "hybrid: convolutions and self-attention": {
        "encoder": ("conv*2", "transformer*3", "bilstm"),
        "decoder": ("transformer*4",),
    },
}
HEADLINES = {
    "bahdanau2015",
    "gehring2017",
    "vaswani2017_base",
    "hybrid: convolutions and self-attention",
}


def scale_recipe(recipe: Config, dataset: Dataset = TRANSLATION) -> Config:
    """Return a recipe at the common size, vocabulary and training settings."""
    model = recipe.model
    has_self_attention = any(
        spec.name in ("transformer", "reformer", "ffn", "cross_attention")
        for spec in _specs(recipe)
    )
    width = NARROW if has_self_attention else WIDE
    # with dropout it supports no CUDA graphs: 5 times slower
    reversible = any(spec.name == "reformer" for spec in _specs(recipe))
    heads = 1 if model.heads == 1 else 4
    group = model.heads // model.kv_heads if model.kv_heads else 0
    prefix_lm = model.architecture == "prefix_lm"
    return recipe.replace(
        text={**dataset.text, "bpe_dropout": 0.0},
        data={"max_length": 100},
        model={
            "encoder": _reduce_depth(model.encoder),
            # one stack has the depth of two
            "decoder": model.decoder if prefix_lm else _reduce_depth(model.decoder),
            "width": width,
            "heads": heads,
            "kv_heads": max(1, heads // group) if group else 0,
            "head_width": min(model.head_width, 2 * width // heads) if model.head_width else 0,
            "embedding_width": 64 if model.embedding_width else 0,
            "ffn_width": 4 * width,
            "tie_embeddings": "all" if dataset.text["shared_vocab"] else "target",
            "max_positions": 256,
            "dropout": 0.0 if reversible else 0.2,
            "attention_dropout": 0.0,
            "ffn_dropout": 0.0,
        },
        train={
            "batch_tokens": 6000,
            "gradient_accumulation": 1,
            "optimizer": "adamw",
            "learning_rate": 3e-3 if has_self_attention else 2e-3,
            "beta1": 0.9,
            "beta2": 0.98,
            "epsilon": 1e-9,
            "weight_decay": 0.0,
            "schedule": "linear",
            "max_grad_norm": 1.0,
            "label_smoothing": 0.1,
            "average_checkpoints": 1,
            "keep_checkpoints": 2,
            "final_checkpoint": "best",
            "best_metric": "loss",
            "compile": "off",
            "validate_sentences": 0,
        },
        decode={"beam": 5, "length_penalty": 1.0},
    )


def _specs(config: Config) -> list[BlockSpec]:
    return [
        spec
        for blocks in (config.model.encoder, config.model.decoder)
        if blocks
        for spec in parse_blocks(blocks)
    ]


def _with_option(spec: BlockSpec, option: str, value: str) -> BlockSpec:
    return BlockSpec(spec.name, {**spec.options, option: value})


def _reduce_depth(blocks: tuple[str, ...]) -> tuple[str, ...]:
    """Return block lists cut to the common depth; mixed lists are not changed."""
    if not blocks:
        return blocks
    specs = parse_blocks(blocks)
    specs = [
        _with_option(spec, "layers", min(int(spec.options["layers"]), DEPTH.get(spec.name, 99)))
        if "layers" in spec.options
        else spec  # type: ignore[arg-type]
        for spec in specs
    ]
    if len({str(spec) for spec in specs}) == 1:
        specs = specs[: DEPTH.get(specs[0].name, 99)]
    return tuple(map(str, specs))
