"""Names of weights in bundles of earlier releases, and their current names."""

from __future__ import annotations

from collections.abc import Collection

from dragoman.storage.int8_quantization import SCALE_SUFFIX

# Components of a weight's name, such as `feedforward` in encoder.0.feedforward.inner.weight.
RENAMED_COMPONENTS = {
    "src_entrance": "src_input",
    "tgt_entrance": "tgt_input",
    "entrance": "stack_input",
    "feedforward": "ffn",
    "feedforward_residual": "ffn_residual",
    "asking": "attention_decoder",
    "recurrence": "rnn",
    "above": "upper_layers",
    "sides": "rnn",
    "ahead": "forward_rnn",
    "back": "backward_rnn",
    "kernel": "module",
    "wide": "up_proj",
    "narrow": "down_proj",
    "within": "relative_position",
    "content": "content_bias",
    "place": "position_bias",
    "places": "position_proj",
    "questions": "queries",
}


def rename_old_weights(stored: Collection[str], expected: Collection[str]) -> dict[str, str]:
    """Return the current name of each stored weight that has the name of an earlier release.

    A weight is renamed only if the model has none of its stored name, but has one of its current
    name that is not stored. The scales of weights in int8 are renamed as their weights are.
    """
    taken, known = set(stored), set(expected)
    renamed = {}
    for name in sorted(taken - known):
        current = ".".join(RENAMED_COMPONENTS.get(part, part) for part in name.split("."))
        is_known = current in known or current.removesuffix(SCALE_SUFFIX) in known
        if is_known and current not in taken:
            renamed[name] = current
            taken.add(current)
    return renamed
