"""Untrusted model directories are rejected with a reason; nothing outside is opened."""

from __future__ import annotations

import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hostile_bundles import CASES, resign

from dragoman.bundle import Bundle, write_bundle
from dragoman.bundle.translation_bundle_loader import build_loaded_model
from dragoman.config import Config
from dragoman.errors import BundleError, CorruptError, DragomanError
from dragoman.models.factory import build_model
from dragoman.text.sentencepiece_tokenizer import train_tokenizers

SIZES = {
    "width": 16,
    "heads": 2,
    "ffn_width": 16,
    "encoder": ("transformer",),
    "decoder": ("transformer",),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid bundle, to be copied and damaged."""
    path = tmp_path_factory.mktemp("sound") / "model"
    config = Config().replace(
        text={"vocab_size": 300, "shared_vocab": False}, model={**SIZES, "tie_embeddings": "target"}
    )
    lines = ["ein mann geht", "eine frau steht", "zwei kinder"] * 10
    tokenizers = train_tokenizers(lines, [line.upper() for line in lines], config.text)
    torch.manual_seed(0)
    model = build_model(
        config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    )
    write_bundle(
        path, config=config, tokenizers=tokenizers, weights=model.state_dict(), golden=["ein mann"]
    )
    return path


opened: list[str] = []
sys.addaudithook(
    lambda event, arguments: (
        opened.append(str(arguments[0])) if event == "open" and watching else None
    )
)
watching = False


@pytest.fixture
def watched() -> Iterator[list[str]]:
    """Every path that is opened while the test runs."""
    global watching
    opened.clear()
    watching = True
    yield opened
    watching = False


def test_there_are_thirty_cases_and_more() -> None:
    assert len(CASES) >= 30


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", CASES)
def test_a_hostile_bundle_is_rejected_with_its_reason(
    name: str, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: list[str]
) -> None:
    """Nothing in a model directory runs, allocates without bound, or leads outside.

    See fairseq#5610 and safetensors#668.
    """
    damage, reason = CASES[name]
    path = tmp_path / "model"
    shutil.copytree(sound, path)
    damage(path)
    monkeypatch.chdir(tmp_path)
    watched.clear()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DragomanError) as caught:
        _ = Bundle.load(path).model
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert isinstance(caught.value, (BundleError, CorruptError))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "canary").exists()
    assert grown < 300 << 10, f"{grown} KiB more memory"
    assert not [
        each
        for each in watched
        if each.startswith(str(tmp_path)) and not each.startswith(str(path))
    ]


def test_the_sound_bundle_loads(sound: Path, tmp_path: Path) -> None:
    """The cases above are rejected for their damage, not for how they were copied."""
    path = tmp_path / "model"
    shutil.copytree(sound, path)
    resign(path)
    (path / "notes of mine.txt").write_text("files that are not listed are not opened")
    (path / ".DS_Store").write_bytes(b"\0")
    (path / "text" / ".DS_Store").write_bytes(b"\0")
    (path / "training").mkdir()
    bundle = Bundle.load(path)
    assert bundle.model.training is False
    assert build_loaded_model(bundle.config, bundle.tokenizers, bundle.model.state_dict())
