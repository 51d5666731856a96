"""The tree of settings: its smaller sections, those of `model.py` and `train.py`, and what must hold between them.

Every field has its default, its range and its sentence in its section and nowhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from dragoman.config.aliases import RENAMED_SETTINGS, SETTING_BY_SYNONYM
from dragoman.config.model import ModelConfig
from dragoman.config.setting import Paths, list_settings, setting
from dragoman.config.train import TrainConfig
from dragoman.errors import ConfigError, suggest_name


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConfig:
    """How raw text becomes pieces."""

    tokenizer: str = setting(
        "bpe", "How text is cut into pieces.", choices=("bpe", "unigram", "characters")
    )
    vocab_size: int = setting(
        8000,
        "Number of pieces, byte pieces and special ones included.",
        at_least=8,
        at_most=1_000_000,
    )
    shared_vocab: bool = setting(True, "Whether both sides share one vocabulary.")
    byte_fallback: bool = setting(
        True, "Whether an unseen character is spelt in bytes instead of becoming unknown."
    )
    character_coverage: float = setting(
        0.9999,
        "Share of the text's characters that get pieces of their own.",
        at_least=0.9,
        at_most=1.0,
    )
    normalization: str = setting(
        "nfc", "Unicode form that both sides are put into.", choices=("none", "nfc", "nfkc")
    )
    bpe_dropout: float = setting(
        0.0, "Share of BPE merges skipped at random in training.", at_least=0.0, at_most=0.9
    )
    sample_lines: int = setting(
        2_000_000,
        "Lines that the vocabulary is learnt from, at most, spread evenly over the text; never more than 32 MiB of them (12 for unigram), "
        "so that memory stays bounded.",
        at_least=1,
    )

    def problems(self) -> Iterator[str]:
        """Say what is wrong between fields."""
        if self.bpe_dropout and self.tokenizer != "bpe":
            yield f"text.bpe_dropout works on BPE merges and needs text.tokenizer=bpe; found text.tokenizer={self.tokenizer}; set text.bpe_dropout=0"
        if self.byte_fallback and self.tokenizer != "characters" and self.vocab_size < 262:
            yield (
                f"text.vocab_size must be at least 262 with text.byte_fallback, whose bytes take 256; found {self.vocab_size}; "
                "raise it, or set text.byte_fallback=false"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the text comes from and what is left out."""

    src: str | tuple[str, ...] = setting(
        "",
        "File of source sentences, one a line; plain, .gz or .xz; several files are read in order.",
    )
    tgt: str | tuple[str, ...] = setting(
        "", "File of target sentences, aligned with data.src; as many files."
    )
    pairs: str | tuple[str, ...] = setting(
        "", "TSV, CSV or JSONL file with both sides, instead of data.src and data.tgt, or several."
    )
    valid_src: str | tuple[str, ...] = setting("", "Source sentences to validate on.")
    valid_tgt: str | tuple[str, ...] = setting("", "Target sentences to validate on.")
    valid_pairs: str | tuple[str, ...] = setting(
        "", "File with both sides to validate on, or several."
    )
    src_field: str = setting(
        "",
        "Column of the source in data.pairs: a name, or a number from 1; found by itself when empty.",
    )
    tgt_field: str = setting(
        "",
        "Column of the target in data.pairs: a name, or a number from 1; found by itself when empty.",
    )
    src_lang: str = setting("", "Source language, such as de: for the model card.")
    tgt_lang: str = setting(
        "", "Target language, such as zh or ja-JP: for the model card and the tokenizer of BLEU."
    )
    max_length: int = setting(
        200,
        "Longest sentence, in pieces, that is trained on; longer pairs are set aside and counted.",
        at_least=4,
        at_most=65_000,
    )
    max_line_bytes: int = setting(65_536, "Longest line, in bytes, that is read.", at_least=64)
    on_bad_line: str = setting(
        "stop", "What to do with a pair that has a bad line.", choices=("stop", "skip")
    )
    cache_dir: str = setting(
        "", "Folder for prepared data; by default dragoman's own cache folder."
    )

    def problems(self) -> Iterator[str]:
        """Say what is wrong between fields."""
        for prefix in ("", "valid_"):
            named = {name: getattr(self, prefix + name) for name in ("src", "tgt", "pairs")}
            yield from _corpus_problems(
                prefix, {name: file_names(value) for name, value in named.items()}
            )


def file_names(value: Paths) -> tuple[str, ...]:
    """Return the files that a setting names, in order."""
    return (value,) if isinstance(value, str) and value else tuple(value)


def _corpus_problems(prefix: str, named: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield inconsistencies between the settings that name one corpus."""
    src, tgt, pairs = (f"data.{prefix}{name}" for name in ("src", "tgt", "pairs"))
    if named["pairs"] and (named["src"] or named["tgt"]):
        found = f"{', '.join(named['pairs'])} and {', '.join(named['src'] or named['tgt'])}"
        yield f"{pairs} stands in place of {src} and {tgt}; found {found}; keep one form"
    if bool(named["src"]) != bool(named["tgt"]):
        yield f"{src} and {tgt} go together; found only {', '.join(named['src'] or named['tgt'])}; give both"
    elif len(named["src"]) != len(named["tgt"]):
        flag = prefix.replace("_", "-")
        found = f"{len(named['src'])} ({', '.join(named['src'])}) and {len(named['tgt'])} ({', '.join(named['tgt'])})"
        yield f"{src} and {tgt} must name equally many files; found {found}; give one --{flag}tgt for each --{flag}src"
    for name, files in named.items():
        if "" in files:
            yield f"data.{prefix}{name} must name files; found an empty name in {list(files)}; leave it out"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """How the trained model translates unless told otherwise."""

    beam: int = setting(4, "Hypotheses kept in beam search; 1 is greedy.", at_least=1, at_most=256)
    length_penalty: float = setting(
        0.6,
        "Exponent of the length penalty of Wu et al. (2016); 0 for none.",
        at_least=0.0,
        at_most=5.0,
    )
    max_length_ratio: float = setting(
        2.0, "Longest output, as a multiple of the source's pieces ...", at_least=0.1, at_most=100.0
    )
    max_length_extra: int = setting(50, "... plus this many pieces.", at_least=1, at_most=10_000)
    batch_tokens: int = setting(
        4096, "Padded slots of source and beam translated together.", at_least=1
    )

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
        more = [f"{len(changed) - _MAX_REPR_SETTINGS} more"] * (len(changed) > _MAX_REPR_SETTINGS)
        return f"Config({', '.join([*changed[:_MAX_REPR_SETTINGS], *more])})"

    def problems(self) -> list[str]:
        """List everything that is wrong, ranges first; empty when the configuration can be run."""
        found = self.range_problems()
        if found:
            return found
        for section in SECTIONS:
            found.extend(getattr(self, section).problems())
        found.extend(self._problems_between_sections())
        from dragoman.models.block_rules import stack_problems  # models imports config

        found.extend(stack_problems(self.model))
        return found

    def range_problems(self) -> list[str]:
        """List the settings that are wrong by themselves."""
        found: list[str] = []
        for section in SECTIONS:
            values = getattr(self, section)
            for each in list_settings(type(values)):
                problem = each.setting.problem(f"{section}.{each.name}", getattr(values, each.name))
                if problem:
                    found.append(problem)
        return found

    def _problems_between_sections(self) -> Iterator[str]:
        """Say what is wrong between fields of different sections."""
        if self.model.tie_embeddings == "all" and not self.text.shared_vocab:
            # Vocabularies that happen to have one size would share rows between pieces that have nothing in common.
            yield "model.tie_embeddings=all needs one vocabulary for both sides; found text.shared_vocab=false; set model.tie_embeddings=target, or text.shared_vocab=true"
        if self.model.positions == "learned" and self.data.max_length >= self.model.max_positions:
            yield (
                f"data.max_length must be below model.max_positions, whose last place is for the end; found {self.data.max_length} and "
                f"{self.model.max_positions}; set data.max_length={self.model.max_positions - 1}, or raise model.max_positions"
            )

    @classmethod
    def setting_names(cls, section: str) -> set[str]:
        """List a section's settings."""
        return {each.name for each in list_settings(type(getattr(cls(), section)))}

    def replace(self, **sections: dict[str, object]) -> Config:
        """Return a copy with settings changed: `config.replace(model={"width": 256})`."""
        problems = [
            f"there is no section {name!r} in the configuration; {suggest_name(name, SECTIONS)}"
            for name in sections
            if name not in SECTIONS
        ]
        for section, values in sections.items():
            known = (
                [each.name for each in list_settings(type(getattr(self, section, None)))]
                if section in SECTIONS
                else list(values)
            )
            problems += [
                f"there is no setting {section}.{name}; {suggest_setting(name, known, section)}"
                for name in values
                if name not in known
            ]
        if problems:
            raise ConfigError(problems)
        changed = {
            name: dataclasses.replace(getattr(self, name), **values)
            for name, values in sections.items()
        }
        return dataclasses.replace(self, **changed)


SECTIONS = ("text", "data", "model", "train", "decode")
_MAX_REPR_SETTINGS = 8  # settings in a repr


def suggest_setting(name: str, known: Iterable[str], section: str = "") -> str:
    """Return a suggestion for an unknown setting: its new name, its section, another toolkit's name, or the nearest spelling."""
    plain = name.strip().lower().replace("-", "_")
    if new := RENAMED_SETTINGS.get(f"{section}.{plain}"):
        return f"it is now {section}.{new}"
    owners = [f"{owner}.{plain}" for owner in SECTIONS if plain in Config.setting_names(owner)]
    meant = owners or ([SETTING_BY_SYNONYM[plain]] if plain in SETTING_BY_SYNONYM else [])
    return f"did you mean {' or '.join(meant)}?" if meant else suggest_name(name, known)
