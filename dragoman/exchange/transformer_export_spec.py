"""Read the structure of a built Transformer, per stack; export formats are written from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dragoman.attention.absolute_position_encodings import Positions
from dragoman.errors import ConfigError
from dragoman.layers.embedding_and_output_projection import Embedding
from dragoman.models.block_stack import Stack
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.prefix_language_model import PrefixLM
from dragoman.models.transformer_blocks import TransformerLayer

NATIVE_HINT = "the native engine runs every model, and needs no export"


# The weights of a layer that other programs support; a layer with more is unsupported.
_WEIGHT_PATTERN = re.compile(
    r"(self\.(query_key_value|output)|cross\.(query|key_value|output)|ffn\.(inner|outer))"
    r"\.(weight|bias)"
    r"|(self|cross|ffn)_residual\.norm\.(weight|bias)"
    r"|self\.relative_position\..*|(self|cross)\.(query|key)_norm\..*"
)


@dataclass(frozen=True, slots=True)
class StackSpec:
    """An encoder or decoder stack of equal layers."""

    layers: Sequence[TransformerLayer]
    norm: nn.Module | None  # norm after the last layer
    positions: Positions  # norm before the first layer
    heads: int
    kv_heads: int
    head_width: int
    window: int
    activation: type
    residual: type
    norm_type: type  # of the norms
    epsilon: float
    relative_position: type | None  # relative or rotary positions
    qk_norm: type | None

    @property
    def first(self) -> TransformerLayer:
        """The first layer; all others are equal in shape."""
        return self.layers[0]


@dataclass(frozen=True, slots=True)
class TransformerStructure:
    """The specification of encoder and decoder."""

    encoder: StackSpec
    decoder: StackSpec


def read_transformer_structure(model: EncoderDecoder, program: str) -> TransformerStructure:
    """Return the specification; raise with all reasons if it is no Transformer of equal layers."""
    require_two_stacks(model, program)
    problems: list[str] = []
    sides = [
        _read_stack(stack, stack_input.positions, name, program, problems)
        for name, stack, stack_input in (
            ("encoder", model.encoder, model.src_input),
            ("decoder", model.decoder, model.tgt_input),
        )
    ]
    raise_problems(problems)
    encoder, decoder = sides
    assert encoder is not None, "an encoder without a shape has a problem"
    assert decoder is not None, "a decoder without a shape has a problem"
    return TransformerStructure(encoder, decoder)


class EmbeddingTable(NamedTuple):
    """An embedding table (V, D) and its scale."""

    vectors: Tensor
    scale: float


@torch.no_grad()
def embedding_table(model: EncoderDecoder, side: str) -> EmbeddingTable:
    """Return the embedding table of a side, `src` or `tgt`; factorized ones are multiplied out."""
    embedding = model.embeddings["shared" if "shared" in model.embeddings else side]
    assert isinstance(embedding, Embedding), "embeddings must be of our kind"
    if {name for name, _ in embedding.named_parameters()} == {"weight"}:
        return EmbeddingTable(embedding.weight, embedding.scale)
    return EmbeddingTable(
        embedding(torch.arange(embedding.weight.size(0), device=embedding.weight.device)), 1.0
    )


@torch.no_grad()
def output_matrix(model: EncoderDecoder) -> Tensor:
    """Return the output projection (V, D); a factorized one is multiplied out."""
    down_proj = model.output.down_proj
    return model.output_weight if down_proj is None else model.output_weight @ down_proj.weight


def require_two_stacks(model: EncoderDecoder, program: str) -> None:
    """Raise for a prefix LM, whose one stack no other program reads."""
    if isinstance(model, PrefixLM):
        must = "a model must have an encoder and a decoder"
        raise ConfigError([export_problem(program, must, "model.architecture=prefix_lm")])


def raise_problems(problems: Sequence[str]) -> None:
    """Raise with all reasons why a model cannot be exported."""
    if problems:
        raise ConfigError(problems)


def export_problem(program: str, must: str, found: object) -> str:
    """Return one reason."""
    return f"for export to {program}, {must}; found {found}; {NATIVE_HINT}"


def _read_stack(
    stack: Stack, positions: Positions, name: str, program: str, problems: list[str]
) -> StackSpec | None:
    """Read the specification of one stack."""
    layers = []
    for number, block in stack.blocks():
        if not isinstance(block, TransformerLayer):
            found = f"{type(block).__name__} as block {number}"
            problems.append(
                export_problem(program, f"model.{name} must have transformer blocks only", found)
            )
            return None
        unknown_weights = [
            part for part in block.state_dict() if not _WEIGHT_PATTERN.fullmatch(part)
        ]
        if unknown_weights:
            problems.append(
                export_problem(
                    program,
                    f"a layer of model.{name} must have the Transformer's weights alone",
                    unknown_weights[0],
                )
            )
            return None
        attentions = [block.self, block.cross] if block.has_cross else [block.self]
        if other := [each for each in attentions if each.value_width != each.head_width]:
            problems.append(
                export_problem(
                    program,
                    f"a head of model.{name} must have values as wide as its keys",
                    f"model.value_width={other[0].value_width}",
                )
            )
            return None
        layers.append(block)

    def one(what: str, read: Callable[[TransformerLayer], Any]) -> Any:
        found = list(dict.fromkeys(read(layer) for layer in layers))
        if len(found) > 1:
            shown = " and ".join(getattr(each, "__name__", str(each)) for each in found)
            problems.append(
                export_problem(
                    program, f"all layers of model.{name} must have the same {what}", shown
                )
            )
        return found[0]

    return StackSpec(
        layers=layers,
        norm=stack.norm,
        positions=positions,
        heads=one("heads", lambda layer: layer.self.heads),
        kv_heads=one("kv_heads", lambda layer: layer.self.kv_heads),
        head_width=one("head_width", lambda layer: layer.self.head_width),
        window=one("window", lambda layer: layer.self.window),
        activation=one("activation", lambda layer: type(layer.ffn.activation)),
        residual=one("residual", lambda layer: type(layer.self_residual)),
        norm_type=one("norm", lambda layer: type(getattr(layer.self_residual, "norm", None))),
        epsilon=one(
            "norm_epsilon", lambda layer: _epsilon(getattr(layer.self_residual, "norm", None))
        ),
        relative_position=one(
            "positions",
            lambda layer: (
                None if layer.self.relative_position is None else type(layer.self.relative_position)
            ),
        ),
        qk_norm=one(
            "qk_norm",
            lambda layer: None if layer.self.query_norm is None else type(layer.self.query_norm),
        ),
    )


def _epsilon(norm: nn.Module | None) -> float:
    """Return the epsilon of a norm, under either of its names."""
    return float(getattr(norm, "eps", getattr(norm, "epsilon", 0.0)))
