"""The tree of settings: its smaller sections, those of `model.py` and `train.py`, and what must hold between them.

Every field has its default, its range and its sentence in its section and nowhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

from dragoman.config.model import ModelConfig
from dragoman.config.setting import setting, settings_of
from dragoman.config.train import TrainConfig
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
    tgt_lang: str = setting("", "Target language, such as zh or ja-JP: for the model card and the tokenizer of BLEU.")
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

    def __repr__(self) -> str:
        """Write the recipe and the settings that differ from their defaults, in one line."""
        changed = [f"recipe={self.recipe!r:.60}"] * bool(self.recipe)
        for section in SECTIONS:
            values = getattr(self, section)
            for each in dataclasses.fields(values):
                value = getattr(values, each.name)
                if value != each.default:
                    changed.append(f"{section}.{each.name}={value!r:.40}")
        more = [f"{len(changed) - _SHOWN} more"] * (len(changed) > _SHOWN)
        return f"Config({', '.join([*changed[:_SHOWN], *more])})"

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
_SHOWN = 8  # settings in a repr
