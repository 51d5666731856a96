"""Options of the blocks, as in `lstm(attention=additive)`, and their rules; needs no torch.

Each block's entry in `models/block_catalogue.py` names its class. The fields are the keyword
arguments of the block's `build` (a test compares the two), declared like settings: type, default,
range, help.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dragoman.attention.lsh_bucket_count import bucket_problem
from dragoman.config import ModelConfig
from dragoman.config.setting_declaration import setting
from dragoman.errors import ConfigError
from dragoman.models.block_list_parser import OptionValue, parse_blocks
from dragoman.registry import catalogue

HEAD_SETTINGS = ("heads", "head_width", "value_width", "kv_heads", "qk_norm", "talking_heads")
# Scores of the alignments' papers, where they are not additive.
_DEFAULT_SCORES = {
    "monotonic": "normed_additive",
    "mocha": "normed_additive",
    "local_m": "general",
    "local_p": "general",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockOptions:
    """Base class, and the options of a block that has none."""

    # Settings of `model` that the block can override: transformer(heads=4).
    overridable: ClassVar[tuple[str, ...]] = ()
    is_bidirectional: ClassVar[bool] = False  # encoders only
    needs_memory: ClassVar[bool] = False  # reads the encoder's output: decoders only
    has_self_attention: ClassVar[bool] = False  # uses model.positions and model.window

    def problems(self, config: ModelConfig, *, memory: bool, causal: bool) -> Iterator[str]:
        """Yield problems of the options; a decoder's block has a `memory` and is `causal`."""
        return iter(())

    def reads_source(self) -> bool:
        """Whether a decoder's block reads the encoder's output."""
        return True

    def own_width(self) -> int:
        """Return the width of the block's output if it is the block's own; 0 for model.width."""
        return 0

    @classmethod
    def suggest(cls, option: str, value: OptionValue) -> str:
        """Return a hint for an option or value that the block does not have, or ""."""
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerOptions(BlockOptions):
    """Options of `transformer`."""

    overridable = (
        *HEAD_SETTINGS,
        "window",
        "ffn_width",
        "activation",
        "dropout",
        "attention_dropout",
        "ffn_dropout",
    )
    has_self_attention = True

    @classmethod
    def suggest(cls, option: str, value: OptionValue) -> str:
        """Point to the recurrent blocks for other scores and alignments."""
        if option not in ("attention", "alignment", "score"):
            return ""
        alignments = catalogue("alignment")
        if value in alignments and "stateful" in alignments[str(value)].traits:
            return (
                f"a Transformer layer computes all positions in parallel, while {value} depends on "
                f"the previous position; use lstm(attention={value}) or gru(attention={value}) in "
                "model.decoder"
            )
        return (
            "a Transformer layer has scaled dot-product attention only; leave it out, or use "
            f"lstm(attention={value}) in model.decoder"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReformerOptions(BlockOptions):
    """Options of `reformer`."""

    overridable = (
        *HEAD_SETTINGS,
        "ffn_width",
        "activation",
        "dropout",
        "attention_dropout",
        "ffn_dropout",
    )
    has_self_attention = True

    layers: int = setting(
        1,
        "Number of reversible layers, whose activations are recomputed in the backward pass.",
        at_least=1,
        at_most=1000,
    )
    attention: str = setting("lsh", "Self-attention: lsh or full.", choices=("lsh", "full"))
    rounds: int = setting(4, "LSH rounds; more approach full attention.", at_least=1, at_most=64)
    buckets: int = setting(
        0,
        "LSH buckets per round; 0 for 2 * model.max_positions / window.",
        at_least=0,
        at_most=1_000_000,
    )
    window: int = setting(
        64,
        "Positions to either side in its bucket that a token attends to.",
        at_least=1,
        at_most=65_536,
    )
    torch_compile: bool = setting(
        False,
        "Compile the LSH attention with torch.compile; for long sequences on a GPU.",
    )
    ffn_chunks: int = setting(
        1,
        "Chunks of positions that the feed-forward networks process one after another, "
        "to save memory.",
        at_least=1,
        at_most=65_536,
    )

    def problems(self, config: ModelConfig, *, memory: bool, causal: bool) -> Iterator[str]:
        """Yield invalid buckets, and settings that LSH attention does not support."""
        if self.attention == "full":
            return
        if self.buckets and (problem := bucket_problem(self.buckets)):
            yield f"buckets must be {problem.must}; found {self.buckets}; {problem.fix}"
        defaults = ModelConfig()
        reasons = {
            "value_width": "its kernels need values as wide as keys",
            "kv_heads": "queries and keys are the same vectors",
            "qk_norm": "keys are normalized to unit length",
            "talking_heads": "each head has its own buckets",
            "window": "the block's own window limits attention within a bucket",
            "attention_dropout": "the weight matrix is never materialized",
        }
        for name, reason in reasons.items():
            value = getattr(config, name)
            if value != getattr(defaults, name):
                yield (
                    f"LSH attention does not support model.{name}: {reason}; found {value}; "
                    "leave it out, or use attention=full"
                )
        if "in_attention" in catalogue("positions")[config.positions].traits:
            yield (
                "LSH attention needs positions that are added to the embeddings; found "
                f"model.positions={config.positions}; use sinusoidal, or attention=full"
            )

    @classmethod
    def suggest(cls, option: str, value: OptionValue) -> str:
        """Explain that reversible layers are pre-norm, and which attentions there are."""
        if option == "residual":
            return "reversible layers are always pre-norm; leave it out"
        if option == "attention":
            return "use attention=lsh or attention=full"
        return TransformerOptions.suggest(option, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossAttentionOptions(BlockOptions):
    """Options of `cross_attention`."""

    overridable = (*HEAD_SETTINGS, "dropout", "attention_dropout", "residual")
    needs_memory = True

    @classmethod
    def suggest(cls, option: str, value: OptionValue) -> str:
        """Return the hint of the Transformer layer."""
        return TransformerOptions.suggest(option, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForwardOptions(BlockOptions):
    """Options of `ffn`."""

    overridable = ("ffn_width", "activation", "dropout", "ffn_dropout", "residual")

    def reads_source(self) -> bool:
        """Whether a decoder's block reads the encoder's output: never."""
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class TCNOptions(BlockOptions):
    """Options of `tcn`."""

    overridable = ("dropout",)

    kernel_size: int = setting(3, "Kernel size.", at_least=1, at_most=10_000)
    dilation: int = setting(
        1, "Distance between the positions that a kernel reads.", at_least=1, at_most=10_000
    )

    def reads_source(self) -> bool:
        """Whether a decoder's block reads the encoder's output: never."""
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvolutionOptions(BlockOptions):
    """Options of `conv`."""

    overridable = ("dropout", "attention_dropout")

    kernel_size: int = setting(3, "Kernel size.", at_least=1, at_most=10_000)
    dilation: int = setting(
        1, "Distance between the positions that the kernel reads.", at_least=1, at_most=10_000
    )
    width: int = setting(
        0,
        "Width of its own, with projections where widths change; its attentions then share the "
        "decoder's input as target embeddings; 0 for model.width.",
        at_least=0,
        at_most=65_536,
    )
    weight_norm: bool = setting(True, "Weight normalization.")
    layers: int = setting(
        1,
        "Number of layers whose attentions share the target embeddings.",
        at_least=1,
        at_most=1000,
    )
    attention: str = setting(
        "convs2s", "Attention of a decoder's layer: convs2s or none.", choices=("convs2s", "none")
    )
    activation: str = setting(
        "glu",
        "Activation: glu, or any of model.activation.",
        choices=("glu",),
        kind="activation",
    )
    scale_encoder_grad: bool = setting(
        False,
        "Divide the encoder's gradient by twice the number of attentions, as in fairseq.",
    )

    def problems(self, config: ModelConfig, *, memory: bool, causal: bool) -> Iterator[str]:
        """Yield an encoder's even kernel size, and settings that need blocks of one width."""
        if not causal and self.kernel_size % 2 == 0:
            yield (
                f"kernel_size must be odd in an encoder; found {self.kernel_size}; "
                f"try kernel_size={self.kernel_size + 1}"
            )
        if not self.width:
            return
        if config.layer_drop:
            yield (
                "a block with a width of its own cannot be skipped; found "
                f"width={self.width} with model.layer_drop={config.layer_drop:g}; set "
                "model.layer_drop=0, or leave width out"
            )
        if config.share_layers == "all":
            yield (
                "blocks with widths of their own have weights of different shapes; found "
                f"width={self.width} with model.share_layers=all; set model.share_layers=none, "
                "or leave width out"
            )

    def own_width(self) -> int:
        """Return the width of the block's output if it is the block's own; 0 for model.width."""
        return self.width

    def reads_source(self) -> bool:
        """Whether a decoder's block reads the encoder's output: with attention."""
        return self.attention != "none"

    @classmethod
    def suggest(cls, option: str, value: OptionValue) -> str:
        """Point from a window to the kernel size, and from other attentions to other blocks."""
        if option == "window":
            return "a convolution has a kernel size; conv(kernel_size=5) sees 2 positions each side"
        if option in (*HEAD_SETTINGS, "attention", "alignment", "score"):
            return (
                "a conv block has single-head dot-product attention only; leave it out, or use "
                "lstm or transformer"
            )
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RNNOptions(BlockOptions):
    """Options of `lstm`, and the base class of those of `gru`, `rnn` and `sru`."""

    overridable = ("dropout", "residual")

    attention: str = setting(
        "none",
        "Attention of a decoder's layer: a score, or an alignment with its paper's score.",
        choices=("none",),
        kind="score+alignment",
    )
    alignment: str = setting(
        "softmax", "Alignment: how scores become attention weights.", kind="alignment"
    )
    decoder: str = setting(
        "luong",
        "Attention decoder: bahdanau (query is the previous state), luong (the new state), "
        "gnmt (the lowest layer's previous state).",
        choices=("bahdanau", "luong", "gnmt"),
    )
    input_feeding: bool = setting(
        False, "Input feeding: the previous attentional output is part of the next input."
    )
    layers: int = setting(1, "Number of stacked layers.", at_least=1, at_most=1000)
    initial_state: str = setting(
        "mean",
        "Encoder states that a decoder's initial hidden state is projected from; last_backward and "
        "last_bidirectional need a bidirectional encoder; encoder copies the final states of an "
        "encoder of the same kind.",
        choices=("first", "last", "mean", "last_backward", "last_bidirectional", "encoder", "zero"),
    )
    reverse: bool = setting(False, "Read the source from right to left; encoders only.")
    residual_connection: bool = setting(
        True, "Whether the block has a residual connection and norm."
    )
    radius: int = setting(
        0,
        "Half-width of the local attention window or of the location filters; 0 for the "
        "alignment's default.",
        at_least=0,
        at_most=10_000,
    )
    chunk_size: int = setting(
        0, "MoChA chunk size; 0 for the default of 4.", at_least=0, at_most=10_000
    )
    smoothing: bool = setting(
        False,
        "Normalize sigmoids instead of exponentials of the scores (Chorowski et al. 2015).",
    )
    coverage_loss_weight: float = setting(
        0.0, "Weight of the coverage loss.", at_least=0.0, at_most=1000.0
    )
    initial_cell: bool = setting(
        False,
        "Also project an LSTM decoder's initial cell state; otherwise it is zero.",
    )
    weight_dropout: float = setting(
        0.0,
        "DropConnect on the hidden-to-hidden weights, one mask per batch (Merity et al. 2018).",
        at_least=0.0,
        at_most=0.95,
    )
    locked_dropout: bool = setting(
        False, "Variational dropout: one mask for all positions of a sequence."
    )

    def problems(self, config: ModelConfig, *, memory: bool, causal: bool) -> Iterator[str]:
        """Yield options that contradict each other or do not fit an encoder or a decoder."""
        yield from self._attention_problems(memory=memory)
        yield from self._state_problems(config, memory=memory)
        if self.weight_dropout and self.attention != "none":
            yield (
                "weight_dropout is for an RNN without attention; found "
                f"weight_dropout={self.weight_dropout:g} with attention={self.attention}; "
                "leave one of them out"
            )
        if self.locked_dropout and self.layers > 1:
            yield (
                "locked_dropout acts on a block's output; found layers="
                f"{self.layers}; repeat the block instead: lstm*{self.layers}"
            )
        if self.reverse and causal:
            yield (
                "reverse needs the whole sentence; found reverse=true in a decoder; "
                "use it in model.encoder"
            )

    def _attention_problems(self, *, memory: bool) -> Iterator[str]:
        """Yield problems of the attention and its options."""
        attends, defaults = self.attention != "none", RNNOptions()
        if attends and not memory:
            yield (
                "attention needs an encoder's output and is for decoders; found "
                f"attention={self.attention}; leave it out, or move the block to model.decoder"
            )
        for option in ("alignment", "decoder", "input_feeding"):
            value = getattr(self, option)
            if not attends and value != getattr(defaults, option):
                yield (
                    f"{option} needs attention; found {option}={str(value).lower()} with "
                    f"attention=none; set attention=NAME, or leave {option} out"
                )
        has_alignment = self.alignment != defaults.alignment
        if attends and has_alignment and self.attention in catalogue("alignment"):
            score = _DEFAULT_SCORES.get(self.alignment, "additive")
            yield (
                f"a block has one alignment; found attention={self.attention} and "
                f"alignment={self.alignment}; set one, or a score for it: attention={score}"
            )
        elif attends and _score_ignores_features(
            *resolve_attention(self.attention, self.alignment)
        ):
            yield (
                f"alignment={self.alignment} adds terms inside an additive score; found "
                f"attention={self.attention}; use attention=additive or normed_additive"
            )
        for option, alignments in _ALIGNMENT_OPTIONS.items():
            value = getattr(self, option)
            if value != getattr(defaults, option) and (
                not attends
                or resolve_attention(self.attention, self.alignment)[1] not in alignments
            ):
                found = f"{option}={str(value).lower()} with attention={self.attention}"
                if self.attention in catalogue("score"):  # otherwise it names the alignment
                    found += f" and alignment={self.alignment}"
                yield (
                    f"{option} is for alignment {' or '.join(alignments)}; found {found}; "
                    f"name one of these, or leave {option} out"
                )
        if self.decoder == "gnmt" and self.input_feeding:
            yield (
                "decoder=gnmt has no input feeding; found input_feeding=true; leave it out, or "
                "use decoder=luong"
            )

    def _state_problems(self, config: ModelConfig, *, memory: bool) -> Iterator[str]:
        """Yield problems of the initial state."""
        if self.initial_state != "mean" and not memory:
            yield (
                "initial_state is for decoders; found "
                f"initial_state={self.initial_state} in an encoder; leave it out"
            )
        if memory and self.initial_state == "encoder":
            yield from self._copy_problems(config)
        if self.initial_cell and (not memory or self.initial_state in ("zero", "encoder")):
            found = (
                f"initial_cell=true with initial_state={self.initial_state}"
                if memory
                else "initial_cell=true in an encoder"
            )
            yield (
                "initial_cell projects a decoder's initial cell state, as initial_state its hidden "
                f"state; found {found}; leave it out"
            )
        if (
            self.initial_state in ("last_backward", "last_bidirectional")
            and memory
            and not _has_bidirectional_encoder(config)
        ):
            yield (
                "initial_state=last_backward and initial_state=last_bidirectional need an encoder "
                f"that ends in bigru or bilstm; found initial_state={self.initial_state} with "
                f"model.encoder=[{', '.join(config.encoder)}]; use first, last or mean"
            )

    def _copy_problems(self, config: ModelConfig) -> Iterator[str]:
        """Yield a problem if the encoder has no final states for every layer of the decoder."""
        try:
            last = parse_blocks(config.encoder)[-1]
        except ConfigError:
            return  # reported with the encoder
        kind = catalogue("block").options(last.name)
        layers = last.options.get("layers", 1)
        if kind is not type(self) or layers != self.layers or self.decoder == "gnmt":
            found = (
                "decoder=gnmt"
                if self.decoder == "gnmt"
                else f"layers={self.layers} with model.encoder=[{', '.join(config.encoder)}]"
            )
            yield (
                "initial_state=encoder copies the final states of an encoder that ends in the same "
                f"block with as many layers; found {found}; make the two equal, or use last or mean"
            )
        elif config.layer_drop:
            yield (
                "an encoder whose final states are copied cannot be skipped; found "
                f"model.layer_drop={config.layer_drop:g}; set it to 0, or use last or mean"
            )
        elif last.options.get("residual_connection", True) and all(
            spec.options.get("initial_state") == "encoder" and "attention" not in spec.options
            for spec in parse_blocks(config.decoder)
        ):
            yield (
                "a decoder that reads only the encoder's final states leaves its outputs unused; "
                f"found a residual connection in '{last}' of model.encoder; add "
                "residual_connection=false to it"
            )

    def reads_source(self) -> bool:
        """Whether a decoder's block reads the encoder's output: attention or the initial state."""
        return self.attention != "none" or self.initial_state != "zero"

    @classmethod
    def suggest(cls, option: str, value: OptionValue) -> str:
        """Suggest a score for an alignment name, local attention for a self-attention window."""
        if option == "alignment" and value in catalogue("score"):
            return f"{value} is a score, not an alignment; write attention={value}"
        if option == "window":
            return (
                f"an RNN has no window over its own sequence; use transformer(window={value}), or "
                "attention=general, alignment=local_p for a window over the source"
            )
        if option in HEAD_SETTINGS:
            return "an RNN has single-head attention; leave it out, or use transformer"
        return ""


def _has_bidirectional_encoder(config: ModelConfig) -> bool:
    """Whether the encoder's last block is bidirectional; also true if its text is invalid."""
    try:
        last = parse_blocks(config.encoder)[-1].name
    except ConfigError:
        return True
    kind = catalogue("block").options(last)
    return kind is None or bool(kind.is_bidirectional)


def copies_final_state(config: ModelConfig) -> bool:
    """Whether a decoder's block starts with the final states of the encoder."""
    return bool(config.decoder) and any(
        spec.options.get("initial_state") == "encoder"
        for spec in parse_blocks(config.decoder, "model.decoder")
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class GRUOptions(RNNOptions):
    """Options of `gru`, which has no cell state."""

    block: ClassVar[str] = "gru"

    def problems(self, config: ModelConfig, *, memory: bool, causal: bool) -> Iterator[str]:
        """Yield the problems of any RNN, and `initial_cell`, which a GRU does not have."""
        yield from RNNOptions.problems(self, config, memory=memory, causal=causal)
        if self.initial_cell:
            yield (
                f"initial_cell needs an LSTM's cell state; found initial_cell=true in a "
                f"{self.block}; leave it out, or use lstm"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TanhRNNOptions(GRUOptions):
    """Options of `rnn`, which has no cell state."""

    block = "rnn"


@dataclass(frozen=True, kw_only=True, slots=True)
class SRUOptions(GRUOptions):
    """Options of `sru`, whose cell always starts as its hidden state."""

    block = "sru"

    def problems(self, config: ModelConfig, *, memory: bool, causal: bool) -> Iterator[str]:
        """Yield the problems of any RNN, and dropout of matrices that an SRU does not have."""
        yield from GRUOptions.problems(self, config, memory=memory, causal=causal)
        if self.weight_dropout:
            yield (
                "weight_dropout needs hidden-to-hidden matrices, which an sru does not have; found "
                f"weight_dropout={self.weight_dropout:g}; leave it out, or use lstm"
            )


# Options that only some alignments have.
_ALIGNMENT_OPTIONS = {
    "radius": ("local_m", "local_p", "location_sensitive", "location_cumulative"),
    "chunk_size": ("mocha",),
    "smoothing": ("location_sensitive", "location_cumulative", "coverage"),
    "coverage_loss_weight": ("coverage",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BidirectionalRNNOptions(BlockOptions):
    """Options of `bilstm`, `bigru`, `birnn` and `bisru`."""

    overridable = ("dropout", "residual")
    is_bidirectional = True

    residual_connection: bool = setting(
        True, "Whether the block has a residual connection and norm."
    )

    def problems(self, config: ModelConfig, *, memory: bool, causal: bool) -> Iterator[str]:
        """Yield a problem if the two directions cannot have half of the width each."""
        if config.width % 2:
            yield (
                "model.width must be even for a bidirectional RNN; "
                f"found {config.width}; try model.width={config.width + 1}"
            )

    @classmethod
    def suggest(cls, option: str, value: OptionValue) -> str:
        """Point to the decoder's blocks for attention, and to repetition for layers."""
        if option in ("attention", "alignment", "decoder", "input_feeding", "initial_state"):
            return (
                "it is an option of decoders; leave it out, or use "
                f"lstm({option}={value}) in model.decoder"
            )
        if option == "layers":
            return f"repeat the block instead: bigru*{value} or bilstm*{value}"
        return RNNOptions.suggest(option, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlicedRNNOptions(BlockOptions):
    """Options of `sliced_rnn`."""

    overridable = ("dropout", "residual")
    is_bidirectional = True  # a position sees the rest of its slice

    cell: str = setting("gru", "RNN of every level.", choices=("gru", "lstm", "rnn", "sru"))
    slice_length: int = setting(
        4, "Positions in a slice, and slices in a slice of slices.", at_least=2, at_most=65_536
    )
    levels: int = setting(
        2, "Levels of RNNs; the top one runs over all that is left.", at_least=2, at_most=16
    )
    residual_connection: bool = setting(
        True, "Whether the block has a residual connection and norm."
    )

    @classmethod
    def suggest(cls, option: str, value: OptionValue) -> str:
        """Return the hint of the bidirectional RNNs."""
        return BidirectionalRNNOptions.suggest(option, value)


def resolve_attention(attention: str, alignment: str) -> tuple[str, str]:
    """Return the names of the score and the alignment; `attention` may name either.

    An alignment without a score has the score of its paper.
    """
    if attention in catalogue("alignment"):
        return _DEFAULT_SCORES.get(attention, "additive"), attention
    return attention, alignment


def _score_ignores_features(score: str, alignment: str) -> bool:
    """Whether an alignment has score features that the score does not accept."""
    if (
        "has_score_features" not in catalogue("alignment")[alignment].traits
        or "accepts_features" in catalogue("score")[score].traits
    ):
        return False
    # A user's score may accept features without the trait in its entry.
    return not catalogue("score").load(score).accepts_features
