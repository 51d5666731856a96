"""Models for export tests: perturbed weights, and tokenizers trained once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from model_kit import perturb_weights

from dragoman.config import Config
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model
from dragoman.text.sentencepiece_tokenizer import Tokenizers, train_tokenizers

LINES = [
    "ein mann geht",
    "eine frau geht schnell",
    "zwei hunde",
    "ein hund und ein mann sehen eine frau",
    "der hund",
]
BASE = {
    "encoder": ["transformer*2"],
    "decoder": ["transformer*2"],
    "width": 32,
    "heads": 4,
    "ffn_width": 64,
    "dropout": 0.0,
}
TOKENIZERS: dict[bool, Tokenizers] = {}


def tokenizers_of(config: Config) -> Tokenizers:
    """Learn tokenizers once for all tests."""
    joint = config.text.shared_vocab
    if joint not in TOKENIZERS:
        TOKENIZERS[joint] = train_tokenizers(
            LINES * 3, [line.upper() for line in LINES] * 3, config.text
        )
    return TOKENIZERS[joint]


def build_exportable_model(**model: Any) -> tuple[EncoderDecoder, Tokenizers, Config]:
    """Build a model whose every weight, norms and biases included, has moved off its first
    value.
    """
    config = Config().replace(
        model={**BASE, **model},
        text={"vocab_size": 300, "shared_vocab": model.get("tie_embeddings", "all") == "all"},
    )
    tokenizers = tokenizers_of(config)
    torch.manual_seed(0)
    net = perturb_weights(
        build_model(
            config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
        )
    ).eval()
    return net, tokenizers, config


def run_readme(folder: Path) -> str:
    """Run the code in an export's README as it is, in the export's directory, with nothing of ours
    on the path.
    """
    page = (folder / "README.md").read_text("utf-8")
    [code] = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert "dragoman" not in code
    assert page.startswith("---\nlibrary_name: ")
    assert "dragoman\n" not in page[:40]
    assert "## Limits" in page
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def begins_alike(text: str, other: str) -> bool:
    """Whether one of two outputs is the beginning of the other, but for the last characters, which
    a limit may have cut.
    """
    text, other = (each.rstrip("\ufffd ") for each in (text, other))
    return text.startswith(other) or other.startswith(text)
