"""The configuration: sections `text`, `data`, `model`, `train` and `decode`, and one for each task.

Each setting has its default, range and description in its section and nowhere else. Constraints
between sections are checked by `Config.problems`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from dragoman.config.classification import ClassifyConfig
from dragoman.config.language_model import LanguageConfig
from dragoman.config.model import ModelConfig
from dragoman.config.sentence_pair_classification import PairsConfig
from dragoman.config.setting_aliases import RENAMED_SETTINGS, SETTING_BY_SYNONYM
from dragoman.config.setting_declaration import Paths, list_settings, setting
from dragoman.config.tagging import TagConfig
from dragoman.config.train import TrainConfig
from dragoman.config.translation_directions import (
    direction_problems,
    file_language_problems,
    parse_directions,
)
from dragoman.config.unordered_set_input_task import SetsConfig
from dragoman.errors import ConfigError, suggest_name
from dragoman.registry import import_object

TRANSLATE = "translate"  # the task of `dragoman train` without --task
# Block lists of `model` that the models of each other task are built from.
TASK_STACKS: dict[str, tuple[str, ...]] = {
    "language": ("decoder",),
    "classify": ("encoder",),
    "tag": ("encoder",),
    "pairs": ("encoder",),
    "sets": (),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConfig:
    """Tokenizer settings: algorithm, vocabulary and normalization."""

    tokenizer: str = setting(
        "bpe",
        "Tokens: subwords (bpe, unigram), characters, words or bytes.",
        choices=("bpe", "unigram", "characters", "words", "bytes"),
    )
    vocab_size: int = setting(
        8000,
        "Vocabulary size, byte tokens and special tokens included.",
        at_least=8,
        at_most=1_000_000,
    )
    shared_vocab: bool = setting(True, "Whether source and target share one vocabulary.")
    byte_fallback: bool = setting(
        True, "Whether unknown characters are encoded as UTF-8 bytes instead of <unk>."
    )
    character_coverage: float = setting(
        0.9999,
        "Fraction of the corpus's characters covered by the vocabulary, as in SentencePiece.",
        at_least=0.9,
        at_most=1.0,
    )
    normalization: str = setting(
        "nfc", "Unicode normalization form of both sides.", choices=("none", "nfc", "nfkc")
    )
    bpe_dropout: float = setting(
        0.0, "BPE-dropout: probability of skipping a merge in training.", at_least=0.0, at_most=0.9
    )
    language_tags: bool = setting(
        False,
        "Whether sources begin with the target language's tag, a token such as <2en> (Johnson et "
        "al. 2017).",
    )
    lowercase: bool = setting(False, "Whether words and characters are lowercased.")
    min_count: int = setting(
        1,
        "Minimum count of a word or character in the vocabulary.",
        at_least=1,
        at_most=1_000_000,
    )
    sample_lines: int = setting(
        2_000_000,
        "Maximum number of lines to train the tokenizer on, sampled evenly over the corpus.",
        at_least=1,
    )

    def problems(self) -> Iterator[str]:
        """Yield inconsistencies between fields."""
        if self.bpe_dropout and self.tokenizer != "bpe":
            yield (
                "text.bpe_dropout works on BPE merges and needs text.tokenizer=bpe; found "
                f"text.tokenizer={self.tokenizer}; set text.bpe_dropout=0"
            )
        if self.byte_fallback and self.tokenizer in ("bpe", "unigram") and self.vocab_size < 262:
            yield (
                "text.vocab_size must be at least 262 with text.byte_fallback, whose bytes take "
                f"256; found {self.vocab_size}; "
                "raise it, or set text.byte_fallback=false"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Training and validation corpora, and which sentence pairs are skipped."""

    src: str | tuple[str, ...] = setting(
        "",
        "Source file, one sentence per line; plain, .gz or .xz; several are read in order.",
    )
    tgt: str | tuple[str, ...] = setting(
        "", "Target file, aligned with data.src line by line; as many files."
    )
    pairs: str | tuple[str, ...] = setting(
        "", "TSV, CSV or JSONL file of sentence pairs, or several; replaces data.src and data.tgt."
    )
    valid_src: str | tuple[str, ...] = setting("", "Source file of the validation set.")
    valid_tgt: str | tuple[str, ...] = setting("", "Target file of the validation set.")
    valid_pairs: str | tuple[str, ...] = setting(
        "", "TSV, CSV or JSONL file of the validation set, or several."
    )
    train: str | tuple[str, ...] = setting(
        "",
        "Training file of a task other than translation, or several: JSONL, CSV, TSV, CoNLL, text.",
    )
    valid: str | tuple[str, ...] = setting(
        "", "Validation file of a task other than translation, or several."
    )
    text_field: str = setting(
        "", "Column of data.train with the text: a name, or a number from 1; detected when empty."
    )
    label_field: str = setting(
        "", "Column of data.train with the label: a name, or a number from 1; detected when empty."
    )
    hold_out: int = setting(
        10,
        "Without data.valid, one example of data.train in this many is for validation; 0 for none.",
        at_least=0,
        at_most=1000,
    )
    src_field: str = setting(
        "",
        "Source column of data.pairs: a name, or a number from 1; detected when empty.",
    )
    tgt_field: str = setting(
        "",
        "Target column of data.pairs: a name, or a number from 1; detected when empty.",
    )
    src_lang: str = setting("", "Source language code, such as de; shown in the model card.")
    tgt_lang: str = setting(
        "", "Target language code, such as zh or ja-JP; for the model card and BLEU's tokenizer."
    )
    directions: tuple[str, ...] = setting(
        (),
        "Translation directions of a multilingual model, such as [de-en, en-de]; empty for one.",
    )
    languages: tuple[str, ...] = setting(
        (), "Languages of each file pair of a multilingual model, such as [de-en, fr-en]."
    )
    valid_languages: tuple[str, ...] = setting(
        (), "Languages of each validation file pair of a multilingual model."
    )
    direction_temperature: float = setting(
        1.0,
        "Sampling of directions: 1 in proportion to their sizes, above 1 more evenly "
        "(Arivazhagan et al. 2019).",
        at_least=1.0,
        at_most=1000.0,
    )
    max_length: int = setting(
        200,
        "Longest training sentence in tokens; longer pairs are skipped and counted.",
        at_least=4,
        at_most=65_000,
    )
    max_line_bytes: int = setting(65_536, "Longest input line in bytes.", at_least=64)
    on_bad_line: str = setting(
        "stop",
        "Stop at a sentence pair with a malformed line, or skip it.",
        choices=("stop", "skip"),
    )
    cache_dir: str = setting(
        "", "Directory of the tokenized data; by default Dragoman's cache directory."
    )

    def problems(self) -> Iterator[str]:
        """Yield inconsistencies between fields."""
        for prefix in ("", "valid_"):
            named = {name: getattr(self, prefix + name) for name in ("src", "tgt", "pairs")}
            yield from _corpus_problems(
                prefix, {name: file_names(value) for name, value in named.items()}
            )
            yield from self._direction_problems(prefix)
        yield from direction_problems("data.directions", self.directions)
        if len(set(self.directions)) < len(self.directions):
            yield (
                "data.directions must name each direction once; found "
                f"{', '.join(self.directions)}; leave out what is there twice"
            )

    def _direction_problems(self, prefix: str) -> Iterator[str]:
        """Yield inconsistencies between directions and the files of one corpus."""
        languages = getattr(self, f"{prefix}languages")
        if not self.directions:
            if languages:
                yield (
                    f"data.{prefix}languages is for multilingual models; found "
                    f"{', '.join(languages)} without data.directions; name those too"
                )
            return
        files = max(len(file_names(getattr(self, prefix + name))) for name in ("src", "pairs"))
        yield from file_language_problems(prefix, languages, files, self.directions)
        if files and not prefix:
            covered = {
                str(each)
                for given in parse_directions(languages)
                for each in (given, given.reverse)
            }
            missing = [each for each in self.directions if each not in covered]
            if missing and len(languages) == files:
                yield (
                    "data.directions must be those of the training files; found no file for "
                    f"{', '.join(missing)}; add --pair {missing[0]} FILE FILE"
                )


# Settings of `data` that name corpus files.
CORPUS_SETTINGS = (
    "src",
    "tgt",
    "pairs",
    "valid_src",
    "valid_tgt",
    "valid_pairs",
    "train",
    "valid",
)


def file_names(value: Paths) -> tuple[str, ...]:
    """Return the files that a setting names, in order."""
    return (value,) if isinstance(value, str) and value else tuple(value)


def _corpus_problems(prefix: str, named: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield inconsistencies between the settings that name one corpus."""
    src, tgt, pairs = (f"data.{prefix}{name}" for name in ("src", "tgt", "pairs"))
    if named["pairs"] and (named["src"] or named["tgt"]):
        found = f"{', '.join(named['pairs'])} and {', '.join(named['src'] or named['tgt'])}"
        yield f"{pairs} replaces {src} and {tgt}; found {found}; keep one form"
    if bool(named["src"]) != bool(named["tgt"]):
        yield (
            f"{src} and {tgt} go together; found only {', '.join(named['src'] or named['tgt'])}; "
            "pass both"
        )
    elif len(named["src"]) != len(named["tgt"]):
        flag = prefix.replace("_", "-")
        found = (
            f"{len(named['src'])} ({', '.join(named['src'])}) and {len(named['tgt'])} "
            f"({', '.join(named['tgt'])})"
        )
        yield (
            f"{src} and {tgt} must name equally many files; found {found}; pass one --{flag}tgt "
            f"for each --{flag}src"
        )
    for name, files in named.items():
        if "" in files:
            yield (
                f"data.{prefix}{name} must name files; found an empty name in {list(files)}; "
                "leave it out"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """Default search settings of the trained model."""

    beam: int = setting(4, "Beam size; 1 is greedy search.", at_least=1, at_most=256)
    length_penalty: float = setting(
        0.6,
        "Exponent of the length penalty of Wu et al. (2016); 0 disables it.",
        at_least=0.0,
        at_most=5.0,
    )
    max_length_ratio: float = setting(
        2.0,
        "Maximum output length: this multiple of the source tokens ...",
        at_least=0.1,
        at_most=100.0,
    )
    max_length_extra: int = setting(50, "... plus this many tokens.", at_least=1, at_most=10_000)
    batch_tokens: int = setting(
        4096, "Padded source tokens times beam size that are decoded in one batch.", at_least=1
    )

    split_sentences: bool = setting(
        False,
        "Translate the sentences of a line one by one, for models trained on single sentences.",
    )
    recase_capitals: bool = setting(
        False,
        "Translate lines in capitals in sentence case, and print the translation in capitals, for "
        "models trained without such lines.",
    )
    mirror_final_stop: bool = setting(
        False,
        "Print no full stop after lines without one, and translate lines of one or two words with "
        "one, for models trained on sentences.",
    )

    def problems(self) -> Iterator[str]:
        """Yield inconsistencies between fields; there are none."""
        return iter(())


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings of a training run: the argument of `dragoman.train`."""

    recipe: str = ""  # name of the recipe that the settings started from, for `dragoman info`
    task: str = TRANSLATE  # what the model does
    text: TextConfig = field(default_factory=TextConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    language: LanguageConfig = field(default_factory=LanguageConfig)
    classify: ClassifyConfig = field(default_factory=ClassifyConfig)
    tag: TagConfig = field(default_factory=TagConfig)
    pairs: PairsConfig = field(default_factory=PairsConfig)
    sets: SetsConfig = field(default_factory=SetsConfig)

    @property
    def sections(self) -> tuple[str, ...]:
        """The sections of this task: the common ones, and its own."""
        return (*COMMON_SECTIONS, *((self.task,) if self.task in TASK_STACKS else ()))

    @property
    def record_fields(self) -> frozenset[str]:
        """The fields of a record that the settings of this task name."""
        sections = (self.data, getattr(self, self.task)) if self.task in TASK_STACKS else ()
        values = (
            getattr(section, each.name)
            for section in sections
            for each in dataclasses.fields(section)
            if each.name.endswith("_field")
        )
        return frozenset(filter(None, values))

    @property
    def stacks(self) -> tuple[str, ...]:
        """The block lists of `model` that this task's models are built from."""
        return TASK_STACKS.get(self.task, ("encoder", "decoder"))

    def __repr__(self) -> str:
        """Return the recipe and the settings that differ from their defaults, in one line."""
        changed = [f"task={self.task!r:.60}"] * (self.task != TRANSLATE)
        changed += [f"recipe={self.recipe!r:.60}"] * bool(self.recipe)
        for section in SECTIONS:
            values = getattr(self, section)
            for each in dataclasses.fields(values):
                value = getattr(values, each.name)
                if value != each.default:
                    changed.append(f"{section}.{each.name}={value!r:.40}")
        more = [f"{len(changed) - _MAX_REPR_SETTINGS} more"] * (len(changed) > _MAX_REPR_SETTINGS)
        return f"Config({', '.join([*changed[:_MAX_REPR_SETTINGS], *more])})"

    def problems(self) -> list[str]:
        """Return all problems, ranges first; empty if the configuration is valid."""
        found = self.range_problems()
        if found:
            return found
        for section in self.sections:
            found.extend(getattr(self, section).problems())
        found.extend(self._problems_between_sections())
        # By name: models is a higher layer, and imports this one.
        stack_problems = import_object("dragoman.models.block_validation:stack_problems")
        found.extend(stack_problems(self.model, TASK_STACKS.get(self.task)))
        return found

    def range_problems(self) -> list[str]:
        """Return the problems of single settings: values out of range, and unused sections."""
        found: list[str] = []
        if self.task != TRANSLATE and self.task not in TASK_STACKS:
            known = (TRANSLATE, *TASK_STACKS)
            found.append(
                f"task must be one of {', '.join(known)}; found {self.task!r:.60}; "
                f"{suggest_name(self.task, known, listed=True)}"
            )
        for section in TASK_STACKS:
            if section != self.task and getattr(self, section) != type(getattr(self, section))():
                found.append(
                    f"settings of {section} are for --task {section}; found task {self.task}; "
                    f"leave them out, or add --task {section}"
                )
        for section in SECTIONS:
            values = getattr(self, section)
            for each in list_settings(type(values)):
                problem = each.setting.problem(f"{section}.{each.name}", getattr(values, each.name))
                if problem:
                    found.append(problem)
        return found

    def _problems_between_sections(self) -> Iterator[str]:
        """Yield inconsistencies between settings of different sections."""
        own = ("bleu",) if self.task == TRANSLATE else getattr(self, self.task).metrics
        if self.train.best_metric not in ("loss", *own):
            yield (
                f"train.best_metric must be one of {', '.join(('loss', *own))}; found "
                f"{self.train.best_metric!r:.60}; "
                f"{suggest_name(self.train.best_metric, own, listed=True)}"
            )
        if self.task == TRANSLATE:
            yield from self._translation_problems()
            return
        if self.train.init_from:
            yield (
                f"train.init_from fine-tunes a translation model; found task {self.task}; "
                "leave it out"
            )
        named = [
            f"data.{prefix}{name}"
            for prefix in ("", "valid_")
            for name in ("src", "tgt", "pairs")
            if getattr(self.data, prefix + name)
        ]
        if named:
            yield (
                f"{named[0]} is for translation; found task {self.task}; "
                "name the files by data.train and data.valid (--train, --valid)"
            )
        if self.task == "language":
            # By name: models is a higher layer, and imports this one.
            yield from import_object(
                "dragoman.models.language_model_config_checks:language_problems"
            )(self)

    def _translation_problems(self) -> Iterator[str]:
        """Yield inconsistencies between settings of a translation model."""
        for name in ("train", "valid"):
            if getattr(self.data, name):
                yield (
                    f"data.{name} is for other tasks than translation; found "
                    f"{', '.join(file_names(getattr(self.data, name)))}; "
                    "use --src and --tgt or --pairs, or name the --task"
                )
        if self.text.tokenizer in ("words", "bytes"):
            yield (
                f"text.tokenizer={self.text.tokenizer} is for other tasks than translation; "
                f"found task {self.task}; use bpe, unigram or characters"
            )
        if self.text.lowercase:
            yield (
                "text.lowercase=true is for other tasks than translation; "
                f"found task {self.task}; lowercase the files"
            )
        if self.text.language_tags != bool(self.data.directions):
            found = (
                "no data.directions"
                if self.text.language_tags
                else f"data.directions={list(self.data.directions)} without it"
            )
            yield (
                "text.language_tags is for models with data.directions and needed by them; found "
                f"{found}; use --pair de-en FILE FILE, which sets both"
            )
        if self.text.language_tags and not self.text.shared_vocab:
            yield (
                "text.language_tags needs one vocabulary for all languages; found "
                "text.shared_vocab=false; set text.shared_vocab=true"
            )
        if self.model.tie_embeddings == "all" and not self.text.shared_vocab:
            # Separate vocabularies of equal size would tie the embeddings of unrelated tokens.
            yield (
                "model.tie_embeddings=all needs one vocabulary for both sides; found "
                "text.shared_vocab=false; set model.tie_embeddings=target, or "
                "text.shared_vocab=true"
            )
        if self.model.positions == "learned" and self.data.max_length >= self.model.max_positions:
            yield (
                "data.max_length must be below model.max_positions, whose last position is for "
                f"</s>; found {self.data.max_length} and "
                f"{self.model.max_positions}; set data.max_length={self.model.max_positions - 1}, "
                "or raise model.max_positions"
            )

    @classmethod
    def setting_names(cls, section: str) -> set[str]:
        """Return the names of a section's settings."""
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


COMMON_SECTIONS = ("text", "data", "model", "train", "decode")
SECTIONS = (*COMMON_SECTIONS, *TASK_STACKS)
_MAX_REPR_SETTINGS = 8  # settings shown in a repr


def suggest_setting(name: str, known: Iterable[str], section: str = "") -> str:
    """Return a suggestion for an unknown setting.

    It is the setting's new name, its section, the name of another toolkit's setting, or the nearest
    spelling.
    """
    plain = name.strip().lower().replace("-", "_")
    if new := RENAMED_SETTINGS.get(f"{section}.{plain}"):
        return f"it is now {section}.{new}"
    if found := find_settings(plain, section):
        return f"did you mean {' or '.join(found)}?"
    dot = f"{section}." if section else ""
    return suggest_name(f"{dot}{name}", [f"{dot}{each}" for each in known])


def find_settings(name: str, section: str = "") -> list[str]:
    """Return the paths of the settings of this name, in any section, or what a synonym stands for.

    A synonym of another toolkit counts first if its setting is in the given section.
    """
    synonym = SETTING_BY_SYNONYM.get(name, "")
    if synonym and synonym.partition(".")[0] == section:
        return [synonym]
    found = [f"{owner}.{name}" for owner in SECTIONS if name in Config.setting_names(owner)]
    return found + [synonym] * bool(synonym and not (found and section))
