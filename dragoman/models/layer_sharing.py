"""Layers that share their weights: Lan et al. (2020), "ALBERT".

Equal blocks of a stack have the weights of the first of them, all of them or those of one kind of layer. Each block stays a module
of its own, so that paths, recording and editing are what they are without sharing; but a shared weight is one parameter with one
name, the first block's. By that name alone it is counted, trained, averaged and saved.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dragoman.attention.recorder import RecordableAttention
from dragoman.layers.feed_forward import FeedForward
from dragoman.models.stack import Stack

SHARED_LAYER_TYPES: dict[str, type[nn.Module] | None] = {
    "none": None,
    "all": nn.Module,
    "attention": RecordableAttention,
    "ffn": FeedForward,
}


def share_layers(stack: Stack, kind: type[nn.Module]) -> None:
    """Let each block have from the first one that was asked for in the same words the weights of all layers of a kind."""
    first: dict[str, str] = {}
    for number, block_texts in zip(
        (name for name, _ in stack.blocks()), stack.block_texts, strict=True
    ):
        owner = first.setdefault(block_texts, number)
        if owner != number:
            stack.shared_from |= {
                f"{number}.{path}": f"{owner}.{path}"
                for path in _parameter_paths(stack.get_submodule(number), kind)
            }
    if stack.shared_from:
        _tie_parameters(stack)
        stack.register_state_dict_post_hook(_drop_shared_keys)  # type: ignore[no-untyped-call]
        stack.register_load_state_dict_pre_hook(_restore_shared_keys)  # type: ignore[no-untyped-call]
        stack.register_load_state_dict_post_hook(_tie_parameters)  # type: ignore[no-untyped-call] # loading may have put new parameters into the old ones' places


def _parameter_paths(block: nn.Module, kind: type[nn.Module]) -> list[str]:
    """List the paths of the weights that belong to layers of a kind."""
    layers = [
        f"{path}." if path else ""
        for path, layer in block.named_modules()
        if isinstance(layer, kind)
    ]
    return [path for path, _ in block.named_parameters() if path.startswith(tuple(layers))]


def _tie_parameters(stack: nn.Module, _keys: Any = None) -> None:
    """Put the owners' parameters into the places of the others."""
    assert isinstance(stack, Stack), "only stacks share"
    for alias, owner in stack.shared_from.items():
        path, _dot, name = alias.rpartition(".")
        setattr(stack.get_submodule(path), name, stack.get_parameter(owner))


def _drop_shared_keys(
    stack: nn.Module, weights: dict[str, Tensor], prefix: str, _metadata: Any
) -> None:
    """Save a shared weight once."""
    assert isinstance(stack, Stack), "only stacks share"
    for alias in stack.shared_from:
        del weights[prefix + alias]


def _restore_shared_keys(
    stack: nn.Module, weights: dict[str, Tensor], prefix: str, *_: Any
) -> None:
    """Give what is loaded the names that torch looks for; one that is missing is missed under its owner's name."""
    assert isinstance(stack, Stack), "only stacks share"
    for alias, owner in stack.shared_from.items():
        if prefix + owner in weights:
            weights[prefix + alias] = weights[prefix + owner]
