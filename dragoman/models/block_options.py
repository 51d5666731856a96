"""What may be asked of each block, and what it cannot be combined with: the options of `lstm(attention=additive)`, without tensors.

One class a kind of block, named in the block's entry in `models/catalogue.py`. Its fields are the keyword options of the block's
builder (a test compares the two), declared like settings: type, default, range, sentence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dragoman.attention import lsh_buckets as numbers
from dragoman.config import ModelConfig
from dragoman.config.setting import setting
from dragoman.errors import ConfigError
from dragoman.models.block_spec import OptionValue, parse_blocks
from dragoman.registry import catalogue

HEAD_SETTINGS = ("heads", "head_width", "kv_heads", "qk_norm", "talking_heads")
# The scores that papers put below their alignments, where it is not the additive one.
_DEFAULT_SCORES = {
    "monotonic": "normed_additive",
    "mocha": "normed_additive",
    "local_m": "general",
    "local_p": "general",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockOptions:
    """The options of a block that has none of its own; the base of all others."""

    overridable: ClassVar[
        tuple[str, ...]
    ] = ()  # settings of `model` that a block may have for itself: transformer(heads=4)
    is_bidirectional: ClassVar[bool] = (
        False  # whether it reads what comes after, and stands in encoders only
    )
    needs_memory: ClassVar[bool] = (
        False  # whether it reads the encoder's output, and stands in decoders only
    )
    has_self_attention: ClassVar[bool] = (
        False  # whether model.positions and model.window can act inside it
    )

    def problems(self, config: ModelConfig, *, memory: bool, causal: bool) -> Iterator[str]:
        """Say what is wrong between options, and with the place: with an encoder's `memory` or not, `causal` or not."""
        return iter(())

    def reads_source(self) -> bool:
        """Say whether a decoder's block learns anything of the source."""
        return True

    @classmethod
    def suggest(cls, option: str, value: OptionValue) -> str:
        """Say why an option or a value that somebody may try is not there, and what to use; nothing where there is no more to say."""
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerOptions(BlockOptions):
    """The options of `transformer`."""

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
        """Send those who want another alignment or score to the recurrent blocks."""
        if option not in ("attention", "alignment", "score"):
            return ""
        alignments = catalogue("alignment")
        if value in alignments and "stateful" in alignments[str(value)].traits:
            why = f"a Transformer layer weighs all positions at once, while {value} goes on from the position before"
            return f"{why}; use lstm(attention={value}) or gru(attention={value}) in model.decoder"
        why = "a Transformer layer's attention is the softmax of scaled dot products, which fused kernels compute"
        return f"{why}; leave it out, or use lstm(attention={value}) in model.decoder"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReformerOptions(BlockOptions):
    """The options of `reformer`."""

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
        "Reversible layers, which keep nothing in between for the way back.",
        at_least=1,
        at_most=1000,
    )
    attention: str = setting(
        "lsh", "Self-attention: by hashing, or to everything.", choices=("lsh", "full")
    )
    rounds: int = setting(
        4, "Rounds of hashing; more come nearer to full attention.", at_least=1, at_most=64
    )
    buckets: int = setting(
        0,
        "Buckets of each round; 0 for 2 * model.max_positions / window, which suits sequences that long.",
        at_least=0,
        at_most=1_000_000,
    )
    window: int = setting(
        64, "Tokens of its bucket that a token sees to a side.", at_least=1, at_most=65_536
    )
    torch_compile: bool = setting(
        False,
        "Whether hashed attention compiles its kernels, which pays for long sequences on a GPU.",
    )
    ffn_chunks: int = setting(
        1,
        "Parts of the positions that the feed-forward layers take at a time.",
        at_least=1,
        at_most=65_536,
    )

    def problems(self, config: ModelConfig, *, memory: bool, causal: bool) -> Iterator[str]:
        """Say what is wrong between options, and what hashing leaves no room for."""
        if self.attention == "full":
            return
        if self.buckets and (problem := numbers.bucket_problem(self.buckets)):
            yield f"buckets must be {problem.must}; found {self.buckets}; {problem.fix}"
        plain = ModelConfig()
        why = {
            "kv_heads": "queries are the keys, so there are as many of both",
            "qk_norm": "keys have length one already",
            "talking_heads": "heads look into different buckets",
            "window": "tokens see part of their bucket, and the block's own window says how much",
            "attention_dropout": "its weights are never all there to drop some of",
        }
        for name, reason in why.items():
            value = getattr(config, name)
            if value != getattr(plain, name):
                yield f"attention by hashing has no model.{name}: {reason}; found {value}; leave it out, or use attention=full"
        if "in_attention" in catalogue("positions")[config.positions].traits:
            found = f"model.positions={config.positions}"
            yield f"positions must be added to embeddings where attention hashes; found {found}; use sinusoidal, or attention=full"

    @classmethod
    def suggest(cls, option: str, value: OptionValue) -> str:
        """Say where the norms stand, and what attentions there are."""
        if option == "residual":
            return "reversible layers have their norms inside, for a sum must be taken off again; leave it out"
        if option == "attention":
            return "use attention=lsh or attention=full"
        return TransformerOptions.suggest(option, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossAttentionOptions(BlockOptions):
    """The options of `cross_attention`."""

    overridable = (*HEAD_SETTINGS, "dropout", "attention_dropout", "residual")
    needs_memory = True

    @classmethod
    def suggest(cls, option: str, value: OptionValue) -> str:
        """Say of scores and alignments what the Transformer's layer says."""
        return TransformerOptions.suggest(option, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForwardOptions(BlockOptions):
    """The options of `ffn`."""

    overridable = ("ffn_width", "activation", "dropout", "ffn_dropout", "residual")

    def reads_source(self) -> bool:
        """Take each position by itself."""
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvolutionOptions(BlockOptions):
    """The options of `conv`."""

    overridable = ("dropout", "attention_dropout")

    kernel_size: int = setting(
        3, "Places that a convolution sees, its own included.", at_least=1, at_most=10_000
    )
    weight_norm: bool = setting(True, "Whether the length of each weight vector is trained apart.")
    layers: int = setting(
        1, "Layers whose attentions share the target embeddings.", at_least=1, at_most=1000
    )
    attention: str = setting(
        "convs2s", "Attention of a decoder's layer: convs2s or none.", choices=("convs2s", "none")
    )
    activation: str = setting(
        "glu",
        "What follows the convolution: the paper's gate, or a function.",
        choices=("glu",),
        kind="activation",
    )
    scale_encoder_grad: bool = setting(
        False, "Whether the encoder's gradient is divided by twice the number of attentions."
    )

    def problems(self, config: ModelConfig, *, memory: bool, causal: bool) -> Iterator[str]:
        """Say what is wrong between options and place."""
        if not causal and self.kernel_size % 2 == 0:
            yield f"kernel_size must be odd in an encoder, to reach as far to either side; found {self.kernel_size}; try kernel_size={self.kernel_size + 1}"

    def reads_source(self) -> bool:
        """Say whether there is attention."""
        return self.attention != "none"

    @classmethod
    def suggest(cls, option: str, value: OptionValue) -> str:
        """Name the convolution's own word for a window, and the one attention that it has."""
        if option == "window":
            return "how far a convolution sees is its kernel; use conv(kernel_size=5) for two places to either side"
        if option in (*HEAD_SETTINGS, "attention", "alignment", "score"):
            return "a convolution attends to the source by one dot product a layer; leave it out, or use lstm or transformer"
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RNNOptions(BlockOptions):
    """The options of `lstm`, and the base of those of `gru`."""

    overridable = ("dropout", "residual")

    attention: str = setting(
        "none",
        "How a decoder's layer attends to the source: a score, or an alignment.",
        choices=("none",),
        kind="score+alignment",
    )
    alignment: str = setting("softmax", "What is made of the scores.", kind="alignment")
    decoder: str = setting(
        "luong",
        "Attention decoder: bahdanau (the query is the previous state), luong (the new state), gnmt (the lowest layer's previous state).",
        choices=("bahdanau", "luong", "gnmt"),
    )
    input_feeding: bool = setting(False, "Whether the last output is part of the next input.")
    layers: int = setting(1, "Layers stacked as one.", at_least=1, at_most=1000)
    initial_state: str = setting(
        "mean",
        "What of the memory a decoder's first state is made of; last_backward and last_bidirectional are a bidirectional encoder's last states.",
        choices=("first", "last", "mean", "last_backward", "last_bidirectional", "zero"),
    )
    reverse: bool = setting(False, "Whether an encoder's layer reads from the end.")
    residual_connection: bool = setting(
        True, "Whether there is a way around the layer, with its norm."
    )
    radius: int = setting(
        0,
        "Places to either side of a window or of location filters; 0 for the alignment's own.",
        at_least=0,
        at_most=10_000,
    )
    chunk_size: int = setting(
        0, "Keys that mocha looks back over; 0 for its own 4.", at_least=0, at_most=10_000
    )
    smoothing: bool = setting(
        False,
        "Whether weights are shares of the scores' sigmoids, below an alignment that remembers.",
    )
    coverage_loss_weight: float = setting(
        0.0, "Weight of the loss for attending to what is covered.", at_least=0.0, at_most=1000.0
    )
    initial_cell: bool = setting(
        False,
        "Whether an LSTM decoder's first cell state is projected from the memory as well; else it is zero.",
    )

    def problems(self, config: ModelConfig, *, memory: bool, causal: bool) -> Iterator[str]:
        """Say what is wrong between options and place."""
        attends, plain = self.attention != "none", RNNOptions()
        if attends and not memory:
            yield (
                f"attention needs a memory, which an encoder has not; found attention={self.attention}; "
                "leave it out, or move the block to model.decoder"
            )
        for option in ("alignment", "decoder", "input_feeding"):
            value = getattr(self, option)
            if not attends and value != getattr(plain, option):
                found = f"{option}={str(value).lower()} with attention=none"
                yield f"{option} needs attention, of which it is a part; found {found}; give attention=NAME, or leave {option} out"
        if (
            attends
            and self.alignment != plain.alignment
            and self.attention in catalogue("alignment")
        ):
            found, fitting = (
                f"attention={self.attention} and alignment={self.alignment}",
                _DEFAULT_SCORES.get(self.alignment, "additive"),
            )
            yield f"a block has one alignment; found {found}; give one, or a score for it: attention={fitting}"
        elif attends and _score_ignores_features(
            *resolve_attention(self.attention, self.alignment)
        ):
            yield (
                f"alignment={self.alignment} adds terms inside the score, and only a score with a hidden layer has room for them; "
                f"found attention={self.attention}; use attention=additive or normed_additive"
            )
        for option, alignments in _ALIGNMENT_OPTIONS.items():
            value = getattr(self, option)
            if value != getattr(plain, option) and (
                not attends
                or resolve_attention(self.attention, self.alignment)[1] not in alignments
            ):
                alignment = (
                    f" and alignment={self.alignment}"
                    if self.attention in catalogue("score")
                    else ""
                )  # else it is one itself
                found = f"{option}={str(value).lower()} with attention={self.attention}{alignment}"
                yield f"{option} is for alignment {' or '.join(alignments)}; found {found}; name one of these, or leave {option} out"
        if self.decoder == "gnmt" and self.input_feeding:
            yield "decoder=gnmt gives every layer the answer and feeds no output; found input_feeding=true; leave it out, or use decoder=luong"
        if self.initial_state != "mean" and not memory:
            yield f"initial_state is about a decoder's first state; found initial_state={self.initial_state} in an encoder; leave it out"
        if self.initial_cell and (not memory or self.initial_state == "zero"):
            found = (
                f"initial_cell=true with initial_state={self.initial_state}"
                if memory
                else "initial_cell=true in an encoder"
            )
            yield f"initial_cell projects a decoder's first cell state from the memory, as initial_state does; found {found}; leave it out"
        if (
            self.initial_state in ("last_backward", "last_bidirectional")
            and memory
            and not _has_bidirectional_encoder(config)
        ):
            found = f"initial_state={self.initial_state} with model.encoder=[{', '.join(config.encoder)}]"
            yield f"initial_state=last_backward and initial_state=last_bidirectional need an encoder that ends in bigru or bilstm; found {found}; use first, last or mean"
        if self.reverse and causal:
            yield "reverse needs a whole sentence; found reverse=true in a decoder; use it in model.encoder"

    def reads_source(self) -> bool:
        """Say whether there is attention, or a first state made of the memory."""
        return self.attention != "none" or self.initial_state != "zero"

    @classmethod
    def suggest(cls, option: str, value: OptionValue) -> str:
        """Tell scores from alignments, and windows over the source from windows of self-attention."""
        if option == "alignment" and value in catalogue("score"):
            return f"{value} is a score, not an alignment; write attention={value}"
        if option == "window":
            why = "a recurrence goes from one position to the next and has no window over its own sequence"
            return f"{why}; use transformer(window={value}), or for a window over the source attention=general, alignment=local_p"
        if option in HEAD_SETTINGS:
            return "a recurrent block attends with one head; leave it out, or use transformer for several"
        return ""


def _has_bidirectional_encoder(config: ModelConfig) -> bool:
    """Whether the encoder's last block reads from both ends; one that cannot be read is reported where the encoder is."""
    try:
        last = parse_blocks(config.encoder)[-1].name
    except ConfigError:
        return True
    kind = catalogue("block").options(last)
    return kind is None or bool(kind.is_bidirectional)


@dataclass(frozen=True, kw_only=True, slots=True)
class GRUOptions(RNNOptions):
    """The options of `gru`, which has no cell state."""

    def problems(self, config: ModelConfig, *, memory: bool, causal: bool) -> Iterator[str]:
        """Yield the recurrent block's problems, and a cell state that is not there."""
        yield from RNNOptions.problems(self, config, memory=memory, causal=causal)
        if self.initial_cell:
            yield "initial_cell needs a cell state, which an LSTM has; found initial_cell=true in a gru; leave it out, or use lstm"


# Options that only some alignments have.
_ALIGNMENT_OPTIONS = {
    "radius": ("local_m", "local_p", "location_sensitive", "location_cumulative"),
    "chunk_size": ("mocha",),
    "smoothing": ("location_sensitive", "location_cumulative", "coverage"),
    "coverage_loss_weight": ("coverage",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BidirectionalRNNOptions(BlockOptions):
    """The options of `bilstm` and `bigru`."""

    overridable = ("dropout", "residual")
    is_bidirectional = True

    residual_connection: bool = setting(
        True, "Whether there is a way around the layer, with its norm."
    )

    def problems(self, config: ModelConfig, *, memory: bool, causal: bool) -> Iterator[str]:
        """Say what is wrong with the place."""
        if config.width % 2:
            yield f"model.width must be even, for both sides share it; found {config.width}; try model.width={config.width + 1}"

    @classmethod
    def suggest(cls, option: str, value: OptionValue) -> str:
        """Send those who want attention to the decoder's blocks."""
        if option in ("attention", "alignment", "decoder", "input_feeding", "initial_state"):
            return f"an encoder's block attends to nothing; leave it out, or use lstm({option}={value}) in model.decoder"
        if option == "layers":
            return (
                f"its layers are written one after another; write bigru*{value} or bilstm*{value}"
            )
        return RNNOptions.suggest(option, value)


def resolve_attention(attention: str, alignment: str) -> tuple[str, str]:
    """Name a score and an alignment, where `attention` may be either: an alignment brings the score of its paper."""
    return (
        (_DEFAULT_SCORES.get(attention, "additive"), attention)
        if attention in catalogue("alignment")
        else (attention, alignment)
    )


def _score_ignores_features(score: str, alignment: str) -> bool:
    """Say whether an alignment has terms for a score that has no room for them."""
    if (
        "has_score_features" not in catalogue("alignment")[alignment].traits
        or "accepts_features" in catalogue("score")[score].traits
    ):
        return False
    return (
        not catalogue("score").load(score).accepts_features
    )  # a person's own score may have room and not say so in its entry
