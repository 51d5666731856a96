"""Build a model from its configuration, and summarize its layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dragoman.attention.absolute_position_encodings import Positions
from dragoman.config import ModelConfig
from dragoman.errors import ConfigError
from dragoman.layers.convs2s import ConvS2SLinear, WeightNormWeight
from dragoman.layers.embedding_and_output_projection import (
    Embedding,
    OutputProjection,
    SegmentInput,
    StackInput,
)
from dragoman.models.block_catalogue import BLOCKS
from dragoman.models.block_interface import Block, BuildContext
from dragoman.models.block_list_parser import parse_blocks
from dragoman.models.block_stack import Stack
from dragoman.models.block_validation import resolve_block, stack_problems
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.initialization import DEPTH_SCALINGS, initialize_weights
from dragoman.models.layer_sharing import SHARED_LAYER_TYPES, share_layers
from dragoman.models.prefix_language_model import PrefixLM
from dragoman.registry import catalogue


class LayerSummary(NamedTuple):
    """One row of a model summary."""

    path: str  # module path, such as "encoder.0.self"
    class_name: str
    shapes: str  # of the weight matrices
    parameters: int


def build_model(config: ModelConfig, *, src_vocab_size: int, tgt_vocab_size: int) -> EncoderDecoder:
    """Build a translator with weights initialized from torch's random number generator."""
    problems = [*config.problems(), *stack_problems(config)]
    if config.tie_embeddings == "all" and src_vocab_size != tgt_vocab_size:
        problems.append(
            "model.tie_embeddings=all needs one vocabulary for both sides; "
            f"found {src_vocab_size} source and {tgt_vocab_size} target tokens; "
            "set model.tie_embeddings=target, or text.shared_vocab=true"
        )
    if problems:
        raise ConfigError(problems)
    model = ARCHITECTURES[config.architecture](
        config, src_vocab_size=src_vocab_size, tgt_vocab_size=tgt_vocab_size
    )
    initialize_weights(model, DEPTH_SCALINGS[config.initialization])
    kind = SHARED_LAYER_TYPES[config.share_layers]
    if kind is not None:
        for stack in (model.encoder, model.decoder):
            share_layers(stack, kind)
    return model


def _build_encoder_decoder(
    config: ModelConfig, *, src_vocab_size: int, tgt_vocab_size: int
) -> EncoderDecoder:
    """Build a model with an encoder and a decoder."""
    return EncoderDecoder(
        embeddings=_build_embeddings(config, src_vocab_size, tgt_vocab_size),
        src_input=build_stack_input(config),
        tgt_input=build_stack_input(config),
        encoder=build_stack(
            config, config.encoder, "model.encoder", causal=False, memory_width=None
        ),
        decoder=build_stack(
            config, config.decoder, "model.decoder", causal=True, memory_width=config.width
        ),
        output=_build_output(config, tgt_vocab_size),
    )


def _build_prefix_lm(
    config: ModelConfig, *, src_vocab_size: int, tgt_vocab_size: int
) -> EncoderDecoder:
    """Build a model of one stack, model.decoder, without cross-attention."""
    scale = _embedding_scale(config)
    return PrefixLM(
        embeddings=_build_embeddings(config, src_vocab_size, tgt_vocab_size),
        src_input=SegmentInput(
            _build_positions(config), width=config.width, scale=scale, dropout=config.dropout
        ),
        tgt_input=SegmentInput(
            _build_positions(config), width=config.width, scale=scale, dropout=config.dropout
        ),
        stack=build_stack(config, config.decoder, "model.decoder", causal=True, memory_width=None),
        output=_build_output(config, tgt_vocab_size),
    )


ARCHITECTURES: dict[str, Callable[..., EncoderDecoder]] = {
    "encoder_decoder": _build_encoder_decoder,
    "prefix_lm": _build_prefix_lm,
}


def build_meta_model(
    config: ModelConfig, *, src_vocab_size: int, tgt_vocab_size: int
) -> EncoderDecoder:
    """Build a model on the meta device, without allocating or initializing weights.

    `load_state_dict(weights, assign=True)` fills it.
    """
    with torch.device("meta"), skip_initialization():
        return build_model(config, src_vocab_size=src_vocab_size, tgt_vocab_size=tgt_vocab_size)


class skip_initialization(TorchFunctionMode):  # noqa: N801 - a context manager
    """Skip weight initialization: `nn.init` and random in-place fills return their tensor.

    On the meta device they compute nothing, but their Python decompositions import torch._dynamo,
    which takes longer than importing torch.
    """

    FACTORIES = frozenset({torch.randn, torch.rand})
    FILLS = frozenset({Tensor.normal_, Tensor.uniform_, Tensor.bernoulli_, Tensor.exponential_})

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Skip initialization functions; call all others."""
        kwargs = kwargs or {}
        if func is torch.eye:
            return torch.empty(args[0], args[-1], **kwargs)
        if func in self.FACTORIES:
            return torch.empty(*args, **kwargs)
        if func in self.FILLS or getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters, shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def summarize_model(
    config: ModelConfig, *, src_vocab_size: int, tgt_vocab_size: int
) -> list[LayerSummary]:
    """Return the layers of a model with their shapes and sizes, without allocating weights."""
    model = build_meta_model(config, src_vocab_size=src_vocab_size, tgt_vocab_size=tgt_vocab_size)
    rows, seen = [], set[nn.Parameter]()
    for path, module in _named_layers(model):
        weights = dict(module.named_parameters())
        if weights:
            own = {name: weight for name, weight in weights.items() if weight not in seen}
            shapes = ", ".join(
                f"{name} {'x'.join(map(str, weight.shape))}"
                for name, weight in own.items()
                if weight.dim() > 1
            )
            rows.append(
                LayerSummary(
                    path,
                    type(module).__name__,
                    shapes if own else "shared",
                    sum(weight.numel() for weight in own.values()),
                )
            )
            seen.update(own.values())
    return rows


def _named_layers(model: EncoderDecoder) -> list[tuple[str, nn.Module]]:
    """Return the modules that a summary lists: embeddings, layers of blocks, norms, output."""
    parts: list[tuple[str, nn.Module]] = [
        (f"embeddings.{name}", table) for name, table in model.embeddings.items()
    ]
    for side, stack_input, stack in (
        ("src", model.src_input, model.encoder),
        ("tgt", model.tgt_input, model.decoder),
    ):
        if isinstance(stack_input, SegmentInput):
            parts.append((f"{side}_input", stack_input))
        else:
            parts.append((f"{side}_input.positions", stack_input.positions))
        role = "encoder" if stack is model.encoder else "decoder"
        if stack.has_projections:
            parts.extend(
                (f"{role}.projections.{name}", layer) for name, layer in stack.projections.items()
            )
        for number, block in stack.blocks():
            for name, layer in block.named_children():
                if name.isdecimal():  # a block of several layers
                    parts.extend(
                        (f"{role}.{number}.{name}.{part}", inner)
                        for part, inner in layer.named_children()
                    )
                else:
                    parts.append((f"{role}.{number}.{name}", layer))
        if stack.norm is not None:
            parts.append((f"{role}.norm", stack.norm))
    return [*parts, ("output", model.output)]


def _embedding_scale(config: ModelConfig) -> float:
    """Return the factor of the embeddings."""
    return config.width**0.5 if config.scale_embeddings else 1.0


def _build_embeddings(
    config: ModelConfig, src_vocab_size: int, tgt_vocab_size: int
) -> dict[str, Embedding]:
    """Build one shared embedding table, or one for each side."""
    sizes = (
        {"shared": tgt_vocab_size}
        if config.tie_embeddings == "all"
        else {"src": src_vocab_size, "tgt": tgt_vocab_size}
    )
    return {
        side: Embedding(
            size,
            config.width,
            scale=_embedding_scale(config),
            embedding_width=config.embedding_width,
            fix_norm=config.fix_norm,
        )
        for side, size in sizes.items()
    }


def build_stack_input(config: ModelConfig) -> StackInput:
    """Build the positions and dropout applied to the embeddings."""
    return StackInput(_build_positions(config), dropout=config.dropout)


def _build_positions(config: ModelConfig) -> Positions:
    """Build the positions that are added to the embeddings."""
    positions: Positions = catalogue("positions").load(config.positions)(
        width=config.width, max_positions=config.max_positions
    )
    return positions


def _build_output(config: ModelConfig, tgt_vocab_size: int) -> OutputProjection:
    """Build the projection to the vocabulary."""
    return OutputProjection(
        tgt_vocab_size,
        config.width,
        tied=config.tie_embeddings != "none",
        bias=config.output_bias,
        embedding_width=config.embedding_width,
        fix_norm=config.fix_norm,
    )


def build_stack(
    config: ModelConfig,
    texts: Sequence[str],
    setting: str,
    *,
    causal: bool,
    memory_width: int | None,
) -> Stack:
    """Build a stack from its block list."""
    build_context = BuildContext(config=config, causal=causal, memory_width=memory_width)
    specs = parse_blocks(texts, setting)
    blocks: list[Block] = []
    projections: dict[str, nn.Module] = {}
    width = config.width  # of the residual stream
    for number, spec in enumerate(specs):
        resolved, options = resolve_block(
            spec, config, setting, memory=memory_width is not None, causal=causal
        )
        own = options.own_width()
        # Embeddings are projected to the first block's own width; after another block a block with
        # its own width projects its residual connection itself (Gehring et al. 2017, section 3.3).
        needed = (own if number == 0 else width) if own else config.width
        if needed != width:
            projections[str(number)] = ConvS2SLinear(width, needed, weight=WeightNormWeight)
        kind = BLOCKS.load(spec.name)
        assert issubclass(kind, Block), f"{spec.name} must be a Block"
        block_context = replace(build_context, config=resolved, input_width=needed)
        blocks.append(kind.build(block_context, **asdict(options)))
        width = own or config.width
    if width != config.width:
        projections["end"] = ConvS2SLinear(width, config.width, weight=WeightNormWeight)
    ends_in_norm = {"auto": blocks[-1].final_norm, "on": True, "off": False}[config.final_norm]
    norm = (
        catalogue("norm").load(config.norm)(config.width, config.norm_epsilon)
        if ends_in_norm
        else None
    )
    return Stack(
        blocks,
        norm,
        block_texts=[str(spec) for spec in specs],
        layer_drop=config.layer_drop,
        projections=projections,
    )
