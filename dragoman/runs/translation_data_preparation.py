"""Data preparation: train tokenizers, build token stores, select validation sentences."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dragoman.bundle.format import LANGUAGE_ID, TEXT_FILES
from dragoman.bundle.translation_bundle_loader import read_identifier
from dragoman.config import Config, DataConfig, TextConfig, to_dict
from dragoman.config.root_config import file_names
from dragoman.config.translation_directions import list_languages, parse_directions
from dragoman.data.parallel_corpus import (
    ConcatCorpus,
    Corpus,
    DirectedCorpus,
    SentencePair,
    build_corpus,
    build_directed_corpus,
)
from dragoman.data.token_store import TokenStore, prepared_data_directory
from dragoman.data.token_store_builder import BuildProgress, check_files_unchanged
from dragoman.errors import BundleError
from dragoman.runs.output_directory_and_resume_checks import DataFile, require_same_files
from dragoman.runs.validation_split import HOLD_OUT_EVERY, SplitCorpus
from dragoman.runtime import signals
from dragoman.storage.atomic_and_safe_file_io import replace_file
from dragoman.storage.disk_space_and_errors import os_errors_converted
from dragoman.storage.manifest import canonical_json
from dragoman.storage.trusted_cache_directory import make_private_directory
from dragoman.text.language_identification import LanguageIdentifier
from dragoman.text.sentencepiece_tokenizer import (
    Tokenizers,
    load_tokenizers,
    save_tokenizers,
    train_tokenizers,
)
from dragoman.text.tokenizer_extension import extend_tokenizers
from dragoman.training.progress_display import Progress

TOKENIZER_PART = "text"  # DataFile.part of the tokenizer's files
MIN_RECOMMENDED_PAIRS = 1000  # fewer give a warning
MAX_BYTE_FRACTION = 0.2  # of a side's tokens, with a pretrained model's vocabulary
SAMPLED_PAIRS = 1000  # that are looked at for copies and bytes
MAX_UNKNOWN_FRACTION = 0.01  # of all tokens; more give a warning (OpenNMT-py#2602)


class Corpora(NamedTuple):
    """Training and validation corpora, and a note on how the latter was chosen."""

    train: Corpus
    valid: Corpus | None
    note: str
    held_out: bool = False  # whether the validation pairs are held out of the training files

    def named(self) -> list[tuple[str, Corpus]]:
        """Return the corpora with files of their own, by part; held-out pairs have none."""
        own = [] if self.valid is None or self.held_out else [("valid", self.valid)]
        return [("train", self.train), *own]


class PreparedData(NamedTuple):
    """The prepared data of a run."""

    tokenizers: Tokenizers
    train: TokenStore
    valid: TokenStore | None
    sentences: list[SentencePair]  # the first validation pairs as text, for BLEU
    files: list[DataFile]  # the files read, with their hashes
    written: list[Path]  # new folders of the cache
    identifier: LanguageIdentifier | None = None  # of source languages, if there are several

    @property
    def digest(self) -> str:
        """Hash of the data, compared on resume."""
        parts = [self.train.digest, self.valid.digest if self.valid else ""]
        return hashlib.sha256(canonical_json(parts)).hexdigest()


def open_corpora(data: DataConfig) -> Corpora:
    """Open the corpora; without validation files some training pairs are held out."""
    train = build_corpus(data, "train")
    if data.valid_src or data.valid_pairs:
        return Corpora(train, build_corpus(data, "valid"), "")
    has_enough = any(pair.number >= HOLD_OUT_EVERY for pair in train.pairs())
    if not has_enough:
        return Corpora(
            train, None, f"no validation set: fewer than {HOLD_OUT_EVERY} sentence pairs"
        )
    note = f"validation set: one training pair in {HOLD_OUT_EVERY} is held out, at most 1,000"
    if not data.directions:
        kept, held_out = (SplitCorpus(train, held_out=part) for part in (False, True))
        return Corpora(kept, held_out, note, held_out=True)
    # The same pairs of a file in both directions: none is trained on the other way round.
    directed = [
        build_directed_corpus(data, "train", partial(SplitCorpus, held_out=part))
        for part in (False, True)
    ]
    return Corpora(directed[0], directed[1], f"{note} of each file", held_out=True)


def prepare_data(
    config: Config,
    text_folder: Path,
    progress: Progress,
    *,
    initial_files: Sequence[DataFile] | None = None,
    given: Tokenizers | None = None,
    max_sentences: int = 2000,
) -> PreparedData:
    """Train the tokenizers and build the token stores, or open cached ones of the same files.

    A resumed run passes the files that it started with as `initial_files`: it keeps its tokenizers,
    and none of its files may have changed. Fine-tuning passes the tokenizers of the pretrained
    model as `given`, which `train.extend_vocabulary` extends.
    """
    corpora = open_corpora(config.data)
    cache = _writable_cache(config.data, text_folder.parent, progress)
    known = set(cache.glob("*-*"))
    files = [DataFile.of(part, path) for part, corpus in corpora.named() for path in corpus.files]
    before = list(initial_files or ())
    if before:
        require_same_files([each for each in before if each.part in ("train", "valid")], files)
    digests = {
        part: [each.sha256 for each in files if each.part == part] for part in ("train", "valid")
    }
    if initial_files is not None and (text_folder / "text.json").exists():
        if before:
            require_same_files(
                [each for each in before if each.part == TOKENIZER_PART],
                _tokenizer_files(text_folder),
            )
        tokenizers = load_tokenizers(text_folder)
    else:
        tokenizers = _new_tokenizers(
            given, corpora.train, config, cache, progress, digests["train"]
        )
        _replace_tokenizers(tokenizers, text_folder)
    for direction in parse_directions(config.data.directions):
        tokenizers.src.tagged(direction.target)  # raises if a pretrained model has no such tag
    identifier = _prepare_identifier(
        corpora.train, config.data, text_folder, progress, resumed=bool(before)
    )
    if before:  # if the folder was lost, its files must be the same again
        require_same_files(
            [each for each in before if each.part == TOKENIZER_PART],
            _tokenizer_files(text_folder),
        )
    files += _tokenizer_files(text_folder)
    for note in filter(None, (corpora.note, _copy_warning(corpora.train, config.data))):
        progress.note(note)
    signals.raise_if_stop_requested()
    train = _build_store(
        "tokenizing training pairs",
        corpora.train,
        tokenizers,
        config,
        cache,
        progress,
        digests["train"],
    )
    _report_corpora(corpora.train, train, progress, "")
    is_pretrained = bool(config.train.init_from)
    _warn_about_data(train, progress, pretrained=is_pretrained)
    if is_pretrained and not config.train.extend_vocabulary:
        _warn_about_script(train, tokenizers, progress)
    if corpora.valid is None:
        return PreparedData(
            tokenizers, train, None, [], files, _new_cache_directories(cache, known), identifier
        )
    # Held-out pairs come from the training files.
    valid_digests = digests["valid"] or digests["train"]
    valid = _build_store(
        "tokenizing validation pairs",
        corpora.valid,
        tokenizers,
        config,
        cache,
        progress,
        valid_digests,
    )
    if digests["valid"]:
        _report_corpora(corpora.valid, valid, progress, "validation ")
    sentences = _select_sentences(corpora.valid, config.data, max_sentences)
    written = _new_cache_directories(cache, known)
    return PreparedData(tokenizers, train, valid, sentences, files, written, identifier)


def _select_sentences(corpus: Corpus, data: DataConfig, most: int) -> list[SentencePair]:
    """Return the first pairs with text, of several directions equally many of each."""
    parts = list[Corpus]()
    if isinstance(corpus, ConcatCorpus) and data.directions:
        parts = corpus.parts
    most_each = most // max(1, len(data.directions))
    found = dict[str, list[SentencePair]]()
    for part in parts or [corpus]:
        for pair in part.pairs():
            own = found.setdefault(pair.direction, [])
            if len(own) >= most_each:
                break
            if pair.src.strip() and pair.tgt.strip():
                own.append(pair)
    order = data.directions or [""]
    return [pair for direction in order for pair in found.get(direction, [])]


def _prepare_identifier(
    corpus: Corpus, data: DataConfig, folder: Path, progress: Progress, *, resumed: bool
) -> LanguageIdentifier | None:
    """Return the classifier of source languages, trained or, in a resumed run, read from its file.

    None for a model with one source language.
    """
    sources = {each.source for each in parse_directions(data.directions)}
    if len(sources) < 2:
        (folder / LANGUAGE_ID).unlink(missing_ok=True)
        return None
    known = read_identifier(folder, os.listdir(folder)) if resumed else None
    if known is not None:
        return known
    with progress.phase("training the language identifier"):
        identifier = LanguageIdentifier.train(
            {language: _language_texts(corpus, language) for language in sorted(sources)}
        )
    replace_file(folder / LANGUAGE_ID, identifier.to_bytes())
    return identifier


def _language_texts(corpus: Corpus, language: str) -> Iterator[str]:
    """Yield the texts of a language, in parts by turns so that every corpus is represented."""
    assert isinstance(corpus, ConcatCorpus), "a multilingual corpus has parts"
    texts = list[Iterator[str]]()
    for part in corpus.parts:
        assert isinstance(part, DirectedCorpus), "a multilingual corpus has directions"
        if part.direction.source == language:
            texts.append(part.src_texts())
    while texts:
        for each in list(texts):
            text = next(each, None)
            if text is None:
                texts.remove(each)
            else:
                yield text


def _writable_cache(data: DataConfig, run: Path, progress: Progress) -> Path:
    """Return the cache folder, or a folder in the run directory if it is not writable."""
    folder = prepared_data_directory(data)
    if data.cache_dir:
        return folder
    try:
        if not folder.exists():
            make_private_directory(folder)
        elif not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return folder
    except OSError as error:
        own = run / "prepared"
        progress.note(
            f"the cache folder {folder} is not writable ({error.strerror or error}): "
            f"prepared data is written to {own}"
        )
        return own


def _new_cache_directories(cache: Path, known: set[Path]) -> list[Path]:
    """Return the new folders of tokenizers and token stores in the cache."""
    return sorted(
        path for kind in ("text", "store") for path in cache.glob(f"{kind}-*") if path not in known
    )


def _report_corpora(corpus: Corpus, store: TokenStore, progress: Progress, kind: str) -> None:
    """Report the number of pairs of each of several corpora; `kind` begins the line."""
    counts = store.report.parts
    if store.direction_names:
        examples = store.direction_examples()
        each = ", ".join(f"{name} {len(own):,}" for name, own in examples.items())
        progress.note(f"{kind}pairs of each direction: {each}")
        return
    files = iter(corpus.files)
    for index, count in enumerate(counts):
        names = ", ".join(str(next(files)) for _ in range(len(corpus.files) // len(counts)))
        progress.note(
            f"{kind}corpus {index + 1} of {len(counts)}: {names}: {count:,} "
            f"pair{'' if count == 1 else 's'}"
        )


def _tokenizer_files(folder: Path) -> list[DataFile]:
    """Return the tokenizer's files with their hashes."""
    return [
        DataFile.of(TOKENIZER_PART, path) for path in sorted(folder.iterdir()) if path.is_file()
    ]


def _warn_about_data(train: TokenStore, progress: Progress, *, pretrained: bool) -> None:
    """Warn of a very small corpus or of many unknown tokens."""
    if len(train) < MIN_RECOMMENDED_PAIRS:
        found = f"{len(train):,} pair{'' if len(train) == 1 else 's'}"
        progress.note(
            f"warning: only {found} to train on: the model will overfit; use a larger corpus"
            + ("" if pretrained else ", or continue from a trained model (--init-from)")
        )
    unknown = train.report.unknown_fraction()
    if unknown > MAX_UNKNOWN_FRACTION:
        progress.note(
            f"warning: {unknown:.1%} of all tokens are unknown: "
            "set text.byte_fallback=true or raise text.character_coverage"
        )


def _build_store(
    what: str,
    corpus: Corpus,
    tokenizers: Tokenizers,
    config: Config,
    cache: Path,
    progress: Progress,
    digests: list[str],
) -> TokenStore:
    """Build or open a token store and report progress."""
    with progress.phase(what, None, "pairs") as phase:
        store = TokenStore.prepare(
            corpus,
            tokenizers,
            folder=cache,
            data=config.data,
            progress=_progress_callback(phase.advance),
            digests=digests,
        )
    if store.report.skipped:
        progress.note(f"{what}: {store.report.summary()}")
    return store


def _progress_callback(advance: Callable[[int], None]) -> Callable[[BuildProgress], None]:
    """Return a callback that converts totals into increments."""
    before = 0

    def report(now: BuildProgress) -> None:
        nonlocal before
        signals.raise_if_stop_requested()
        advance(now.pairs - before)
        before = now.pairs

    return report


def _new_tokenizers(
    given: Tokenizers | None,
    corpus: Corpus,
    config: Config,
    cache: Path,
    progress: Progress,
    digests: list[str],
) -> Tokenizers:
    """Return the given tokenizers, extended if that is set, or tokenizers of the corpus."""
    if given is None:
        return _load_or_train_tokenizers(corpus, config, cache, progress, digests)
    if not config.train.extend_vocabulary:
        return given
    tokenizers = _extend_tokenizers(given, corpus, config, progress)
    check_files_unchanged(corpus, digests)
    return tokenizers


def _load_or_train_tokenizers(
    corpus: Corpus, config: Config, cache: Path, progress: Progress, digests: list[str]
) -> Tokenizers:
    """Load cached tokenizers of the same files and settings, or train them."""
    languages = list_languages(config.data.directions)
    folder = cache / f"text-{_tokenizer_key(corpus, config.text, digests, languages)[:32]}"
    if (folder / "text.json").exists():
        return load_tokenizers(folder)
    with progress.phase("training the tokenizer"):
        tokenizers = train_tokenizers(
            corpus.src_texts(), corpus.tgt_texts(), config.text, languages
        )
    check_files_unchanged(corpus, digests)
    _save_atomically(tokenizers, folder)
    return tokenizers


def _extend_tokenizers(
    given: Tokenizers, corpus: Corpus, config: Config, progress: Progress
) -> Tokenizers:
    """Return the tokenizers of the pretrained model with more tokens for the corpus."""
    with progress.phase("extending the vocabulary"):
        extended = extend_tokenizers(
            given,
            corpus.src_texts(),
            corpus.tgt_texts(),
            config.train.extend_vocabulary,
            config.text,
        )
    for name, before, after in zip(("source", "target"), given, extended, strict=True):
        progress.note(
            f"{'' if given.shared_vocab else name + ' '}vocabulary: {len(after) - len(before):,} "
            f"tokens added to {len(before):,}"
        )
        if given.shared_vocab:
            break
    return extended


def _replace_tokenizers(tokenizers: Tokenizers, folder: Path) -> None:
    """Copy the tokenizers into the run directory, replacing those of an earlier attempt."""
    if (folder / "text.json").exists() and _tokenizer_digests(
        load_tokenizers(folder)
    ) != _tokenizer_digests(tokenizers):
        _remove_tokenizers(folder)
    _save_atomically(tokenizers, folder)


def _remove_tokenizers(folder: Path) -> None:
    """Remove a folder of tokenizers; raise BundleError if it is a link or has other files."""
    others = sorted(set(os.listdir(folder)) - set(TEXT_FILES))
    if folder.is_symlink() or others:
        found = "a symbolic link" if folder.is_symlink() else f"{others[0]!r:.120} in it"
        raise BundleError(
            f"{folder} must contain only the tokenizers of an earlier attempt, to be replaced",
            found=found,
            fix="move it away",
        )
    with os_errors_converted(folder):
        for each in folder.iterdir():
            each.unlink()
        folder.rmdir()


def _tokenizer_digests(tokenizers: Tokenizers) -> tuple[str, str]:
    return tokenizers.src.digest, tokenizers.tgt.digest


def _warn_about_script(train: TokenStore, tokenizers: Tokenizers, progress: Progress) -> None:
    """Warn if a pretrained model's vocabulary lacks the characters of one side."""
    sides = {"src": ("source", tokenizers.src), "tgt": ("target", tokenizers.tgt)}
    for side, (name, tokenizer) in sides.items():
        rows = [train.ids(side, index) for index in range(min(len(train), SAMPLED_PAIRS))]
        ids = np.concatenate([np.zeros(0, np.int64), *rows])
        unknown = np.isin(ids, list(tokenizer.unknown_ids)).sum() / max(1, len(ids))
        if unknown > MAX_BYTE_FRACTION:
            progress.note(
                f"warning: {100 * unknown:.0f} % of the {name} tokens are single bytes or unknown: "
                "the model's vocabulary lacks its characters; --extend-vocabulary adds tokens"
            )


def _copy_warning(corpus: Corpus, data: DataConfig) -> str:
    """Return a warning if source and target are one file, or most of the first pairs are equal."""
    for src, tgt in zip(file_names(data.src), file_names(data.tgt), strict=False):
        if os.path.realpath(src) == os.path.realpath(tgt):
            return (
                f"warning: source and target are the same file, {src}: the model will learn to copy"
            )
    first = list(itertools.islice(corpus.pairs(), SAMPLED_PAIRS))
    copies = sum(pair.src.strip() == pair.tgt.strip() for pair in first)
    if 2 * copies <= len(first):
        return ""
    return (
        f"warning: of the first {len(first):,} pairs {copies:,} have equal source and target: the "
        "model will learn to copy; `dragoman data check` names their lines"
    )


def _save_atomically(tokenizers: Tokenizers, folder: Path) -> None:
    """Save the tokenizers into a new folder, atomically."""
    with os_errors_converted(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".tmp-text-", dir=folder.parent))
        try:
            temporary.chmod(0o755)
            save_tokenizers(tokenizers, temporary)
            try:
                temporary.rename(folder)
            except OSError:
                if not folder.exists():  # another process was first, with the same result
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _tokenizer_key(
    corpus: Corpus, config: TextConfig, digests: list[str], languages: Sequence[str]
) -> str:
    """Return the cache key of tokenizers: a hash of files, corpus format and text settings."""
    settings = to_dict(Config(text=config))["text"]
    del settings["bpe_dropout"]  # does not change the vocabulary
    del settings["language_tags"]  # the languages do
    inputs = {"format": 1, "files": digests, "layout": corpus.layout(), "text": settings}
    if languages:
        inputs["languages"] = list(languages)
    return hashlib.sha256(canonical_json(inputs)).hexdigest()
