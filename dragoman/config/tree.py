"""The settings themselves. Every field has its default, its range and its sentence here and nowhere else."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

from dragoman.config.setting import setting, settings_of
from dragoman.errors import ConfigError, nearest
from dragoman.registry import catalogue


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConfig:
    """How raw text becomes pieces."""

    kind: str = setting("bpe", "How text is cut into pieces.", choices=("bpe", "unigram", "characters"))
    vocabulary: int = setting(8000, "Number of pieces, byte pieces and special ones included.", at_least=8, at_most=1_000_000)
    joint: bool = setting(True, "Whether both sides share one vocabulary.")
    byte_fallback: bool = setting(True, "Whether an unseen character is spelt in bytes instead of becoming unknown.")
    coverage: float = setting(0.9999, "Share of the text's characters that get pieces of their own.", at_least=0.9, at_most=1.0)
    normalisation: str = setting("nfc", "Unicode form that both sides are put into.", choices=("none", "nfc", "nfkc"))
    dropout: float = setting(0.0, "Share of BPE merges skipped at random in training.", at_least=0.0, at_most=0.9)
    sample_lines: int = setting(2_000_000, "Lines that the vocabulary is learnt from, at most.", at_least=1)

    def problems(self) -> Iterator[str]:
        """Say what is wrong between fields."""
        if self.dropout and self.kind != "bpe":
            yield f"text.dropout works on BPE merges and needs text.kind=bpe; found text.kind={self.kind}; set text.dropout=0"
        if self.byte_fallback and self.kind != "characters" and self.vocabulary < 262:
            yield (
                f"text.vocabulary must be at least 262 with text.byte_fallback, whose bytes take 256; found {self.vocabulary}; "
                "raise it, or set text.byte_fallback=false"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the text comes from and what is left out."""

    src: str = setting("", "File of source sentences, one a line; plain, .gz or .xz.")
    tgt: str = setting("", "File of target sentences, aligned with data.src.")
    pairs: str = setting("", "One TSV, CSV or JSONL file with both sides, instead of data.src and data.tgt.")
    valid_src: str = setting("", "Source sentences to validate on.")
    valid_tgt: str = setting("", "Target sentences to validate on.")
    valid_pairs: str = setting("", "One file with both sides to validate on.")
    src_field: str = setting("", "Column of the source in data.pairs: a name, or a number from 1; found by itself when empty.")
    tgt_field: str = setting("", "Column of the target in data.pairs: a name, or a number from 1; found by itself when empty.")
    src_lang: str = setting("", "Source language, such as de: for the model card.")
    tgt_lang: str = setting("", "Target language, such as zh: for the model card and the scorer's tokeniser.")
    max_length: int = setting(
        200, "Longest sentence, in pieces, that is trained on; longer pairs are set aside and counted.", at_least=4, at_most=65_000
    )
    max_line_bytes: int = setting(65_536, "Longest line, in bytes, that is read.", at_least=64)
    on_bad_line: str = setting("stop", "What to do with a pair that has a bad line.", choices=("stop", "skip"))
    cache: str = setting("", "Folder for prepared data; by default dragoman's own cache folder.")

    def problems(self) -> Iterator[str]:
        """Say what is wrong between fields."""
        if self.pairs and (self.src or self.tgt):
            yield f"data.pairs stands in place of data.src and data.tgt; found {self.pairs} and {self.src or self.tgt}; keep one form"
        if bool(self.src) != bool(self.tgt):
            yield f"data.src and data.tgt go together; found only {self.src or self.tgt}; give both"
        if self.valid_pairs and (self.valid_src or self.valid_tgt):
            yield (
                "data.valid_pairs stands in place of data.valid_src and data.valid_tgt; "
                f"found {self.valid_pairs} and {self.valid_src or self.valid_tgt}; keep one form"
            )
        if bool(self.valid_src) != bool(self.valid_tgt):
            yield f"data.valid_src and data.valid_tgt go together; found only {self.valid_src or self.valid_tgt}; give both"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """What the model is made of."""

    encoder: tuple[str, ...] = setting(("self*6",), "The encoder's blocks, such as [self*6].")
    decoder: tuple[str, ...] = setting(("self*6",), "The decoder's blocks, such as [self*6].")
    width: int = setting(512, "Size of every layer's input and output, D.", at_least=1, at_most=65_536)
    heads: int = setting(8, "Attention heads that share the width, H.", at_least=1, at_most=1024)
    head_width: int = setting(
        0,
        "Size of each attention head; 0 for model.width / model.heads. A head narrower than the sentence is long cannot form every pattern "
        "of weights, the low-rank bottleneck of Bhojanapalli et al. (2020): with many heads, set it apart from the width.",
        at_least=0,
        at_most=4096,
    )
    kv_heads: int = setting(
        0, "Heads of keys and values, each shared by a group of the model.heads; 0 for as many.", at_least=0, at_most=1024
    )
    qk_norm: str = setting("none", "Normalisation of each head's queries and keys.", choices=("none", "layer", "rms", "t5", "scale"))
    talking_heads: bool = setting(
        False, "Whether heads mix their scores before the softmax and their weights after it, by trained matrices; slower."
    )
    window: int = setting(0, "How far self-attention looks to either side; 0 for no limit.", at_least=0, at_most=1_000_000)
    feedforward: int = setting(2048, "Inner size of the feed-forward layers.", at_least=1, at_most=1_000_000)
    activation: str = setting("relu", "Function inside the feed-forward layers.", kind="activation")
    norm: str = setting("layer", "Normalisation of each layer.", kind="norm")
    norm_epsilon: float = setting(1e-5, "What keeps the norm from dividing by zero.", at_least=1e-12, at_most=0.1)
    residual: str = setting("post", "Where the norm stands around each layer.", kind="residual")
    final_norm: str = setting(
        "auto", "Whether each stack ends in a norm; auto is what model.residual needs.", choices=("auto", "on", "off")
    )
    positions: str = setting("sinusoidal", "How the model knows the order of the words.", kind="positions")
    max_positions: int = setting(1024, "Longest sequence that learned positions know.", at_least=8, at_most=1_000_000)
    tie: str = setting("all", "Weights shared by source embedding, target embedding and output.", choices=("all", "target", "none"))
    embedding_width: int = setting(
        0,
        "Size of the embeddings that a matrix widens to model.width, and another narrows to at the output; 0 for model.width.",
        at_least=0,
        at_most=65_536,
    )
    fix_norm: bool = setting(False, "Whether every piece's embedding has length one; on the way in it is times one trained number.")
    share_layers: str = setting(
        "none",
        "What equal blocks of a stack have in common with the first of them, so that it is trained once.",
        choices=("none", "all", "attention", "feedforward"),
    )
    layer_drop: float = setting(0.0, "Probability that a block is left out in training; afterwards none is.", at_least=0.0, at_most=0.95)
    initialise: str = setting(
        "plain",
        "How a layer's first weights depend on where it stands: not at all, divided by the root of its depth, or, where they lead back "
        "into the stream, by the root of the number of such places.",
        choices=("plain", "depth", "residual"),
    )
    scale_embeddings: bool = setting(True, "Whether embeddings are multiplied by the square root of the width.")
    attention_bias: bool = setting(True, "Whether the attention projections have a bias.")
    feedforward_bias: bool = setting(True, "Whether the feed-forward layers' products have a bias.")
    output_bias: bool = setting(False, "Whether the output projection has a bias.")
    dropout: float = setting(0.1, "Share of each layer's output, and of the embeddings, dropped in training.", at_least=0.0, at_most=0.95)
    attention_dropout: float = setting(0.0, "Share of attention weights dropped in training.", at_least=0.0, at_most=0.95)
    feedforward_dropout: float = setting(
        0.0, "Share of the feed-forward layers' inner values dropped in training.", at_least=0.0, at_most=0.95
    )

    @property
    def head_size(self) -> int:
        """Give the width of each attention head, whether it is set or follows from the model's."""
        return self.head_width or self.width // self.heads

    @property
    def embedding_size(self) -> int:
        """Give the width of the embeddings, whether it is set or is the model's."""
        return self.embedding_width or self.width

    def problems(self) -> Iterator[str]:
        """Say what is wrong between fields; ranges are checked before this."""
        if self.positions.startswith("sinusoidal") and self.width % 2:
            yield f"model.width must be even for {self.positions} positions; found {self.width}; try model.width={self.width + 1}"
        if self.embedding_width >= self.width:
            found = f"{self.embedding_width} and {self.width}"
            yield f"model.embedding_width must be below model.width, for it saves weights; found {found}; set model.embedding_width=0"
        if self.initialise != "plain" and self.share_layers != "none":
            found = f"model.initialise={self.initialise} and model.share_layers={self.share_layers}"
            yield f"weights that layers share stand at no one depth; found {found}; set model.initialise=plain, or model.share_layers=none"

    def head_problems(self) -> Iterator[str]:
        """Say what is wrong with the heads, for blocks that have any: a model of recurrences alone may have any width."""
        if not self.head_width and self.width % self.heads:
            near = _divisors_near(self.heads, self.width)
            yield f"model.heads must divide model.width; found {self.heads} and {self.width}; try model.heads={near}"
        if self.kv_heads and self.heads % self.kv_heads:
            near = _divisors_near(self.kv_heads, self.heads)
            yield f"model.kv_heads must divide model.heads; found {self.kv_heads} and {self.heads}; try model.kv_heads={near}"
        if self.positions == "rotary" and self.head_size % 2:
            found = f"model.head_width={self.head_width}" if self.head_width else f"model.width={self.width} by model.heads={self.heads}"
            yield f"a head's width must be even for rotary positions; found {self.head_size}, {found}; set an even model.head_width"
        if self.positions == "transformer_xl" and self.heads * self.head_size % 2:
            found = f"{self.heads} heads of {self.head_size}"
            yield f"all heads together must have an even width for transformer_xl positions; found {found}; change one of them"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How the model is trained."""

    steps: int = setting(100_000, "Updates of the weights.", at_least=1)
    batch_tokens: int = setting(25_000, "Padded slots of the longer side in one micro-batch.", at_least=16)
    accumulate: int = setting(1, "Micro-batches that make one update, over all ranks.", at_least=1, at_most=100_000)
    seed: int = setting(1, "Where all randomness starts.", at_least=0, at_most=2**62)
    optimiser: str = setting("adam", "How gradients become changes.", kind="optimiser")
    learning_rate: float = setting(
        7e-4, "The schedule's highest learning rate; for noam, the factor before the paper's formula.", at_least=0.0, at_most=100.0
    )
    schedule: str = setting("inverse_sqrt", "How the learning rate moves.", kind="schedule")
    warmup: int = setting(4000, "Updates over which the learning rate rises.", at_least=0)
    cooldown: float = setting(0.2, "Share of the updates over which warm-up-stable-decay falls to zero.", at_least=0.0, at_most=1.0)
    beta1: float = setting(0.9, "Adam's memory of the gradient.", at_least=0.0, at_most=0.9999)
    beta2: float = setting(0.98, "Adam's memory of the squared gradient.", at_least=0.0, at_most=0.999999)
    epsilon: float = setting(1e-9, "What keeps Adam from dividing by zero.", at_least=1e-15, at_most=1.0)
    weight_decay: float = setting(0.0, "Pull of the matrices towards zero.", at_least=0.0, at_most=10.0)
    clip: float = setting(0.0, "Longest gradient, as a norm; 0 for no limit.", at_least=0.0)
    label_smoothing: float = setting(0.1, "Probability spread over the wrong pieces.", at_least=0.0, at_most=0.9)
    ema: float = setting(0.0, "Decay of the running average of the weights; 0 for none.", at_least=0.0, at_most=0.99999)
    average: int = setting(1, "Newest checkpoints averaged into the finished model.", at_least=1, at_most=100)
    choose: str = setting("best", "Which weights the finished model takes.", choices=("best", "last"))
    precision: str = setting("auto", "Number format of the products.", choices=("auto", "float32", "bfloat16"))
    compile: str = setting("auto", "Whether the model is compiled.", choices=("auto", "on", "off"))
    replay: str = setting("auto", "Whether a GPU's launches are recorded for each shape and replayed as one.", choices=("auto", "off"))
    device: str = setting("auto", "Where to run: auto, cpu, cuda or cuda:1, mps.")
    threads: int = setting(0, "CPU threads; 0 for all cores.", at_least=0, at_most=1024)
    checkpoint_every: int = setting(1000, "Updates between checkpoints.", at_least=1)
    keep: int = setting(3, "Newest checkpoints kept, besides the best.", at_least=1, at_most=1000)
    validate_every: int = setting(1000, "Updates between validations.", at_least=1)
    validate_sentences: int = setting(200, "Validation sentences that are also translated and scored; 0 for none.", at_least=0)
    best_by: str = setting("loss", "What the best checkpoint is the best in.", choices=("loss", "bleu"))
    patience: int = setting(0, "Validations without improvement after which training stops; 0 for never.", at_least=0)
    budget: float = setting(0.0, "Seconds that the whole run may take; 0 for no limit.", at_least=0.0)
    deterministic: bool = setting(False, "Whether a GPU must give the same bits each time, and slower.")
    tensorboard: bool = setting(False, "Whether curves are also written for TensorBoard.")

    def problems(self) -> Iterator[str]:
        """Say what is wrong between fields."""
        if self.average > self.keep:
            found = f"train.average={self.average} and train.keep={self.keep}"
            yield f"train.average needs that many kept checkpoints; found {found}; raise train.keep"
        if self.best_by == "bleu" and not self.validate_sentences:
            yield "train.best_by=bleu needs sentences to translate; found train.validate_sentences=0; raise it, or set train.best_by=loss"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """How the trained model translates unless told otherwise."""

    beam: int = setting(4, "Hypotheses kept in beam search; 1 is greedy.", at_least=1, at_most=256)
    length_penalty: float = setting(0.6, "Exponent of the length penalty of Wu et al. (2016); 0 for none.", at_least=0.0, at_most=5.0)
    max_ratio: float = setting(2.0, "Longest output, as a multiple of the source's pieces ...", at_least=0.1, at_most=100.0)
    max_extra: int = setting(50, "... plus this many pieces.", at_least=1, at_most=10_000)
    batch_tokens: int = setting(4096, "Padded slots of source and beam translated together.", at_least=1)

    def problems(self) -> Iterator[str]:
        """Say what is wrong between fields."""
        return iter(())


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything that decides a run: give it to `dragoman.train`."""

    recipe: str = ""  # the recipe that the rest started from, for `dragoman info`
    text: TextConfig = field(default_factory=TextConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)

    def problems(self) -> list[str]:
        """List everything that is wrong, ranges first; empty when the configuration can be run."""
        found = self.range_problems()
        if found:
            return found
        for section in SECTIONS:
            found.extend(getattr(self, section).problems())
        found.extend(self._problems_between_sections())
        for rule in catalogue("rule"):  # what is known further up: which blocks there are, and what each can be asked for
            found.extend(catalogue("rule").load(rule)(self))
        return found

    def range_problems(self) -> list[str]:
        """List the settings that are wrong by themselves."""
        found: list[str] = []
        for section in SECTIONS:
            values = getattr(self, section)
            for each in settings_of(type(values)):
                problem = each.setting.problem(f"{section}.{each.name}", getattr(values, each.name))
                if problem:
                    found.append(problem)
        return found

    def _problems_between_sections(self) -> Iterator[str]:
        """Say what is wrong between fields of different sections."""
        if self.model.tie == "all" and not self.text.joint:
            # Vocabularies that happen to have one size would share rows between pieces that have nothing in common.
            yield "model.tie=all needs one vocabulary for both sides; found text.joint=false; set model.tie=target, or text.joint=true"
        if self.model.positions == "learned" and self.data.max_length >= self.model.max_positions:
            yield (
                f"data.max_length must be below model.max_positions, whose last place is for the end; found {self.data.max_length} and "
                f"{self.model.max_positions}; set data.max_length={self.model.max_positions - 1}, or raise model.max_positions"
            )

    def replace(self, **sections: dict[str, object]) -> Config:
        """Return a copy with settings changed: `config.replace(model={"width": 256})`."""
        problems = [
            f"there is no section {name!r} in the configuration; {nearest(name, SECTIONS)}" for name in sections if name not in SECTIONS
        ]
        for section, values in sections.items():
            known = [each.name for each in settings_of(type(getattr(self, section, None)))] if section in SECTIONS else list(values)
            problems += [f"there is no setting {section}.{name}; {nearest(name, known)}" for name in values if name not in known]
        if problems:
            raise ConfigError(problems)
        changed = {name: dataclasses.replace(getattr(self, name), **values) for name, values in sections.items()}
        return dataclasses.replace(self, **changed)


SECTIONS = ("text", "data", "model", "train", "decode")


def _divisors_near(number: int, of: int) -> str:
    """Name the nearest divisors below and above a number: "5 or 10"."""
    below = max(n for n in range(1, number) if of % n == 0)
    above = next((n for n in range(number, of + 1) if of % n == 0), None)
    return f"{below} or {above}" if above else str(below)
