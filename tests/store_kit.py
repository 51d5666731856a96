"""A corpus of three repeated sentences, and its token store."""

from __future__ import annotations

from pathlib import Path

from dragoman.config.root_config import DataConfig
from dragoman.data.parallel_corpus import Corpus, ParallelFiles
from dragoman.data.token_store import TokenStore
from dragoman.text.sentencepiece_tokenizer import Tokenizers

GERMAN = [
    "Ein Hund läuft durch den Schnee.",
    "Zwei Männer reden auf der Straße.",
    "Eine Frau liest ein Buch im Park.",
]
ENGLISH = [
    "A dog runs through the snow.",
    "Two men are talking in the street.",
    "A woman reads a book in the park.",
]


def write_corpus(folder: Path, src: list[str], tgt: list[str], **options: object) -> ParallelFiles:
    """Write lines of two languages."""
    (folder / "x.de").write_text("".join(f"{line}\n" for line in src), encoding="utf-8")
    (folder / "x.en").write_text("".join(f"{line}\n" for line in tgt), encoding="utf-8")
    return ParallelFiles(folder / "x.de", folder / "x.en", **options)  # type: ignore[arg-type]


def prepare_store(
    corpus: Corpus, tokenizers: Tokenizers, folder: Path, **options: object
) -> TokenStore:
    """Prepare a corpus, with or without a limit for its lengths."""
    data = DataConfig(max_length=options.pop("max_length", 200))  # type: ignore[arg-type]
    return TokenStore.prepare(corpus, tokenizers, folder=folder, data=data, **options)  # type: ignore[arg-type]


def write_long_corpus(folder: Path, count: int) -> ParallelFiles:
    """Write as many different pairs as are wanted."""
    return write_corpus(
        folder,
        [f"{GERMAN[i % 3]} {i}" for i in range(count)],
        [f"{ENGLISH[i % 3]} {i}" for i in range(count)],
    )
