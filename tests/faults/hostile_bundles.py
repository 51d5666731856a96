"""Corruptions of a bundle, each with a part of the expected error message."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from confidence_kit import CALIBRATION

from dragoman.config import Config
from dragoman.storage.manifest import canonical_json
from dragoman.text.sentencepiece_tokenizer import train_tokenizers

Damage = Callable[[Path], None]
CASES: dict[str, tuple[Damage, str]] = {}


def case(reason: str) -> Callable[[Damage], Damage]:
    """Register a corruption of a bundle, with a part of the expected error."""

    def listed(damage: Damage) -> Damage:
        CASES[damage.__name__] = (damage, reason)
        return damage

    return listed


def resign(path: Path, change: Callable[[dict], None] = lambda content: None) -> None:
    """Write a manifest that fits the damaged files, as an attacker would."""
    content = json.loads((path / "manifest.json").read_bytes())
    content.pop("manifest_sha256")
    for name in content["files"]:
        data = (path / name).read_bytes() if (path / name).is_file() else b""
        content["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    change(content)
    content["manifest_sha256"] = hashlib.sha256(canonical_json(content)).hexdigest()
    (path / "manifest.json").write_bytes(canonical_json(content))


def rewrite(path: Path, name: str, data: bytes) -> None:
    (path / name).write_bytes(data)
    resign(path)


def edit_json(path: Path, name: str, change: Callable[[dict], None]) -> None:
    content = json.loads((path / name).read_bytes())
    change(content)
    rewrite(path, name, canonical_json(content))


def safetensors(path: Path, change: Callable[[dict], object], data: bytes | None = None) -> None:
    """Rewrite the header of the weights; `change` may return the header as bytes."""
    raw = (path / "weights.safetensors").read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    changed = change(header)
    text = changed if isinstance(changed, bytes) else json.dumps(header).encode()
    rewrite(
        path,
        "weights.safetensors",
        struct.pack("<Q", len(text)) + text + (raw[8 + size :] if data is None else data),
    )


def link(path: Path, name: str) -> None:
    """Move a file or folder outside and leave a link to it."""
    outside = path.parent / "outside"
    outside.mkdir()
    shutil.move(path / name, outside / Path(name).name)
    (path / name).symlink_to(outside / Path(name).name)


CASES["link text"] = (lambda path: link(path, "text"), "symbolic link")
for _name in ("weights.safetensors", "config.json", "text/source.model", "card.md", "golden.json"):
    CASES[f"link {_name}"] = (lambda path, name=_name: link(path, name), "symbolic link")
CASES["link manifest"] = (lambda path: link(path, "manifest.json"), "manifest.json")


@case("pipe")
def fifo_in_place_of_the_configuration(path: Path) -> None:
    (path / "config.json").unlink()
    os.mkfifo(path / "config.json")


@case("not a regular file")
def fifo_in_place_of_the_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")


@case("a folder")
def folder_in_place_of_the_card(path: Path) -> None:
    (path / "card.md").unlink()
    (path / "card.md").mkdir()


@case("socket")
def socket_in_place_of_the_golden_vectors(path: Path) -> None:
    (path / "golden.json").unlink()
    before = os.getcwd()
    os.chdir(path)  # a socket's path is limited to a hundred bytes
    try:
        with socket.socket(socket.AF_UNIX) as door:
            door.bind("golden.json")
    finally:
        os.chdir(before)


@case("list of files")
def manifest_that_names_a_file_above(path: Path) -> None:
    resign(
        path, lambda content: content["files"].update({"../outside": {"bytes": 0, "sha256": ""}})
    )


@case("list of files")
def manifest_that_names_an_absolute_path(path: Path) -> None:
    resign(
        path, lambda content: content["files"].update({"/etc/passwd": {"bytes": 0, "sha256": ""}})
    )


@case("'run.py'")
def manifest_that_names_a_program(path: Path) -> None:
    (path / "run.py").write_text("print('hello')")
    resign(path, lambda content: content["files"].update({"run.py": {"bytes": 0, "sha256": ""}}))


@case("'golden.json'")
def manifest_without_the_golden_vectors(path: Path) -> None:
    resign(path, lambda content: content["files"].pop("golden.json"))


@case("its own hash")
def manifest_with_a_flipped_bit(path: Path) -> None:
    text = (path / "manifest.json").read_bytes()
    (path / "manifest.json").write_bytes(text.replace(b'"sha256": "', b'"sha256": "0', 1))


@case("format 2")
def bundle_of_a_later_format(path: Path) -> None:
    resign(path, lambda content: content.update(bundle_format=2))


@case("kind None")
def checkpoint_in_place_of_a_bundle(path: Path) -> None:
    resign(path, lambda content: content.pop("kind"))


@case("a header of")
def weights_with_a_header_of_an_exabyte(path: Path) -> None:
    rewrite(path, "weights.safetensors", struct.pack("<Q", 1 << 60) + bytes(50_000))


@case("weights.safetensors")
def weights_cut_short(path: Path) -> None:
    rewrite(path, "weights.safetensors", (path / "weights.safetensors").read_bytes()[:-100])


@case("weights.safetensors")
def weights_with_more_behind_them(path: Path) -> None:
    rewrite(path, "weights.safetensors", (path / "weights.safetensors").read_bytes() + b"more")


@case("the tensor name '../../etc/x'")
def tensor_named_like_a_path(path: Path) -> None:
    safetensors(
        path,
        lambda header: header.update(
            {"../../etc/x": header.pop("output.bias", None) or header.popitem()[1]}
        ),
    )


@case("twice")
def tensor_named_twice(path: Path) -> None:
    def change(header: dict) -> bytes:
        name = next(each for each in header if each != "__metadata__")
        return (json.dumps(header)[:-1] + f', "{name}": {json.dumps(header[name])}}}').encode()

    safetensors(path, change)


@case("weights.safetensors must fit the model")
def tensor_of_another_shape(path: Path) -> None:
    def change(header: dict) -> None:
        name = next(each for each in header if each.startswith("embeddings"))
        header[name]["shape"] = header[name]["shape"][::-1]

    safetensors(path, change)


@case("weights.safetensors must fit the model")
def tensor_of_another_type(path: Path) -> None:
    def change(header: dict) -> None:
        name = next(each for each in header if each.startswith("embeddings"))
        header[name]["dtype"] = "I32"

    safetensors(path, change)


@case("found no ")
def tensor_missing(path: Path) -> None:
    safetensors(
        path,
        lambda header: (
            header.pop(next(each for each in header if each.startswith("decoder"))) and None
        ),
    )


@case("empty F32 [0]")
def tensor_of_no_size(path: Path) -> None:
    safetensors(
        path,
        lambda header: header.update(empty={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
    )


@case("tensors")
def a_million_tensors(path: Path) -> None:
    entry = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    text = "{" + ",".join(entry % number for number in range(200_000)) + "}"
    safetensors(path, lambda header: text.encode(), b"")


@case("nan")
def weights_that_are_not_numbers(path: Path) -> None:
    raw = bytearray((path / "weights.safetensors").read_bytes())
    raw[-4:] = struct.pack("<f", float("nan"))
    rewrite(path, "weights.safetensors", bytes(raw))


@case("SHA-256")
def weights_changed_and_not_listed(path: Path) -> None:
    raw = bytearray((path / "weights.safetensors").read_bytes())
    raw[-4:] = struct.pack("<f", 0.125)
    (path / "weights.safetensors").write_bytes(bytes(raw))


def calibration(path: Path, data: bytes) -> None:
    """Add a calibration of the confidence, listed in the manifest."""
    (path / "calibration.json").write_bytes(data)
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    resign(path, lambda content: content["files"].update({"calibration.json": entry}))


@case("format None")
def calibration_that_is_empty(path: Path) -> None:
    calibration(path, b"{}")


@case("an unknown value 'command'")
def calibration_with_a_command(path: Path) -> None:
    values = {**CALIBRATION.to_dict(), "command": "touch canary"}
    calibration(path, json.dumps(values).encode())


@case("bias nan")
def calibration_that_is_no_number(path: Path) -> None:
    values = {**CALIBRATION.to_dict(), "bias": float("nan")}
    calibration(path, json.dumps(values).encode())


@case("mean_log_prob -1")
def calibration_that_prefers_what_is_improbable(path: Path) -> None:
    values = CALIBRATION.to_dict()
    calibration(
        path, json.dumps(values | {"weights": values["weights"] | {"mean_log_prob": -1}}).encode()
    )


@case("isotonic that is not a short list")
def calibration_of_very_many_points(path: Path) -> None:
    values = {**CALIBRATION.to_dict(), "isotonic": [[at, 0.5] for at in range(50_000)]}
    calibration(path, json.dumps(values).encode())


@case("calibration.json must have at most")
def calibration_of_two_megabytes(path: Path) -> None:
    calibration(path, b" " * (2 << 20) + b"{}")


@case("nested deeper")
def calibration_nested_without_end(path: Path) -> None:
    calibration(path, b'{"a":' * 100_000 + b"1" + b"}" * 100_000)


@case("symbolic link")
def calibration_that_is_a_link(path: Path) -> None:
    calibration(path, json.dumps(CALIBRATION.to_dict()).encode())
    link(path, "calibration.json")


@case("nothing")
def calibration_that_is_listed_and_missing(path: Path) -> None:
    calibration(path, b"{}")
    (path / "calibration.json").unlink()


@case("twice")
def configuration_with_a_key_twice(path: Path) -> None:
    text = (path / "config.json").read_bytes()
    rewrite(path, "config.json", text.replace(b'"recipe"', b'"recipe": "x",\n "recipe"', 1))


@case("nested deeper")
def configuration_nested_without_end(path: Path) -> None:
    rewrite(path, "config.json", b'{"a":' * 100_000 + b"1" + b"}" * 100_000)


@case("config.json must have at most")
def configuration_of_two_megabytes(path: Path) -> None:
    rewrite(path, "config.json", b" " * (2 << 20) + (path / "config.json").read_bytes())


@case("text.vocab_size")
def configuration_with_a_giant_vocabulary(path: Path) -> None:
    edit_json(path, "config.json", lambda content: content["text"].update(vocab_size=10**12))


@case("model.width of 65536")
def configuration_of_a_giant_width(path: Path) -> None:
    edit_json(path, "config.json", lambda content: content["model"].update(width=65_536))


@case("must hold the weights of the model's 901 layers; found 34 tensors")
def configuration_of_a_giant_depth(path: Path) -> None:
    edit_json(
        path, "config.json", lambda content: content["model"].update(encoder=["transformer*900"])
    )


@case("28,800,000,000 in its feed-forward networks")
def configuration_of_giant_feed_forward_networks(path: Path) -> None:
    edit_json(
        path,
        "config.json",
        lambda content: content["model"].update(ffn_width=1_000_000, encoder=["transformer*900"]),
    )


@case("at most 10,000,000,000 parameters")
def configuration_of_giant_heads(path: Path) -> None:
    edit_json(
        path,
        "config.json",
        lambda content: content["model"].update(
            heads=1024, head_width=4096, decoder=["transformer*32"]
        ),
    )


@case("at most 1000 layers in all; found 1,000,000")
def configuration_of_a_thousand_times_a_thousand_layers(path: Path) -> None:
    edit_json(
        path,
        "config.json",
        lambda content: content["model"].update(encoder=["lstm(layers=1000)*1000"]),
    )


@case("at most 1000 blocks")
def configuration_of_a_million_layers(path: Path) -> None:
    edit_json(
        path,
        "config.json",
        lambda content: content["model"].update(encoder=["transformer*1000000"]),
    )


@case("weights.safetensors must fit the model")
def configuration_of_another_model(path: Path) -> None:
    edit_json(path, "config.json", lambda content: content["model"].update(width=32))


@case("there is no setting model.hook")
def configuration_with_an_unknown_key(path: Path) -> None:
    edit_json(path, "config.json", lambda content: content["model"].update(hook="os.system"))


@case("config.json")
def configuration_with_yaml_tags(path: Path) -> None:
    rewrite(path, "config.json", b"model: !!python/object/apply:os.system ['touch canary']\n")


@case("config.json")
def configuration_with_yaml_aliases(path: Path) -> None:
    rewrite(path, "config.json", b"a: &a [x, x, x]\nb: &b [*a, *a, *a]\nmodel: [*b, *b, *b]\n")


class Canary:
    """An object that leaves a file behind when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return (os.mkdir, ("canary",))


@case("weights.safetensors")
def weights_that_are_a_pickle(path: Path) -> None:
    rewrite(path, "weights.safetensors", pickle.dumps(Canary()))


@case("golden.json")
def golden_vectors_that_are_a_pickle(path: Path) -> None:
    rewrite(path, "golden.json", pickle.dumps(Canary()))


@case("weights.pt, another program's model")
def nothing_but_a_pickle(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()
    (path / "weights.pt").write_bytes(pickle.dumps(Canary()))


@case("nested deeper")
def golden_vectors_nested_deeply(path: Path) -> None:
    rewrite(path, "golden.json", b'{"cases":' + b"[" * 100 + b"]" * 100 + b"}")


@case("token ids of the vocabulary")
def golden_vectors_with_ids_past_the_vocabulary(path: Path) -> None:
    edit_json(path, "golden.json", lambda content: content["cases"][0].update(src=[10**9]))


@case("at most 16 cases")
def golden_vectors_without_end(path: Path) -> None:
    edit_json(path, "golden.json", lambda content: content.update(cases=content["cases"] * 100))


@case("must have log-probability")
def golden_vectors_of_another_model(path: Path) -> None:
    edit_json(
        path, "golden.json", lambda content: content["cases"][0]["log_probs"].__setitem__(0, -0.125)
    )


@case("SentencePiece")
def tokenizer_of_noise(path: Path) -> None:
    rewrite(path, "text/source.model", os.urandom(1000))


@case("weights.safetensors must fit the model")
def tokenizer_of_another_size(path: Path) -> None:
    tokenizers = train_tokenizers(
        ["abc def ghi"] * 20, ["abc def ghi"] * 20, Config().replace(text={"vocab_size": 280}).text
    )
    rewrite(path, "text/source.model", tokenizers.src.model)


@case("not listed")
def tokenizer_slipped_in(path: Path) -> None:
    shutil.copy(path / "text/source.model", path / "text/shared.model")


@case("text.json")
def tokenizer_settings_with_a_key_twice(path: Path) -> None:
    text = (path / "text/text.json").read_bytes()
    rewrite(path, "text/text.json", text.replace(b'"kind"', b'"kind": "bpe", "kind"', 1))


@case("card.md must be UTF-8")
def card_that_is_not_text(path: Path) -> None:
    rewrite(path, "card.md", b"\xff\xfe\xff")
