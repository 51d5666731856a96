"""What a stack of blocks must obey: asked when a configuration is read, and again when a model is built from one. Imports no tensors."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, get_type_hints

from dragoman.config import Config, ModelConfig, list_settings
from dragoman.config.aliases import RENAMED_OPTION_VALUES, RENAMED_OPTIONS
from dragoman.config.setting import Field, convert_value, describe_type, setting
from dragoman.errors import ConfigError, suggest_name
from dragoman.models.block_options import HEAD_SETTINGS, BlockOptions
from dragoman.models.block_spec import MAX_BLOCKS, BlockSpec, parse_blocks
from dragoman.models.catalogue import BLOCKS
from dragoman.registry import catalogue

MAX_PARAMETERS = 10_000_000_000


class ResolvedBlock(NamedTuple):
    """What a block is built with."""

    config: ModelConfig  # with the block's own values in the place of the model's
    options: BlockOptions


def config_problems(config: Config) -> Iterator[str]:
    """Say what is wrong with the lists of blocks of a configuration: the rule as `Config.problems` asks for it."""
    yield from stack_problems(config.model)


def stack_problems(config: ModelConfig) -> list[str]:
    """List what is wrong with both stacks, each problem once."""
    found: list[str] = []
    kinds: list[type[BlockOptions]] = []
    reads = False  # whether anything of the source gets into the decoder
    for texts, where, decoder in (
        (config.encoder, "model.encoder", False),
        (config.decoder, "model.decoder", True),
    ):
        try:
            specs = parse_blocks(texts, where)
        except ConfigError as error:
            found.extend(error.problems)
            continue
        layers = parameters = 0
        times = Counter(str(spec) for spec in specs)
        for spec in {
            str(spec): spec for spec in specs
        }.values():  # a repeated block has each problem once
            kinds.append(block_options_type(spec.name))
            try:
                settled, options = resolve_block(
                    spec, config, where, memory=decoder, causal=decoder
                )
            except ConfigError as error:
                found.extend(error.problems)
                continue
            reads |= options.reads_source() and decoder
            here = times[str(spec)] * int(getattr(options, "layers", 1))
            layers += here
            parameters += (
                here * 2 * settled.width * settled.ffn_width
                if "ffn_width" in options.overridable
                else 0
            )
        if layers > MAX_BLOCKS:
            found.append(
                f"{where} must have at most {MAX_BLOCKS} layers in all; found {layers:,}; lower the number after * or layers"
            )
        if (
            parameters > MAX_PARAMETERS
        ):  # those of the feed-forward networks alone, counted before anything is built
            problem = f"found {parameters:,} in its feed-forward networks"
            found.append(
                f"{where} must have at most {MAX_PARAMETERS:,} parameters; {problem}; lower model.ffn_width or model.width"
            )
    if not reads and not found:
        blocks = ", ".join(config.decoder)
        found.append(
            f"model.decoder must read the source; found {blocks}, of which none does; add cross_attention, transformer or lstm(attention=additive)"
        )
    found = list(dict.fromkeys(found))  # several blocks may have the model's heads
    if not any(kind.has_self_attention for kind in kinds) and not found:
        found.extend(_unused_attention_settings(config))
    if not found:
        found.extend(
            _unused_layer_settings(config, {name for kind in kinds for name in kind.overridable})
        )
    return found


def count_layers(config: ModelConfig) -> int:
    """Return the number of layers of both stacks, without building them; raise ConfigError for stacks that make no model."""
    if problems := stack_problems(config):
        raise ConfigError(problems)
    sides = ((config.encoder, "model.encoder", False), (config.decoder, "model.decoder", True))
    return sum(
        int(
            getattr(
                resolve_block(spec, config, where, memory=decoder, causal=decoder).options,
                "layers",
                1,
            )
        )
        for texts, where, decoder in sides
        for spec in parse_blocks(texts, where)
    )


def resolve_block(
    spec: BlockSpec, config: ModelConfig, where: str, *, memory: bool, causal: bool
) -> ResolvedBlock:
    """Check a block for its place and give what it is built with; everything that is wrong is told at once."""
    kind = block_options_type(spec.name)
    values = _convert_options(spec, kind, where)
    shared = {name: value for name, value in values.items() if name in kind.overridable}
    options = kind(**{name: value for name, value in values.items() if name not in shared})
    settled = replace(config, **shared)
    problems = [*_placement_problems(spec.name, kind, memory=memory, causal=causal)]
    problems += [
        problem for problem in settled.problems() if problem not in config.problems()
    ]  # the model's own are told elsewhere
    problems += options.problems(settled, memory=memory, causal=causal)
    heads = list(settled.head_problems()) if "heads" in kind.overridable else []
    if set(shared) & set(HEAD_SETTINGS):
        problems, heads = (
            [*problems, *heads],
            [],
        )  # the block's own; otherwise the model's, told without the block
    if problems or heads:
        raise ConfigError(
            [
                *heads,
                *(f"{where} must hold together in '{spec}': {problem}" for problem in problems),
            ]
        )
    return ResolvedBlock(settled, options)


def block_options_type(name: str) -> type[BlockOptions]:
    """Find the options of a block: as listed or, for a block of somebody's own without a list, as its builder takes them."""
    listed = BLOCKS.options(name)
    if listed is None:
        return _options_from_signature(BLOCKS.load(name))
    assert issubclass(listed, BlockOptions), f"the options of {name} must be Options"
    return listed


def _convert_options(spec: BlockSpec, kind: type[BlockOptions], where: str) -> dict[str, Any]:
    """Convert and check each option by itself."""
    known = {each.name: each for each in list_settings(kind)} | {
        each.name: each for each in list_settings(ModelConfig) if each.name in kind.overridable
    }
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in spec.options.items():
        if name not in known:
            must = f"{where} must give {spec.name} options that it has; found {name!r} in '{spec}'"
            renamed = (
                f"it is now {RENAMED_OPTIONS[name]}" if RENAMED_OPTIONS.get(name) in known else ""
            )
            problems.append(
                f"{must}; {renamed or kind.suggest(name, value) or suggest_name(name, known)}"
            )
            continue
        try:
            values[name] = convert_value(value, known[name].type)
        except (TypeError, ValueError, OverflowError):
            problems.append(
                f"{name} of '{spec}' in {where} must be {describe_type(known[name].type)}; found {value!r}; correct it"
            )
            continue
        problem = _range_problem(known[name], values[name], f"{name} of '{spec}' in {where}", kind)
        problems += [problem] if problem else []
    if problems:
        raise ConfigError(problems)
    return values


def _range_problem(field: Field, value: Any, where: str, kind: type[BlockOptions]) -> str | None:
    """Say what is wrong with one value, with a better hint where the block has one."""
    renamed = RENAMED_OPTION_VALUES.get(field.name, {}).get(str(value))
    problem, hint = (
        field.setting.problem(where, value),
        f"it is now {renamed}" if renamed else kind.suggest(field.name, value),
    )
    return (
        f"{where} must be {field.setting.describe_range()}; found {value!r}; {hint}"
        if problem and hint
        else problem
    )


def _placement_problems(
    name: str, kind: type[BlockOptions], *, memory: bool, causal: bool
) -> Iterator[str]:
    """Say whether a block stands on the wrong side."""
    if kind.is_bidirectional and causal:
        ahead = name.removeprefix("bi")  # bilstm's one-sided kin is lstm
        suggest = (
            f"use {ahead}, or put {name} into model.encoder"
            if ahead in BLOCKS and ahead != name
            else "put it into model.encoder"
        )
        yield f"a decoder's block must see no future; found {name}, which reads from both ends; {suggest}"
    if kind.needs_memory and not memory:
        yield f"an encoder's block must need no memory; found {name}, which reads the encoder's output; put it into model.decoder"


def _unused_attention_settings(config: ModelConfig) -> Iterator[str]:
    """Say which settings could act in self-attention only, where there is none."""
    blocks = ", ".join((*config.encoder, *config.decoder))
    if "in_attention" in catalogue("positions")[config.positions].traits:
        yield f"model.positions={config.positions} acts in self-attention and needs a transformer block; found {blocks}; try sinusoidal"
    if config.window:
        yield f"model.window={config.window} acts in self-attention and needs a transformer block; found {blocks}; set model.window=0"


def _unused_layer_settings(config: ModelConfig, known: set[str]) -> Iterator[str]:
    """Say which settings no layer could heed, given the settings that some block knows."""
    blocks = ", ".join((*config.encoder, *config.decoder))
    if config.talking_heads and "talking_heads" not in known:
        yield f"model.talking_heads needs a block with several heads; found {blocks}; use transformer, or set model.talking_heads=false"
    if config.share_layers == "ffn" and "ffn_width" not in known:
        yield f"model.share_layers=ffn needs a block with a feed-forward layer; found {blocks}; use transformer, or set it to all"


def _options_from_signature(block: Any) -> type[BlockOptions]:
    """Make a list of options from a builder's signature."""
    hints = get_type_hints(block.build)
    own = [
        each
        for each in inspect.signature(block.build).parameters.values()
        if each.name != "build_context"
    ]
    fields = [(each.name, hints[each.name], setting(each.default, "")) for each in own]
    # Without a list nobody knows whether it attends to itself: better to let an idle setting pass than to refuse one that acts.
    traits = {"overridable": block.overridable, "has_self_attention": True}
    made: type[BlockOptions] = dataclasses.make_dataclass(
        f"{block.__name__}Options",
        fields,
        bases=(BlockOptions,),
        namespace=traits,
        frozen=True,
        kw_only=True,
    )
    return made
