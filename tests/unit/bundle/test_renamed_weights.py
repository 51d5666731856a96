"""Bundles with the weight names of earlier releases load, and give the same output."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tagging_kit import make_config, make_records
from torch import Tensor

from dragoman import Translator
from dragoman.bundle import Bundle, TaskBundle, write_bundle, write_task_bundle
from dragoman.bundle import format as layout
from dragoman.bundle.renamed_weights import RENAMED_COMPONENTS, rename_old_weights
from dragoman.config import Config
from dragoman.doctor.model_under_test import load_model_under_test
from dragoman.errors import BundleError
from dragoman.models.factory import build_model
from dragoman.runs.finetune import load_init_weights, open_pretrained
from dragoman.storage.atomic_and_safe_file_io import FileRecord
from dragoman.storage.manifest import read_manifest, write_manifest
from dragoman.storage.tensor_files import write_tensors
from dragoman.tasks.tagging import TaggingTask
from dragoman.text.sentencepiece_tokenizer import train_tokenizers

LINES = ["ein mann geht", "eine frau steht", "zwei kinder spielen"] * 10
STORED = Path(__file__).resolve().parents[2] / "fixtures" / "before_renames"

MODELS: dict[str, dict[str, Any]] = {
    "transformer": {"positions": "transformer_xl", "embedding_width": 8},
    "rnn": {
        "encoder": ("bigru",),
        "decoder": ("gru(attention=location, decoder=gnmt, layers=2)", "gru", "ffn"),
        "positions": "learned",
    },
}
BEFORE = {new: old for old, new in RENAMED_COMPONENTS.items()} | {"rnn": "recurrence"}


def old_name(name: str) -> str:
    """Return the name that a weight had in earlier releases."""
    name = re.sub(r"\brnn\.(?=(forward|backward)_rnn\.)", "sides.", name)
    return ".".join(BEFORE.get(part, part) for part in name.split("."))


def replace_weights(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write other weights into a bundle, with a manifest that fits them."""
    listed = read_manifest(path)
    (path / layout.WEIGHTS).unlink()
    (path / "manifest.json").unlink()
    files = {name: FileRecord(**each) for name, each in listed.pop("files").items()}
    fields = {name: listed[name] for name in listed.keys() - {"format", "manifest_sha256"}}
    record = write_tensors(path / layout.WEIGHTS, tensors)
    write_manifest(path, files | {layout.WEIGHTS: record}, fields)


def write_model(path: Path, model: str, quantization: str = "float32") -> dict[str, Tensor]:
    """Write a bundle with random weights, and return the tensors of its file."""
    sizes = {"width": 16, "heads": 2, "ffn_width": 16}
    layers = {"encoder": ("transformer",), "decoder": ("transformer",)}
    config = Config().replace(text={"vocab_size": 300}, model=sizes | layers | MODELS[model])
    tokenizers = train_tokenizers(LINES, [line.upper() for line in LINES], config.text)
    torch.manual_seed(0)
    weights = build_model(
        config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    ).state_dict()
    options: dict[str, Any] = {"golden": ["ein mann"], "quantization": quantization}
    write_bundle(path, config=config, tokenizers=tokenizers, weights=weights, **options)
    return load_file(path / layout.WEIGHTS)


@pytest.mark.parametrize("quantization", ["float32", "int8"])
@pytest.mark.parametrize("model", MODELS)
def test_a_translation_bundle_with_old_names(tmp_path: Path, model: str, quantization: str) -> None:
    stored = write_model(tmp_path, model, quantization)
    expected = list(Translator.load(tmp_path, device="cpu").stream(LINES[:3]))
    old = {old_name(name): tensor for name, tensor in stored.items()}
    assert len(old) == len(stored)
    assert old.keys() != stored.keys()
    replace_weights(tmp_path, old)
    translated = list(Translator.load(tmp_path, device="cpu").stream(LINES[:3]))
    assert [each.text for each in translated] == [each.text for each in expected]
    scores = [each.score for each in expected]  # other alignment in the file, other rounding
    assert [each.score for each in translated] == pytest.approx(scores, rel=1e-5)
    found = Bundle.load(tmp_path).model.state_dict()
    checked = load_model_under_test(tmp_path, device="cpu").model.state_dict()
    pretrained = open_pretrained(tmp_path)
    start = load_init_weights(pretrained.weights, pretrained.config, pretrained.tokenizers)
    for name, tensor in found.items():
        assert torch.equal(tensor, checked[name])
        assert torch.equal(tensor, start[name])
        if quantization == "float32":
            assert torch.equal(tensor, stored[name])


def test_a_task_bundle_with_old_names(tmp_path: Path) -> None:
    records, config = make_records(40), make_config(encoder="transformer", characters="lstm")
    config = config.replace(model={"positions": "learned", "max_positions": 64})
    task = TaggingTask(config, TaggingTask.fit_text(config, lambda: iter(records)))
    weights = task.build_model().state_dict()
    write_task_bundle(
        tmp_path, task=task, weights=weights, golden=task.golden_inputs(records)
    )  # loading compares the outputs
    old = {old_name(name): tensor.clone() for name, tensor in weights.items()}
    assert {"entrance", "sides", "feedforward"} <= {
        part for name in old for part in name.split(".")
    }
    replace_weights(tmp_path, old)
    found = TaskBundle.load(tmp_path).model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in found.items())


@pytest.mark.parametrize("path", [layout.BOX, *(STORED / name for name in ("cnn", "rnn"))])
def test_stored_bundles_have_old_names_and_load(path: Path) -> None:
    stored = load_file(path / layout.WEIGHTS)
    found = Bundle.load(path).model.state_dict()  # loading compares the golden vectors
    assert stored.keys() - found.keys()
    assert rename_old_weights(stored, found)


def test_a_name_changes_only_if_the_current_one_is_missing() -> None:
    old, new = "encoder.0.feedforward.inner.weight", "encoder.0.ffn.inner.weight"
    assert rename_old_weights([old], [new]) == {old: new}
    assert rename_old_weights([f"{old}.scale", old], [new]) == {
        old: new,
        f"{old}.scale": f"{new}.scale",
    }
    assert rename_old_weights([old], [old]) == {}, "the model has this name"
    assert rename_old_weights([old, new], [new]) == {}, "both are stored"
    assert rename_old_weights([old], ["encoder.0.ffn.outer.weight"]) == {}, "no such weight"
    both = ["encoder.0.recurrence.bias", "encoder.0.sides.bias"]
    assert rename_old_weights(both, ["encoder.0.rnn.bias"]) == {both[0]: "encoder.0.rnn.bias"}


def test_weights_under_both_names_are_rejected(tmp_path: Path) -> None:
    stored = write_model(tmp_path, "transformer")
    name = "decoder.0.ffn.inner.weight"
    replace_weights(tmp_path, stored | {old_name(name): stored[name].clone()})
    with pytest.raises(BundleError, match=r"found decoder\.0\.feedforward\.inner\.weight"):
        _ = Bundle.load(tmp_path).model
