"""Cross-layer parameter sharing: Lan et al. (2020), "ALBERT".

Equal blocks of a stack share the parameters of the first, all of them or those of one layer type.
Each block stays a module of its own, so module paths do not change. A shared parameter has one
name in the state_dict, that of the first block.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dragoman.attention.attention_weight_hooks import RecordableAttention
from dragoman.layers.feed_forward import FeedForward
from dragoman.models.block_stack import Stack

SHARED_LAYER_TYPES: dict[str, type[nn.Module] | None] = {
    "none": None,
    "all": nn.Module,
    "attention": RecordableAttention,
    "ffn": FeedForward,
}


def share_layers(stack: Stack, kind: type[nn.Module]) -> None:
    """Share the parameters of layers of a type between the blocks with equal texts."""
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
        # load_state_dict(assign=True) replaces parameters: tie them again.
        stack.register_load_state_dict_post_hook(_tie_parameters)  # type: ignore[no-untyped-call]


def _parameter_paths(block: nn.Module, kind: type[nn.Module]) -> list[str]:
    """Return the paths of the parameters of layers of a type."""
    layers = [
        f"{path}." if path else ""
        for path, layer in block.named_modules()
        if isinstance(layer, kind)
    ]
    return [path for path, _ in block.named_parameters() if path.startswith(tuple(layers))]


def _tie_parameters(stack: nn.Module, _keys: Any = None) -> None:
    """Set each shared parameter to its owner."""
    assert isinstance(stack, Stack), "only stacks share"
    for alias, owner in stack.shared_from.items():
        path, _dot, name = alias.rpartition(".")
        setattr(stack.get_submodule(path), name, stack.get_parameter(owner))


def _drop_shared_keys(
    stack: nn.Module, weights: dict[str, Tensor], prefix: str, _metadata: Any
) -> None:
    """Remove the aliases of shared parameters from a state_dict."""
    assert isinstance(stack, Stack), "only stacks share"
    for alias in stack.shared_from:
        del weights[prefix + alias]


def _restore_shared_keys(
    stack: nn.Module, weights: dict[str, Tensor], prefix: str, *_: Any
) -> None:
    """Add the aliases of shared parameters to a state_dict before it is loaded."""
    assert isinstance(stack, Stack), "only stacks share"
    for alias, owner in stack.shared_from.items():
        if prefix + owner in weights:
            weights[prefix + alias] = weights[prefix + owner]
