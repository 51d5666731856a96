"""From a configuration's files to what training reads: tokenizers, prepared pairs, sentences to validate on."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from dragoman.bundle.format import TEXT_FILES
from dragoman.config import Config, DataConfig, TextConfig, to_dict
from dragoman.config.config import file_names
from dragoman.data.corpus import Corpus, SentencePair, build_corpus
from dragoman.data.store_builder import BuildProgress as Preparing
from dragoman.data.store_builder import check_files_unchanged
from dragoman.data.token_store import TokenStore, prepared_data_directory
from dragoman.errors import BundleError
from dragoman.runs.output_directory import DataFile, require_same_files
from dragoman.runs.validation_split import HOLD_OUT_EVERY, SplitCorpus
from dragoman.runtime import signals
from dragoman.storage.cache import make_private_directory
from dragoman.storage.disk import os_errors_converted
from dragoman.storage.manifest import canonical_json
from dragoman.text.tokenizer import Tokenizers, load_tokenizers, save_tokenizers, train_tokenizers
from dragoman.training.progress import Progress

TOKENIZER_PART = "text"  # the part of DataFile that the tokenizer's files are
MIN_RECOMMENDED_PAIRS = (
    1000  # fewer are warned about: below this nothing but the corpus itself is learnt
)
MAX_UNKNOWN_FRACTION = (
    0.01  # of all pieces; more means that the vocabulary does not fit the text (OpenNMT-py#2602)
)


class Corpora(NamedTuple):
    """The pairs to train on, the pairs to validate on, and how the latter came about."""

    train: Corpus
    valid: Corpus | None
    note: str

    def named(self) -> list[tuple[str, Corpus]]:
        """Return the corpora that have files of their own, by part; pairs held out are in the training files."""
        own = self.valid is not None and not isinstance(self.valid, SplitCorpus)
        return [
            ("train", self.train),
            *([("valid", self.valid)] if own and self.valid is not None else []),
        ]


class PreparedData(NamedTuple):
    """Everything that training reads."""

    tokenizers: Tokenizers
    train: TokenStore
    valid: TokenStore | None
    sentences: list[
        SentencePair
    ]  # the first validation pairs as text: translated at each validation, scored at the end
    files: list[DataFile]  # what was read, as it was then
    written: list[Path]  # folders of the cache that were made for it

    @property
    def digest(self) -> str:
        """Fingerprint the data: what a resumed run compares."""
        parts = [self.train.digest, self.valid.digest if self.valid else ""]
        return hashlib.sha256(canonical_json(parts)).hexdigest()


def open_corpora(data: DataConfig) -> Corpora:
    """Open what the configuration names; without validation files some pairs are held out."""
    train = build_corpus(data, "train")
    if data.valid_src or data.valid_pairs:
        return Corpora(train, build_corpus(data, "valid"), "")
    enough = next((True for pair in train.pairs() if pair.number >= HOLD_OUT_EVERY), False)
    if not enough:
        return Corpora(train, None, f"no validation: fewer than {HOLD_OUT_EVERY} pairs")
    note = f"one pair in {HOLD_OUT_EVERY}, a thousand at the most, is held out for validation, for no validation files were given"
    return Corpora(SplitCorpus(train, held_out=False), SplitCorpus(train, held_out=True), note)


def prepare_data(
    config: Config,
    text_folder: Path,
    progress: Progress,
    *,
    initial_files: Sequence[DataFile] | None = None,
    given: Tokenizers | None = None,
    max_sentences: int = 2000,
) -> PreparedData:
    """Make the tokenizers and the stores, or open those of an earlier run on the same files.

    A run that was begun passes the files that it `began_with` (an older dragoman recorded none): it keeps its
    tokenizers, whatever has become of the cache, and none of its files may have changed. Fine-tuning passes the
    tokenizers of its model as `given`.
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
        tokenizers = given or _load_or_train_tokenizers(
            corpora.train, config.text, cache, progress, digests["train"]
        )
        _replace_tokenizers(tokenizers, text_folder)
        if before:  # the folder was lost: the same text must have given the same tokenizer
            require_same_files(
                [each for each in before if each.part == TOKENIZER_PART],
                _tokenizer_files(text_folder),
            )
    files += _tokenizer_files(text_folder)
    for note in filter(None, (corpora.note, _same_file_warning(config.data))):
        progress.note(note)
    signals.raise_if_stop_requested()
    train = _build_store(
        "preparing pairs", corpora.train, tokenizers, config, cache, progress, digests["train"]
    )
    _report_corpora(corpora.train, train, progress)
    _warn_about_data(train, progress)
    if corpora.valid is None:
        return PreparedData(
            tokenizers, train, None, [], files, _new_cache_directories(cache, known)
        )
    # Pairs that are held out come from the training files.
    valid_digests = digests["valid"] or digests["train"]
    valid = _build_store(
        "preparing validation pairs",
        corpora.valid,
        tokenizers,
        config,
        cache,
        progress,
        valid_digests,
    )
    if digests["valid"]:
        _report_corpora(corpora.valid, valid, progress)
    sentences = []
    for pair in corpora.valid.pairs():
        if pair.src.strip() and pair.tgt.strip():
            sentences.append(pair)
        if len(sentences) >= max_sentences:
            break
    return PreparedData(
        tokenizers, train, valid, sentences, files, _new_cache_directories(cache, known)
    )


def _writable_cache(data: DataConfig, run: Path, progress: Progress) -> Path:
    """Return the folder for prepared data: the run's own directory where the cache folder cannot be used and nobody chose one."""
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
            f"the cache folder {folder} cannot be used ({error.strerror or error}): prepared data goes to {own}"
        )
        return own


def _new_cache_directories(cache: Path, known: set[Path]) -> list[Path]:
    """List the folders of tokenizers and stores that are new in the cache."""
    return sorted(
        path for kind in ("text", "store") for path in cache.glob(f"{kind}-*") if path not in known
    )


def _report_corpora(corpus: Corpus, store: TokenStore, progress: Progress) -> None:
    """Name each of several corpora with its pairs."""
    counts = store.report.parts
    files = iter(corpus.files)
    for index, count in enumerate(counts):
        names = ", ".join(str(next(files)) for _ in range(len(corpus.files) // len(counts)))
        progress.note(
            f"corpus {index + 1} of {len(counts)}: {names}: {count:,} pair{'' if count == 1 else 's'}"
        )


def _tokenizer_files(folder: Path) -> list[DataFile]:
    """List the tokenizer's files with their hashes."""
    return [
        DataFile.of(TOKENIZER_PART, path) for path in sorted(folder.iterdir()) if path.is_file()
    ]


def _warn_about_data(train: TokenStore, progress: Progress) -> None:
    """Warn of a corpus that no model can learn much from, or that the vocabulary does not fit."""
    if len(train) < MIN_RECOMMENDED_PAIRS:
        found = f"{len(train):,} pair{'' if len(train) == 1 else 's'}"
        progress.note(
            f"warning: only {found} to train on: a model learns so few by heart and translates little else; give more text"
        )
    unknown = train.report.unknown_fraction()
    if unknown > MAX_UNKNOWN_FRACTION:
        progress.note(
            f"{unknown:.1%} of all pieces are unknown to the vocabulary: set text.byte_fallback=true or raise text.character_coverage"
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
    """Make or open a store, showing how far it is."""
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


def _progress_callback(advance: Callable[[int], None]) -> Callable[[Preparing], None]:
    """Turn totals, as preparing reports them, into steps, as a phase takes them."""
    before = 0

    def report(now: Preparing) -> None:
        nonlocal before
        signals.raise_if_stop_requested()
        advance(now.pairs - before)
        before = now.pairs

    return report


def _load_or_train_tokenizers(
    corpus: Corpus, config: TextConfig, cache: Path, progress: Progress, digests: list[str]
) -> Tokenizers:
    """Take the tokenizers that an earlier run learnt from the same files, or learn them."""
    kept = cache / f"text-{_tokenizer_key(corpus, config, digests)[:32]}"
    if (kept / "text.json").exists():
        return load_tokenizers(kept)
    with progress.phase("learning the vocabulary"):
        tokenizers = train_tokenizers(corpus.src_texts(), corpus.tgt_texts(), config)
    check_files_unchanged(corpus, digests)
    _save_atomically(tokenizers, kept)
    return tokenizers


def _replace_tokenizers(tokenizers: Tokenizers, folder: Path) -> None:
    """Copy the tokenizers into the run, replacing those of an earlier attempt that stopped before training."""
    if (folder / "text.json").exists() and _tokenizer_digests(
        load_tokenizers(folder)
    ) != _tokenizer_digests(tokenizers):
        _remove_tokenizers(folder)
    _save_atomically(tokenizers, folder)


def _remove_tokenizers(folder: Path) -> None:
    """Remove a folder of tokenizers; raise BundleError where it is a link or holds anything else, which stays."""
    others = sorted(set(os.listdir(folder)) - set(TEXT_FILES))
    if folder.is_symlink() or others:
        found = "a symbolic link" if folder.is_symlink() else f"{others[0]!r:.120} in it"
        raise BundleError(
            f"{folder} must hold an earlier attempt's tokenizers alone, to be replaced",
            found=found,
            fix="move it away",
        )
    with os_errors_converted(folder):
        for each in folder.iterdir():
            each.unlink()
        folder.rmdir()


def _tokenizer_digests(tokenizers: Tokenizers) -> tuple[str, str]:
    return tokenizers.src.digest, tokenizers.tgt.digest


def _same_file_warning(data: DataConfig) -> str:
    """Warn of what is nearly always a slip of the hand."""
    for src, tgt in zip(file_names(data.src), file_names(data.tgt), strict=False):
        if os.path.realpath(src) == os.path.realpath(tgt):
            return (
                f"warning: source and target are the same file, {src}: the model will learn to copy"
            )
    return ""


def _save_atomically(tokenizers: Tokenizers, folder: Path) -> None:
    """Save so that the folder is there with everything in it, or not at all."""
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


def _tokenizer_key(corpus: Corpus, config: TextConfig, digests: list[str]) -> str:
    """Hash what decides the tokenizers: the files, how they are read, and the settings of text."""
    settings = to_dict(Config(text=config))["text"]
    del settings["bpe_dropout"]  # changes how training cuts words, not the vocabulary
    return hashlib.sha256(
        canonical_json({"format": 1, "files": digests, "layout": corpus.layout(), "text": settings})
    ).hexdigest()
