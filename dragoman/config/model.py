"""The settings of the model. Every field has its default, its range and its sentence here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dragoman.config.setting import setting


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """What the model is made of."""

    encoder: tuple[str, ...] = setting(
        ("transformer*6",), "The encoder's blocks, such as [transformer*6]."
    )
    decoder: tuple[str, ...] = setting(
        ("transformer*6",), "The decoder's blocks, such as [transformer*6]."
    )
    width: int = setting(
        512, "Size of every layer's input and output, D.", at_least=1, at_most=65_536
    )
    heads: int = setting(8, "Attention heads that share the width, H.", at_least=1, at_most=1024)
    head_width: int = setting(
        0,
        "Size of each attention head; 0 for model.width / model.heads. A head narrower than the sentence is long cannot form every pattern "
        "of weights, the low-rank bottleneck of Bhojanapalli et al. (2020): with many heads, set it apart from the width.",
        at_least=0,
        at_most=4096,
    )
    kv_heads: int = setting(
        0,
        "Heads of keys and values, each shared by a group of the model.heads; 0 for as many.",
        at_least=0,
        at_most=1024,
    )
    qk_norm: str = setting(
        "none",
        "Normalisation of each head's queries and keys.",
        choices=("none", "layer", "rms", "t5", "scale"),
    )
    talking_heads: bool = setting(
        False,
        "Whether heads mix their scores before the softmax and their weights after it, by trained matrices; slower.",
    )
    window: int = setting(
        0,
        "How far self-attention looks to either side; 0 for no limit.",
        at_least=0,
        at_most=1_000_000,
    )
    ffn_width: int = setting(
        2048, "Inner size of the feed-forward layers.", at_least=1, at_most=1_000_000
    )
    activation: str = setting("relu", "Function inside the feed-forward layers.", kind="activation")
    norm: str = setting("layer", "Normalisation of each layer.", kind="norm")
    norm_epsilon: float = setting(
        1e-5, "What keeps the norm from dividing by zero.", at_least=1e-12, at_most=0.1
    )
    residual: str = setting(
        "post_norm", "Where the norm stands around each layer.", kind="residual"
    )
    final_norm: str = setting(
        "auto",
        "Whether each stack ends in a norm; auto is what model.residual needs.",
        choices=("auto", "on", "off"),
    )
    positions: str = setting(
        "sinusoidal", "How the model knows the order of the words.", kind="positions"
    )
    max_positions: int = setting(
        1024, "Longest sequence that learned positions know.", at_least=8, at_most=1_000_000
    )
    tie_embeddings: str = setting(
        "all",
        "Weights shared by source embedding, target embedding and output.",
        choices=("all", "target", "none"),
    )
    embedding_width: int = setting(
        0,
        "Size of the embeddings that a matrix widens to model.width, and another narrows to at the output; 0 for model.width.",
        at_least=0,
        at_most=65_536,
    )
    fix_norm: bool = setting(
        False,
        "Whether every piece's embedding has length one; on the way in it is times one trained number.",
    )
    share_layers: str = setting(
        "none",
        "What equal blocks of a stack have in common with the first of them, so that it is trained once.",
        choices=("none", "all", "attention", "ffn"),
    )
    layer_drop: float = setting(
        0.0,
        "Probability that a block is left out in training; afterwards none is.",
        at_least=0.0,
        at_most=0.95,
    )
    initialization: str = setting(
        "xavier",
        "How a layer's first weights depend on where it stands: not at all, divided by the root of its depth, or, where they lead back "
        "into the stream, by the root of the number of such places.",
        choices=("xavier", "depth_scaled", "residual_scaled"),
    )
    scale_embeddings: bool = setting(
        True, "Whether embeddings are multiplied by the square root of the width."
    )
    attention_bias: bool = setting(True, "Whether the attention projections have a bias.")
    ffn_bias: bool = setting(True, "Whether the feed-forward layers' products have a bias.")
    output_bias: bool = setting(False, "Whether the output projection has a bias.")
    dropout: float = setting(
        0.1,
        "Share of each layer's output, and of the embeddings, dropped in training.",
        at_least=0.0,
        at_most=0.95,
    )
    attention_dropout: float = setting(
        0.0, "Share of attention weights dropped in training.", at_least=0.0, at_most=0.95
    )
    ffn_dropout: float = setting(
        0.0,
        "Share of the feed-forward layers' inner values dropped in training.",
        at_least=0.0,
        at_most=0.95,
    )

    @property
    def resolved_head_width(self) -> int:
        """Give the width of each attention head, whether it is set or follows from the model's."""
        return self.head_width or self.width // self.heads

    @property
    def resolved_embedding_width(self) -> int:
        """Give the width of the embeddings, whether it is set or is the model's."""
        return self.embedding_width or self.width

    def problems(self) -> Iterator[str]:
        """Say what is wrong between fields; ranges are checked before this."""
        if self.positions.startswith("sinusoidal") and self.width % 2:
            yield f"model.width must be even for {self.positions} positions; found {self.width}; try model.width={self.width + 1}"
        if self.embedding_width >= self.width:
            found = f"{self.embedding_width} and {self.width}"
            yield f"model.embedding_width must be below model.width, for it saves weights; found {found}; set model.embedding_width=0"
        if self.initialization != "xavier" and self.share_layers != "none":
            found = f"model.initialization={self.initialization} and model.share_layers={self.share_layers}"
            yield f"weights that layers share stand at no one depth; found {found}; set model.initialization=xavier, or model.share_layers=none"

    def head_problems(self) -> Iterator[str]:
        """Say what is wrong with the heads, for blocks that have any: a model of recurrences alone may have any width."""
        if not self.head_width and self.width % self.heads:
            near = _nearest_divisors(self.heads, self.width)
            yield f"model.heads must divide model.width; found {self.heads} and {self.width}; try model.heads={near}"
        if self.kv_heads and self.heads % self.kv_heads:
            near = _nearest_divisors(self.kv_heads, self.heads)
            yield f"model.kv_heads must divide model.heads; found {self.kv_heads} and {self.heads}; try model.kv_heads={near}"
        if self.positions == "rotary" and self.resolved_head_width % 2:
            found = (
                f"model.head_width={self.head_width}"
                if self.head_width
                else f"model.width={self.width} by model.heads={self.heads}"
            )
            yield f"a head's width must be even for rotary positions; found {self.resolved_head_width}, {found}; set an even model.head_width"
        if self.positions == "transformer_xl" and self.heads * self.resolved_head_width % 2:
            found = f"{self.heads} heads of {self.resolved_head_width}"
            yield f"all heads together must have an even width for transformer_xl positions; found {found}; change one of them"


def _nearest_divisors(number: int, of: int) -> str:
    """Name the nearest divisors below and above a number: "5 or 10"."""
    below = max(n for n in range(1, number) if of % n == 0)
    above = next((n for n in range(number, of + 1) if of % n == 0), None)
    return f"{below} or {above}" if above else str(below)
