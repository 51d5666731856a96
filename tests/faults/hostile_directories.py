"""Seeded generator of hostile model, run and import directories: damaged copies of valid ones."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dragoman.storage.manifest import canonical_json

ESCAPES = "\x1b]0;owned\x07\x1b[31m\x9b31m\x85\u202eevil\u2066\r\nsecond line\x7f\x00"
_MOST_SIGNED = 64 << 20  # bytes; a terabyte of nothing is not read
_KEYS = "{" + ",".join(f'"key{number}": {number}' for number in range(60_000)) + "}"

# Raw JSON, since Python's own writer cannot make half of it.
VALUES = {
    "null": "null",
    "true": "true",
    "zero": "0",
    "minus one": "-1",
    "a fraction": "0.5",
    "a billion": "1000000000",
    "a huge number": "1" + "0" * 30,
    "five thousand digits": "9" * 5000,
    "nan": "NaN",
    "infinity": "Infinity",
    "an overflow": "1e999",
    "empty text": '""',
    "a word": '"word"',
    "escapes": json.dumps(ESCAPES),
    "raw C1 and bidi": '"\u009b31m\u202e\u2069"',
    "long text": '"' + "a" * 300_000 + '"',
    "many spaces": '"transformer' + " " * 200_000 + '("',
    "a lone surrogate": '"\\ud800"',
    "a path above": '"../../outside/secret.txt"',
    "an absolute path": '"/etc/passwd"',
    "an empty list": "[]",
    "lists in lists": '[[1, [2]], {}, "x", null]',
    "a deep list": "[" * 3000 + "]" * 3000,
    "a list of depth 40": "[" * 40 + "]" * 40,
    "a long list": "[" + "1," * 100_000 + "1]",
    "an empty object": "{}",
    "a deep object": '{"a":' * 3000 + "1" + "}" * 3000,
    "sixty thousand keys": _KEYS,
    "repeated keys": '{"a": 1, "b": 2, "a": 3}',
    "sixty thousand keys and a repeat": _KEYS[:-1] + ', "key59999": 1}',
}
BLOCKS = {
    "a million layers": '["lstm(layers=1000)*1000"]',
    "a million transformer layers": '["reformer(layers=1000)*1000"]',
    "many spaces": json.dumps(["transformer" + " " * 200_000 + "!"]),
    "many spaces in brackets": json.dumps(["transformer(" + " " * 200_000 + "*"]),
    "open brackets": json.dumps(["transformer" + "(" * 100_000]),
    "torn brackets": json.dumps(["transformer("] * 30_000),
    "many options": json.dumps(["transformer(" + ",".join(f"x{n}=1" for n in range(30_000)) + ")"]),
    "a huge repetition": json.dumps(["transformer*" + "9" * 5000]),
    "another script's digits": json.dumps(["transformer*\u0663", "transformer*\u00b2"]),
    "a hundred thousand entries": json.dumps(["transformer"] * 100_000),
    "huge feed-forward layers": json.dumps(["transformer(ffn_width=1000000)*1000"]),
    "escapes": json.dumps([ESCAPES, f"transformer({ESCAPES}=1)"]),
}


class Case(NamedTuple):
    """One way to damage a copy of a valid directory."""

    name: str
    damage: Callable[[Path], None]
    user: bool = False  # whether it needs a user whom file modes stop


def generate(kind: str, sound: Path, count: int, seed: int) -> Iterator[Case]:
    """Yield `count` cases for a kind of directory: `model`, `run` or `import`, spread over its
    files."""
    files = sorted(
        path.relative_to(sound).as_posix()
        for path in sound.rglob("*")
        if path.is_file() and path.name != "curves.png"
    )
    shuffle = random.Random(f"{kind} {seed}")
    handmade = [*_handmade(kind)]
    shuffle.shuffle(handmade)
    for number in range(count):
        rng = random.Random(f"{kind} {seed} {number}")
        if number % 4 == 3 and handmade:
            yield handmade.pop()
            continue
        name = (
            files[number % len(files)]
            if number % 2
            else rng.choice([each for each in files if each.endswith(("json", "jsonl"))])
        )
        if name.endswith((".json", ".jsonl")) and rng.random() < 0.7:
            yield _json_case(name, rng)
        elif name.endswith(".safetensors") and rng.random() < 0.5:
            yield _header_case(name, rng)
        else:
            yield _file_case(name, rng)


def sign(directory: Path) -> None:
    """Rewrite every manifest to match the files beside it, as an attacker would.

    Files that cannot be hashed are left as they are.
    """
    for path in sorted(directory.rglob("manifest.json")):
        if not _is_small(path):
            continue
        try:
            content = json.loads(path.read_bytes())
            content.pop("manifest_sha256", None)
            for name in content["files"]:
                place = path.parent / name
                if _is_small(place):
                    data = place.read_bytes()
                    content["files"][name] = {
                        "bytes": len(data),
                        "sha256": hashlib.sha256(data).hexdigest(),
                    }
            content["manifest_sha256"] = hashlib.sha256(canonical_json(content)).hexdigest()
            path.write_bytes(canonical_json(content))
        except (ValueError, TypeError, AttributeError, KeyError, OSError, RecursionError):
            continue


def _is_small(path: Path) -> bool:
    """Whether a path is a regular file of moderate size, not a link to a device or a huge sparse
    file."""
    return path.is_file() and not path.is_symlink() and path.stat().st_size < _MOST_SIGNED


def _json_case(name: str, rng: random.Random) -> Case:
    """Replace, remove, rename or add at one key of a JSON file, or of one line of JSON lines."""
    what = rng.choice([*VALUES, *VALUES, "removed", "renamed", "30,000 unknown keys"])
    signed = rng.random() < 0.8
    place = rng.random()

    def damage(directory: Path) -> None:
        path = directory / name
        lines = (
            path.read_text("utf-8").split("\n")
            if name.endswith(".jsonl")
            else [path.read_text("utf-8")]
        )
        row = int(place * (len(lines) - 1))
        lines[row] = _changed(json.loads(lines[row]), what, place)
        path.write_text("\n".join(lines), "utf-8", errors="surrogatepass")
        if signed:
            sign(directory)

    return Case(f"{name}: {what} at {place:.3f}{', signed' if signed else ''}", damage)


def _changed(value: Any, what: str, place: float) -> str:
    """Return the JSON text of a value with one position changed; `place` (0 to 1) selects it."""
    places = [*_positions(value)]
    if not places:
        return VALUES.get(what, "null")
    holder, key = places[int(place * len(places))]
    if what == "removed":
        del holder[key]
    elif what == "renamed" and isinstance(holder, dict):
        holder[ESCAPES] = holder.pop(key)
    elif what == "30,000 unknown keys":
        target = holder if isinstance(holder, dict) else value
        if isinstance(target, dict):
            target.update({f"unknown{number}": 1 for number in range(30_000)})
    else:
        holder[key] = "\ue000"
        return json.dumps(value, ensure_ascii=False).replace('"\ue000"', VALUES.get(what, "null"))
    return json.dumps(value)


def _positions(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every position of a JSON value as its container and key; of a list, the first two."""
    inside = (
        [*value.items()]
        if isinstance(value, dict)
        else [*enumerate(value)][:2]
        if isinstance(value, list)
        else []
    )
    for key, part in inside:
        yield value, key
        yield from _positions(part)


def _header_case(name: str, rng: random.Random) -> Case:
    """Change one position in the header of a safetensors file, or its length."""
    what = rng.choice([*VALUES, "removed", "renamed", "length 2**63", "length 0", "length 1 GiB"])
    place, signed = rng.random(), rng.random() < 0.9

    def damage(directory: Path) -> None:
        raw = (directory / name).read_bytes()
        size = struct.unpack("<Q", raw[:8])[0]
        if what.startswith("length"):
            length = {"length 2**63": 1 << 63, "length 0": 0, "length 1 GiB": 1 << 30}[what]
            data = struct.pack("<Q", length) + raw[8:]
        else:
            text = _changed(json.loads(raw[8 : 8 + size]), what, place).encode(
                "utf-8", "surrogatepass"
            )
            data = struct.pack("<Q", len(text)) + text + raw[8 + size :]
        (directory / name).write_bytes(data)
        if signed:
            sign(directory)

    return Case(f"{name}, header: {what} at {place:.3f}{', signed' if signed else ''}", damage)


def _file_case(name: str, rng: random.Random) -> Case:
    """Put something else in place of a whole file, or nothing."""
    what, signed = rng.choice([*FILES]), rng.random() < 0.7
    noise = rng.randbytes(2000)

    def damage(directory: Path) -> None:
        FILES[what](directory / name, noise)
        if signed:
            sign(directory)

    return Case(f"{name}: {what}{', signed' if signed else ''}", damage, user=what == "unreadable")


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def _outside(path: Path) -> Path:
    """Return the folder beside the damaged directory whose files must stay untouched."""
    return next(each / "outside" for each in path.parents if (each / "outside").is_dir())


FILES: dict[str, Callable[[Path, bytes], object]] = {
    "missing": lambda path, noise: path.unlink(),
    "empty": lambda path, noise: path.write_bytes(b""),
    "cut in half": lambda path, noise: path.write_bytes(
        path.read_bytes()[: path.stat().st_size // 2]
    ),
    "one byte less": lambda path, noise: path.write_bytes(path.read_bytes()[:-1]),
    "noise": lambda path, noise: path.write_bytes(noise),
    "zeros": lambda path, noise: path.write_bytes(bytes(2000)),
    "not UTF-8": lambda path, noise: path.write_bytes(
        path.read_bytes().replace(b'"', b'"\xff\xfe', 3)
    ),
    "UTF-16": lambda path, noise: path.write_bytes(
        path.read_bytes().decode("latin-1").encode("utf-16")
    ),
    "a byte order mark": lambda path, noise: path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes()),
    "a terabyte of nothing": lambda path, noise: os.truncate(path, 1 << 40),
    "a pipe": lambda path, noise: _replace(path, os.mkfifo),
    "a folder": lambda path, noise: _replace(path, os.mkdir),
    "a link to an endless device": lambda path, noise: _replace(
        path, lambda place: os.symlink("/dev/zero", place)
    ),
    "a link to a terminal": lambda path, noise: _replace(
        path, lambda place: os.symlink("/dev/tty", place)
    ),
    "a link to a file outside": lambda path, noise: _replace(
        path, lambda place: os.symlink(_outside(place) / "secret.txt", place)
    ),
    "a link to a folder outside": lambda path, noise: _replace(
        path, lambda place: os.symlink(_outside(place), place)
    ),
    "a link to itself": lambda path, noise: _replace(
        path, lambda place: os.symlink(place.name, place)
    ),
    "a link to nothing": lambda path, noise: _replace(
        path, lambda place: os.symlink("nowhere", place)
    ),
    "unreadable": lambda path, noise: path.chmod(0),
    "only an object": lambda path, noise: path.write_bytes(b"{}"),
    "only a list": lambda path, noise: path.write_bytes(b"[" * 500 + b"]" * 500),
}


def _handmade(kind: str) -> Iterator[Case]:
    """Yield handwritten cases: unlisted files, block lists, names, sizes that agree with one
    another."""
    yield from _names(kind)
    config = "training/config.json" if kind == "run" else "config.json"
    if kind != "import":
        for stack in ("encoder", "decoder"):
            for what, blocks in BLOCKS.items():
                yield Case(f"model.{stack}: {what}", _set(config, ("model", stack), blocks))
        for name, value in (
            ("width", 65_536),
            ("ffn_width", 1_000_000),
            ("heads", 1024),
            ("max_positions", 1_000_000),
        ):
            yield Case(f"model.{name}={value}", _set(config, ("model", name), str(value)))
    if kind not in ("run", "import"):
        for name in ("shared.pieces.json", "source.pieces.json", "shared.model"):
            for what in (
                "a pipe",
                "a link to an endless device",
                "a link to a file outside",
                "a folder",
                "noise",
            ):
                yield Case(f"text/{name}, not listed: {what}", _extra(f"text/{name}", what))
        for name in (
            "engines/ctranslate2/manifest.json",
            "training/status.json",
            "training/config.json",
        ):
            for what in ("a pipe", "a link to an endless device", "noise", "a folder"):
                yield Case(f"{name}: {what}", _extra(name, what))
    if kind == "run":
        for name in (
            "training/request.json",
            "training/step-00000004",
            "training/keep",
            "training/text",
        ):
            yield Case(f"{name}: a link to a folder outside", _link_out(name))
        for step in (
            "step-99999999",
            "step-0000000000000000000000000000000000001",
            "step-" + "9" * 200,
        ):
            yield Case(
                f"an empty {step[:20]}", _extra(f"training/{step}/state.json", "only an object")
            )
        for what in (
            "a pipe",
            "a link to an endless device",
            "a link to a file outside",
            "a folder",
            "noise",
            "zeros",
        ):
            yield Case(f"training/lock: {what}", _extra("training/lock", what))
    if kind == "import":
        for name in (
            "vocab_size",
            "d_model",
            "encoder_layers",
            "decoder_layers",
            "encoder_ffn_dim",
            "max_position_embeddings",
        ):
            for value in ("1000000000", "1000000", "0", "-1", '"7"', "true", "null"):
                yield Case(f"{name}={value}", _set("config.json", (name,), value))
        for name in (
            "pytorch_model.bin",
            "tokenizer.json",
            "added_tokens.json",
            "special_tokens_map.json",
        ):
            for what in ("a pipe", "a link to an endless device", "noise"):
                yield Case(f"{name}: {what}", _extra(name, what))


def _names(kind: str) -> Iterator[Case]:
    folders = {
        "run": ("", "training/", "training/step-00000004/"),
        "import": ("",),
    }.get(kind, ("", "text/", "training/", "engines/"))
    for folder in folders:
        for what, name in (
            ("escapes", b"\x1b[31m\x9b\xc2\x9b\xe2\x80\xae\n"),
            ("bytes that are not UTF-8", b"caf\xe9\xff.json"),
        ):
            yield Case(f"{folder}: a name of {what}", _named(folder, name))
        yield Case(f"{folder}: ten thousand files", _many(folder))


def _set(name: str, keys: tuple[str, ...], raw: str) -> Callable[[Path], None]:
    """Return a function that sets one value of a JSON file and signs it."""

    def damage(directory: Path) -> None:
        content = json.loads((directory / name).read_bytes())
        holder = content
        for key in keys[:-1]:
            holder = holder[key]
        holder[keys[-1]] = "\ue000"
        (directory / name).write_text(
            json.dumps(content, ensure_ascii=False).replace('"\ue000"', raw), "utf-8"
        )
        sign(directory)

    return damage


def _extra(name: str, what: str) -> Callable[[Path], None]:
    """Return a function that adds a file that no manifest lists."""

    def damage(directory: Path) -> None:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(b"{}")
        FILES[what](path, b"noise" * 100)

    return damage


def _link_out(name: str) -> Callable[[Path], None]:
    """Return a function that moves an entry out and leaves a link to it."""

    def damage(directory: Path) -> None:
        target = _outside(directory / name) / Path(name).name
        os.rename(directory / name, target)
        os.symlink(target, directory / name)

    return damage


def _named(folder: str, name: bytes) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        (directory / folder).mkdir(exist_ok=True)
        with open(os.fsencode(directory / folder) + b"/" + name, "wb") as file:
            file.write(b"{}")

    return damage


def _many(folder: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        (directory / folder / "many").mkdir(parents=True)
        for number in range(10_000):
            (directory / folder / "many" / f"file{number}").touch()

    return damage
