"""Hugging Face directories that are damaged or hostile: each import ends in one line, and
nothing is left behind.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange_kit import LINES, build_exportable_model
from safetensors.torch import load_file, save_file

from dragoman.bundle import Bundle
from dragoman.cli.app import main
from dragoman.errors import DragomanError
from dragoman.exchange import huggingface_import
from dragoman.exchange.huggingface_export import save_hugging_face
from dragoman.exchange.huggingface_import import import_marian

pytest.importorskip("transformers")

Damage = Callable[[Path], None]
WEIGHT = "model.encoder.layers.0.fc1.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Pegasus directory."""
    model, tokenizers, config = build_exportable_model(
        encoder=["transformer"],
        decoder=["transformer"],
        width=16,
        heads=2,
        ffn_width=16,
        residual="pre_norm",
    )
    path = tmp_path_factory.mktemp("imports") / "theirs"
    path.mkdir()
    save_hugging_face(model, tokenizers, config, path)
    return path


def setting(name: str, value: Any, file: str = "config.json") -> Damage:
    """Change one value of a JSON file."""

    def damage(path: Path) -> None:
        content = json.loads((path / file).read_text("utf-8"))
        content[name] = value
        (path / file).write_text(json.dumps(content), "utf-8")

    return damage


def without(name: str, file: str = "config.json") -> Damage:
    """Remove one key of a JSON file."""

    def damage(path: Path) -> None:
        content = json.loads((path / file).read_text("utf-8"))
        del content[name]
        (path / file).write_text(json.dumps(content), "utf-8")

    return damage


def content(file: str, data: bytes) -> Damage:
    """Replace the contents of a file."""
    return lambda path: (path / file).write_bytes(data) and None


def cut(file: str, kept: float) -> Damage:
    """Keep the first part of a file."""
    return lambda path: os.truncate(path / file, int(kept * (path / file).stat().st_size))


def pipe(file: str) -> Damage:
    """Replace a file by a named pipe without a writer."""

    def damage(path: Path) -> None:
        (path / file).unlink(missing_ok=True)
        os.mkfifo(path / file)

    return damage


def folder(file: str) -> Damage:
    """Replace a file by a directory."""

    def damage(path: Path) -> None:
        (path / file).unlink(missing_ok=True)
        (path / file).mkdir()

    return damage


def link(file: str, to: str = "/dev/zero") -> Damage:
    """Replace a file by a symbolic link."""

    def damage(path: Path) -> None:
        (path / file).unlink(missing_ok=True)
        (path / file).symlink_to(to)

    return damage


def header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change the header of the weights."""

    def damage(path: Path) -> None:
        raw = (path / "model.safetensors").read_bytes()
        size = struct.unpack("<Q", raw[:8])[0]
        entries = json.loads(raw[8 : 8 + size])
        change(entries)
        text = json.dumps(entries).encode()
        (path / "model.safetensors").write_bytes(
            struct.pack("<Q", len(text)) + text + raw[8 + size :]
        )

    return damage


def number(value: float) -> Damage:
    """Write a number into the middle of the weights."""

    def damage(path: Path) -> None:
        raw = bytearray((path / "model.safetensors").read_bytes())
        at = (len(raw) // 2) & ~3
        start = 8 + struct.unpack("<Q", raw[:8])[0]
        at -= (at - start) % 4
        raw[at : at + 4] = np.float32(value).tobytes()
        (path / "model.safetensors").write_bytes(raw)

    return damage


def pickled(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def index(**weight_map: Any) -> Damage:
    """Replace the weights by an index of several files."""

    def damage(path: Path) -> None:
        (path / "model.safetensors").rename(path / "part.safetensors")
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return damage


def swapped_vocabulary(path: Path) -> None:
    """Map two tokens to one id."""
    tokens = json.loads((path / "vocab.json").read_text("utf-8"))
    last, other = list(tokens)[-2:]
    tokens[last] = tokens[other]
    (path / "vocab.json").write_text(json.dumps(tokens))


WHOLE = (
    "vocab_size",
    "d_model",
    "encoder_layers",
    "decoder_attention_heads",
    "encoder_ffn_dim",
    "max_position_embeddings",
)
CASES: dict[str, tuple[Damage, str]] = {
    **{
        f"{name} {value!r:.20}": (setting(name, value), name)
        for name in WHOLE
        for value in (10**9, 0, -1, "8", 2.5, None, [8], True, 10**400)
    },
    **{
        f"without {name}": (without(name), name)
        for name in ("vocab_size", "d_model", "decoder_layers", "activation_function")
    },
    **{
        f"{name} {value!r}": (setting(name, value), name)
        for name in ("scale_embedding", "tie_word_embeddings")
        for value in (1, "yes", None)
    },
    **{
        f"dropout {value!r}": (setting("dropout", value), "dropout")
        for value in ("0.1", -1, 2, [], 10**400)
    },
    **{
        f"activation {value!r}": (setting("activation_function", value), "activation_function")
        for value in ("tanh", 3, [], {})
    },
    **{
        f"start {value!r}": (setting("decoder_start_token_id", value), "decoder_start_token_id")
        for value in (10**9, -1, "1", [1], 1.0)
    },
    **{
        f"eos {value!r}": (setting("eos_token_id", value), "eos_token_id")
        for value in (0, 10**9, [2], "</s>")
    },
    **{
        f"kind {value!r}": (setting("model_type", value), "model_type")
        for value in ("bart", None, 7, ["marian"], {"a": 1})
    },
    "another width": (setting("d_model", 32), "must fit config.json"),
    "more heads than divide": (setting("encoder_attention_heads", 3), "do not divide"),
    "one vocabulary of two sizes": (setting("decoder_vocab_size", 77), "decoder_vocab_size of 77"),
    "tables apart": (
        setting("share_encoder_decoder_embeddings", False),
        "share_encoder_decoder_embeddings False",
    ),
    "post-norm": (setting("normalize_before", False), "normalize_before False"),
    "more layers": (setting("decoder_layers", 2), "no model.decoder.layers.1"),
    "another vocabulary size": (
        setting("vocab_size", 1000),
        "a vocab_size of 1000 and a decoder_vocab_size of 300",
    ),
    "output of its own": (setting("tie_word_embeddings", False), "lm_head.weight"),
    "beams": (
        setting("num_beams", 10**9, "generation_config.json"),
        "num_beams from 1 to 256; found 1000000000",
    ),
    "beams of text": (setting("num_beams", "many", "generation_config.json"), "found 'many'"),
    "noted beam": (setting("dragoman", {"decode": {"beam": "x"}}), "beam"),
    "noted setting": (setting("dragoman", {"data": {"secret": 1}}), "secret"),
    "ids beyond": (setting("mehr", 10**6, "vocab.json"), "1000000 for 'mehr'"),
    "ids of text": (setting("mehr", "7", "vocab.json"), "'7' for 'mehr'"),
    "ids of truth": (setting("mehr", True, "vocab.json"), "True for 'mehr'"),
    "half a character": (setting("\ud800", 299, "vocab.json"), "tokens of Unicode text"),
    "ids twice": (swapped_vocabulary, "one id twice"),
    "no unknown": (without("<unk>", "vocab.json"), "no <unk>"),
    "other tokens": (
        content("vocab.json", b'{"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}'),
        "must have its pieces in vocab.json",
    ),
    "not a number": (number(float("nan")), "finite numbers"),
    "infinity": (number(float("inf")), "finite numbers"),
    "a pickle": (
        pickled,
        "a pickle or another format, which is not opened because it can run code",
    ),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "found none"),
    "an index of nothing": (index(), "found no model.decoder.embed_tokens"),
    "an index elsewhere": (index(**{WEIGHT: "../part.safetensors"}), "found '../part.safetensors'"),
    "an index of a lost file": (index(**{WEIGHT: "none.safetensors"}), "no such file"),
    "an index of a lost weight": (index(nothing="part.safetensors"), "must hold 'nothing'"),
    "an index of numbers": (index(**{WEIGHT: 3}), "weight_map of file names"),
    "a lost weight": (header(lambda entries: entries.pop(WEIGHT)), f"found no {WEIGHT}"),
    "one weight more": (
        header(lambda entries: entries.update({"model.more": entries[WEIGHT]})),
        "found 'model.more'",
    ),
    "another shape": (
        header(lambda entries: entries[WEIGHT].update(shape=[8, 32])),
        r"found \[8, 32\] of F32",
    ),
    "a shape of text": (header(lambda entries: entries[WEIGHT].update(shape="ab")), "found"),
    "another type": (header(lambda entries: entries[WEIGHT].update(dtype="I32")), "of I32"),
    "a type that is none": (header(lambda entries: entries[WEIGHT].update(dtype=["F32"])), "of"),
    "offsets beyond": (
        header(lambda entries: entries[WEIGHT].update(data_offsets=[0, 1 << 60])),
        "model.safetensors",
    ),
    "a huge header": (content("model.safetensors", struct.pack("<Q", 1 << 62) + b"{}"), "header"),
    **{
        f"{file} {what}": (damage(file), file)
        for file in ("config.json", "vocab.json", "source.spm", "target.spm", "model.safetensors")
        for what, damage in (("as a pipe", pipe), ("as a folder", folder), ("as a link", link))
    },
    **{
        f"{file} of {len(data)} bytes {data[:8]!r}": (content(file, data), file)
        for file in ("config.json", "vocab.json", "generation_config.json")
        for data in (b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"a": 1, "a": 2}')
    },
    **{
        f"{file} cut {kept}": (cut(file, kept), file)
        for file in ("config.json", "vocab.json", "source.spm", "target.spm", "model.safetensors")
        for kept in (0.0, 0.3, 0.9)
    },
    "source.spm of noise": (content("source.spm", bytes(range(256)) * 8), "source.spm"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_directory_ends_in_one_line_and_leaves_nothing(
    case: str, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """23 of 58 such directories ended in tracebacks, and 11 left a finished model behind."""
    damage, found = CASES[case]
    theirs = Path(shutil.copytree(sound, tmp_path / "theirs"))
    damage(theirs)
    monkeypatch.setattr(
        huggingface_import, "is_installed", lambda _: False
    )  # damage is found by our own reading
    before = sorted(theirs.iterdir())
    with pytest.raises(DragomanError, match=found) as caught:
        import_marian(theirs, tmp_path / "new" / "mine")
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.exit_code in (2, 65)
    assert [each.name for each in tmp_path.iterdir()] == ["theirs"]
    assert sorted(theirs.iterdir()) == before


def test_several_files_of_weights_are_read(sound: Path, tmp_path: Path) -> None:
    theirs = Path(shutil.copytree(sound, tmp_path / "theirs"))
    weights = load_file(theirs / "model.safetensors")
    (theirs / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in parts.items():
        save_file({name: weights[name] for name in some}, theirs / file)
    file_of_weight = {name: file for file, some in parts.items() for name in some}
    (theirs / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of_weight}))
    whole, split = (
        Bundle.load(import_marian(path, tmp_path / path.parent.name).path)
        for path in (sound, theirs)
    )
    assert all(
        bool((a == b).all())
        for a, b in zip(
            whole.model.state_dict().values(), split.model.state_dict().values(), strict=True
        )
    )


def test_an_import_that_translates_otherwise_is_not_kept(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = huggingface_import._map_weights

    def wrong(*arguments: Any) -> Any:
        weights = real(*arguments)
        return weights | {"encoder.norm.bias": weights["encoder.norm.bias"] + 1}

    monkeypatch.setattr(huggingface_import, "_map_weights", wrong)
    assert main(["import", str(sound), "--out", str(tmp_path / "mine")]) == 65
    [line] = capsys.readouterr().err.splitlines()
    assert "nothing was kept" in line
    assert list(tmp_path.iterdir()) == []


def test_files_outside_the_directory_are_not_read(sound: Path, tmp_path: Path) -> None:
    """A tokenizer's settings may name any file; only what was validated is handed to
    transformers.
    """
    theirs = Path(shutil.copytree(sound, tmp_path / "theirs"))
    os.mkfifo(tmp_path / "pipe")
    setting("target_vocab_file", str(tmp_path / "pipe"), "tokenizer_config.json")(theirs)
    setting("separate_vocabs", True, "tokenizer_config.json")(theirs)
    setting("auto_map", {"AutoModelForSeq2SeqLM": "hook.Model"})(theirs)
    (theirs / "hook.py").write_text("raise SystemExit('untrusted code ran')")
    setting("min_length", 10**9, "generation_config.json")(theirs)
    imported = import_marian(theirs, tmp_path / "mine", texts=LINES)
    assert imported.parity is not None
    assert imported.parity.equal_fraction == 1.0


def test_texts_beyond_the_positions_of_the_original_are_not_compared(
    sound: Path, tmp_path: Path
) -> None:
    theirs = Path(shutil.copytree(sound, tmp_path / "theirs"))
    setting("max_position_embeddings", 256)(theirs)
    setting("dragoman", None)(theirs)
    weights = load_file(theirs / "model.safetensors")
    save_file(
        {name: weight for name, weight in weights.items() if "embed_positions" not in name},
        theirs / "model.safetensors",
    )
    imported = import_marian(
        theirs, tmp_path / "mine", texts=["ein mann geht", "ein mann geht " * 50]
    )
    assert imported.parity is not None
    assert (imported.parity.equal, imported.parity.sentences) == (1, 1)


def test_a_killed_import_is_swept_away_by_the_next(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_import, "is_installed", lambda _: False)
    left = tmp_path / ".tmp-import-999999999-00ff00ff"
    (left / "text").mkdir(parents=True)
    (tmp_path / ".tmp-import-mine").mkdir()
    import_marian(sound, tmp_path / "mine")
    assert sorted(each.name for each in tmp_path.iterdir()) == [".tmp-import-mine", "mine"]
