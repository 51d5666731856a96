"""Rules of block lists: checked when a configuration is read and when a model is built.

Importing this module needs no torch.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, get_type_hints

from dragoman.config import ModelConfig, list_settings
from dragoman.config.setting_aliases import RENAMED_OPTION_VALUES, RENAMED_OPTIONS
from dragoman.config.setting_declaration import Field, convert_value, describe_type, setting
from dragoman.errors import ConfigError, suggest_name
from dragoman.models.block_catalogue import BLOCKS
from dragoman.models.block_list_parser import MAX_BLOCKS, BlockSpec, parse_blocks
from dragoman.models.block_options import HEAD_SETTINGS, BlockOptions
from dragoman.registry import catalogue

MAX_PARAMETERS = 10_000_000_000
PREFIX_LM_BLOCKS = {"transformer", "ffn"}


class ResolvedBlock(NamedTuple):
    """The arguments of a block's `build`."""

    config: ModelConfig  # with the block's overrides
    options: BlockOptions


def stack_problems(config: ModelConfig, sides: Collection[str] | None = None) -> list[str]:
    """Return the problems of the block lists of a configuration, each once.

    Without `sides` they are those of an encoder-decoder. A model of only an encoder or only a
    decoder has no cross-attention.
    """
    found: list[str] = []
    kinds: list[type[BlockOptions]] = []
    reads_source = False  # whether any decoder block reads the encoder's output
    if sides is None and config.architecture == "prefix_lm":
        found.extend(_prefix_lm_problems(config))
        sides = ("decoder",)
    pair = sides is None  # whether there is an encoder's output to attend to
    for texts, where, decoder in _stacks(config, sides):
        try:
            specs = parse_blocks(texts, where)
        except ConfigError as error:
            found.extend(error.problems)
            continue
        layers = parameters = 0
        times = Counter(str(spec) for spec in specs)
        for text, spec in {str(spec): spec for spec in specs}.items():  # each distinct block once
            kinds.append(block_options_type(spec.name))
            try:
                resolved, options = resolve_block(
                    spec, config, where, memory=decoder and pair, causal=decoder
                )
            except ConfigError as error:
                found.extend(error.problems)
                continue
            reads_source |= options.reads_source() and decoder
            num_layers = times[text] * _num_layers(options)
            layers += num_layers
            if "ffn_width" in options.overridable:
                parameters += num_layers * 2 * resolved.width * resolved.ffn_width
        if layers > MAX_BLOCKS:
            found.append(
                f"{where} must have at most {MAX_BLOCKS} layers in all; found {layers:,}; "
                "lower the number after * or layers"
            )
        # The feed-forward networks alone, counted before anything is allocated.
        if parameters > MAX_PARAMETERS:
            found.append(
                f"{where} must have at most {MAX_PARAMETERS:,} parameters; found {parameters:,} in "
                "its feed-forward networks; lower model.ffn_width or model.width"
            )
    if pair and not reads_source and not found:
        blocks = ", ".join(config.decoder)
        found.append(
            f"model.decoder must read the source; found {blocks}, of which none does; "
            "add cross_attention, transformer or lstm(attention=additive)"
        )
    found = list(dict.fromkeys(found))  # several blocks may share the model's head settings
    if kinds and not any(kind.has_self_attention for kind in kinds) and not found:
        found.extend(_unused_attention_settings(config, _list_blocks(config, sides)))
    if kinds and not found:
        overridable = {name for kind in kinds for name in kind.overridable}
        blocks = _list_blocks(config, sides)
        found.extend(_unused_layer_settings(config, overridable, blocks))
    return found


def count_layers(config: ModelConfig, sides: Collection[str] | None = None) -> int:
    """Return the number of layers of all stacks; raise ConfigError for invalid block lists."""
    if problems := stack_problems(config, sides):
        raise ConfigError(problems)
    if sides is None and config.architecture == "prefix_lm":
        sides = ("decoder",)
    memory = sides is None
    return sum(
        _num_layers(
            resolve_block(spec, config, where, memory=decoder and memory, causal=decoder).options
        )
        for texts, where, decoder in _stacks(config, sides)
        for spec in parse_blocks(texts, where)
    )


def _stacks(
    config: ModelConfig, sides: Collection[str] | None = None
) -> list[tuple[Sequence[str], str, bool]]:
    """Return the block list, the setting's name and whether it is the decoder, of each stack."""
    return [
        (getattr(config, side), f"model.{side}", side == "decoder")
        for side in ("encoder", "decoder")
        if sides is None or side in sides
    ]


def _prefix_lm_problems(config: ModelConfig) -> Iterator[str]:
    """Yield the settings that model.architecture=prefix_lm does not support."""
    if config.encoder:
        yield (
            "model.architecture=prefix_lm has one stack, model.decoder; found model.encoder="
            f"[{', '.join(config.encoder)}]; set model.encoder=[]"
        )
    names = {text.partition("(")[0].partition("*")[0].strip() for text in config.decoder}
    if others := sorted(names - PREFIX_LM_BLOCKS):
        yield (
            "model.architecture=prefix_lm needs blocks that a mask makes both bidirectional and "
            f"causal, transformer and ffn; found {', '.join(others)} in model.decoder; "
            "use transformer"
        )
    if "in_attention" in catalogue("positions")[config.positions].traits:
        yield (
            "model.architecture=prefix_lm needs positions that are added to the embeddings, "
            "because a source and a target position have no distance; found "
            f"model.positions={config.positions}; try sinusoidal"
        )
    if config.window or any("window" in text for text in config.decoder):
        yield (
            "model.architecture=prefix_lm attends to the whole source; found a window; "
            "set model.window=0"
        )


def _num_layers(options: BlockOptions) -> int:
    """Return the number of layers in a block."""
    return int(getattr(options, "layers", 1))


def resolve_block(
    spec: BlockSpec, config: ModelConfig, where: str, *, memory: bool, causal: bool
) -> ResolvedBlock:
    """Return the configuration and options of a block; raise ConfigError with all its problems."""
    kind = block_options_type(spec.name)
    values = _convert_options(spec, kind, where)
    overrides = {name: value for name, value in values.items() if name in kind.overridable}
    options = kind(**{name: value for name, value in values.items() if name not in overrides})
    resolved = replace(config, **overrides)
    problems = [*_placement_problems(spec.name, kind, memory=memory, causal=causal)]
    # Problems of the model's own settings are reported with the model.
    problems += [problem for problem in resolved.problems() if problem not in config.problems()]
    problems += options.problems(resolved, memory=memory, causal=causal)
    head_problems = list(resolved.head_problems()) if "heads" in kind.overridable else []
    if set(overrides) & set(HEAD_SETTINGS):  # the block's own heads: report them with the block
        problems, head_problems = [*problems, *head_problems], []
    if problems or head_problems:
        block_problems = (f"{where} is inconsistent in '{spec}': {each}" for each in problems)
        raise ConfigError([*head_problems, *block_problems])
    return ResolvedBlock(resolved, options)


def block_options_type(name: str) -> type[BlockOptions]:
    """Return the options class of a block; of a user's block, one made from its build method."""
    listed = BLOCKS.options(name)
    if listed is None:
        return _options_from_signature(BLOCKS.load(name))
    assert issubclass(listed, BlockOptions), f"the options of {name} must be BlockOptions"
    return listed


def _convert_options(spec: BlockSpec, kind: type[BlockOptions], where: str) -> dict[str, Any]:
    """Return a block's options with their types; raise ConfigError if one is unknown or invalid."""
    known = {each.name: each for each in list_settings(kind)} | {
        each.name: each for each in list_settings(ModelConfig) if each.name in kind.overridable
    }
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in spec.options.items():
        if name not in known:
            renamed = RENAMED_OPTIONS.get(name)
            hint = f"it is now {renamed}" if renamed in known else kind.suggest(name, value)
            problems.append(
                f"{where} must set options that {spec.name} has; found {name!r} in '{spec}'; "
                f"{hint or suggest_name(name, known)}"
            )
            continue
        try:
            values[name] = convert_value(value, known[name].type)
        except (TypeError, ValueError, OverflowError):
            problems.append(
                f"{name} of '{spec}' in {where} must be {describe_type(known[name].type)}; "
                f"found {value!r}; correct it"
            )
            continue
        problem = _range_problem(known[name], values[name], f"{name} of '{spec}' in {where}", kind)
        problems += [problem] if problem else []
    if problems:
        raise ConfigError(problems)
    return values


def _range_problem(field: Field, value: Any, where: str, kind: type[BlockOptions]) -> str | None:
    """Return the problem with one value, with the block's hint if it has one, or None."""
    problem = field.setting.problem(where, value)
    renamed = RENAMED_OPTION_VALUES.get(field.name, {}).get(str(value))
    hint = f"it is now {renamed}" if renamed else kind.suggest(field.name, value)
    if problem and hint:
        return f"{where} must be {field.setting.describe_range()}; found {value!r}; {hint}"
    return problem


def _placement_problems(
    name: str, kind: type[BlockOptions], *, memory: bool, causal: bool
) -> Iterator[str]:
    """Yield a problem if an encoder's block is in a decoder, or a decoder's in an encoder."""
    if kind.is_bidirectional and causal:
        unidirectional = name.removeprefix("bi")  # bilstm -> lstm
        hint = (
            f"use {unidirectional}, or put {name} into model.encoder"
            if unidirectional in BLOCKS and unidirectional != name
            else "put it into model.encoder"
        )
        yield f"a decoder's block must be causal; found {name}, which is bidirectional; {hint}"
    if kind.needs_memory and not memory:
        stack, fix = (
            ("a language model's", "leave it out")
            if causal
            else ("an encoder's", "put it into model.decoder")
        )
        yield (
            f"{stack} block must have no cross-attention; found {name}, which reads the "
            f"encoder's output; {fix}"
        )


def _list_blocks(config: ModelConfig, sides: Collection[str] | None) -> str:
    """Return the blocks of a model's stacks, for messages."""
    return ", ".join(text for texts, _, _ in _stacks(config, sides) for text in texts)


def _unused_attention_settings(config: ModelConfig, blocks: str) -> Iterator[str]:
    """Yield the self-attention settings of a model without self-attention."""
    why = "acts in self-attention and needs a transformer block"
    if "in_attention" in catalogue("positions")[config.positions].traits:
        yield (
            f"model.positions={config.positions} {why}; found {blocks}; "
            "try sinusoidal, or none for RNNs"
        )
    if config.window:
        yield f"model.window={config.window} {why}; found {blocks}; set model.window=0"


def _unused_layer_settings(
    config: ModelConfig, overridable: set[str], blocks: str
) -> Iterator[str]:
    """Yield the settings that no block uses, given the settings that the blocks can override."""
    if config.talking_heads and "talking_heads" not in overridable:
        yield (
            f"model.talking_heads needs a block with several heads; found {blocks}; "
            "use transformer, or set model.talking_heads=false"
        )
    if config.share_layers == "ffn" and "ffn_width" not in overridable:
        yield (
            f"model.share_layers=ffn needs a block with a feed-forward network; found {blocks}; "
            "use transformer, or set it to all"
        )


def _options_from_signature(block: Any) -> type[BlockOptions]:
    """Return an options class made from the signature of a block's build method."""
    hints = get_type_hints(block.build)
    own = [
        each
        for each in inspect.signature(block.build).parameters.values()
        if each.name != "build_context"
    ]
    fields = [(each.name, hints[each.name], setting(each.default, "")) for each in own]
    # It may have self-attention: accepting an unused setting is better than rejecting a used one.
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
