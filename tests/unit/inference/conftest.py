"""Fixtures of the inference tests: a translator of random weights, its bundle and tokenizers."""

from __future__ import annotations

from pathlib import Path

import pytest
from translator_kit import CONFIG, TEXT, write_random_bundle

from dragoman.inference import Translator
from dragoman.text.sentencepiece_tokenizer import Tokenizers, train_tokenizers


@pytest.fixture(scope="session")
def tokenizers() -> Tokenizers:
    return train_tokenizers(TEXT, TEXT, CONFIG.text)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, tokenizers: Tokenizers) -> Path:
    return write_random_bundle(tmp_path_factory.mktemp("bundle"), tokenizers)


@pytest.fixture(scope="module")
def translator(bundle: Path) -> Translator:
    return Translator.load(bundle, device="cpu")
