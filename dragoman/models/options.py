"""What may be asked of each block, and what it cannot be combined with: the options of `lstm(attention=additive)`, without tensors.

One class a kind of block, named in the block's entry in `models/catalogue.py`. Its fields are the keyword options of the block's
builder (a test compares the two), declared like settings: type, default, range, sentence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dragoman.attention import buckets as numbers
from dragoman.config import ModelConfig
from dragoman.config.setting import setting
from dragoman.errors import ConfigError
from dragoman.models.spec import Value, parse_blocks
from dragoman.registry import catalogue

HEADS = ("heads", "head_width", "kv_heads", "qk_norm", "talking_heads")
# The scores that papers put below their alignments, where it is not the additive one.
_FITTING = {"monotonic": "normed_additive", "mocha": "normed_additive", "local_m": "general", "local_p": "general"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options of a block that has none of its own; the base of all others."""

    overrides: ClassVar[tuple[str, ...]] = ()  # settings of `model` that a block may have for itself: self(heads=4)
    sees_future: ClassVar[bool] = False  # whether it reads what comes after, and stands in encoders only
    needs_memory: ClassVar[bool] = False  # whether it reads the encoder's output, and stands in decoders only
    attends_itself: ClassVar[bool] = False  # whether model.positions and model.window can act inside it

    def problems(self, config: ModelConfig, *, memory: bool, causal: bool) -> Iterator[str]:
        """Say what is wrong between options, and with the place: with an encoder's `memory` or not, `causal` or not."""
        return iter(())

    def reads_source(self) -> bool:
        """Say whether a decoder's block learns anything of the source."""
        return True

    @classmethod
    def instead(cls, option: str, value: Value) -> str:
        """Say why an option or a value that somebody may try is not there, and what to use; nothing where there is no more to say."""
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerOptions(Options):
    """The options of `self`."""

    overrides = (*HEADS, "window", "feedforward", "activation", "dropout", "attention_dropout", "feedforward_dropout")
    attends_itself = True

    @classmethod
    def instead(cls, option: str, value: Value) -> str:
        """Send those who want another alignment or score to the recurrent blocks."""
        if option not in ("attention", "alignment", "score"):
            return ""
        alignments = catalogue("alignment")
        if value in alignments and "remembers" in alignments[str(value)].traits:
            why = f"a Transformer layer weighs all positions at once, while {value} goes on from the position before"
            return f"{why}; use lstm(attention={value}) or gru(attention={value}) in model.decoder"
        why = "a Transformer layer's attention is the softmax of scaled dot products, which fused kernels compute"
        return f"{why}; leave it out, or use lstm(attention={value}) in model.decoder"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReformerOptions(Options):
    """The options of `reformer`."""

    overrides = (*HEADS, "feedforward", "activation", "dropout", "attention_dropout", "feedforward_dropout")
    attends_itself = True

    layers: int = setting(1, "Reversible layers, which keep nothing in between for the way back.", at_least=1, at_most=1000)
    attention: str = setting("lsh", "Self-attention: by hashing, or to everything.", choices=("lsh", "full"))
    rounds: int = setting(4, "Rounds of hashing; more come nearer to full attention.", at_least=1, at_most=64)
    buckets: int = setting(
        0, "Buckets of each round; 0 for 2 * model.max_positions / window, which suits sequences that long.", at_least=0, at_most=1_000_000
    )
    window: int = setting(64, "Tokens of its bucket that a token sees to a side.", at_least=1, at_most=65_536)
    compiled: bool = setting(False, "Whether hashed attention compiles its kernels, which pays for long sequences on a GPU.")
    chunks: int = setting(1, "Parts of the positions that the feed-forward layers take at a time.", at_least=1, at_most=65_536)

    def problems(self, config: ModelConfig, *, memory: bool, causal: bool) -> Iterator[str]:
        """Say what is wrong between options, and what hashing leaves no room for."""
        if self.attention == "full":
            return
        if self.buckets and (problem := numbers.problem(self.buckets)):
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
        if "within" in catalogue("positions")[config.positions].traits:
            found = f"model.positions={config.positions}"
            yield f"positions must be added to embeddings where attention hashes; found {found}; use sinusoidal, or attention=full"

    @classmethod
    def instead(cls, option: str, value: Value) -> str:
        """Say where the norms stand, and what attentions there are."""
        if option == "residual":
            return "reversible layers have their norms inside, for a sum must be taken off again; leave it out"
        if option == "attention":
            return "use attention=lsh or attention=full"
        return TransformerOptions.instead(option, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttendOptions(Options):
    """The options of `attend`."""

    overrides = (*HEADS, "dropout", "attention_dropout", "residual")
    needs_memory = True

    @classmethod
    def instead(cls, option: str, value: Value) -> str:
        """Say of scores and alignments what the Transformer's layer says."""
        return TransformerOptions.instead(option, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForwardOptions(Options):
    """The options of `feedforward`."""

    overrides = ("feedforward", "activation", "dropout", "feedforward_dropout", "residual")

    def reads_source(self) -> bool:
        """Take each position by itself."""
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvolutionOptions(Options):
    """The options of `conv`."""

    overrides = ("dropout", "attention_dropout")

    kernel: int = setting(3, "Places that a convolution sees, its own included.", at_least=1, at_most=10_000)
    weight_norm: bool = setting(True, "Whether the length of each weight vector is trained apart.")
    layers: int = setting(1, "Layers whose attentions share the target embeddings.", at_least=1, at_most=1000)
    attention: str = setting("embedded", "A decoder's attention: the paper's, or none.", choices=("embedded", "none"))
    activation: str = setting("glu", "What follows the convolution: the paper's gate, or a function.", choices=("glu",), kind="activation")
    damping: bool = setting(False, "Whether the encoder's gradient is divided by twice the number of attentions.")

    def problems(self, config: ModelConfig, *, memory: bool, causal: bool) -> Iterator[str]:
        """Say what is wrong between options and place."""
        if not causal and self.kernel % 2 == 0:
            yield f"kernel must be odd in an encoder, to reach as far to either side; found {self.kernel}; try kernel={self.kernel + 1}"

    def reads_source(self) -> bool:
        """Say whether there is attention."""
        return self.attention != "none"

    @classmethod
    def instead(cls, option: str, value: Value) -> str:
        """Name the convolution's own word for a window, and the one attention that it has."""
        if option == "window":
            return "how far a convolution sees is its kernel; use conv(kernel=5) for two places to either side"
        if option in (*HEADS, "attention", "alignment", "score"):
            return "a convolution attends to the source by one dot product a layer; leave it out, or use lstm or self"
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentOptions(Options):
    """The options of `lstm`, and the base of those of `gru`."""

    overrides = ("dropout", "residual")

    attention: str = setting(
        "none", "How a decoder's layer attends to the source: a score, or an alignment.", choices=("none",), kind="score+alignment"
    )
    alignment: str = setting("softmax", "What is made of the scores.", kind="alignment")
    query: str = setting(
        "after", "Whether the state before or after the step asks, or the lowest layer's for all.", choices=("before", "after", "below")
    )
    feeding: bool = setting(False, "Whether the last output is part of the next input.")
    layers: int = setting(1, "Layers stacked as one.", at_least=1, at_most=1000)
    initial: str = setting(
        "mean",
        "What of the memory a decoder's first state is made of; backward and ends are a two-sided encoder's last states.",
        choices=("first", "last", "mean", "backward", "ends", "zero"),
    )
    reverse: bool = setting(False, "Whether an encoder's layer reads from the end.")
    skip: bool = setting(True, "Whether there is a way around the layer, with its norm.")
    reach: int = setting(
        0, "Places to either side of a window or of location filters; 0 for the alignment's own.", at_least=0, at_most=10_000
    )
    chunk: int = setting(0, "Keys that mocha looks back over; 0 for its own 4.", at_least=0, at_most=10_000)
    smoothing: bool = setting(False, "Whether weights are shares of the scores' sigmoids, below an alignment that remembers.")
    penalty: float = setting(0.0, "Weight of the loss for attending to what is covered.", at_least=0.0, at_most=1000.0)
    initial_cell: bool = setting(False, "Whether an LSTM decoder's first cell state is projected from the memory as well; else it is zero.")

    def problems(self, config: ModelConfig, *, memory: bool, causal: bool) -> Iterator[str]:
        """Say what is wrong between options and place."""
        attends, plain = self.attention != "none", RecurrentOptions()
        if attends and not memory:
            yield (
                f"attention needs a memory, which an encoder has not; found attention={self.attention}; "
                "leave it out, or move the block to model.decoder"
            )
        for option in ("alignment", "query", "feeding"):
            value = getattr(self, option)
            if not attends and value != getattr(plain, option):
                found = f"{option}={str(value).lower()} with attention=none"
                yield f"{option} needs attention, of which it is a part; found {found}; give attention=NAME, or leave {option} out"
        if attends and self.alignment != plain.alignment and self.attention in catalogue("alignment"):
            found, fitting = f"attention={self.attention} and alignment={self.alignment}", _FITTING.get(self.alignment, "additive")
            yield f"a block has one alignment; found {found}; give one, or a score for it: attention={fitting}"
        elif attends and _unheard(*pair_of(self.attention, self.alignment)):
            yield (
                f"alignment={self.alignment} adds terms inside the score, and only a score with a hidden layer has room for them; "
                f"found attention={self.attention}; use attention=additive or normed_additive"
            )
        for option, alignments in _OF_ALIGNMENTS.items():
            value = getattr(self, option)
            if value != getattr(plain, option) and (not attends or pair_of(self.attention, self.alignment)[1] not in alignments):
                alignment = f" and alignment={self.alignment}" if self.attention in catalogue("score") else ""  # else it is one itself
                found = f"{option}={str(value).lower()} with attention={self.attention}{alignment}"
                yield f"{option} is for alignment {' or '.join(alignments)}; found {found}; name one of these, or leave {option} out"
        if self.query == "below" and self.feeding:
            yield "query=below gives every layer the answer and feeds no output; found feeding=true; leave it out, or use query=after"
        if self.initial != "mean" and not memory:
            yield f"initial is about a decoder's first state; found initial={self.initial} in an encoder; leave it out"
        if self.initial_cell and (not memory or self.initial == "zero"):
            found = f"initial_cell=true with initial={self.initial}" if memory else "initial_cell=true in an encoder"
            yield f"initial_cell projects a decoder's first cell state from the memory, as initial does; found {found}; leave it out"
        if self.initial in ("backward", "ends") and memory and not _two_sided(config):
            found = f"initial={self.initial} with model.encoder=[{', '.join(config.encoder)}]"
            yield f"initial=backward and initial=ends need an encoder that ends in bigru or bilstm; found {found}; use first, last or mean"
        if self.reverse and causal:
            yield "reverse needs a whole sentence; found reverse=true in a decoder; use it in model.encoder"

    def reads_source(self) -> bool:
        """Say whether there is attention, or a first state made of the memory."""
        return self.attention != "none" or self.initial != "zero"

    @classmethod
    def instead(cls, option: str, value: Value) -> str:
        """Tell scores from alignments, and windows over the source from windows of self-attention."""
        if option == "alignment" and value in catalogue("score"):
            return f"{value} is a score, not an alignment; write attention={value}"
        if option == "window":
            why = "a recurrence goes from one position to the next and has no window over its own sequence"
            return f"{why}; use self(window={value}), or for a window over the source attention=general, alignment=local_p"
        if option in HEADS:
            return "a recurrent block attends with one head; leave it out, or use self for several"
        return ""


def _two_sided(config: ModelConfig) -> bool:
    """Whether the encoder's last block reads from both ends; one that cannot be read is reported where the encoder is."""
    try:
        last = parse_blocks(config.encoder)[-1].name
    except ConfigError:
        return True
    kind = catalogue("block").options(last)
    return kind is None or bool(kind.sees_future)


@dataclass(frozen=True, kw_only=True, slots=True)
class GRUOptions(RecurrentOptions):
    """The options of `gru`, which has no cell state."""

    def problems(self, config: ModelConfig, *, memory: bool, causal: bool) -> Iterator[str]:
        """Yield the recurrent block's problems, and a cell state that is not there."""
        yield from RecurrentOptions.problems(self, config, memory=memory, causal=causal)
        if self.initial_cell:
            yield "initial_cell needs a cell state, which an LSTM has; found initial_cell=true in a gru; leave it out, or use lstm"


# Options that only some alignments have.
_OF_ALIGNMENTS = {
    "reach": ("local_m", "local_p", "location_sensitive", "location_cumulative"),
    "chunk": ("mocha",),
    "smoothing": ("location_sensitive", "location_cumulative", "coverage"),
    "penalty": ("coverage",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoSidedOptions(Options):
    """The options of `bilstm` and `bigru`."""

    overrides = ("dropout", "residual")
    sees_future = True

    skip: bool = setting(True, "Whether there is a way around the layer, with its norm.")

    def problems(self, config: ModelConfig, *, memory: bool, causal: bool) -> Iterator[str]:
        """Say what is wrong with the place."""
        if config.width % 2:
            yield f"model.width must be even, for both sides share it; found {config.width}; try model.width={config.width + 1}"

    @classmethod
    def instead(cls, option: str, value: Value) -> str:
        """Send those who want attention to the decoder's blocks."""
        if option in ("attention", "alignment", "query", "feeding", "initial"):
            return f"an encoder's block attends to nothing; leave it out, or use lstm({option}={value}) in model.decoder"
        if option == "layers":
            return f"its layers are written one after another; write bigru*{value} or bilstm*{value}"
        return RecurrentOptions.instead(option, value)


def pair_of(attention: str, alignment: str) -> tuple[str, str]:
    """Name a score and an alignment, where `attention` may be either: an alignment brings the score of its paper."""
    return (_FITTING.get(attention, "additive"), attention) if attention in catalogue("alignment") else (attention, alignment)


def _unheard(score: str, alignment: str) -> bool:
    """Say whether an alignment has terms for a score that has no room for them."""
    if "gives_features" not in catalogue("alignment")[alignment].traits or "takes_features" in catalogue("score")[score].traits:
        return False
    return not catalogue("score").load(score).takes_features  # a person's own score may have room and not say so in its entry
