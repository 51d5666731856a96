"""Settings of the model: each with its default, range and description."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dragoman.config.setting_declaration import setting


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Architecture of the model."""

    architecture: str = setting(
        "encoder_decoder",
        "Two stacks, or one that reads source and target under a prefix mask (UniLM).",
        choices=("encoder_decoder", "prefix_lm"),
    )
    encoder: tuple[str, ...] = setting(
        ("transformer*6",), "Encoder blocks, such as [transformer*6]."
    )
    decoder: tuple[str, ...] = setting(
        ("transformer*6",), "Decoder blocks, such as [transformer*6]."
    )
    width: int = setting(512, "Model dimension (d_model), D.", at_least=1, at_most=65_536)
    heads: int = setting(8, "Number of attention heads, H.", at_least=1, at_most=1024)
    head_width: int = setting(
        0,
        "Dimension of an attention head; 0 for model.width / model.heads.",
        at_least=0,
        at_most=4096,
    )
    value_width: int = setting(
        0,
        "Dimension of a head's values (d_v), apart from queries and keys; 0 for the head's.",
        at_least=0,
        at_most=4096,
    )
    kv_heads: int = setting(
        0,
        "Number of key-value heads (grouped-query attention); 0 for model.heads.",
        at_least=0,
        at_most=1024,
    )
    qk_norm: str = setting(
        "none",
        "Normalization of the queries and keys of each head (QK-Norm).",
        choices=("none", "layer", "rms", "t5", "scale"),
    )
    talking_heads: bool = setting(
        False,
        "Talking-heads attention: learned mixing of scores and weights across heads; slower.",
    )
    window: int = setting(
        0,
        "Sliding-window self-attention: positions to either side; 0 for full attention.",
        at_least=0,
        at_most=1_000_000,
    )
    ffn_width: int = setting(
        2048, "Inner dimension of the feed-forward networks (d_ff).", at_least=1, at_most=1_000_000
    )
    activation: str = setting(
        "relu", "Activation function of the feed-forward networks.", kind="activation"
    )
    norm: str = setting("layer", "Normalization layer.", kind="norm")
    norm_epsilon: float = setting(
        1e-5, "Epsilon of the normalization layers.", at_least=1e-12, at_most=0.1
    )
    residual: str = setting(
        "post_norm",
        "Residual connection around each sub-layer: post-norm, pre-norm, no norm, or scaled.",
        kind="residual",
    )
    final_norm: str = setting(
        "auto",
        "Whether each stack ends in a norm; auto follows model.residual.",
        choices=("auto", "on", "off"),
    )
    positions: str = setting(
        "sinusoidal",
        "Position embeddings, or relative positions in self-attention.",
        kind="positions",
    )
    max_positions: int = setting(
        1024, "Number of learned position embeddings.", at_least=8, at_most=1_000_000
    )
    tie_embeddings: str = setting(
        "all",
        "Tied weights: both embeddings and the output (all), target and output, or none.",
        choices=("all", "target", "none"),
    )
    embedding_width: int = setting(
        0,
        "Dimension of factorized embeddings (ALBERT), projected to model.width; 0 for none.",
        at_least=0,
        at_most=65_536,
    )
    fix_norm: bool = setting(
        False,
        "FixNorm: unit-norm embeddings with one learned scale.",
    )
    share_layers: str = setting(
        "none",
        "Weights shared by equal blocks of a stack, as in ALBERT.",
        choices=("none", "all", "attention", "ffn"),
    )
    layer_drop: float = setting(
        0.0,
        "LayerDrop: probability of skipping a block in training.",
        at_least=0.0,
        at_most=0.95,
    )
    initialization: str = setting(
        "xavier",
        "Weight initialization: Xavier, scaled by depth (DS-Init), or by residuals (GPT-2).",
        choices=("xavier", "depth_scaled", "residual_scaled"),
    )
    scale_embeddings: bool = setting(
        True, "Whether embeddings are multiplied by sqrt(model.width)."
    )
    attention_bias: bool = setting(True, "Whether the attention projections have a bias.")
    ffn_bias: bool = setting(
        True, "Whether the linear layers of the feed-forward networks have a bias."
    )
    output_bias: bool = setting(False, "Whether the output projection has a bias.")
    dropout: float = setting(
        0.1,
        "Dropout probability of sub-layer outputs and embeddings.",
        at_least=0.0,
        at_most=0.95,
    )
    attention_dropout: float = setting(
        0.0, "Dropout probability of the attention weights.", at_least=0.0, at_most=0.95
    )
    ffn_dropout: float = setting(
        0.0,
        "Dropout probability inside the feed-forward networks, after the activation.",
        at_least=0.0,
        at_most=0.95,
    )

    @property
    def resolved_head_width(self) -> int:
        """Return the dimension of an attention head, model.width / model.heads by default."""
        return self.head_width or self.width // self.heads

    @property
    def resolved_embedding_width(self) -> int:
        """Return the dimension of the embeddings, model.width by default."""
        return self.embedding_width or self.width

    def problems(self) -> Iterator[str]:
        """Yield inconsistencies between fields; ranges are validated before this."""
        if self.positions.startswith("sinusoidal") and self.width % 2:
            yield (
                f"model.width must be even for {self.positions} positions; found {self.width}; "
                f"try model.width={self.width + 1}"
            )
        if self.embedding_width >= self.width:
            found = f"{self.embedding_width} and {self.width}"
            yield (
                "model.embedding_width must be below model.width, because factorized "
                f"embeddings save weights only then; found {found}; set model.embedding_width=0"
            )
        if self.initialization != "xavier" and self.share_layers != "none":
            found = (
                f"model.initialization={self.initialization} and "
                f"model.share_layers={self.share_layers}"
            )
            yield (
                f"shared layers have no single depth to scale by; found {found}; set "
                "model.initialization=xavier, or model.share_layers=none"
            )

    def head_problems(self) -> Iterator[str]:
        """Yield problems of the attention heads; only for models with multi-head attention."""
        if not self.head_width and self.width % self.heads:
            near = _nearest_divisors(self.heads, self.width)
            yield (
                f"model.heads must divide model.width; found {self.heads} and {self.width}; try "
                f"model.heads={near}"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            near = _nearest_divisors(self.kv_heads, self.heads)
            yield (
                f"model.kv_heads must divide model.heads; found {self.kv_heads} and {self.heads}; "
                f"try model.kv_heads={near}"
            )
        if self.positions == "rotary" and self.resolved_head_width % 2:
            found = (
                f"model.head_width={self.head_width}"
                if self.head_width
                else f"model.width={self.width} by model.heads={self.heads}"
            )
            yield (
                "a head's width must be even for rotary positions; found "
                f"{self.resolved_head_width}, {found}; set an even model.head_width"
            )
        if self.positions == "transformer_xl" and self.heads * self.resolved_head_width % 2:
            found = f"{self.heads} heads of {self.resolved_head_width}"
            yield (
                "all heads together must have an even width for transformer_xl positions; found "
                f"{found}; change one of them"
            )


def _nearest_divisors(number: int, of: int) -> str:
    """Return the nearest divisors below and above a number as text: "5 or 10"."""
    below = max(n for n in range(1, number) if of % n == 0)
    above = next((n for n in range(number, of + 1) if of % n == 0), None)
    return f"{below} or {above}" if above else str(below)
