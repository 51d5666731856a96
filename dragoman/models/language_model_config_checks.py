"""Rules of a language model's settings that concern several sections; needs no torch."""

from __future__ import annotations

from collections.abc import Iterator

from dragoman.config import Config
from dragoman.errors import ConfigError
from dragoman.models.block_list_parser import parse_blocks
from dragoman.registry import catalogue

RECURRENT_BLOCKS = ("lstm", "gru", "rnn", "sru")


def language_problems(config: Config) -> Iterator[str]:
    """Yield inconsistencies between `language`, `model.decoder` and the positions."""
    model, language = config.model, config.language
    try:
        names = [spec.name for spec in parse_blocks(model.decoder, "model.decoder")]
    except ConfigError:
        return  # reported with the block list
    yield from _objective_problems(config, names)
    is_relative = "in_attention" in catalogue("positions")[model.positions].traits
    found = f"model.positions={model.positions}"
    if language.memory:
        if "transformer" not in names:
            yield (
                "language.memory is what transformer blocks attend to; found language.memory="
                f"{language.memory} with model.decoder=[{', '.join(model.decoder)}]; "
                "set language.memory=0, or use transformer"
            )
        elif not is_relative:
            yield (
                f"language.memory needs relative positions; found {found}; "
                "set model.positions=transformer_xl"
            )
        if model.layer_drop:
            yield (
                "language.memory needs every layer at every step; found "
                f"model.layer_drop={model.layer_drop:g}; set it to 0"
            )
    is_recurrent = any(name in RECURRENT_BLOCKS for name in names)
    if is_recurrent and not is_relative and model.positions != "none":
        yield (
            "an RNN's state continues from segment to segment, where absolute positions would "
            f"begin anew; found {found}; set model.positions=none"
        )
    if model.positions == "learned" and language.segment > model.max_positions:
        yield (
            "language.segment must be at most model.max_positions with learned positions; found "
            f"{language.segment} and {model.max_positions}; raise model.max_positions"
        )
    if language.clamp_distance and model.positions != "transformer_xl":
        yield (
            "language.clamp_distance needs model.positions=transformer_xl; found "
            f"{found}; leave it out"
        )


def _objective_problems(config: Config, names: list[str]) -> Iterator[str]:
    """Yield the settings that masked and permuted language models do not support."""
    model, objective = config.model, config.language.objective
    if objective == "causal":
        return
    if others := sorted({*names} - {"transformer", "ffn"}):
        yield (
            f"language.objective={objective} needs blocks that attend in both directions, "
            f"transformer and ffn; found {', '.join(others)} in model.decoder; use transformer"
        )
    if objective == "permuted" and "in_attention" in catalogue("positions")[model.positions].traits:
        yield (
            "language.objective=permuted needs positions that are added to the embeddings, "
            "because both streams are one sequence; found "
            f"model.positions={model.positions}; try sinusoidal"
        )
